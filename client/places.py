"""Which positions and rows each batch of an iteration holds: arithmetic done once, rows looked at once a window."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.partition import Range

from .events import Iteration
from .gather import Gatherer
from .order import Order, Windows

WINDOW_ROWS = 1 << 16  #: half a megabyte of indices
SPAN_ROWS = 1 << 20  #: between the first and the last of them, where other consumers' batches lie in between

Rows = npt.NDArray[np.intp] | slice


class Places:
    """Batch `index` of one consumer: its range, and its rows as the gatherer takes them. From any thread.

    What `partition.worker_batch` says, at a fraction of its price: all batches but a rank's last are equally large and equally far
    from each other.
    """

    def __init__(self, iteration: Iteration, order: Order | Windows | None, gatherer: Gatherer) -> None:
        opened, partition = iteration.open, iteration.partition
        self._consumer = opened.rank, opened.worker, opened.workers
        self._partition = partition
        self._order = order
        self._gatherer = gatherer
        self._size = partition.batch_size
        self._step = partition.global_batch * opened.workers
        self._whole = len(range(opened.worker, partition.full, opened.workers))
        self._first = partition.origin + opened.worker * partition.global_batch + opened.rank * partition.batch_size
        self._most = max(1, min(limits.WINDOW_BATCHES, WINDOW_ROWS // self._size, SPAN_ROWS // self._step))
        self._window: tuple[int, list[Any]] = (0, [])  # batches from that index on; replaced as one

    def __call__(self, index: int) -> tuple[Range, Rows]:
        """Its range and rows, which are there. Raises `bad_store` for a row that the store has not: an order can come from a file."""
        if index >= self._whole:
            place = self._partition.worker_batch(*self._consumer, index)
            if self._order is None:
                return place, slice(place.start, place.stop)
            return place, self._gatherer.check(self._order[place.start : place.stop])
        start = self._first + index * self._step
        place = Range(start, start + self._size, self._size)
        if self._order is None:
            return place, slice(start, start + self._size)
        first, rows = self._window
        if not first <= index < first + len(rows):
            first, rows = self._window = index, self._rows(self._order, start, self._whole - index)
        return place, rows[index - first]

    def _rows(self, order: Order | Windows, start: int, left: int) -> list[Any]:
        """The rows of this batch and the next ones, checked; numpy indexes with its own integers only, and casts all others anew."""
        count = min(self._most, left, (self._partition.n - start) // self._step)
        if not count:  # nothing of the last step but this batch
            return [self._gatherer.check(order[start : start + self._size])]
        steps = order[start : start + count * self._step].reshape(count, self._step)
        return list(self._gatherer.check(steps[:, : self._size]))
