"""The messages of the wire as typed, frozen records. PROTOCOL.md lists the same tables; a test compares them.

A message class names its kind, and each field its check: `codec` walks the fields both ways. Requests go from client to
server, replies back; each request has exactly one reply, which carries the request's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from . import checks, limits
from .checks import Check, integer, list_of, number, optional, text
from .errors import DataserveError, from_code
from .partition import LASTS

_name = text(64, limits.NAME)
_epoch = integer(0, limits.EPOCH - 1)
_position = integer(0, limits.ROWS)
_stream = integer(0, 2**63 - 1)
_seconds = number(0, 1e12)
_hex256 = text(64, limits.HEX256)
_count = integer(0, 2**63 - 1)
_plan = checks.tree(  # of bounded size; kinds.py says what it is
    checks.by_type({int: integer(0, limits.SEED - 1), str: text(limits.PLAN_CHARS), bool: checks.flag}),
    limits.PLAN_FIELDS,
    limits.PLAN_CHARS,
    limits.PLAN_DEPTH,
)
_path = text(limits.PATH_BYTES, surrogates=True)  # a folder's name may be no UTF-8

STATES = ("preparing", "confirming", "ready", "failed")
BOUNDS = ("data", "compute", "unknown")


def _as(check: Check, **keywords: Any) -> Any:
    """A dataclass field with that check; with `default=` it may be missing on the wire."""
    return field(metadata={"check": check}, **keywords)


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages."""

    KIND: ClassVar[str] = ""


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Who the client is. The process is (host, pid namespace, pid, start time): enough to look it up, or to know that
    it cannot be looked up."""

    KIND = "hello"
    versions: Sequence[int] = _as(list_of(integer(0, 65535), 16, 1))
    pid: int = _as(integer(0, 2**31 - 1))
    start_time: int = _as(_count)  # /proc/<pid>/stat, field 22, clock ticks since boot
    host: str = _as(text(limits.HOST_CHARS))
    pid_namespace: int = _as(_count)  # inode of /proc/self/ns/pid


@dataclass(frozen=True, slots=True)
class Describe(Message):
    """Asks for a data set by name or NAME@prefix. Claims nothing."""

    KIND = "describe"
    dataset: str = _as(text(64 + 1 + 64))


@dataclass(frozen=True, slots=True)
class Open(Message):
    """Registers a consumer for one iteration, or replaces what the server thinks of it."""

    KIND = "open"
    dataset: str = _as(_name)
    store_id: str = _as(_hex256)
    job: str = _as(text(limits.JOB_CHARS))
    instance: bytes = _as(checks.blob(limits.INSTANCE_BYTES))
    rank: int = _as(integer(0, limits.WORLD_SIZE - 1))
    world_size: int = _as(integer(1, limits.WORLD_SIZE))
    worker: int = _as(integer(0, limits.WORKERS - 1))
    workers: int = _as(integer(1, limits.WORKERS))
    batch_size: int = _as(integer(1, limits.BATCH_SIZE))
    last: str = _as(checks.one_of(*LASTS))
    plan: dict[str, Any] = _as(_plan)
    digest: str = _as(_hex256)
    epoch: int = _as(_epoch)
    position: int = _as(_position)  # the origin of this iteration


@dataclass(frozen=True, slots=True)
class More(Message):
    """Asks for the ranges of `count` batches from batch `first` of this iteration on. Asking twice is harmless."""

    KIND = "more"
    stream: int = _as(_stream)
    epoch: int = _as(_epoch)
    first: int = _as(_position)
    count: int = _as(integer(1, limits.WINDOW_BATCHES))


@dataclass(frozen=True, slots=True)
class Done(Message):
    """How far a consumer has come, and how it spent its time since its last `done`."""

    KIND = "done"
    stream: int = _as(_stream)
    epoch: int = _as(_epoch)
    position: int = _as(_position)
    samples: int = _as(_count)  # since the last `done`
    wait_s: float | None = _as(optional(_seconds))  # waited on data; null where it cannot be known
    busy_s: float | None = _as(optional(_seconds))  # between batches
    alone: bool = _as(checks.flag, default=False)


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Alive, with nothing to tell."""

    KIND = "beat"
    stream: int = _as(_stream)


@dataclass(frozen=True, slots=True)
class Close(Message):
    """The consumer is gone of its own will."""

    KIND = "close"
    stream: int = _as(_stream)


@dataclass(frozen=True, slots=True)
class AskStatus(Message):
    """Asks for one page of the status."""

    KIND = "status"
    page: int = _as(integer(0, 2**31 - 1), default=0)


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Ends the daemon."""

    KIND = "stop"


# --- replies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The version chosen for this connection."""

    KIND = "welcome"
    version: int = _as(integer(0, 65535))
    server: str = _as(text(64))


@dataclass(frozen=True, slots=True)
class Described(Message):
    """A sealed store: map it, and compare the id with its manifest's."""

    KIND = "described"
    dataset: str = _as(_name)
    path: str = _as(_path)
    store_id: str = _as(_hex256)
    fingerprint: str = _as(_hex256)
    rows: int = _as(integer(1, limits.ROWS))
    size_bytes: int = _as(_count)
    columns: Sequence[str] = _as(list_of(text(limits.COLUMN_CHARS, limits.COLUMN), limits.COLUMNS, 1))


