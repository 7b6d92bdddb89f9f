"""A store while it is written: room reserved, chunks put at their places with `pwrite`, then sealed by one rename.

Any number of processes may write chunks of one build: each row has its place from the start, so that the bytes do not
depend on who writes them or in which order.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, MachineError
from dataserve.protocol.manifest import Column, Manifest, Part

from . import store

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Field(NamedTuple):
    """One fixed column: `shape` is one row's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    logical: str | None = None

    @property
    def file(self) -> str:
        """Its file's name."""
        return f"{self.name}.npy"

    @property
    def item_bytes(self) -> int:
        """Bytes of one row."""
        return manifest.row_bytes(self.dtype, self.shape)

    def buffer(self, rows: int) -> npt.NDArray[Any]:
        """An array that holds so many rows as they are stored: `(rows, *shape)`, little-endian."""
        return np.empty((rows, *self.shape), np.dtype(manifest.DTYPES[self.dtype]))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each row of each column lies: all that a writer must know."""

    rows: int
    fields: tuple[Field, ...]

    @property
    def chunk_rows(self) -> int:
        """Rows of each chunk but the last."""
        return manifest.chunk_rows(sum(field.item_bytes for field in self.fields))

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.rows // self.chunk_rows)

    @property
    def size_bytes(self) -> int:
        """Bytes of all column files."""
        return sum(self.file_bytes(field) for field in self.fields)

    def file_bytes(self, field: Field) -> int:
        """Bytes of that column's file."""
        return limits.HEADER_BYTES + self.rows * field.item_bytes

    def span(self, chunk: int) -> tuple[int, int]:
        """The rows `[start, stop)` of that chunk."""
        start = chunk * self.chunk_rows
        return start, min(start + self.chunk_rows, self.rows)

    def columns(self, crcs: Sequence[Sequence[int]]) -> tuple[Column, ...]:
        """The manifest's columns; `crcs[chunk][column]` are the checksums."""
        return tuple(
            Column(
                name=field.name,
                kind="fixed",
                dtype=field.dtype,
                shape=field.shape,
                parts=(Part(field.file, self.rows, self.file_bytes(field), tuple(row[index] for row in crcs)),),
                logical=field.logical,
            )
            for index, field in enumerate(self.fields)
        )

    def to_map(self) -> dict[str, Any]:
        """JSON for the workers."""
        return {"rows": self.rows, "fields": self.fields}

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Layout:
        """The layout of `to_map`."""
        return cls(
            fields["rows"],
            tuple(Field(name, dtype, tuple(shape), logical) for name, dtype, shape, logical in fields["fields"]),
        )


