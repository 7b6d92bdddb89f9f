"""`arrays:FILE.npz`: a dict sample with the file's names in the file's order, read chunk by chunk, whole arrays at once.

The members are streamed out of the zip as they are asked for: one block of each is in memory, never a whole array,
and zip's own checksum is verified where a member is read to its end.
"""

from __future__ import annotations

import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataserveError, UserError

from .sources import Identity, Source, checked_length
from .spec import DatasetSpec

_BLOCK_ROWS = 256  # what `sample` reads ahead


class ArraysSource(Source):
    """The arrays of an .npz, one row each a sample. Raises `bad_source` where they are no such thing."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._path = os.path.abspath(os.path.expanduser(spec.target))
        if spec.args:
            raise UserError("bad_source", f"arrays: takes no arguments, but got {', '.join(spec.args)}.")
        try:
            archive = zipfile.ZipFile(self._path)
        except (OSError, zipfile.BadZipFile) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no .npz file"
            raise UserError(
                "bad_source",
                f"{self._path!r} cannot be opened: {reason}.",
                "Write one with numpy.savez(FILE, image=..., label=...).",
            ) from None
        self._archive = archive
        self._members: dict[str, _Member] = {}
        self._block: tuple[int, int, Mapping[str, npt.NDArray[Any]]] = (0, 0, {})
        try:
            for name in archive.namelist():
                if not name.endswith(".npy"):
                    raise UserError("bad_source", f"{self._path!r} holds {name!r}, no array.", "Use numpy.savez.")
                self._members[name.removesuffix(".npy")] = _Member(archive, self._path, name)
            self.length: int = checked_length(spec.source, self._common_length())
        except DataserveError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        for member in self._members.values():
            member.close()
        self._archive.close()

    def _common_length(self) -> int:
        lengths = {name: member.shape[0] for name, member in self._members.items()}
        if len(set(lengths.values())) > 1:
            (one, first), *rest = lengths.items()
            other, second = next(item for item in rest if item[1] != first)
            text = f"The arrays of {self._path!r} differ in length: {one!r} has {first} rows, {other!r} has {second}."
            raise UserError("bad_source", text, "Each row is one sample: cut them to one length.")
        return next(iter(lengths.values()), 0)

    def identity(self) -> Identity:
        """The one file; numpy reads it."""
        return Identity((self._path,), ("numpy",))

    def block(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]]:
        """Rows `[start, stop)` of each array."""
        return {name: member.rows(start, stop) for name, member in self._members.items()}

    def sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """One row of each array; its neighbours are read along."""
        start, stop, block = self._block
        if not start <= index < stop:
            start, stop = index, min(index + _BLOCK_ROWS, self.length)
            block = self.block(start, stop)
            self._block = (start, stop, block)
        return {name: array[index - start] for name, array in block.items()}


class _Member:
    """One array of the archive, read forwards; a step back starts it again."""

    def __init__(self, archive: zipfile.ZipFile, path: str, name: str) -> None:
        self._archive = archive
        self._name = name
        self._what = f"The array {name.removesuffix('.npy')!r} of {path!r}"
        self._stream: IO[bytes] | None = None
        self._row = 0
        self._whole: npt.NDArray[Any] | None = None
        self.shape, self._fortran, self._dtype = self._start()
        try:
            self._check()
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the stream."""
        if self._stream is not None:
            self._stream.close()

    def _check(self) -> None:
        if len(self.shape) == 0:
            raise UserError("bad_source", f"{self._what} is a single number.", "Each row of an array is one sample.")
        if self._dtype.name not in manifest.DTYPES:
            text = f"{self._what} has the type {self._dtype}, which a store cannot hold."
            raise UserError("bad_source", text, f"Convert it to one of: {', '.join(manifest.DTYPES)}.")

    def _start(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        """Opens the member anew and stands behind its header."""
        self.close()
        self._row = 0
        try:
            self._stream = self._archive.open(self._name)
            version = np.lib.format.read_magic(self._stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"its .npy version is {version}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a header by Python 2 is read all the same
                shape, fortran, dtype = read(self._stream)
        except (ValueError, EOFError, OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise UserError("bad_source", f"{self._what} cannot be read: {error}.") from None
        return shape, fortran, dtype

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows `[start, stop)`, read-only."""
        if self._fortran:  # rows do not lie together: the one case that needs the whole array
            if self._whole is None:
                data = self._read(math.prod(self.shape))
                self._whole = data.reshape(self.shape[::-1]).T
            return self._whole[start:stop]
        if start < self._row:
            self._start()
        items = math.prod(self.shape[1:])
        while self._row < start:  # in steps, so that a long way costs no memory
            step = min(start - self._row, max(1, 2**20 // max(1, items)))
            self._read(step * items)
            self._row += step
        data = self._read((stop - start) * items)
        self._row = stop
        return data.reshape(stop - start, *self.shape[1:])

    def _read(self, items: int) -> npt.NDArray[Any]:
        """The next elements as a flat array."""
        assert self._stream is not None
        need = items * self._dtype.itemsize
        try:
            data = self._stream.read(need) if need else b""
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError("bad_source", f"{self._what} is damaged: {error}.") from None
        if len(data) != need:
            raise UserError("bad_source", f"{self._what} ends {need - len(data)} bytes too early.")
        return np.frombuffer(data, self._dtype)
