"""The manifest: canonical, identified by its bytes, and validated as hostile input."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError
from dataserve.protocol.manifest import Column, Manifest, Part


def column(name: str, dtype: str, shape: tuple[int, ...], rows: int = 10, chunk: int = 4, **more: Any) -> Column:
    size = limits.HEADER_BYTES + rows * manifest.row_bytes(dtype, shape)
    return Column(name, "fixed", dtype, shape, (Part(f"{name}.npy", rows, size, (1,) * -(-rows // chunk)),), **more)


def ragged(name: str, elements: int = 33, rows: int = 10) -> Column:
    spans = -(-elements // limits.CHUNK_BYTES)  # by bytes: a ragged column's rows have no size of their own
    values = Part(f"{name}.values.npy", elements, limits.HEADER_BYTES + elements, (2,) * spans)
    offsets = Part(f"{name}.offsets.npy", rows + 1, limits.HEADER_BYTES + 8 * (rows + 1), (3,))
    return Column(name, "ragged", "uint8", (), (values,), "utf8", (offsets,))


def example() -> Manifest:
    return Manifest(
        name="mnist",
        fingerprint="ab" * 32,
        fingerprint_parts={"source": {"files": [["a", 1, 2]]}},
        rows=10,
        chunk_rows=4,
        structure={
            "tuple": [{"column": "image"}, {"dict": [["label", {"column": "label"}], ["é", {"column": "text"}]]}],
        },
        columns=(
            column("image", "uint8", (1, 2, 3), logical="image"),
            column("label", "int64", ()),
            ragged("text"),
            ragged("origins", elements=limits.CHUNK_BYTES + 1),
        ),
        classes=("zero", "Ein\udcff"),
        versions={"numpy": "2.1"},
    )


def test_a_manifest_survives_its_bytes() -> None:
    made = example()
    read = manifest.parse(made.to_bytes())
    assert read.id == made.id == manifest.identify(made.to_bytes())
    assert read.to_bytes() == made.to_bytes()
    assert read.columns == made.columns
    assert manifest.leaves(read.structure) == ["image", "label", "text"]
    assert read.folder == "mnist-abababababababab"


@given(st.sampled_from(sorted(manifest.DTYPES)), st.lists(st.integers(1, 5), max_size=5), st.integers(1, 4))
def test_numpy_reads_the_header(dtype: str, shape: list[int], rows: int) -> None:
    header = manifest.npy_header(dtype, (rows, *shape))
    assert len(header) == limits.HEADER_BYTES
    array = np.load(io.BytesIO(header + bytes(rows * manifest.row_bytes(dtype, shape))), allow_pickle=False)
    assert array.shape == (rows, *shape)
    assert array.dtype.str == manifest.DTYPES[dtype]
    assert array.flags.c_contiguous


def test_a_header_of_the_greatest_shape_fits() -> None:
    assert len(manifest.npy_header("uint8", (2**32,) * (limits.RANK + 1))) == limits.HEADER_BYTES


@given(st.integers(1, 2**40))
def test_a_chunk_has_at_least_a_row_and_near_4_mib(size: int) -> None:
    rows = manifest.chunk_rows(size)
    assert rows == 1 or rows * size <= limits.CHUNK_BYTES
    assert rows == limits.CHUNK_ROWS or (rows + 1) * size > limits.CHUNK_BYTES


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(raw: dict[str, Any]) -> None:
        *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        for word in way:
            raw = raw[word]  # type: ignore[index]
        raw[last] = value  # type: ignore[index]

    return edit


HOSTILE = {
    "another format": (change("format", 2), "format 2; this dataserve reads format 1"),
    "no format": (change("format", "1"), "names no format"),
    "a feature from the future": (change("requires", ["encoded"]), "requires names 'encoded'"),
    "a name that climbs": (change("name", "../x"), "name is '../x'"),
    "no rows": (change("rows", 0), "rows is 0"),
    "other rows than its columns": (change("rows", 11), "has 10 rows, not 11"),
    "rows beyond the cap": (change("rows", 2**40), "rows is 1099511627776"),
    "a bool for a number": (change("rows", True), "rows is True"),
    "a short fingerprint": (change("fingerprint", "abc"), "fingerprint is 'abc'"),
    "a file that climbs": (change("columns.0.parts.0.file", "../../etc/passwd"), "file is '../../etc/passwd'"),
    "an absolute file": (change("columns.0.parts.0.file", "/etc/passwd"), "file is '/etc/passwd'"),
    "another column's file": (change("columns.0.parts.0.file", "label.npy"), "lies in 'label.npy'"),
    "a size too small": (change("columns.0.parts.0.size_bytes", 4096 + 59), "has 4155 bytes, not 4156"),
    "a size that overflows": (change("columns.0.shape", [2**31 - 1, 2**31 - 1, 2**31 - 1]), "rows of"),
    "a negative dimension": (change("columns.0.shape", [-1, 2, 3]), "outside"),
    "a dimension of zero": (change("columns.0.shape", [0, 2, 3]), "outside"),
    "too many dimensions": (change("columns.0.shape", [1] * 17), "17 items"),
    "an unknown type": (change("columns.0.dtype", "object"), "dtype is 'object'"),
    "an unknown kind": (change("columns.0.kind", "sparse"), "kind is 'sparse'"),
    "a codec": (change("columns.0.codec", "jpeg"), "codec is 'jpeg'"),
    "two parts": (lambda raw: raw["columns"][0]["parts"].append(raw["columns"][0]["parts"][0]), "2 items"),
    "too few checksums": (change("columns.0.parts.0.crcs", [1]), "1 checksums, not 3"),
    "too many checksums of a ragged column": (change("columns.2.parts.0.crcs", [1, 1]), "2 checksums, not 1"),
    "a checksum of 33 bits": (change("columns.0.parts.0.crcs", [2**32, 1, 1]), "outside"),
    "a column twice": (lambda raw: raw["columns"].append(raw["columns"][0]), "twice"),
    "offsets on a fixed column": (
        change("columns.0.offsets", [{"file": "x", "rows": 1, "size_bytes": 5000, "crcs": []}]),
        "fixed and has offsets",
    ),
    "no offsets on a ragged column": (change("columns.2.offsets", []), "has no offsets"),
    "text that is not ragged": (change("columns.1.logical", "utf8"), "not ragged"),
    "an image of two dimensions": (change("columns.0.shape", [2, 3]), "three dimensions"),
    "a structure that lacks a column": (change("structure", {"column": "image"}), "does not name each column once"),
    "a structure with a column twice": (
        change("structure.tuple.0", {"column": "label"}),
        "does not name each column once",
    ),
    "a structure of a foreign kind": (change("structure", {"set": []}), "no structure"),
    "an empty structure": (change("structure", {"tuple": []}), "no structure"),
    "a dict with one key twice": (change("structure.tuple.1.dict.1.0", "label"), "twice"),
    "a named tuple of code": (
        change("structure.tuple.1", {"namedtuple": {"name": "P", "fields": [["a b", {"column": "label"}]]}}),
        "no named tuple",
    ),
    "a named tuple without pairs": (
        change("structure.tuple.1", {"namedtuple": {"name": "P", "fields": 5}}),
        "named tuple",
    ),
    "a named tuple of keywords": (
        change("structure.tuple.1", {"namedtuple": {"name": "P", "fields": [["class", {"column": "label"}]]}}),
        "no named tuple",
    ),
    "columns that are no list": (change("columns", {}), "columns is a dict"),
    "no columns": (change("columns", []), "0 items"),
    "classes of numbers": (change("classes", [1]), "not text"),
    "a float": (change("fingerprint_parts", {"x": 1.5}), "holds a float"),
}


@pytest.mark.parametrize(("edit", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_with_what_is_wrong(edit: Callable[[dict[str, Any]], None], words: str) -> None:
    raw = json.loads(example().to_bytes())
    edit(raw)
    data = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    with pytest.raises(DataError) as caught:
        manifest.parse(data.encode())
    assert caught.value.code == "bad_store"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format":1}', b'{"format":1,"format":1}'], ids=repr
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        manifest.parse(data)


def test_an_edited_manifest_is_refused_though_it_says_the_same() -> None:
    pretty = json.dumps(json.loads(example().to_bytes()), indent=1, sort_keys=True).encode()
    with pytest.raises(DataError, match="not in its canonical form"):
        manifest.parse(pretty)


def test_unknown_fields_are_ignored_and_change_the_id() -> None:
    raw = json.loads(example().to_bytes())
    raw["a_later_field"] = {"x": [1]}
    data = manifest.canonical(raw)
    read = manifest.parse(data)
    assert read.columns == example().columns
    assert manifest.identify(data) != example().id


@given(st.data())
def test_any_single_damage_is_refused_or_changes_the_id(data: st.DataObject) -> None:
    good = example().to_bytes()
    bad = bytearray(good)
    index = data.draw(st.integers(0, len(bad) - 1))
    bad[index] = data.draw(st.integers(0, 255).filter(lambda byte: byte != good[index]))
    try:
        manifest.parse(bytes(bad))
    except DataError:
        return
    assert manifest.identify(bytes(bad)) != manifest.identify(good)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(json.loads(example().to_bytes()))), JSON)
def test_any_value_in_any_field_is_taken_or_refused(key: str, value: Any) -> None:
    raw = copy.deepcopy(json.loads(example().to_bytes()))
    raw[key] = value
    try:
        manifest.parse(manifest.canonical(raw))
    except DataError as error:
        assert error.code == "bad_store"  # noqa: PT017 - any other exception fails the test
