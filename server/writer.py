"""A store while it is written: room reserved, chunks put at their places, then sealed by one rename.

    .building/<fingerprint>/
      journal               what is done (journal.py)
      slots/<column>.npy    fixed columns: each chunk at its slot; kept rows stand at the slot's start
      parts/<column>.<n>    ragged columns, chunk by chunk (parts.py)
      sealed/               the store itself, put together in the end (joining.py) and renamed from here

Where samples were left out, the slots have holes: rows are moved together in their own file, which is renamed then.

Any number of processes may write chunks of one build: each has its place from the start, so that the bytes do not depend
on who writes them, in which order, or how often the work was interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, MachineError
from dataserve.protocol.manifest import Column, Manifest, Part

from . import joining, journal, parts, store
from .journal import Chunk, Journal
from .layout import Field, Layout
from .parts import PartReader, PartWriter

SLOTS = "slots"
SEALED = "sealed"
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

#: Where rows are put: `column[row] = value`.
Rows = npt.NDArray[Any] | PartWriter


class ChunkWriter:
    """Puts chunks into the files of a build. One a process; any number a build.

    Memory: one chunk of each fixed column (`limits.CHUNK_BYTES` in all, or one row where that is more), and as much
    again for each ragged one.
    """

    def __init__(self, folder: str | os.PathLike[str], layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._handles: list[int | None] = []
        rows = layout.chunk_rows if layout.rows is None else min(layout.chunk_rows, layout.rows)
        try:
            for field in layout.fields:
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                path = os.path.join(folder, SLOTS, field.file)
                self._handles.append(None if field.ragged else os.open(path, flags))
        except OSError as error:
            self.close()
            raise store.machine_error(error, folder, "The files being written cannot be opened") from None
        self.columns: list[Rows] = [
            PartWriter(folder, field) if field.ragged else field.buffer(rows) for field in layout.fields
        ]

    def begin(self, chunk: int) -> None:
        """Before the first row of that chunk is put into `columns`."""
        for column in self.columns:
            if isinstance(column, PartWriter):
                column.begin(chunk)

    def finish(self, chunk: int, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Writes the first `rows` rows of `columns` as that chunk: (CRC-32s, elements), both by field, as a `Chunk` has
        them. Raises `no_space`, `no_access`."""
        start, _ = self._layout.span(chunk)
        crcs, elements = [], []
        for field, handle, column in zip(self._layout.fields, self._handles, self.columns, strict=True):
            if isinstance(column, PartWriter):
                crc, count = column.finish(rows)
                crcs.append(crc)
                elements.append(count)
                continue
            assert handle is not None
            data = column[:rows].reshape(-1).view(np.uint8).data
            crcs.append(zlib.crc32(data))
            elements.append(0)
            self._put(handle, data, limits.HEADER_BYTES + start * field.item_bytes)
        return tuple(crcs), tuple(elements)

    def _put(self, handle: int, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(handle, data[done:], offset + done)
            except OSError as error:
                need = self._layout.needed_bytes
                raise store.machine_error(error, self._folder, "The store cannot be written", need) from None

    def close(self) -> None:
        """Gives the descriptors back."""
        for handle in self._handles:
            if handle is not None:
                os.close(handle)
        self._handles = []
        for column in getattr(self, "columns", ()):
            if isinstance(column, PartWriter):
                column.close()


class StoreWriter:
    """One build, in `<root>/.building/<fingerprint>`. Its caller holds the builder's lock of that fingerprint."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.root = root
        self.folder = root / store.BUILDING / fingerprint

    def wipe(self) -> None:
        """Removes what an earlier build that died has left here, or this one that failed."""
        try:
            shutil.rmtree(self.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            raise store.machine_error(error, self.folder, "The leftovers of a dead build cannot be removed") from None

    def announce(self) -> None:
        """Makes the empty folder: who finds it knows that a build began here and has died. Raises `no_access`, ..."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise store.machine_error(error, self.folder, "The store cannot be written") from None

    def create(self, layout: Layout, header: Mapping[str, Any]) -> Journal:
        """Makes the files, with all the room of fixed columns reserved. Raises `no_space`, `no_access`."""
        need, free = layout.needed_bytes, store.free_bytes(self.root)
        if need is not None and need > free:
            text = f"The store needs {need} bytes; {free} are free on the file system of {str(self.root)!r}."
            remedy = "Make room, or choose another place with --store or $DATASERVE_STORE."
            raise MachineError("no_space", text, remedy)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in (SLOTS, parts.FOLDER):
                (self.folder / name).mkdir(mode=0o700)
            for field in layout.fields:
                if not field.ragged:
                    self._reserve(layout, field)
            return Journal(self.folder / journal.FILE, header)
        except OSError as error:
            self.wipe()
            if isinstance(error, MachineError):
                raise
            raise store.machine_error(error, self.folder, "The store cannot be written", need) from None

    def _reserve(self, layout: Layout, field: Field) -> None:
        handle = os.open(self.folder / SLOTS / field.file, _CREATE, 0o600)
        try:
            size = layout.slot_bytes(field)
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(handle, layout.slot_bytes(field))  # no reservation here: a full disk shows at `pwrite`
        finally:
            os.close(handle)

    def recall(self) -> dict[str, Any] | None:
        """What a dead build that lies here was building, as `create` was told; None where there is none to go on with."""
        found = journal.read(self.folder / journal.FILE)
        return None if found is None else found[0]

    def resume(self, layout: Layout, header: Mapping[str, Any]) -> tuple[Journal, dict[int, Chunk]]:
        """Goes on with the dead build that lies here: the chunks of its journal whose data are what it says."""
        found = journal.read(self.folder / journal.FILE)
        assert found is not None
        self._take_back(layout)
        before = _rows_before(found[1])
        claimed = sorted(found[1].items(), reverse=True)  # the order in which holes are opened again
        chunks = [chunk for number, chunk in claimed if self._is_whole(layout, chunk, before.get(number))]
        whole = {chunk.chunk: chunk for chunk in reversed(chunks)}
        return Journal(self.folder / journal.FILE, header, whole.values()), whole

    def _take_back(self, layout: Layout) -> None:
        """Undoes what `assemble` had done: slots go back to their place, all else in `sealed` is made again."""
        try:
            for field in layout.fields:
                slots, moved = self.folder / SLOTS / field.file, self.folder / SEALED / field.file
                if field.ragged:
                    continue
                if not slots.exists():
                    if moved.exists():
                        os.rename(moved, slots)
                    else:
                        self._reserve(layout, field)
                slots.chmod(0o600)
            shutil.rmtree(self.folder / SEALED, ignore_errors=True)
        except OSError as error:
            raise store.machine_error(error, self.folder, "A dead build cannot be gone on with") from None

    def _is_whole(self, layout: Layout, chunk: Chunk, before: int | None) -> bool:
        """Whether that chunk's data are there and have its checksums; where a seal had moved them, they are put back.
        `before`: rows kept before it, None where that is not known."""
        if not len(chunk.crcs) == len(chunk.elements) == len(layout.fields):
            return False
        for index, field in enumerate(layout.fields):
            try:
                if self._crc(layout, field, chunk, chunk.elements[index]) == chunk.crcs[index]:
                    continue
            except DataError:  # what is missing or cut
                pass
            try:
                slots = self.folder / SLOTS / field.file
                if field.ragged or before is None or not joining.bring_back(slots, layout, index, chunk, before):
                    return False
            except DataError:
                return False
        return True

    def _crc(self, layout: Layout, field: Field, chunk: Chunk, elements: int) -> int:
        if field.ragged:
            part = PartReader(self.folder, field, chunk.chunk, chunk.kept, elements)
            try:
                return part.crc()
            finally:
                part.close()
        path, crc = self.folder / SLOTS / field.file, 0
        start, size = joining.slot_start(layout, field, chunk), chunk.kept * field.item_bytes
        with open(path, "rb", buffering=0) as file:
            for piece in joining.pieces(file.fileno(), path, start, size):
                crc = zlib.crc32(piece, crc)
        return crc

    def assemble(
        self, layout: Layout, chunks: Sequence[Chunk], origins: Iterable[tuple[int, bytes]] | None
    ) -> tuple[Column, ...]:
        """Puts the store's files together in `sealed` from all chunks, in their order. Slots are closed up and moved there,
        the rest is written anew. Raises `no_space`, `no_access`."""
        target = self.folder / SEALED
        try:
            target.mkdir(mode=0o700, exist_ok=True)
            columns = []
            for index, field in enumerate(layout.fields):
                slots = self.folder / SLOTS / field.file
                if field.ragged:
                    columns.append(joining.join(self.folder, target, layout, index, chunks))
                    continue
                crcs = tuple(chunk.crcs[index] for chunk in chunks if chunk.kept)
                if any(chunk.bad for chunk in chunks[:-1]):  # holes at the end are none
                    crcs = joining.close_holes(slots, layout, index, chunks)
                columns.append(self._move(slots, target, field, sum(chunk.kept for chunk in chunks), crcs))
            if origins is not None:
                columns.append(joining.write_origins(target, origins))
        except DataserveError:
            raise
        except OSError as error:
            raise store.machine_error(error, self.folder, "The store cannot be put together") from None
        return tuple(columns)

    def _move(self, slots: Path, target: Path, field: Field, rows: int, crcs: tuple[int, ...]) -> Column:
        """A column whose slots are dense: it gets its header and its place."""
        size = limits.HEADER_BYTES + rows * field.item_bytes
        handle = os.open(slots, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(handle, manifest.npy_header(field.dtype, (rows, *field.shape)), 0)
            os.ftruncate(handle, size)
        finally:
            os.close(handle)
        os.rename(slots, target / field.file)
        part = Part(field.file, rows, size, crcs)
        return Column(field.name, "fixed", field.dtype, field.shape, (part,), field.logical)

    def seal(self, found: Manifest) -> store.Sealed:
        """Makes everything in `sealed` durable and read-only, then lets the store appear under its name.

        Where a store of that name and fingerprint exists already and is whole, that one is used and ours is removed.
        Raises `bad_store`, `no_space`, `no_access`.
        """
        folder = self.folder / SEALED
        try:
            for part in found.files():
                _finish(os.open(folder / part.file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
            with contextlib.suppress(FileNotFoundError):  # of a seal that was killed here
                (folder / manifest.FILE).unlink()
            with open(os.open(folder / manifest.FILE, _CREATE, 0o600), "wb") as file:
                file.write(found.to_bytes())
            _finish(os.open(folder / manifest.FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
            store.sync_folder(folder)
            target = self._publish(found)
            store.sync_folder(self.root)
        except DataserveError:
            raise
        except OSError as error:
            raise store.machine_error(error, self.folder, "The store cannot be sealed") from None
        self.wipe()
        return store.open_sealed(target)

    def _publish(self, found: Manifest) -> Path:
        """The one rename. A damaged store in the way is moved out of it; its readers keep what they have mapped."""
        target = self.root / found.folder
        try:
            os.rename(self.folder / SEALED, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            return target
        if usable(target, found.fingerprint) is not None:
            return target
        store.discard(self.root, target)
        os.rename(self.folder / SEALED, target)
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


def _rows_before(chunks: Mapping[int, Chunk]) -> dict[int, int]:
    """How many rows are kept before each chunk, as far as all that lie before it are known."""
    found, rows = {}, 0
    for number in range(len(chunks)):
        if number not in chunks:
            break
        found[number] = rows
        rows += chunks[number].kept
    return found


def _finish(handle: int) -> None:
    """Read-only, durable, closed."""
    try:
        os.fchmod(handle, 0o444)
        os.fsync(handle)
    finally:
        os.close(handle)


def empty_column(field: Field, layout: Layout) -> Column:
    """What the manifest says of that column with no data looked at: right in all but checksums and elements."""
    if field.ragged:
        values = Part(field.file, 0, limits.HEADER_BYTES, ())
        rows = (layout.rows or 0) + 1
        crcs = (0,) * -(-rows * 8 // limits.CHUNK_BYTES)
        offsets = Part(field.offsets_file, rows, limits.HEADER_BYTES + 8 * rows, crcs)
        return Column(field.name, field.kind, field.dtype, field.shape, (values,), field.logical, (offsets,))
    crcs = (0,) * -(-(layout.rows or 0) // layout.chunk_rows)
    part = Part(field.file, layout.rows or 0, layout.slot_bytes(field), crcs)
    return Column(field.name, field.kind, field.dtype, field.shape, (part,), field.logical)
