"""What no checksum shows: that the offsets of a ragged column rise from 0 to the number of its values, and that each row of
origins names a sample behind the one before it. Both are read in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.manifest import Column, Manifest, Part

INDEX_BYTES = 8  #: what a row of origins starts with
_PIECE_ROWS = 1 << 18


class Mismatch(NamedTuple):
    """What is not as it was written: a chunk of a file, the rows `[rows[0], rows[1])` that it holds, and what is wrong."""

    file: str
    chunk: int
    rows: tuple[int, int]
    cause: str

    def __str__(self) -> str:
        return f"{self.file}, chunk {self.chunk}, rows [{self.rows[0]}, {self.rows[1]}): {self.cause}"


def check(folder: Path, column: Column, found: Manifest) -> list[Mismatch]:
    """The first row of that column that cannot be so, and how many others; nothing for a fixed one. Its files have the
    sizes and headers of the manifest."""
    if column.kind == "fixed":
        return []
    wrong = _Wrong(column.offsets[0])
    elements, last_sample = column.parts[0].rows, -1
    skipped = sum(item.get("more", 1) for item in found.skipped)
    for first, ends in _pieces(folder, column.offsets[0], found.rows):
        starts, stops = ends[:-1], ends[1:]
        if first == 0 and ends[0] != 0:
            wrong.add(0, f"its offsets start at {ends[0]}, not at 0")
        for row in np.flatnonzero((stops < starts) | (stops > elements) | (starts < 0)).tolist():
            wrong.add(first + row, f"it lies at [{starts[row]}, {stops[row]}) of {elements} values")
        if column.name == manifest.ORIGINS and not wrong.count:
            last_sample = _check_origins(folder, column, first, ends, last_sample, found.rows + skipped, wrong)
    if not wrong.count and ends[-1] != elements:
        wrong.add(found.rows - 1, f"the last row ends at {ends[-1]}, and there are {elements} values")
    return wrong.told()


class _Wrong:
    """Rows that are wrong: the first in words, the others as a number."""

    def __init__(self, part: Part) -> None:
        self.count = 0
        self._part = part
        self._first = (0, "")

    def add(self, row: int, cause: str) -> None:
        if not self.count:
            self._first = (row, cause)
        self.count += 1

    def told(self) -> list[Mismatch]:
        if not self.count:
            return []
        row, cause = self._first
        more = f"; {self.count - 1} more rows are as wrong" if self.count > 1 else ""
        chunk = (row + 1) * 8 // limits.CHUNK_BYTES
        return [Mismatch(self._part.file, chunk, (row, row + 1), f"row {row} cannot be so: {cause}{more}")]


def _pieces(folder: Path, part: Part, rows: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(first row, the offsets of it and those behind it, one more than rows)."""
    for first in range(0, rows, _PIECE_ROWS):
        yield first, _read(folder / part.file, "<i8", first, min(_PIECE_ROWS, rows - first) + 1)


def _check_origins(
    folder: Path, column: Column, first: int, ends: npt.NDArray[np.int64], last: int, samples: int, wrong: _Wrong
) -> int:
    """Whether these rows name samples that rise and are below `samples`; the last of them. Their offsets are right."""
    short = np.flatnonzero(np.diff(ends) < INDEX_BYTES)
    if len(short):
        row = int(short[0])
        wrong.add(first + row, f"its {int(ends[row + 1] - ends[row])} bytes have no room for a sample's index")
        return last
    data = _read(folder / column.parts[0].file, "u1", int(ends[0]), int(ends[-1] - ends[0]))
    heads = data[(ends[:-1] - ends[0])[:, np.newaxis] + np.arange(INDEX_BYTES)]
    indices = np.ascontiguousarray(heads).view("<u8")[:, 0]
    for row, index in enumerate(indices.tolist()):
        if not last < index < samples:
            wrong.add(first + row, f"it names sample {index}, behind sample {last}, of {samples}")
            return last
        last = index
    return last


def _read(path: Path, dtype: str, start: int, count: int) -> npt.NDArray[Any]:
    """So many elements of a column file from that one on."""
    offset = limits.HEADER_BYTES + start * np.dtype(dtype).itemsize
    return np.fromfile(path, dtype, count, offset=offset)
