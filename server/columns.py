"""The files of the stores that are served, for the thread that reads ahead: what of them is in memory, where rows lie."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from dataserve.protocol import limits, manifest
from dataserve.protocol.manifest import Column

from .pages import Pages, sample
from .readahead import PAGE, Places, pieces, runs
from .store import open_sealed

SAMPLES = 256  #: pages of a column that are looked at: where 1 % is missing, 92 of 100 looks see it
PROBES = 16  #: runs that are looked at before a step's are asked for
PIECE_BYTES = 128 * 1024  #: asked for at once: of more the kernel may take the start only


class ColumnPages:
    """One column's files. `resident` is the share in memory at the last look, None where the kernel does not tell."""

    def __init__(self, folder: str, column: Column) -> None:
        self.values = Pages(os.path.join(folder, column.parts[0].file))
        try:
            self.offsets = Pages(os.path.join(folder, column.offsets[0].file)) if column.offsets else None
        except BaseException:
            self.values.close()
            raise
        self._item_bytes = column.item_bytes
        rows = column.offsets[0].rows - 1 if column.offsets else column.parts[0].rows
        self.row_bytes = (self.values.size_bytes - limits.HEADER_BYTES) / rows + PAGE  #: what a row costs to read
        self.resident: float | None = None

    @property
    def cold(self) -> bool:
        """Whether something of it was missing at the last look."""
        return self.resident is not None and self.resident < 1

    def look(self, turn: int) -> None:
        """Look at a sample of its pages. Raises OSError."""
        if self.values.may_look:
            places = sample(self.values.pages, SAMPLES, turn)
            self.resident = self.values.resident(places) / len(places)

    def runs(self, rows: Places, *, joins: bool) -> tuple[Places, Places]:
        """The bytes of those rows in the file of the values, as `readahead.runs` gives them."""
        if self.offsets is None:
            starts = rows * self._item_bytes
            stops = starts + self._item_bytes
        else:
            ends = self.offsets.numbers("<i8")
            # `take` lets go of the interpreter while pages of the offsets come from the disk.
            starts = np.take(ends, rows, mode="clip") * self._item_bytes
            stops = np.take(ends, rows + 1, mode="clip") * self._item_bytes
        header = limits.HEADER_BYTES
        return runs(starts + header, stops + header, self.values.size_bytes, joins=joins)

    def ask(self, rows: Places, *, joins: bool) -> int:
        """Ask the kernel for those rows, unless all that is looked at is there; how many bytes were asked for."""
        starts, stops = self.runs(rows, joins=joins)
        step = -(-len(starts) // PROBES) or 1
        probes = [place // PAGE for place in starts[::step].tolist()]
        if self.values.resident(probes) == len(probes):
            return 0
        for offset, length in pieces(starts, stops, PIECE_BYTES):
            self.values.advise(offset, length)
        return int((stops - starts).sum())

    def close(self) -> None:
        """Let go of the files."""
        self.values.close()
        if self.offsets is not None:
            self.offsets.close()


class Stores:
    """The columns of the stores, by folder: opened when first named, let go of when named no more."""

    def __init__(self) -> None:
        self._columns: dict[str, list[ColumnPages]] = {}
        self.failed: dict[str, str] = {}  #: stores whose files could not be opened or looked at, and why

    def keep(self, paths: set[str]) -> None:
        """Have these and no others."""
        for path in self._columns.keys() - paths:
            for column in self._columns.pop(path):
                column.close()
        self.failed = {path: why for path, why in self.failed.items() if path in paths}
        for path in paths - self._columns.keys() - self.failed.keys():
            self._open(path)

    def _open(self, path: str) -> None:
        opened = self._columns[path] = []
        try:
            columns = open_sealed(path).manifest.columns
            # One at a time into the list, so that what was opened before a failure is closed; no job reads origins.
            opened.extend(ColumnPages(path, column) for column in columns if column.name != manifest.ORIGINS)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one store, the others are read ahead
            self._drop(path, error)

    def _drop(self, path: str, error: Exception) -> None:
        for column in self._columns.pop(path):
            column.close()
        self.failed[path] = str(error)

    def look(self, turn: int) -> Mapping[str, float | None]:
        """Look at all; the share of each store that is in memory, None where that cannot be known."""
        found: dict[str, float | None] = {}
        for path, columns in list(self._columns.items()):
            try:
                for column in columns:
                    column.look(turn)
            except OSError as error:
                self._drop(path, error)
                continue
            pages = sum(column.values.pages for column in columns)
            known = [column.resident * column.values.pages for column in columns if column.resident is not None]
            found[path] = sum(known) / pages if len(known) == len(columns) else None
        return found

    def cold(self, path: str) -> list[ColumnPages]:
        """The columns of that store of which something was missing."""
        return [column for column in self._columns.get(path, ()) if column.cold]
