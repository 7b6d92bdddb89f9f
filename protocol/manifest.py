"""The manifest of a store: what is in it, as a typed record, its canonical JSON and a validator that trusts nothing.

FORMAT.md states the same. `id` is the SHA-256 of the manifest's bytes, which are canonical: sorted keys, no spaces, ASCII,
no floats. Times, hosts, paths and pids are not in it, so that equal content has an equal id everywhere.
"""

from __future__ import annotations

import hashlib
import json
import keyword
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from . import checks, limits, version
from .checks import integer, list_of, map_of, one_of, optional, record, text
from .errors import DataError

FILE = "manifest.json"
NPY_MAGIC = b"\x93NUMPY\x01\x00"

#: Element types of columns: name, as stored in the `.npy` header, bytes an element. bfloat16 is stored as uint16.
DTYPES: dict[str, str] = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "bfloat16": "<u2",
}
KINDS = ("fixed", "ragged")
#: What a column means beyond its type: an image `C x H x W`, or text and bytes as ragged uint8.
LOGICALS = ("image", "utf8", "bytes")
#: The column of each row's origin: outside the sample's structure.
ORIGINS = "origins"

#: A sample's structure: {"column": name} | {"tuple" | "list": [structure, ...]} |
#: {"dict": [[key, structure], ...]} | {"namedtuple": {"name": ..., "fields": [[key, structure], ...]}}
Structure = Mapping[str, Any]


