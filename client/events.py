"""What can happen to a session and what it has done about it: past facts in, imperatives out. Pure."""

from __future__ import annotations

from typing import NamedTuple

from dataserve.protocol.codec import Reply
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.messages import Message, Open
from dataserve.protocol.partition import Partition


class Iteration(NamedTuple):
    """What one `iter()` draws: `open` is sent for it, `partition` is what its grants must equal."""

    number: int
    open: Open
    partition: Partition

    @property
    def total(self) -> int:
        """Batches of this consumer."""
        return self.partition.worker_count(self.open.rank, self.open.worker, self.open.workers)

    def cursor(self, given: int) -> int:
        """The position after so many batches of this consumer; `n` after its last."""
        if given >= self.total:
            return self.partition.n
        drawn = (given - 1) * self.open.workers + self.open.worker + 1 if given else 0
        return self.partition.cursor(self.open.epoch, self.open.rank, drawn).position


class Progress(NamedTuple):
    """What the loop has been given in this iteration, and where its time went; seconds are None where unknown."""

    given: int = 0
    samples: int = 0
    wait_s: float | None = 0.0
    busy_s: float | None = 0.0


# --- events ---------------------------------------------------------------------------------------------------------


class Begun(NamedTuple):
    """A new iteration started; what was under way of the older one is forgotten."""

    iteration: Iteration


class Asked(NamedTuple):
    """The loop of that iteration has come to this batch, whose window is half used or missing."""

    number: int
    batch: int


class Replied(NamedTuple):
    """A reply arrived."""

    reply: Reply


class Ticked(NamedTuple):
    """Time has passed; this is how far the loop is."""

    progress: Progress


class Finished(NamedTuple):
    """The iteration is over: drawn to its end, broken off, or ended by a newer one."""

    progress: Progress


class Closed(NamedTuple):
    """The object is gone."""


Event = Begun | Asked | Replied | Ticked | Finished | Closed

# --- effects --------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send this request; the same id may be sent again."""

    id: int
    message: Message


class Permit(NamedTuple):
    """What the loop may do: draw batches below `granted`; say `Asked` from `ask_at` on.

    `registered`: `iter()` need not wait. `contested`: another process holds the rank, nothing may be drawn yet.
    """

    number: int
    registered: bool
    contested: bool
    granted: int
    ask_at: int


class Refuse(NamedTuple):
    """The iteration cannot be: raise this from `iter()` or `next()`."""

    number: int
    error: DataserveError


class Warn(NamedTuple):
    """Tell the user, once."""

    text: str


Effect = Send | Permit | Refuse | Warn
