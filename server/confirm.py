"""After a hit: some rows prepared again and compared with the store, so that what no fingerprint sees is seen in the end.

A row that differs means that the source, the code or a library changed behind the fingerprint's back, or that rows are
not a function of their samples. The store itself is whole; it is no longer what its spec would give.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError
from dataserve.protocol.manifest import Manifest

from . import randomness, sources
from .layout import Field
from .reading import Reader
from .schema import Schema
from .sources import Source, shown
from .spec import DatasetSpec
from .store import Sealed

ROWS = 16


def confirm(spec: DatasetSpec, sealed: Sealed) -> int:
    """Prepares `ROWS` rows spread over the store again; how many were equal, 0 for `store:` sources, which have nothing
    to be prepared from. Raises `source_changed` with the row and the difference, and what opening or reading raises."""
    if spec.scheme == "store":
        return 0
    source = sources.open_source(sources.located(spec))
    try:
        found = sealed.manifest
        source.row_key = found.fingerprint if spec.allow_random else None
        expected = found.rows + _skipped(found)
        if source.length not in (None, expected):
            text = f"The source has {source.length} samples now, the store was made from {expected}."
            raise _changed(text, found)
        rows = randomness.probes(None if source.length is None else found.rows, min(ROWS, found.rows))
        columns = {column.name: _Rows(Path(sealed.path), column) for column in found.columns}
        schema = Schema(found.structure, tuple(_field(found.column(name)) for name in manifest.leaves(found.structure)))
        reader = Reader(source, spec)
        for row in rows:
            _compare(source, reader, schema, columns, found, row)
        return len(rows)
    finally:
        source.close()


class _Rows:
    """The rows of one column as they are stored."""

    def __init__(self, folder: Path, column: manifest.Column) -> None:
        self._values = np.load(folder / column.parts[0].file, mmap_mode="r", allow_pickle=False)
        self._offsets = None
        if column.offsets:
            self._offsets = np.load(folder / column.offsets[0].file, mmap_mode="r", allow_pickle=False)

    def row(self, row: int) -> npt.NDArray[Any]:
        """One row, copied."""
        if self._offsets is None:
            return np.array(self._values[row])
        return np.array(self._values[self._offsets[row] : self._offsets[row + 1]])


def _field(column: manifest.Column) -> Field:
    return Field(column.name, column.dtype, column.shape, column.logical, column.kind)


def _skipped(found: Manifest) -> int:
    """How many samples were left out: the last item tells of those that are not listed."""
    return sum(item.get("more", 1) for item in found.skipped)


def _compare(
    source: Source, reader: Reader, schema: Schema, columns: dict[str, _Rows], found: Manifest, row: int
) -> None:
    index = row
    if manifest.ORIGINS in columns:
        index = int.from_bytes(columns[manifest.ORIGINS].row(row)[:8].tobytes(), "little")
    path = source.path(index)
    which = f"Row {row} (sample {index}{'' if path is None else f', {shown(path)}'})"
    try:
        values = schema.values(reader.read(index), index)
    except StopIteration:
        raise _changed(f"{which} is beyond the end of the source now.", found) from None
    for field, value in zip(schema.fields, values, strict=True):
        stored = columns[field.name].row(row)
        if stored.shape != value.shape:
            text = f"{which} has {field.name} of shape {value.shape} now, {stored.shape} in the store."
            raise _changed(text, found)
        if stored.tobytes() != value.tobytes():
            count = int(np.count_nonzero(stored != value))
            text = f"{which} differs from the store in {count} of {value.size} values of {field.name}."
            raise _changed(text, found)


def _changed(text: str, found: Manifest) -> DataError:
    unseen = "; ".join(found.fingerprint_parts.get("not_seen", ())) or "nothing that is known"
    text += f" Nothing has changed that the fingerprint sees; it does not see: {unseen}."
    if any(part.get("look") == "stat" for part in found.fingerprint_parts.get("files", ())):
        text += " Files count by size and time."
    return DataError(
        "source_changed",
        text,
        "Prepare it anew under another --version NAME, or with --identity content; a row must depend on its sample alone.",
    )
