"""After a hit: some rows prepared again and compared with the store, so that what no fingerprint sees is seen in the end.

A row that differs means that the source, the code or a library changed behind the fingerprint's back, or that rows are
not a function of their samples. The store itself is whole; it is no longer what its spec would give.
"""

from __future__ import annotations

import numpy as np

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError
from dataserve.protocol.manifest import Manifest

from . import randomness, sources
from .layout import Field
from .reading import Reader
from .rows import Rows
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
        probes = randomness.probes(None if source.length is None else found.rows, min(ROWS, found.rows))
        rows = Rows(sealed)
        schema = Schema(found.structure, tuple(_field(found.column(name)) for name in manifest.leaves(found.structure)))
        reader = Reader(source, spec)
        for row in probes:
            _compare(source, reader, schema, rows, found, row)
        return len(probes)
    finally:
        source.close()


def _field(column: manifest.Column) -> Field:
    return Field(column.name, column.dtype, column.shape, column.logical, column.kind)


def _skipped(found: Manifest) -> int:
    """How many samples were left out: the last item tells of those that are not listed."""
    return sum(item.get("more", 1) for item in found.skipped)


def _compare(source: Source, reader: Reader, schema: Schema, rows: Rows, found: Manifest, row: int) -> None:
    index = rows.origin(row).sample
    path = source.path(index)
    which = f"Row {row} (sample {index}{'' if path is None else f', {shown(path)}'})"
    try:
        values = schema.values(reader.read(index), index)
    except StopIteration:
        raise _changed(f"{which} is beyond the end of the source now.", found) from None
    for field, value in zip(schema.fields, values, strict=True):
        stored = rows.row(field.name, row)
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
