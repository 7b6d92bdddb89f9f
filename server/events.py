"""What has happened to the daemon (past facts) and what it must do about it (imperatives). Plain records."""

from __future__ import annotations

from typing import NamedTuple

from dataserve.protocol.errors import DataserveError
from dataserve.protocol.messages import Message

# --- events ---------------------------------------------------------------------------------------------------------


class RequestArrived(NamedTuple):
    """A connection sent a request."""

    peer: bytes
    id: int
    message: Message


class FrameRefused(NamedTuple):
    """A connection sent something that is no request. `id` is 0 where it had none."""

    peer: bytes
    id: int
    error: DataserveError


class PreparationAdvanced(NamedTuple):
    """The preparing child told how far it is. `eta_s` is in seconds, None while unknown."""

    name: str
    done: int
    total: int | None
    eta_s: float | None


class DatasetSealed(NamedTuple):
    """A store is there and was validated."""

    name: str
    path: str
    store_id: str
    fingerprint: str
    rows: int
    size_bytes: int
    columns: tuple[str, ...]


class PreparationFailed(NamedTuple):
    """The data set cannot be served, and why."""

    name: str
    code: str
    text: str
    remedy: str


class ConfirmationStarted(NamedTuple):
    """Some rows of a store that was found are being prepared again, to compare."""

    name: str


class ConfirmationEnded(NamedTuple):
    """They were the same (`text` is None), or what was not."""

    name: str
    text: str | None


class MemoryLooked(NamedTuple):
    """The shares of a data set that are in memory, and that are locked there; None where unknown, or not asked for."""

    name: str
    resident: float | None
    locked: float | None


class ProcessProbed(NamedTuple):
    """Whether a process, by pid and start time, is there."""

    pid: int
    start_time: int
    alive: bool


class Ticked(NamedTuple):
    """`TICK_S` have passed."""


Event = (
    RequestArrived
    | FrameRefused
    | PreparationAdvanced
    | DatasetSealed
    | PreparationFailed
    | ConfirmationStarted
    | ConfirmationEnded
    | MemoryLooked
    | ProcessProbed
    | Ticked
)

# --- effects --------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """Answer that request."""

    peer: bytes
    id: int
    message: Message


class ProbeProcess(NamedTuple):
    """Look whether it is there, and say so by `ProcessProbed`."""

    pid: int
    start_time: int


class Log(NamedTuple):
    """Tell the operator."""

    text: str


class StopDaemon(NamedTuple):
    """End, once the replies are out."""


Effect = Reply | ProbeProcess | Log | StopDaemon
