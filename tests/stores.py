"""Sealed stores for tests of the client, written by numpy and the manifest alone."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import manifest
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
) -> tuple[Path, Manifest]:
    """A store of fixed columns below `root`; its folder and its manifest. The sample is a tuple unless told."""
    rows = len(next(iter(columns.values())))
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
    made = Manifest(
        name=name,
        fingerprint=manifest.identify(b"".join(blobs.values())),
        fingerprint_parts={},
        rows=rows,
        chunk_rows=chunk,
        structure=structure or {"tuple": [{"column": column} for column in columns]},
        columns=tuple(described),
        classes=classes,
    )
    folder = root / made.folder
    folder.mkdir(parents=True)
    for file, content in {**blobs, manifest.FILE: made.to_bytes()}.items():
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o444)
    return folder, manifest.parse(made.to_bytes())
