"""Sealed stores for tests of the client, written by numpy and the manifest alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.manifest import Column, Manifest, Part

_NAMES = {stored: name for name, stored in manifest.DTYPES.items() if name != "bfloat16"}


def write_store(
    root: Path,
    columns: Mapping[str, npt.NDArray[Any]],
    *,
    name: str = "digits",
    structure: Mapping[str, Any] | None = None,
    bfloat16: tuple[str, ...] = (),
    images: tuple[str, ...] = (),
    classes: tuple[str, ...] | None = None,
    ragged: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[Path, Manifest]:
    """A store below `root`; its folder and its manifest. The sample is a tuple of fixed, then ragged columns unless told.

    `ragged`: rows by column, arrays of one type and trailing shape, or str, or bytes.
    """
    rows = len(next(iter({**columns, **(ragged or {})}.values())))
    chunk = manifest.chunk_rows(sum(values[:1].nbytes for values in columns.values()))
    described, blobs = [], {}
    for column, given in columns.items():
        values = np.ascontiguousarray(given)
        dtype = "bfloat16" if column in bfloat16 else _NAMES[values.dtype.str]
        data = values.tobytes()
        header = manifest.npy_header(dtype, values.shape)
        step = chunk * values[:1].nbytes
        crcs = tuple(zlib.crc32(data[start : start + step]) for start in range(0, len(data), step))
        part = Part(f"{column}.npy", rows, len(header) + len(data), crcs)
        logical = "image" if column in images else None
        described.append(Column(column, "fixed", dtype, values.shape[1:], (part,), logical))
        blobs[part.file] = header + data
    for column, items in (ragged or {}).items():
        made_column, files = _ragged(column, items, column in bfloat16)
        described.append(made_column)
        blobs |= files
    made = Manifest(
        name=name,
        fingerprint=manifest.identify(b"".join(blobs.values())),
        fingerprint_parts={},
        rows=rows,
        chunk_rows=chunk,
        structure=structure or {"tuple": [{"column": column.name} for column in described]},
        columns=tuple(described),
        classes=classes,
    )
    folder = root / made.folder
    folder.mkdir(parents=True)
    for file, content in {**blobs, manifest.FILE: made.to_bytes()}.items():
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o444)
    return folder, manifest.parse(made.to_bytes())


def _ragged(name: str, items: Sequence[Any], bfloat16: bool) -> tuple[Column, dict[str, bytes]]:
    """A ragged column and its two files."""
    logical = {str: "utf8", bytes: "bytes"}.get(type(items[0]))
    raw = [item.encode() if isinstance(item, str) else item for item in items]
    arrays = [np.frombuffer(item, np.uint8) if logical else item for item in raw]
    values = np.concatenate(arrays)
    offsets = np.cumsum([0, *map(len, arrays)])
    dtype = "bfloat16" if bfloat16 else _NAMES[values.dtype.str]
    parts, files = [], {}
    for kind, array, stored in (("values", values, dtype), ("offsets", offsets, "int64")):
        data, header = array.tobytes(), manifest.npy_header(stored, array.shape)
        step = limits.CHUNK_BYTES
        crcs = tuple(zlib.crc32(data[start : start + step]) for start in range(0, len(data), step))
        parts.append(Part(f"{name}.{kind}.npy", len(array), len(header) + len(data), crcs))
        files[parts[-1].file] = header + data
    return Column(name, "ragged", dtype, values.shape[1:], (parts[0],), logical, (parts[1],)), files