class ChunkWriter:
    """Puts chunks into the files of a build. One a process; any number a build."""

    def __init__(self, folder: str | os.PathLike[str], layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._handles: list[int] = []
        try:
            for field in layout.fields:
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                self._handles.append(os.open(os.path.join(folder, field.file), flags))
        except OSError as error:
            self.close()
            raise store.machine_error(error, folder, "The files being written cannot be opened") from None

    def write(self, chunk: int, arrays: Sequence[npt.NDArray[Any]]) -> tuple[int, ...]:
        """Writes the rows of that chunk of every column and returns their CRC-32s.

        Each array has the chunk's rows, contiguous, in the stored type. Raises `no_space`, `no_access`.
        """
        start, stop = self._layout.span(chunk)
        crcs = []
        for field, handle, array in zip(self._layout.fields, self._handles, arrays, strict=True):
            data = array.reshape(-1).view(np.uint8).data
            assert array.flags.c_contiguous and len(data) == (stop - start) * field.item_bytes, field
            crcs.append(zlib.crc32(data))
            self._put(handle, data, limits.HEADER_BYTES + start * field.item_bytes)
        return tuple(crcs)

    def _put(self, handle: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(handle, data[done:], offset + done)
            except OSError as error:
                need = self._layout.size_bytes
                raise store.machine_error(error, self._folder, "The store cannot be written", need) from None

    def close(self) -> None:
        """Gives the descriptors back."""
        while self._handles:
            os.close(self._handles.pop())


class StoreWriter:
    """One build, in `<root>/.building/<fingerprint>`. Its caller holds the builder's lock of that fingerprint."""

    def __init__(self, root: Path, fingerprint: str, layout: Layout) -> None:
        self.root = root
        self.layout = layout
        self.folder = root / store.BUILDING / fingerprint

    def wipe(self) -> None:
        """Removes what an earlier build that died has left here, or this one that failed."""
        try:
            shutil.rmtree(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise store.machine_error(error, self.folder, "The leftovers of a dead build cannot be removed") from None

    def check_room(self) -> tuple[int, int]:
        """(bytes needed, bytes free) for this build. Raises `no_space` by itself only in `create`."""
        return self.layout.size_bytes, store.free_bytes(self.root)

    def create(self) -> None:
        """Makes the files, with their headers and all their room reserved. Raises `no_space`, `no_access`."""
        need, free = self.check_room()
        if need > free:
            text = f"The store needs {need} bytes; {free} are free on the file system of {str(self.root)!r}."
            remedy = "Make room, or choose another place with --store or $DATASERVE_STORE."
            raise MachineError("no_space", text, remedy)
        try:
            self.folder.mkdir(mode=0o700, parents=True)
            for field in self.layout.fields:
                self._reserve(field)
        except OSError as error:
            self.wipe()
            raise store.machine_error(error, self.folder, "The store cannot be written", need) from None

    def _reserve(self, field: Field) -> None:
        handle = os.open(self.folder / field.file, _CREATE, 0o600)
        try:
            os.pwrite(handle, manifest.npy_header(field.dtype, (self.layout.rows, *field.shape)), 0)
            size = self.layout.file_bytes(field)
            try:
                os.posix_fallocate(handle, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                os.ftruncate(handle, size)  # a file system without reservation: a full disk shows at `pwrite`
        finally:
            os.close(handle)

    def seal(self, found: Manifest) -> store.Sealed:
        """Makes everything durable and read-only, then lets the store appear under its name.

        Where a store of that name and fingerprint exists already and is whole, that one is used and ours is removed.
        Raises `bad_store`, `no_space`, `no_access`.
        """
        try:
            for field in self.layout.fields:
                handle = os.open(self.folder / field.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                _finish(handle)
            handle = os.open(self.folder / manifest.FILE, _CREATE, 0o600)
            data, done = found.to_bytes(), 0
            while done < len(data):
                done += os.pwrite(handle, data[done:], done)
            _finish(handle)
            store.sync_folder(self.folder)
            target = self._publish(found)
            store.sync_folder(self.root)
        except DataserveError:
            raise
        except OSError as error:
            raise store.machine_error(error, self.folder, "The store cannot be sealed") from None
        return store.open_sealed(target)

    def _publish(self, found: Manifest) -> Path:
        """The one rename. A damaged store in the way is moved out of it; its readers keep what they have mapped."""
        target = self.root / found.folder
        try:
            os.rename(self.folder, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return target
        there = usable(target, found.fingerprint)
        if there is not None:
            self.wipe()
            return target
        store.discard(self.root, target)
        os.rename(self.folder, target)
        return target


def usable(path: Path, fingerprint: str) -> store.Sealed | None:
    """The store at that path, or None where there is none or it is damaged.

    Raises `bad_store` where it is whole but of another fingerprint whose first digits are the same.
    """
    try:
        there = store.open_sealed(path)
    except DataError:
        return None
    if there.manifest.fingerprint != fingerprint:
        text = f"The store {str(path)!r} has the fingerprint {there.manifest.fingerprint}, not {fingerprint}."
        raise DataError("bad_store", text, "Give the data set another name with --name.")
    return there


def _finish(handle: int) -> None:
    """Read-only, durable, closed."""
    try:
        os.fchmod(handle, 0o444)
        os.fsync(handle)
    finally:
        os.close(handle)
