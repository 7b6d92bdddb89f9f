"""Part files: what a chunk has of a ragged column. `<folder>/parts/<column>.<chunk>`: the values of its rows one behind
the other, then the length of each row as int64, in elements."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.errors import DataError, MachineError

from . import store
from .layout import Field

FOLDER = "parts"
LENGTH_BYTES = 8
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def part_path(folder: str | os.PathLike[str], field: Field, chunk: int) -> Path:
    """Where that chunk's part of that column lies."""
    return Path(folder, FOLDER, f"{field.name}.{chunk}")


class PartWriter:
    """The rows of one ragged column, chunk by chunk. It takes rows as an array does: `part[row] = values`.

    Memory: `limits.CHUNK_BYTES` and one row; what is more goes to the file before the chunk ends.
    """

    def __init__(self, folder: str | os.PathLike[str], field: Field) -> None:
        self._folder = folder
        self._field = field
        self._handle: int | None = None
        self._rows: list[npt.NDArray[Any]] = []  # behind those that are in the file already
        self._lengths: list[int] = []
        self._bytes = 0
        self._crc = 0
        self._path = Path()

    def begin(self, chunk: int) -> None:
        """A new part in the place of an older one. Raises `no_space`, `no_access`."""
        self.close()
        self._path = part_path(self._folder, self._field, chunk)
        self._rows, self._lengths, self._bytes, self._crc = [], [], 0, 0
        try:
            self._handle = os.open(self._path, _CREATE, 0o600)
        except OSError as error:
            raise self._refused(error) from None

    def __setitem__(self, row: int, values: Any) -> None:
        """Puts that row: the one behind the last, or the last one once more, whose sample failed in a later column."""
        self._cut(row)
        if self._bytes >= limits.CHUNK_BYTES:
            self._spill()
        kept = np.array(values, self._field.stored, order="C")  # a copy: the source may use its own again
        self._rows.append(kept)
        self._lengths.append(len(kept))
        self._bytes += kept.nbytes

    def finish(self, rows: int) -> tuple[int, int]:
        """Ends the part after so many rows: (its CRC-32, its elements)."""
        self._cut(rows)
        assert len(self._lengths) == rows
        self._spill()
        self._write(np.array(self._lengths, "<i8").data.cast("B") if rows else memoryview(b""))
        self.close()
        return self._crc, sum(self._lengths)

    def close(self) -> None:
        """Gives the file back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _cut(self, row: int) -> None:
        if len(self._lengths) > row:
            self._bytes -= self._rows.pop().nbytes
            self._lengths.pop()
        assert len(self._lengths) == row

    def _spill(self) -> None:
        for values in self._rows:
            if values.nbytes:
                self._write(values.reshape(-1).view(np.uint8).data)
        self._rows, self._bytes = [], 0

    def _write(self, data: memoryview) -> None:
        assert self._handle is not None
        self._crc = zlib.crc32(data, self._crc)
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> MachineError:
        return store.machine_error(error, self._path, "A part of the store cannot be written")


class PartReader:
    """A part file that was written for `rows` rows with `elements` elements. Raises `bad_store` where it is not that."""

    def __init__(self, folder: str | os.PathLike[str], field: Field, chunk: int, rows: int, elements: int) -> None:
        self.path = part_path(folder, field, chunk)
        self._rows = rows
        self._values_bytes = elements * field.item_bytes
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataError("bad_store", f"The part {str(self.path)!r} is missing.", "Prepare again.") from None
        except OSError as error:
            raise store.machine_error(error, self.path, "A part of the store cannot be read") from None
        size = os.fstat(self._handle).st_size
        if size != self._values_bytes + rows * LENGTH_BYTES:
            self.close()
            raise DataError("bad_store", f"The part {str(self.path)!r} has {size} bytes.", "Prepare again.")

    def values(self) -> Iterator[bytes]:
        """The values, in pieces of at most `limits.CHUNK_BYTES`."""
        return self._pieces(0, self._values_bytes)

    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each row."""
        size = self._rows * LENGTH_BYTES
        return np.frombuffer(b"".join(self._pieces(self._values_bytes, self._values_bytes + size)), "<i8")

    def crc(self) -> int:
        """The CRC-32 of the whole file."""
        crc = 0
        for piece in self._pieces(0, self._values_bytes + self._rows * LENGTH_BYTES):
            crc = zlib.crc32(piece, crc)
        return crc

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            try:
                piece = os.pread(self._handle, min(stop - start, limits.CHUNK_BYTES), start)
            except OSError as error:
                raise store.machine_error(error, self.path, "A part of the store cannot be read") from None
            if not piece:
                raise DataError("bad_store", f"The part {str(self.path)!r} ends at byte {start}.", "Prepare again.")
            yield piece
            start += len(piece)

    def close(self) -> None:
        """Gives the file back."""
        os.close(self._handle)
