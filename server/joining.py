"""From chunks to columns: parts joined, holes closed, origins made. It may be killed and started again: parts are read and
not changed, and rows that are moved lie whole at their old place or at their new one, but for one chunk, which is made
again. Memory is some pieces of `limits.CHUNK_BYTES` and 8 bytes a row of one chunk."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError
from dataserve.protocol.manifest import Column, Part

from . import store
from .journal import Chunk
from .layout import Field, Layout
from .parts import PartReader

ORIGINS = Field(manifest.ORIGINS, "uint8", (), "bytes", "ragged")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_BUFFER_BYTES = 1 << 20


class Sums:
    """CRC-32s of data that come in pieces, each of `span_bytes` of them."""

    def __init__(self, span_bytes: int) -> None:
        self.size = 0
        self._span_bytes = span_bytes
        self._crc = 0
        self._whole: list[int] = []

    def add(self, data: bytes | memoryview) -> None:
        """The next piece."""
        view = memoryview(data)
        while view:
            left = self._span_bytes - self.size % self._span_bytes
            piece, view = view[:left], view[left:]
            self._crc = zlib.crc32(piece, self._crc)
            self.size += len(piece)
            if len(piece) == left:
                self._whole.append(self._crc)
                self._crc = 0

    def all(self) -> tuple[int, ...]:
        """Those of all that has come."""
        return (*self._whole, self._crc) if self.size % self._span_bytes else tuple(self._whole)


class ColumnFile:
    """A column's `.npy` written from front to back: its checksums come on the way, its header in the end.

    `span_bytes` of data have one checksum. Raises `no_space`, `no_access`.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], span_bytes: int) -> None:
        self._path = path
        self._dtype = dtype
        self._shape = shape
        self._sums = Sums(span_bytes)
        try:
            self._raw = io.FileIO(os.open(path, _CREATE, 0o600), "wb")
            self._raw.seek(limits.HEADER_BYTES)
        except OSError as error:
            raise store.machine_error(error, path, "The store cannot be written") from None
        self._file = io.BufferedWriter(self._raw, _BUFFER_BYTES)

    def append(self, data: bytes | memoryview) -> None:
        """More rows, or a piece of some."""
        try:
            self._file.write(data)
        except OSError as error:
            raise store.machine_error(error, self._path, "The store cannot be written") from None
        self._sums.add(data)

    def finish(self) -> Part:
        """Writes the header and says what the file holds."""
        size = self._sums.size
        rows = size // manifest.row_bytes(self._dtype, self._shape)
        try:
            self._file.seek(0)
            self._file.write(manifest.npy_header(self._dtype, (rows, *self._shape)))
            self._file.truncate(limits.HEADER_BYTES + size)
            self._file.close()
        except OSError as error:
            raise store.machine_error(error, self._path, "The store cannot be written") from None
        return Part(self._path.name, rows, limits.HEADER_BYTES + size, self._sums.all())

    def close(self) -> None:
        """Gives the file back, finished or not."""
        try:
            self._file.close()
        except OSError:  # a full disk refuses what is still buffered, and has been told already
            self._raw.close()


