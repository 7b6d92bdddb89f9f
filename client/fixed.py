"""Batches of a fixed column: rows of one shape, stacked into recycled memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .buffers import Pool
from .convert import BLOCK_BYTES, converter
from .mapping import Store
from .outputs import Output

SMALL_BYTES = 16 * 1024  #: the heap gives so much faster than a lease does, and has it at hand


class FixedColumn:
    """Gives at most `batch_size` rows at a time, stacked, from any thread.

    Rows that leave as they are stored go straight into the batch. Others are converted some at a time, from a scratch buffer that stays in
    the cache. No thread but the caller's, and those that torch's own setting gives to its kernels.
    """

    def __init__(
        self,
        store: Store,
        output: Output,
        batch_size: int,
        make: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        """`make(size_bytes)`: where the memory of batches comes from, if not from the heap."""
        self._rows = store.column(output.column.name)
        self._output = output
        self._small = make is None and batch_size * output.item_bytes <= SMALL_BYTES
        self._pool = Pool(batch_size * output.item_bytes, make=make)
        self._convert = converter(output)
        # numpy has no bfloat16: its bits are lent, and torch is told what they are.
        self._lent = (
            np.dtype(np.int16) if output.dtype == torch.bfloat16 else torch.empty(0, dtype=output.dtype).numpy().dtype
        )
        self._at_once = max(1, min(batch_size, BLOCK_BYTES // max(1, output.item_bytes)))
        self._scratch: deque[npt.NDArray[Any]] = deque(maxlen=2)  # one for the loop, one for a thread ahead of it

    def size_bytes(self, count: int) -> int:
        """Bytes of so many rows as they leave."""
        return count * self._output.item_bytes

    def gather(self, rows: npt.NDArray[np.intp] | slice) -> torch.Tensor:
        """Those rows, `(count, *shape)`. They must be there."""
        if not self._output.stored:
            return self._converted(rows)
        if self._small:
            return self._output.tensor(self._rows[rows].copy() if isinstance(rows, slice) else self._rows.take(rows, 0))
        taken = self._pool.lease((_count(rows), *self._rows.shape[1:]), self._rows.dtype)
        self._take(rows, taken)
        return self._output.tensor(taken)

    def _take(self, rows: npt.NDArray[np.intp] | slice, out: npt.NDArray[Any]) -> None:
        if isinstance(rows, slice):
            np.copyto(out, self._rows[rows])
        else:  # "clip" writes straight into out
            self._rows.take(rows, 0, out, "clip")

    def _converted(self, rows: npt.NDArray[np.intp] | slice) -> torch.Tensor:
        count, step = _count(rows), self._at_once
        result = torch.from_numpy(self._pool.lease((count, *self._rows.shape[1:]), self._lent))
        if self._output.dtype == torch.bfloat16:
            result = result.view(torch.bfloat16)
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = np.empty((step, *self._rows.shape[1:]), self._rows.dtype)
        if count == step:
            self._take(rows, scratch)
            self._convert(self._output.tensor(scratch), result)
        else:
            for start in range(0, count, step):
                part = scratch[: min(step, count - start)]
                self._take(_part(rows, start, start + len(part)), part)
                self._convert(self._output.tensor(part), result[start : start + len(part)])
        self._scratch.append(scratch)
        return result


def _count(rows: npt.NDArray[np.intp] | slice) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _part(rows: npt.NDArray[np.intp] | slice, start: int, stop: int) -> npt.NDArray[np.intp] | slice:
    return slice(rows.start + start, rows.start + stop) if isinstance(rows, slice) else rows[start:stop]
