"""Single rows of a sealed store, for those who look at them: as they are stored, as values, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError
from dataserve.protocol.manifest import Column, Manifest

from .store import Sealed

LISTED_VALUES = 8
TEXT_CHARS = 60

#: A row as it means: text, bytes, a number, or an array of its shape (bfloat16 as float32).
Value = str | bytes | int | float | complex | bool | npt.NDArray[Any]


class Origin(NamedTuple):
    """A row's sample in the source: its index, and its path below the source's root where it has one."""

    sample: int
    path: bytes | None


class Rows:
    """The rows of one store, mapped. A row that lies elsewhere than its file can hold raises `bad_store`."""

    def __init__(self, sealed: Sealed) -> None:
        folder = Path(sealed.path)
        self._columns = {column.name: column for column in sealed.manifest.columns}
        self._values = {name: _mapped(folder / column.parts[0].file) for name, column in self._columns.items()}
        self._offsets = {
            name: _mapped(folder / each.offsets[0].file) for name, each in self._columns.items() if each.offsets
        }

    def row(self, column: str, row: int) -> npt.NDArray[Any]:
        """One row as it is stored, copied: of the column's shape, of a ragged one `(elements, *shape)`."""
        values = self._values[column]
        if column not in self._offsets:
            return np.array(values[row])
        start, stop = (int(end) for end in self._offsets[column][row : row + 2])
        if not 0 <= start <= stop <= len(values):
            text = f"The offsets of {column} say that row {row} lies at [{start}, {stop}) of {len(values)}."
            raise DataError("bad_store", text, "Remove the store and prepare the data again.")
        return np.array(values[start:stop])

    def value(self, column: str, row: int) -> Value:
        """One row as what it means."""
        found, stored = self._columns[column], self.row(column, row)
        if found.logical == "utf8":
            return stored.tobytes().decode("utf-8", "backslashreplace")
        if found.logical == "bytes":
            return stored.tobytes()
        if found.dtype == "bfloat16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32).reshape(stored.shape)
        scalar: Value = stored.item() if stored.shape == () else stored
        return scalar

    def origin(self, row: int) -> Origin:
        """Where that row comes from. Without a column of origins no sample was left out, and none has a path."""
        if manifest.ORIGINS not in self._columns:
            return Origin(row, None)
        found = self.row(manifest.ORIGINS, row).tobytes()
        return Origin(int.from_bytes(found[:8], "little"), found[8:] or None)


def sample_columns(found: Manifest) -> list[Column]:
    """The columns of the sample, in its order."""
    return [found.column(name) for name in manifest.leaves(found.structure)]


def class_column(found: Manifest) -> str | None:
    """The column whose numbers the class list names: `label`, or the only column of single integers."""
    if found.classes is None:
        return None
    single = [
        column.name for column in sample_columns(found) if column.dtype.startswith(("int", "uint")) and _single(column)
    ]
    return "label" if "label" in single else single[0] if len(single) == 1 else None


def class_name(found: Manifest, column: str, value: Value) -> str | None:
    """The class of that value, where that column's numbers have classes."""
    if found.classes is None or column != class_column(found) or not isinstance(value, int):
        return None
    return found.classes[value] if 0 <= value < len(found.classes) else "no class"


def described(value: Value, chars: int = TEXT_CHARS) -> str:
    """A value on one line: a number, the start of a text, the few elements of an array, or its shape and range."""
    if isinstance(value, str | bytes):
        unit = "characters" if isinstance(value, str) else "bytes"
        return repr(value) if len(value) <= chars else f"{value[:chars]!r}... ({len(value):,} {unit})"
    if not isinstance(value, np.ndarray):
        return f"{value:.7g}" if isinstance(value, float) else str(value)
    if value.size <= LISTED_VALUES:
        return f"{value.dtype} {np.array2string(value, separator=', ', precision=5).replace(chr(10), '')}"
    text = f"{value.dtype} {shape_text(value.shape)}"
    if value.dtype.kind in "iuf":
        text += f", {value.min():.5g} to {value.max():.5g}, mean {value.mean(dtype=np.float64):.5g}"
    return text


def shape_text(shape: Sequence[int | str]) -> str:
    """`3 x 32 x 32`, `1` for a single value."""
    return " x ".join(map(str, shape)) or "1"


def _single(column: Column) -> bool:
    return column.kind == "fixed" and column.shape == ()


def _mapped(path: Path) -> npt.NDArray[Any]:
    if path.stat().st_size == limits.HEADER_BYTES:  # nothing to map in a ragged column whose rows are all empty
        found: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        return found
    mapped: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped
