"""Errors by blame: whose fault it is, a stable code, what happened with the numbers, and what to do.

The code is API; the text is not. One class a blame, so that `except UserError` catches what the caller can mend.
Each error travels the wire as `error` and is built again on the other side by `from_code`.
"""

from __future__ import annotations

import re

_TAIL = re.compile(r" ?\[([a-z_]+)\]$", re.MULTILINE)


class DataserveError(Exception):
    """Base of all errors of dataserve. `str()` gives the text, then the remedy, then the code in brackets.

    One is also made of such a string alone, or of a text that ends in one: a `DataLoader` re-creates its worker's error
    from a printed traceback. Then the remedy is part of the text, and what stood around it is a note.
    """

    blame = "nobody"

    def __init__(self, code: str, text: str | None = None, remedy: str = "", *, retryable: bool = False) -> None:
        if text is None:
            code, text, around = _parsed(type(self), code)
            for note in around:
                self.add_note(note)
        assert CODES.get(code) == type(self).blame, f"{code} is not listed under {type(self).blame}"
        super().__init__(code, text, remedy, retryable)
        self.code = code
        self.text = text
        self.remedy = remedy
        self.retryable = retryable

    def __reduce__(self) -> tuple[object, ...]:
        return (from_code, (self.code, self.text, self.remedy, self.retryable))

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".strip() + f" [{self.code}]"


class UserError(DataserveError, ValueError):
    """The caller asked for something that cannot be: an option, a name, a state. Also a `ValueError`."""

    blame = "user"


class DataError(DataserveError):
    """The source or the store is not what it must be."""

    blame = "data"


class ServerError(DataserveError):
    """The daemon is absent, silent, of another version, or failed inside."""

    blame = "server"


class PeerError(DataserveError):
    """The other side of the wire said something that the protocol does not allow."""

    blame = "peer"


class MachineError(DataserveError, OSError):
    """The machine refused: space, permission, limits. Also an `OSError`."""

    blame = "machine"


#: Every code and whose fault it is. PROTOCOL.md lists the same.
CODES: dict[str, str] = {
    # the caller's
    "bad_option": "user",
    "bad_batch": "user",
    "bad_name": "user",
    "bad_plan": "user",
    "bad_address": "user",
    "bad_state": "user",
    "bad_config": "user",
    "unknown_dataset": "user",
    "ambiguous_dataset": "user",
    "unknown_column": "user",
    "no_job": "user",
    "no_world": "user",
    "job_mismatch": "user",
    "rank_taken": "user",
    "state_mismatch": "user",
    "store_mismatch": "user",
    "not_built": "user",
    "daemon_running": "user",
    "in_use": "user",
    "bad_source": "user",
    "bad_transform": "user",
    # the data's
    "bad_store": "data",
    "bad_sample": "data",
    "bad_schema": "data",
    "empty_source": "data",
    "source_changed": "data",
    # the daemon's
    "no_daemon": "server",
    "silent_daemon": "server",
    "version_mismatch": "server",
    "preparation_failed": "server",
    "stopping": "server",
    "internal": "server",
    # the peer's
    "bad_message": "peer",
    "unknown_kind": "peer",
    "too_large": "peer",
    "unknown_stream": "peer",
    "stale_epoch": "peer",
    "no_hello": "peer",
    "wrong_ranges": "peer",
    # the machine's
    "no_space": "machine",
    "no_memory": "machine",
    "no_access": "machine",
    "no_device": "machine",
    "unsafe_folder": "machine",
    "not_linux": "machine",
    "worker_died": "machine",
    "stuck": "machine",
}


def _parsed(kind: type[DataserveError], printed: str) -> tuple[str, str, list[str]]:
    """(code, text, notes) of what `str()` or a traceback gives of an error of that class."""
    codes = [found for found in _TAIL.finditer(printed) if CODES.get(found[1]) == kind.blame]
    assert codes, f"{printed!r} ends in no code of {kind.blame}"
    before, after = printed[: codes[-1].start()], printed[codes[-1].end() :]
    head, _, text = before.rpartition(f"{kind.__module__}.{kind.__qualname__}: ")
    where = head.partition("\n")[0]  # "Caught UserError in DataLoader worker process 0."
    return codes[-1][1], text, [note for note in (where, after.strip()) if note]


_BY_BLAME: dict[str, type[DataserveError]] = {
    kind.blame: kind for kind in (UserError, DataError, ServerError, PeerError, MachineError)
}


def from_code(code: str, text: str, remedy: str = "", retryable: bool = False) -> DataserveError:
    """The error of that code; a code of a later version becomes an `internal` of the server that keeps its name."""
    if code not in CODES:
        return ServerError("internal", f"{text} (unknown code {code})", remedy, retryable=retryable)
    return _BY_BLAME[CODES[code]](code, text, remedy, retryable=retryable)
