"""Which bytes of a store's files a consumer reads next. Pure: the thread that asks the kernel for them is ahead.py.

A consumer tells its place once a second (`done`) and asks for windows of batches (`more`). So what it reads next begins at
the later of what it told last and what the window it asked for last says, and reaches as far as it comes in `AHEAD_S` at
its own rate, `AHEAD_BATCHES` at least, within a budget of bytes. Near the end of an epoch that is the start of the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Partition

PAGE = 4096
GAP_BYTES = 64 * 1024  #: what lies between two runs is read with them up to this, where it will be of use

Places = npt.NDArray[np.int64]


class Reading(NamedTuple):
    """What one consumer reads: of which store, in which order, and how far it is as far as the daemon knows.

    `position` is that of its last `done`; `asked` the first batch of the last window it asked for.
    """

    stream: int
    path: str
    plan: Mapping[str, Any]
    digest: str
    epoch: int
    partition: Partition
    rank: int
    worker: int
    workers: int
    position: int
    asked: int
    samples_per_s: float | None

    @property
    def total(self) -> int:
        """Batches of this iteration."""
        return self.partition.worker_count(self.rank, self.worker, self.workers)

    @property
    def next_batch(self) -> int:
        """The first batch that it may not have drawn yet: what `done` says, or that half of the window before the one
        asked for last is used."""
        steps = (self.position - self.partition.origin) // self.partition.global_batch
        if self.position >= self.partition.n:
            return self.total
        drawn = max(0, -(-(steps - self.worker) // self.workers))
        return min(self.total, max(drawn, self.asked - limits.WINDOW_BATCHES // 2))

    def following(self) -> Reading:
        """The next epoch, from its start."""
        fresh = self.partition
        whole = Partition(fresh.n, fresh.batch_size, fresh.world_size, fresh.last)
        return self._replace(epoch=self.epoch + 1, partition=whole, position=0, asked=0)

    def positions(self, first: int, stop: int) -> Places:
        """The positions of batches `[first, stop)`, one behind the other."""
        ranges = [self.partition.worker_batch(self.rank, self.worker, self.workers, at) for at in range(first, stop)]
        pieces = [np.arange(start, end, dtype=np.int64) for start, end, _ in ranges]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def batches_ahead(reading: Reading, row_bytes: float, budget_bytes: int) -> int:
    """How many batches ahead of the next one are due; `row_bytes` is what a row costs to read."""
    size = reading.partition.batch_size
    wanted = max(limits.AHEAD_BATCHES, math.ceil((reading.samples_per_s or 0.0) * limits.AHEAD_S / size))
    return min(wanted, int(budget_bytes / (size * max(row_bytes, 1.0))))


def due(reading: Reading, ahead: int) -> list[tuple[Reading, int, int]]:
    """The batches `[first, stop)` that so many ahead are: of this epoch, and where it is nearly through of the next."""
    begin = reading.next_batch
    stop = min(reading.total, begin + ahead)
    found = [(reading, begin, stop)]
    rest = ahead - (stop - begin)
    if rest <= 0 or reading.epoch + 1 == limits.EPOCH:
        return found
    try:
        following = reading.following()
    except UserError:  # `drop` leaves no batch of a whole epoch
        return found
    return [*found, (following, 0, min(following.total, rest))]


def budget(available_bytes: int, readings: int) -> int:
    """Bytes that each of so many consumers may be read ahead."""
    return min(limits.AHEAD_BYTES, available_bytes // limits.AHEAD_SHARE // max(1, readings))


def runs(starts: Places, stops: Places, size_bytes: int, *, joins: bool) -> tuple[Places, Places]:
    """The byte intervals `[start, stop)` in ascending order as whole pages, what touches joined.

    `joins`: what lies between near ones will be of use too, as the whole file has room in memory or the order stays in a part
    of it: joined over `GAP_BYTES`. None reaches beyond `size_bytes`, but for its last page.
    """
    low = starts // PAGE * PAGE
    high = -(-np.minimum(stops, size_bytes) // PAGE) * PAGE
    there = high > low
    low, high = low[there], high[there]
    if not len(low):
        return low, high
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    begins = np.concatenate(([True], low[1:] > high[:-1] + (GAP_BYTES if joins else 0)))
    ends = np.concatenate((begins[1:], [True]))
    return low[begins], high[ends]


def pieces(starts: Places, stops: Places, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs as `(offset, length)` of at most so many bytes: the kernel takes no more of one call than its window."""
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        for offset in range(start, stop, piece_bytes):
            yield offset, min(piece_bytes, stop - offset)
