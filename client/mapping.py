"""Maps a sealed store, read-only, after checking that it is what its manifest says and what the daemon described."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest, memory
from dataserve.protocol.errors import DataError, MachineError, UserError
from dataserve.protocol.manifest import Manifest

_REMEDY = "Run `dataserve verify NAME`; if the store is damaged, remove it and prepare the data again."

READ_AHEAD_BYTES = 128 * 1024
OFFSETS_SLICE = 1 << 20  #: offsets are checked so many at a time


class Ragged(NamedTuple):
    """A ragged column: row i is `values[offsets[i]:offsets[i + 1]]`. Values `(elements, *shape)`, offsets int64 `(rows + 1,)`."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]


class Store:
    """A mapped store: its manifest, and its columns on demand as read-only arrays. bfloat16 comes as its bits, uint16."""

    def __init__(self, path: str, wanted_id: str, *, scattered: bool = False) -> None:
        """Read the manifest in the folder `path`; `scattered`: rows will be read in no order of the files. Raises
        `no_access`, `bad_store`, `store_mismatch`."""
        self.path = path
        self._scattered = scattered
        data = _read_manifest(path)
        self.id = manifest.identify(data)
        if self.id != wanted_id:
            raise UserError(
                "store_mismatch",
                f"The store at {path} has the id {self.id[:16]}, the daemon serves {wanted_id[:16]}.",
                "Give store=PATH, where the daemon's store is seen from here.",
            )
        self.manifest: Manifest = manifest.parse(data)
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._ragged: dict[str, Ragged] = {}

    def column(self, name: str) -> npt.NDArray[Any]:
        """The rows of a fixed column, `(rows, *shape)`. Raises `bad_store`, `no_access`."""
        if name not in self._columns:
            column = self.manifest.column(name)
            part = column.parts[0]
            mapped = map_npy(os.path.join(self.path, part.file), column.dtype, (part.rows, *column.shape))
            if self._scattered:
                advise_scattered(mapped, os.path.join(self.path, part.file), column.item_bytes)
            self._columns[name] = mapped
        return self._columns[name]

    def ragged(self, name: str) -> Ragged:
        """A ragged column; its offsets are looked through, once. Raises `bad_store`, `no_access`."""
        if name not in self._ragged:
            column = self.manifest.column(name)
            values, ends = column.parts[0], column.offsets[0]
            path = os.path.join(self.path, ends.file)
            offsets = map_npy(path, "int64", (ends.rows,))
            _check_offsets(path, offsets, values.rows)
            mapped = map_npy(os.path.join(self.path, values.file), column.dtype, (values.rows, *column.shape))
            if self._scattered:
                advise_scattered(mapped, os.path.join(self.path, values.file), mapped.nbytes // (ends.rows - 1))
            self._ragged[name] = Ragged(mapped, offsets)
        return self._ragged[name]


def _check_offsets(path: str, offsets: npt.NDArray[np.int64], elements: int) -> None:
    """Raises `bad_store` for offsets by which a row would lie outside the values."""
    if (offsets[0], offsets[-1]) != (0, elements):
        text = f"{path} leads from {offsets[0]} to {offsets[-1]}, not from 0 to {elements}."
        raise DataError("bad_store", text, _REMEDY)
    for start in range(0, len(offsets) - 1, OFFSETS_SLICE):
        part = offsets[start : start + OFFSETS_SLICE + 1]
        falling = part[1:] < part[:-1]
        if falling.any():
            text = f"{path} falls behind row {start + int(falling.argmax())}."
            raise DataError("bad_store", text, _REMEDY)


def locate(described: str, seen_from_here: str | None) -> str:
    """The store's folder: the daemon's path, or where `store=` says it is: the folder itself, or the root above it."""
    if seen_from_here is None:
        return described
    if (Path(seen_from_here) / manifest.FILE).exists():
        return seen_from_here
    return os.path.join(seen_from_here, os.path.basename(described))


def map_npy(path: str, dtype: str, shape: tuple[int, ...], owner: int | None = None) -> npt.NDArray[Any]:
    """The data of a `.npy` of ours, mapped read-only: header and exact size are as they must be, no link is followed.

    `owner`: the user id that the file must have. Raises `bad_store`, `no_access`.
    """
    header = manifest.npy_header(dtype, shape)
    size_bytes = len(header) + manifest.row_bytes(dtype, shape)
    descriptor = _open(path)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DataError("bad_store", f"{path} is no file.", _REMEDY)
        if owner is not None and (found.st_uid != owner or found.st_mode & 0o022):
            raise DataError("bad_store", f"{path} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}.")
        if found.st_size != size_bytes:
            raise DataError("bad_store", f"{path} has {found.st_size} bytes, not {size_bytes}.", _REMEDY)
        if os.pread(descriptor, len(header), 0) != header:
            raise DataError("bad_store", f"{path} has another header than {dtype} {shape} has.", _REMEDY)
        mapped = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return np.ndarray(shape, manifest.DTYPES[dtype], mapped, len(header))


def advise_scattered(mapped: npt.NDArray[Any], path: str, row_bytes: int) -> None:
    """Have the kernel bring in a missing page alone, for rows read in no order, where that pays: its habit is to bring in as
    much around it as the disk's read-ahead says, which is more than a row and, in a file with no room in memory, is dropped
    before it is of use. Scripts/bench_cold shows what it saves."""
    base = cast(mmap.mmap, mapped.base)
    available = memory.available_bytes(_text)
    if available is not None and mapped.nbytes * 2 > available and row_bytes < read_ahead_bytes(os.stat(path).st_dev):
        base.madvise(mmap.MADV_RANDOM)


def read_ahead_bytes(device: int) -> int:
    """What the kernel reads around a missing page on that device, Linux's default where it does not say."""
    try:
        return int(_text(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")) * 1024
    except (OSError, ValueError):
        return READ_AHEAD_BYTES


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise MachineError(
            "no_access",
            f"{path} cannot be opened: {error.strerror}.",
            "The daemon's store must be readable from here; in a container, mount it and give store=PATH.",
        ) from None


def _read_manifest(path: str) -> bytes:
    with open(_open(os.path.join(path, manifest.FILE)), "rb") as file:
        return file.read(limits.MANIFEST_BYTES + 1)
