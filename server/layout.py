"""What the columns of a build are and where each row of a fixed one lies: all that a writer must know. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest


class Field(NamedTuple):
    """One column: `shape` is one row's, of a ragged column one element's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    logical: str | None = None
    kind: str = "fixed"

    @property
    def ragged(self) -> bool:
        """Whether its rows differ in length."""
        return self.kind == "ragged"

    @property
    def file(self) -> str:
        """The file of its rows, or of its values."""
        return f"{self.name}.values.npy" if self.ragged else f"{self.name}.npy"

    @property
    def offsets_file(self) -> str:
        """The file of a ragged column's offsets."""
        return f"{self.name}.offsets.npy"

    @property
    def item_bytes(self) -> int:
        """Bytes of one row, of a ragged column of one element."""
        return manifest.row_bytes(self.dtype, self.shape)

    @property
    def stored(self) -> np.dtype[Any]:
        """The type of its elements in the file: little-endian."""
        return np.dtype(manifest.DTYPES[self.dtype])

    def buffer(self, rows: int) -> npt.NDArray[Any]:
        """An array that holds so many rows as they are stored: `(rows, *shape)`."""
        return np.empty((rows, *self.shape), self.stored)


@dataclass(frozen=True, slots=True)
class Layout:
    """Samples are taken in chunks of `chunk_rows`, each of which has its slot in the files of the fixed columns.

    `rows` is the number of samples of the source, None where only its end will tell. `ragged_bytes` is what the ragged
    columns of one sample are expected to take: it decides the size of a chunk, and nothing else.
    """

    rows: int | None
    fields: tuple[Field, ...]
    ragged_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one row of all fixed columns."""
        return sum(field.item_bytes for field in self.fields if not field.ragged)

    @property
    def chunk_rows(self) -> int:
        """Samples of each chunk but the last."""
        return manifest.chunk_rows(self.fixed_bytes + self.ragged_bytes)

    @property
    def chunks(self) -> int | None:
        """How many chunks there are, where it is known."""
        return None if self.rows is None else -(-self.rows // self.chunk_rows)

    @property
    def size_bytes(self) -> int | None:
        """Bytes of all column files: exact for fixed columns, an estimate where some are ragged, None where the number
        of rows is not known."""
        if self.rows is None:
            return None
        ragged = [field for field in self.fields if field.ragged]
        headers = limits.HEADER_BYTES * (len(self.fields) + len(ragged))
        return headers + self.rows * (self.fixed_bytes + self.ragged_bytes + 8 * len(ragged)) + 8 * len(ragged)

    @property
    def needed_bytes(self) -> int | None:
        """The most room that the build takes: ragged columns lie there twice while their parts are joined."""
        return None if self.size_bytes is None else self.size_bytes + (self.rows or 0) * self.ragged_bytes

    def slot_bytes(self, field: Field) -> int:
        """Bytes of that fixed column's file while it is written."""
        return limits.HEADER_BYTES + (self.rows or 0) * field.item_bytes

    def span(self, chunk: int) -> tuple[int, int]:
        """The samples `[start, stop)` of that chunk, as far as the source goes."""
        start = chunk * self.chunk_rows
        stop = start + self.chunk_rows
        return start, stop if self.rows is None else min(stop, self.rows)

    def to_map(self) -> dict[str, Any]:
        """JSON for the workers and the journal."""
        return {"rows": self.rows, "fields": [list(field) for field in self.fields], "ragged_bytes": self.ragged_bytes}

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Layout:
        """The layout of `to_map`."""
        return cls(
            fields["rows"],
            tuple(Field(name, dtype, tuple(shape), *more) for name, dtype, shape, *more in fields["fields"]),
            fields["ragged_bytes"],
        )
