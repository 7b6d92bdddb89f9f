"""Partition: how positions of an epoch become batches of ranks and loader workers, and back to a cursor.

Pure arithmetic. Both sides compute it and must agree; so a client can go on without the daemon.
PROTOCOL.md states the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from . import limits
from .errors import UserError

LASTS = ("even", "drop", "short")


class Range(NamedTuple):
    """One batch: the positions `[start, stop)`, of which the first `valid` count; the rest are padding."""

    start: int
    stop: int
    valid: int


class Cursor(NamedTuple):
    """How far a job has come: the same for all its ranks."""

    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The batches of one iteration over `[origin, n)` by `world_size` ranks of `batch_size` rows each.

    Raises `bad_batch` where a number cannot be, and where `drop` leaves nothing of a whole epoch.
    """

    n: int
    batch_size: int
    world_size: int = 1
    last: str = "even"
    origin: int = 0

    def __post_init__(self) -> None:
        if self.last not in LASTS:
            raise UserError("bad_option", f"last={self.last!r} is unknown.", f"Known: {', '.join(LASTS)}.")
        for what, value, low, high in (
            ("n", self.n, 1, limits.ROWS),
            ("batch_size", self.batch_size, 1, limits.BATCH_SIZE),
            ("world_size", self.world_size, 1, limits.WORLD_SIZE),
            ("origin", self.origin, 0, self.n),
        ):
            if not low <= value <= high:
                raise UserError("bad_batch", f"{what} is {value}; it must lie in [{low}, {high}].")
        if self.last == "drop" and self.origin == 0 and self.full == 0:
            raise UserError(
                "bad_batch",
                f"last='drop' leaves no batch at all: the {self.n} rows do not fill one global batch of "
                f"{self.world_size} ranks x {self.batch_size} rows.",
                "Take a smaller batch_size, or last='even'.",
            )

    @property
    def global_batch(self) -> int:
        """Positions that all ranks together take in a step."""
        return self.world_size * self.batch_size

    @property
    def full(self) -> int:
        """Whole global batches."""
        return (self.n - self.origin) // self.global_batch

    @property
    def tail(self) -> int:
        """Positions behind the last whole global batch."""
        return (self.n - self.origin) % self.global_batch

    def tail_range(self, rank: int) -> Range | None:
        """This rank's share of the tail, or None. Under `even` a rank without a share takes one padding row, found by
        wrapping round to the start of the epoch's sequence."""
        size, tail = self.world_size, self.tail
        if tail == 0 or self.last == "drop":
            return None
        share, more = divmod(tail, size)
        start = self.n - tail + rank * share + min(rank, more)
        count = share + (rank < more)
        if count:
            return Range(start, start + count, count)
        if self.last == "short":
            return None
        wrapped = (rank - tail) % self.n
        return Range(wrapped, wrapped + 1, 0)

    def count(self, rank: int) -> int:
        """Batches of that rank in this iteration."""
        return self.full + (self.tail_range(rank) is not None)

    def batch(self, rank: int, index: int) -> Range:
        """Batch `index` of that rank, `0 <= index < count(rank)`."""
        if not 0 <= index < self.count(rank):
            raise IndexError(f"batch {index} of rank {rank}, which has {self.count(rank)}")
        if index == self.full:
            tail = self.tail_range(rank)
            assert tail is not None
            return tail
        start = self.origin + index * self.global_batch + rank * self.batch_size
        return Range(start, start + self.batch_size, self.batch_size)

    def worker_count(self, rank: int, worker: int, workers: int) -> int:
        """Batches of that loader worker: every `workers`-th of its rank's, from `worker` on."""
        return len(range(worker, self.count(rank), workers))

    def worker_batch(self, rank: int, worker: int, workers: int, index: int) -> Range:
        """Batch `index` of that loader worker, `0 <= index < worker_count(...)`."""
        return self.batch(rank, worker + index * workers)

    def window(self, rank: int, worker: int, workers: int, first: int, count: int) -> list[Range]:
        """At most `count` batches of that loader worker from batch `first` on: what a `ranges` message holds."""
        stop = min(first + count, self.worker_count(rank, worker, workers))
        whole = min(stop, len(range(worker, self.full, workers)))
        size, step = self.batch_size, workers * self.global_batch
        start = self.origin + worker * self.global_batch + rank * size
        found = [Range(place, place + size, size) for place in range(start + first * step, start + whole * step, step)]
        return found + [self.worker_batch(rank, worker, workers, index) for index in range(max(first, whole), stop)]

    def cursor(self, epoch: int, rank: int, batches: int) -> Cursor:
        """The cursor after so many batches of this rank; after its last one it is the start of the next epoch."""
        total = self.count(rank)
        if not 0 <= batches <= total:
            raise UserError("bad_state", f"There is no state after {batches} batches: rank {rank} has {total} of them.")
        if batches == total:
            return Cursor(epoch + 1, 0)
        return Cursor(epoch, self.origin + batches * self.global_batch)

    def padding(self) -> int:
        """Rows that this iteration delivers beyond its positions."""
        return max(0, self.world_size - self.tail) if self.last == "even" and self.tail else 0