@dataclass(frozen=True, slots=True)
class Preparing(Message):
    """Not there yet; ask again."""

    KIND = "preparing"
    dataset: str = _as(_name)
    state: str = _as(checks.one_of(*STATES))
    done: int = _as(_count)
    total: int | None = _as(optional(_count))
    eta_s: float | None = _as(optional(_seconds))


@dataclass(frozen=True, slots=True)
class Opened(Message):
    """The consumer is registered."""

    KIND = "opened"
    stream: int = _as(_stream)


@dataclass(frozen=True, slots=True)
class Ranges(Message):
    """Batches `first`, `first + 1`, ... of the iteration, each `[start, stop, valid]`; `end` where the last is among
    them or before them."""

    KIND = "ranges"
    stream: int = _as(_stream)
    epoch: int = _as(_epoch)
    first: int = _as(_position)
    ranges: Sequence[Sequence[int]] = _as(checks.triples(limits.ROWS, limits.WINDOW_BATCHES))
    end: bool = _as(checks.flag)


@dataclass(frozen=True, slots=True)
class Ok(Message):
    """Understood."""

    KIND = "ok"


_dataset_row = checks.record(
    {
        "name": _name,
        "fingerprint": optional(_hex256),
        "id": optional(_hex256),
        "path": optional(_path),
        "state": checks.one_of(*STATES),
        "rows": optional(_count),
        "size_bytes": optional(_count),
        "done": optional(_count),
        "total": optional(_count),
        "eta_s": optional(_seconds),
        "resident": optional(number(0, 1)),
        "locked": optional(number(0, 1)),
        "error": optional(text(limits.TEXT_CHARS)),
    }
)
_consumer_row = checks.record(
    {
        "job": text(limits.JOB_CHARS),
        "dataset": _name,
        "world_size": integer(1, limits.WORLD_SIZE),
        "batch_size": integer(1, limits.BATCH_SIZE),
        "seed": integer(0, limits.SEED - 1),
        "rank": integer(0, limits.WORLD_SIZE - 1),
        "worker": integer(0, limits.WORKERS - 1),
        "pid": _count,
        "epoch": _epoch,
        "position": _position,
        "samples_per_s": optional(number(0, 1e15)),
        "wait_share": optional(number(0, 1)),
        "bound": checks.one_of(*BOUNDS),
        "last_seen_s": _seconds,
        "alone": checks.flag,
    }
)


@dataclass(frozen=True, slots=True)
class StatusPage(Message):
    """One page of what the daemon knows: `datasets` and `consumers` are slices of the whole lists."""

    KIND = "status_page"
    version: str = _as(text(64))
    pid: int = _as(_count)
    address: str = _as(text(limits.PATH_BYTES))
    store: str = _as(_path)
    uptime_s: float = _as(_seconds)
    page: int = _as(_count)
    pages: int = _as(integer(1, 2**31 - 1))
    datasets: Sequence[dict[str, Any]] = _as(list_of(_dataset_row, limits.STATUS_DATASETS))
    consumers: Sequence[dict[str, Any]] = _as(list_of(_consumer_row, limits.STATUS_CONSUMERS))


@dataclass(frozen=True, slots=True)
class Error(Message):
    """What went wrong: the code is API, the text is for people."""

    KIND = "error"
    code: str = _as(checks.text(64))
    text: str = _as(checks.text(limits.TEXT_CHARS))
    remedy: str = _as(checks.text(limits.TEXT_CHARS))
    retryable: bool = _as(checks.flag)

    @classmethod
    def of(cls, error: DataserveError) -> Error:
        """The message that carries that error, its text cut to what a frame takes."""
        return cls(error.code, printable(error.text), printable(error.remedy), error.retryable)

    def to_exception(self) -> DataserveError:
        """The error that it carries."""
        return from_code(self.code, self.text, self.remedy, self.retryable)


def printable(string: str) -> str:
    """Text that any frame takes: valid UTF-8, no control characters, cut to the cap."""
    string = string.encode("utf-8", "backslashreplace").decode()
    string = "".join(letter if letter == "\n" or 32 <= ord(letter) != 127 else "�" for letter in string)
    return string if len(string) <= limits.TEXT_CHARS else string[: limits.TEXT_CHARS - 4] + " ..."


REQUESTS: dict[str, type[Message]] = {
    kind.KIND: kind for kind in (Hello, Describe, Open, More, Done, Beat, Close, AskStatus, Stop)
}
REPLIES: dict[str, type[Message]] = {
    kind.KIND: kind for kind in (Welcome, Described, Preparing, Opened, Ranges, Ok, StatusPage, Error)
}

#: By kind, each field of a message with its check and its default (`dataclasses.MISSING` where there is none).
FIELDS: dict[str, dict[str, tuple[Check, Any]]] = {
    name: {item.name: (item.metadata["check"], item.default) for item in fields(kind)}
    for name, kind in (REQUESTS | REPLIES).items()
}
assert len(FIELDS) == len(REQUESTS) + len(REPLIES), "a kind is a request or a reply"
