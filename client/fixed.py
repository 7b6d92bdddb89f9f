"""Batches of a fixed column: rows of one shape, stacked into recycled memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .buffers import Pool
from .mapping import Store
from .outputs import Output


class FixedColumn:
    """Gives at most `batch_size` rows at a time, stacked, from any thread."""

    def __init__(self, store: Store, output: Output, batch_size: int) -> None:
        self._rows = store.column(output.column.name)
        self._output = output
        self._pool = Pool(batch_size * output.item_bytes)
        self._stored = self._pool if output.stored else Pool(batch_size * output.column.item_bytes, 2)

    def size_bytes(self, count: int) -> int:
        """Bytes of so many rows as they leave."""
        return count * self._output.item_bytes

    def gather(self, rows: npt.NDArray[Any] | slice) -> torch.Tensor:
        """Those rows, `(count, *shape)`. They must be there."""
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        taken = self._stored.lease((count, *self._output.column.shape), self._rows.dtype)
        if isinstance(rows, slice):
            np.copyto(taken, self._rows[rows])
        else:  # "clip" writes straight into out
            np.take(self._rows, rows, axis=0, out=taken, mode="clip")
        stored = self._output.tensor(taken)
        if self._output.stored:
            return stored
        leased = self._pool.lease((count * self._output.item_bytes,), np.uint8)
        result = torch.from_numpy(leased).view(self._output.dtype).reshape(stored.shape)
        self._output.convert(stored, result)
        return result
