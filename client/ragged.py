"""Batches of a ragged column, whose rows differ in length: as a list, flat with offsets, or padded with a mask.

Whatever the form, the rows are copied one behind the other into one recycled buffer, without a Python step a row where rows are
short. A list's tensors are views of that buffer and keep it; text and bytes are made straight from the map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dataserve.protocol.errors import DataError

from .buffers import VaryingPool
from .convert import Blockwise
from .mapping import Store
from .outputs import Output

RUN_ELEMENTS = 256  #: from this mean length on, one copy a row is faster than one index an element
BLOCK_ELEMENTS = 1 << 15  #: of short rows so many are indexed at a time: the indices stay in the cache


class Flat(NamedTuple):
    """Rows one behind the other: row i is `values[offsets[i]:offsets[i + 1]]`.

    `values`: `(elements, *shape)`; `offsets`: int64, `(rows + 1,)`, from 0 to `elements`. Text is its UTF-8, as uint8.
    """

    values: torch.Tensor
    offsets: torch.Tensor


class Padded(NamedTuple):
    """Rows filled up to the longest of their batch.

    `values`: `(rows, longest, *shape)`, 0 behind a row's end, normalised or not; `mask`: bool, `(rows, longest)`, true where
    a row has an element; `lengths`: int64, `(rows,)`.
    """

    values: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor


class RaggedColumn:
    """Gives rows in the form of its output, from any thread. Memory: what a batch needs; once more while it is
    converted or padded."""

    def __init__(
        self, store: Store, output: Output, make: Callable[[int], npt.NDArray[np.uint8]] | None = None
    ) -> None:
        """`make(size_bytes)`: where the memory of batches comes from, if not from the heap."""
        self._values, self._offsets = store.ragged(output.column.name)
        self._output = output
        self._convert = Blockwise(output)
        self._pool = VaryingPool(make=make)
        self._scratch = VaryingPool(2)

    def size_bytes(self, count: int) -> int:
        """Bytes of so many rows of the mean length as they leave, padding left out."""
        elements = -(-count * len(self._values) // (len(self._offsets) - 1))
        return elements * self._output.item_bytes

    def gather(self, rows: npt.NDArray[Any] | slice) -> Any:
        """Those rows: `Flat`, `Padded`, or a list of tensors, str or bytes. They must be there."""
        if isinstance(rows, slice):
            starts, stops = self._offsets[rows], self._offsets[rows.start + 1 : rows.stop + 1]
        else:
            places = rows.astype(np.int64)  # row 2^32 - 1 has a successor too
            starts, stops = self._offsets[places], self._offsets[places + 1]
        form, logical = self._output.form, self._output.column.logical
        if form == "list" and logical in ("utf8", "bytes"):
            return self._texts(starts, stops, logical == "utf8")
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(stops - starts, out=offsets[1:])
        flat = self._flat(starts, offsets)
        if form == "flat":
            return Flat(flat, torch.from_numpy(offsets))
        lengths = torch.from_numpy(np.diff(offsets))
        return self._padded(flat, lengths) if form == "padded" else list(flat.split_with_sizes(lengths.tolist()))

    def _texts(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], as_text: bool) -> list[Any]:
        view = self._values.data
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        if not as_text:
            return [bytes(view[start:stop]) for start, stop in spans]
        try:
            return [str(view[start:stop], "utf-8") for start, stop in spans]
        except UnicodeDecodeError as error:
            text = f"The column {self._output.column.name!r} holds text that is no UTF-8: {error}."
            raise DataError("bad_store", text, "Prepare the data again.") from None

    def _flat(self, starts: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> torch.Tensor:
        """The rows as they leave, one behind the other."""
        output, total = self._output, int(offsets[-1])
        last = output.form != "padded"
        pool = self._pool if last and output.stored else self._scratch
        shape = (total, *output.column.shape)
        taken = pool.lease(total * output.column.item_bytes).view(self._values.dtype).reshape(shape)
        copy_rows(self._values, starts, offsets, taken)
        stored = output.tensor(taken)
        if output.stored:
            return stored
        leased = (self._pool if last else self._scratch).lease(total * output.item_bytes)
        result = torch.from_numpy(leased).view(output.dtype).reshape(shape)
        self._convert(stored, result)
        return result

    def _padded(self, flat: torch.Tensor, lengths: torch.Tensor) -> Padded:
        mask = np.arange(int(lengths.max())) < lengths.numpy()[:, None]
        leased = self._pool.lease(mask.size * self._output.item_bytes)
        leased.fill(0)
        # As opaque items of their size: numpy is ten times as fast with a mask of whole items.
        item = np.dtype((np.void, self._output.item_bytes))
        leased.view(item).reshape(mask.shape)[mask] = flat.view(-1).view(torch.uint8).numpy().view(item)
        values = torch.from_numpy(leased).view(flat.dtype).reshape(*mask.shape, *flat.shape[1:])
        return Padded(values, torch.from_numpy(mask), lengths)


def copy_rows(
    values: npt.NDArray[Any], starts: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], out: npt.NDArray[Any]
) -> None:
    """Copies row i, which begins at `values[starts[i]]`, to `out[offsets[i]:offsets[i + 1]]`."""
    count = len(starts)
    block = BLOCK_ELEMENTS if len(out) < RUN_ELEMENTS * count else 0
    first = 0
    while first < count:
        last = first + 1
        if block:
            last = max(last, int(np.searchsorted(offsets, offsets[first] + block, "right")) - 1)
        low, high, start = int(offsets[first]), int(offsets[last]), int(starts[first])
        if last == first + 1:
            out[low:high] = values[start : start + high - low]
        else:
            places = np.arange(low, high)
            places += np.repeat(starts[first:last] - offsets[first:last], np.diff(offsets[first : last + 1]))
            np.take(values, places, axis=0, out=out[low:high], mode="clip")
        first = last