class Part(NamedTuple):
    """One file of a column: its rows, its whole size, the CRC-32s of its data (`Column.span_bytes` of it each)."""

    file: str
    rows: int
    size_bytes: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a sample. `shape` is one row's; `parts` hold the rows, `offsets` the rows' ends of a ragged column.

    A ragged column's `parts` count elements, not rows, in `rows`; row i is `values[offsets[i]:offsets[i + 1]]`.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    logical: str | None = None
    offsets: tuple[Part, ...] = ()
    codec: None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one row of a fixed column, of one element of a ragged one."""
        return row_bytes(self.dtype, self.shape)

    def span_bytes(self, chunk_rows: int) -> int:
        """Bytes of data that one checksum covers: a chunk of rows, or `CHUNK_BYTES` in the files of a ragged column,
        whose rows have no size of their own."""
        return chunk_rows * self.item_bytes if self.kind == "fixed" else limits.CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a reader must know of a store."""

    name: str
    fingerprint: str
    fingerprint_parts: Mapping[str, Any]
    rows: int
    chunk_rows: int
    structure: Structure
    columns: tuple[Column, ...]
    classes: tuple[str, ...] | None = None
    skipped: tuple[Mapping[str, Any], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    uniform: tuple[Mapping[str, Any], ...] = ()

    def to_bytes(self) -> bytes:
        """The canonical JSON: what the file holds and what `id` hashes."""
        return canonical(
            {
                "format": version.STORE_FORMAT,
                "requires": [],
                "name": self.name,
                "fingerprint": self.fingerprint,
                "fingerprint_parts": self.fingerprint_parts,
                "rows": self.rows,
                "chunk_rows": self.chunk_rows,
                "structure": self.structure,
                "columns": [_column_map(column) for column in self.columns],
                "classes": self.classes,
                "skipped": self.skipped,
                "versions": self.versions,
                **({"uniform": self.uniform} if self.uniform else {}),
            }
        )

    @property
    def id(self) -> str:
        """SHA-256 of the manifest's bytes, in hexadecimal."""
        return identify(self.to_bytes())

    @property
    def folder(self) -> str:
        """The store's folder below the store root."""
        return f"{self.name}-{self.fingerprint[: limits.FINGERPRINT_DIGITS]}"

    @property
    def size_bytes(self) -> int:
        """Bytes of all column files."""
        return sum(part.size_bytes for part in self.files())

    def files(self) -> Iterator[Part]:
        """All files of all columns."""
        for column in self.columns:
            yield from column.parts
            yield from column.offsets

    def column(self, name: str) -> Column:
        """The column of that name. Raises `KeyError`."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


def canonical(value: object) -> bytes:
    """JSON with sorted keys, no spaces, in ASCII (a name that is no UTF-8 stands as an escape), and no floats.

    Raises `ValueError` for what has no single form.
    """
    _refuse_floats(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def identify(data: bytes) -> str:
    """The id of a store by its manifest's bytes."""
    return hashlib.sha256(data).hexdigest()


def row_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of an array of that type and shape; Python's integers do not overflow."""
    size = np.dtype(DTYPES[dtype]).itemsize
    for dimension in shape:
        size *= dimension
    return size


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """The 4096 bytes before the data of a column file: a version 1.0 `.npy` header, padded with spaces."""
    dimensions = "".join(f"{dimension}, " for dimension in shape).rstrip()
    dimensions = dimensions if len(shape) == 1 else dimensions.rstrip(",")
    words = f"{{'descr': '{DTYPES[dtype]}', 'fortran_order': False, 'shape': ({dimensions}), }}"
    body = limits.HEADER_BYTES - len(NPY_MAGIC) - 2
    return NPY_MAGIC + body.to_bytes(2, "little") + words.encode().ljust(body - 1) + b"\n"


def chunk_rows(sample_bytes: int) -> int:
    """Rows of a chunk, so that its bytes come near 4 MiB: by the row alone, so the same everywhere."""
    return max(1, min(limits.CHUNK_ROWS, limits.CHUNK_BYTES // max(1, sample_bytes)))


def leaves(structure: Structure) -> list[str]:
    """Names of the columns of a sample, in the order of the structure."""
    return [name for _, name in _walk(structure, "structure", 0)]


def parse(data: bytes) -> Manifest:
    """The manifest of those bytes, checked as hostile input. Raises `bad_store`.

    A later format, or a feature that this reader does not know, is refused with what it is. Files are not looked at.
    """
    if len(data) > limits.MANIFEST_BYTES:
        raise DataError("bad_store", f"The manifest has {len(data)} bytes, more than {limits.MANIFEST_BYTES}.")
    try:
        raw = json.loads(data)
        if canonical(raw) != data:
            raise ValueError("is not in its canonical form: somebody edited it")
    except (ValueError, RecursionError) as error:
        raise DataError("bad_store", f"The manifest {error}.", _REBUILD) from None
    if type(raw) is not dict or type(raw.get("format")) is not int:
        raise DataError("bad_store", "The manifest names no format.", _REBUILD)
    if raw["format"] != version.STORE_FORMAT:
        raise DataError(
            "bad_store",
            f"The store has format {raw['format']}; this dataserve reads format {version.STORE_FORMAT}.",
            "Use the dataserve that made it, or prepare the data again with this one.",
        )
    try:
        return _build(raw)
    except (ValueError, RecursionError) as error:
        raise DataError("bad_store", f"The manifest's {error}.", _REBUILD) from None


_REBUILD = "The store is damaged: remove it and prepare the data again."


def _anything(value: Any) -> Any:
    """What is checked later, or is for people only."""
    return value


_part = record(
    {
        "file": text(limits.COLUMN_CHARS + 16, limits.COLUMN_FILE),
        "rows": integer(0, 2**62),
        "size_bytes": integer(limits.HEADER_BYTES, 2**62),
        "crcs": list_of(integer(0, 2**32 - 1), 2**32),
    }
)
_column = record(
    {
        "name": text(limits.COLUMN_CHARS, limits.COLUMN),
        "kind": one_of(*KINDS),
        "dtype": one_of(*DTYPES),
        "shape": list_of(integer(1, limits.ROW_BYTES), limits.RANK),
        "logical": optional(one_of(*LOGICALS)),
        "codec": optional(one_of()),
        "parts": list_of(_part, 1, 1),
        "offsets": list_of(_part, 1),
    }
)
_manifest: dict[str, checks.Check] = {
    "requires": list_of(text(64), 64),
    "name": text(64, limits.NAME),
    "fingerprint": text(64, limits.HEX256),
    "fingerprint_parts": map_of(_anything, 256, 256),
    "rows": integer(1, limits.ROWS),
    "chunk_rows": integer(1, limits.CHUNK_ROWS),
    "structure": _anything,
    "columns": list_of(_column, limits.COLUMNS, 1),
    "classes": optional(list_of(text(4096, surrogates=True), limits.CLASSES)),
    "skipped": list_of(map_of(_anything, 16, 64), 2**32),
    "versions": map_of(text(256), 64, 64),
    "uniform": list_of(map_of(_anything, 16, 64), limits.COLUMNS),
}


def _build(raw: dict[str, Any]) -> Manifest:
    """Each field by its check, then the relations between them. Raises `ValueError` that starts with the field."""
    raw = {"uniform": [], **raw}
    for key in _manifest.keys() - raw.keys():
        raise ValueError(f"{key} is missing")
    fields = {key: checks.at(key, check, raw[key]) for key, check in _manifest.items()}
    for feature in fields.pop("requires"):
        if feature not in version.STORE_FEATURES:
            raise ValueError(f"requires names {feature!r}, which this dataserve does not know: use a later one")
    columns = tuple(
        Column(**{**column, "parts": _parts(column["parts"]), "offsets": _parts(column["offsets"])})
        for column in fields.pop("columns")
    )
    manifest = Manifest(**fields, columns=columns)
    for column in columns:
        _check_column(column, manifest.rows, manifest.chunk_rows)
    _check_names(manifest)
    return manifest


def _parts(items: Sequence[dict[str, Any]]) -> tuple[Part, ...]:
    return tuple(Part(**item) for item in items)


def _check_column(column: Column, rows: int, chunk: int) -> None:
    where = f"column {column.name}"
    if column.item_bytes > limits.ROW_BYTES:
        raise ValueError(f"{where} has rows of {column.item_bytes} bytes, more than {limits.ROW_BYTES}")
    if column.logical in ("utf8", "bytes") and (column.kind, column.dtype, column.shape) != ("ragged", "uint8", ()):
        raise ValueError(f"{where} is {column.logical} but not ragged uint8")
    if column.logical == "image" and (column.dtype != "uint8" or column.kind == "fixed" and len(column.shape) != 3):
        raise ValueError(f"{where} is an image but not uint8 of three dimensions")
    if column.kind == "fixed":
        if column.offsets:
            raise ValueError(f"{where} is fixed and has offsets")
        _check_part(column, column.parts[0], f"{column.name}.npy", rows, column.item_bytes, chunk)
        return
    if not column.offsets:
        raise ValueError(f"{where} is ragged and has no offsets")
    values = column.parts[0]
    _check_part(column, values, f"{column.name}.values.npy", values.rows, column.item_bytes, chunk)
    _check_part(column, column.offsets[0], f"{column.name}.offsets.npy", rows + 1, 8, chunk)


def _check_part(column: Column, part: Part, file: str, rows: int, item_bytes: int, chunk: int) -> None:
    where = f"column {column.name}"
    if part.file != file:
        raise ValueError(f"{where} lies in {part.file!r}, not in {file!r}")
    if part.rows != rows:
        raise ValueError(f"{where} has {part.rows} rows, not {rows}")
    size = limits.HEADER_BYTES + rows * item_bytes
    if part.size_bytes != size:
        raise ValueError(f"{where} has {part.size_bytes} bytes, not {size}")
    spans = -(-(size - limits.HEADER_BYTES) // column.span_bytes(chunk))
    if len(part.crcs) != spans:
        raise ValueError(f"{where} has {len(part.crcs)} checksums, not {spans}")


def _check_names(manifest: Manifest) -> None:
    names = [column.name for column in manifest.columns]
    files = [part.file for part in manifest.files()]
    for what, found in (("column", names), ("file", files)):
        if len(set(found)) != len(found):
            raise ValueError(f"columns name a {what} twice")
    used = leaves(manifest.structure)
    if sorted(used) != sorted(set(names) - {ORIGINS}):
        raise ValueError("structure does not name each column once")


def _walk(structure: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """(place, column) of each leaf. Raises `ValueError` for anything that is no structure."""
    if depth > limits.STRUCTURE_DEPTH:
        raise ValueError(f"{path} is nested deeper than {limits.STRUCTURE_DEPTH}")
    if not isinstance(structure, Mapping) or len(structure) != 1:
        raise ValueError(f"{path} is no structure")
    ((kind, inner),) = structure.items()
    if kind == "column" and isinstance(inner, str):
        yield path, inner
        return
    if kind == "namedtuple":
        if not _is_named(inner):
            raise ValueError(f"{path} is no named tuple")
        inner, kind = inner["fields"], "dict"
    if kind not in ("tuple", "list", "dict") or not isinstance(inner, list | tuple) or not inner:
        raise ValueError(f"{path} is no structure")
    seen = set()
    for index, item in enumerate(inner):
        key, below = index, item
        if kind == "dict":
            if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], str):
                raise ValueError(f"{path} holds no pairs of key and structure")
            key, below = item
        if key in seen:
            raise ValueError(f"{path} names {key!r} twice")
        seen.add(key)
        yield from _walk(below, f"{path}.{key}", depth + 1)


def _is_named(inner: object) -> bool:
    """Whether a named tuple can be built again: collections.namedtuple is given these words."""
    if (
        not isinstance(inner, Mapping)
        or set(inner) != {"name", "fields"}
        or not isinstance(inner["fields"], list | tuple)
    ):
        return False
    words = [item[0] for item in inner["fields"] if isinstance(item, list | tuple) and item]
    return _is_word(inner["name"]) and all(_is_word(word) and not word.startswith("_") for word in words)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)


def _column_map(column: Column) -> dict[str, Any]:
    plain = {key: getattr(column, key) for key in ("name", "kind", "dtype", "shape", "logical", "codec")}
    return {
        **plain,
        "parts": [part._asdict() for part in column.parts],
        "offsets": [part._asdict() for part in column.offsets],
    }


def _refuse_floats(value: object) -> None:
    if isinstance(value, float):
        raise ValueError("holds a float, which has no single form in text")
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)