class _Ragged:
    """The two files of a ragged column."""

    def __init__(self, folder: Path, field: Field) -> None:
        self._field = field
        self._last = 0
        self._values = ColumnFile(folder / field.file, field.dtype, field.shape, limits.CHUNK_BYTES)
        try:
            self._offsets = ColumnFile(folder / field.offsets_file, "int64", (), limits.CHUNK_BYTES)
        except BaseException:
            self._values.close()
            raise

    def begin(self) -> None:
        self._offsets.append(bytes(8))

    def values(self, data: bytes) -> None:
        self._values.append(data)

    def lengths(self, lengths: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
        if len(lengths):
            ends = np.cumsum(lengths, dtype="<i8")
            ends += self._last
            self._last = int(ends[-1])
            self._offsets.append(ends.data.cast("B"))

    def finish(self) -> Column:
        field = self._field
        return Column(
            field.name,
            "ragged",
            field.dtype,
            field.shape,
            (self._values.finish(),),
            field.logical,
            (self._offsets.finish(),),
        )

    def close(self) -> None:
        self._values.close()
        self._offsets.close()


def join(folder: Path, target: Path, layout: Layout, index: int, chunks: Sequence[Chunk]) -> Column:
    """The ragged column at that index of the layout, from the parts of all chunks in their order."""
    field = layout.fields[index]
    joined = _Ragged(target, field)
    try:
        joined.begin()
        for chunk in chunks:
            part = PartReader(folder, field, chunk.chunk, chunk.kept, chunk.elements[index])
            try:
                for piece in part.values():
                    joined.values(piece)
                joined.lengths(part.lengths())
            finally:
                part.close()
        return joined.finish()
    finally:
        joined.close()


def close_holes(slots: Path, layout: Layout, index: int, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Moves the kept rows of all slots of that fixed column together at the front of their file, so that no room is needed
    for them twice: their checksums. Rows go towards the front, so what is written covers only what was read.

    Raises `bad_store`, `no_space` (a file system that copies on writing), `no_access`.
    """
    field = layout.fields[index]
    sums = Sums(layout.chunk_rows * field.item_bytes)
    handle = os.open(slots, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for chunk in chunks:
            at, moved = (
                limits.HEADER_BYTES + sums.size,
                limits.HEADER_BYTES + sums.size != slot_start(layout, field, chunk),
            )
            for piece in pieces(handle, slots, slot_start(layout, field, chunk), chunk.kept * field.item_bytes):
                if moved:
                    write_all(handle, slots, piece, at)
                sums.add(piece)
                at += len(piece)
    finally:
        os.close(handle)
    return sums.all()


def bring_back(slots: Path, layout: Layout, index: int, chunk: Chunk, before: int) -> bool:
    """Undoes what `close_holes` has done to that chunk, before which so many rows are kept: whether its rows are found at
    their dense place, and put into their slot. Chunks must be brought back from the last to the first.
    """
    field = layout.fields[index]
    size, dense = chunk.kept * field.item_bytes, limits.HEADER_BYTES + before * field.item_bytes
    handle = os.open(slots, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        data = b"".join(pieces(handle, slots, dense, size))
        if zlib.crc32(data) != chunk.crcs[index]:
            return False
        write_all(handle, slots, data, slot_start(layout, field, chunk))
    finally:
        os.close(handle)
    return True


def slot_start(layout: Layout, field: Field, chunk: Chunk) -> int:
    """Where that chunk's slot begins in the file of a fixed column, in bytes."""
    return limits.HEADER_BYTES + layout.span(chunk.chunk)[0] * field.item_bytes


def pieces(handle: int, path: Path, start: int, size: int) -> Iterator[bytes]:
    """So many bytes from that place on, in pieces of at most `limits.CHUNK_BYTES`. Raises `bad_store`, `no_access`."""
    stop = start + size
    while start < stop:
        try:
            piece = os.pread(handle, min(stop - start, limits.CHUNK_BYTES), start)
        except OSError as error:
            raise store.machine_error(error, path, "The store cannot be read") from None
        if not piece:
            raise DataError("bad_store", f"{str(path)!r} ends at byte {start}.", "Prepare again.")
        yield piece
        start += len(piece)


def write_all(handle: int, path: Path, data: bytes, at: int) -> None:
    """Puts these bytes at that place. Raises `no_space`, `no_access`."""
    view = memoryview(data)
    while view:
        try:
            done = os.pwrite(handle, view, at)
        except OSError as error:
            raise store.machine_error(error, path, "The store cannot be written") from None
        view, at = view[done:], at + done


def write_origins(target: Path, origins: Iterable[tuple[int, bytes]]) -> Column:
    """The column of origins from each row's (index in the source, path below its root)."""
    column = _Ragged(target, ORIGINS)
    try:
        column.begin()
        lengths: list[int] = []
        for index, path in origins:
            column.values(index.to_bytes(8, "little") + path)
            lengths.append(8 + len(path))
            if len(lengths) == limits.CHUNK_ROWS:
                column.lengths(np.array(lengths, "<i8"))
                lengths.clear()
        column.lengths(np.array(lengths, "<i8"))
        return column.finish()
    finally:
        column.close()


def kept_indices(layout: Layout, chunks: Sequence[Chunk]) -> Iterator[int]:
    """The index in the source of each row of the store."""
    for chunk in chunks:
        start = layout.span(chunk.chunk)[0]
        bad = {each.place for each in chunk.bad}
        yield from (index for index in range(start, start + chunk.scanned) if index not in bad)
