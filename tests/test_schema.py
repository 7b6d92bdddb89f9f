"""server/schema.py: any sample that a store can hold comes back bit for bit; any other is refused with what it was."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError, UserError
from dataserve.server.layout import Field
from dataserve.server.schema import Schema, flatten


class Point(NamedTuple):
    x: Any
    y: Any


def stored(sample: Any) -> dict[str, Any]:
    """Each column's one row, after a way through the schema."""
    schema = Schema.of(sample)
    columns = [field.buffer(1) for field in schema.fields]
    schema.put(sample, 0, 0, columns)
    return {field.name: column[0] for field, column in zip(schema.fields, columns, strict=True)}


def names(sample: Any) -> list[str]:
    return [field.name for field in Schema.of(sample).fields]


def test_an_image_and_an_integer_are_called_image_and_label() -> None:
    picture = Image.new("RGB", (4, 2))
    assert names((picture, 3)) == ["image", "label"]
    assert names((torch.zeros(3, 2, 4), torch.tensor(3))) == ["image", "label"]
    assert names((picture, picture)) == ["field_0", "field_1"]
    assert names((picture, 0.5)) == ["field_0", "field_1"]
    assert names(picture) == ["image"]
    assert names(7) == ["value"]


def test_names_are_sanitised_and_unique() -> None:
    assert names({"a b": 1, "a/b": 2, "a_b": 3, "../x": 4, "origins": 5}) == [
        "a_b",
        "a_b_2",
        "a_b_3",
        "_x",
        "origins_2",
    ]
    assert names({"target": {"box": 1}, "9": (2, 3)}) == ["target_box", "field_9_0", "field_9_1"]
    assert len(names({"x" * 500: 1})[0]) <= 64


def test_a_nested_sample_keeps_its_structure() -> None:
    schema = Schema.of({"a": (1, [2.0]), "p": Point(True, {"z": np.uint8(3)})})
    assert schema.structure == {
        "dict": [
            ["a", {"tuple": [{"column": "a_0"}, {"list": [{"column": "a_1_0"}]}]}],
            [
                "p",
                {
                    "namedtuple": {
                        "name": "Point",
                        "fields": [["x", {"column": "p_x"}], ["y", {"dict": [["z", {"column": "p_y_z"}]]}]],
                    }
                },
            ],
        ]
    }
    assert [field.dtype for field in schema.fields] == ["int64", "float64", "bool", "uint8"]
    assert manifest.leaves(schema.structure) == [field.name for field in schema.fields]


@pytest.mark.parametrize("name", sorted(manifest.DTYPES.keys() - {"bfloat16"}))
def test_every_type_is_stored_bit_for_bit(name: str) -> None:
    array = np.frombuffer(bytes(range(1, 97)), np.uint8).view(np.dtype(name) if name != "bool" else np.uint8)
    array = (array % 2).astype(bool) if name == "bool" else array
    assert stored(array)["value"].tobytes() == array.tobytes()
    assert Schema.of(array).fields[0].dtype == name


def test_bfloat16_is_stored_as_its_bits_under_its_name() -> None:
    tensor = torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16)
    assert Schema.of(tensor).fields[0].dtype == "bfloat16"
    assert stored(tensor)["value"].tolist() == [0x3F80, 0xC020, 0x7F80]


def test_tensors_come_as_they_are_whatever_their_strides_and_grad() -> None:
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    np.testing.assert_array_equal(stored(tensor)["value"], tensor.detach().numpy())


@given(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())
def test_numbers_are_exact(integer: int, real: float, flag: bool) -> None:
    found = stored({"i": integer, "r": real, "f": flag})
    assert (found["i"].item(), found["r"].item(), found["f"].item()) == (integer, real, flag)


def test_values_of_derived_types_are_taken_as_their_bases() -> None:
    class Level(enum.IntEnum):
        HIGH = 7

    sample = (Level.HIGH, np.float64(0.5), torch.nn.Parameter(torch.ones(2)), np.ones(3).view(np.recarray))
    kinds = [(field.dtype, field.shape) for field in Schema.of(sample).fields]
    assert kinds == [("int64", ()), ("float64", ()), ("float32", (2,)), ("float64", (3,))]


def test_the_other_byte_order_keeps_its_values() -> None:
    assert stored(np.array([1, 258], ">i4"))["value"].tolist() == [1, 258]


def test_a_picture_is_an_image_column() -> None:
    field = Schema.of(Image.new("L", (5, 4))).fields[0]
    assert field == ("image", "uint8", (1, 4, 5), "image", "fixed")


@pytest.mark.parametrize(
    ("sample", "code"),
    [
        (2**63, "bad_sample"),
        (None, "bad_sample"),
        (object(), "bad_sample"),
        (np.array(["a"]), "bad_sample"),
        (np.array([None]), "bad_sample"),
        (np.ma.masked_array([1, 2], [True, False]), "bad_sample"),
        (torch.zeros(2, 2).to_sparse(), "bad_sample"),
        (Image.new("I", (2, 2)), "bad_sample"),
        ((), "bad_schema"),
        ({}, "bad_schema"),
        ({1: 2}, "bad_schema"),
        (np.zeros((3, 0)), "bad_schema"),
        (list(range(600)), "bad_schema"),
        ([[[[[[[[[[1]]]]]]]]]], "bad_schema"),
    ],
)
def test_what_a_store_cannot_hold_is_refused(sample: Any, code: str) -> None:
    with pytest.raises(DataError) as caught:
        Schema.of(sample, 4)
    assert caught.value.code == code
    assert "Sample 4" in caught.value.text


@pytest.mark.parametrize(
    ("value", "logical", "data"),
    [
        ("é\0", "utf8", "é\0".encode()),
        ("", "utf8", b""),
        (np.str_("x"), "utf8", b"x"),
        (b"\xff\0", "bytes", b"\xff\0"),
        (bytearray(b"ab"), "bytes", b"ab"),
    ],
)
def test_text_and_bytes_are_ragged_columns_of_bytes(value: object, logical: str, data: bytes) -> None:
    schema = Schema.of(value)
    assert schema.fields == (Field("value", "uint8", (), logical, "ragged"),)
    rows: dict[int, bytes] = {}
    keeper: Any = type("Keeper", (), {"__setitem__": lambda self, row, array: rows.update({row: array.tobytes()})})()
    schema.put(value, 0, 3, [keeper])
    assert rows == {3: data}


def test_text_that_is_no_utf_8_is_bad() -> None:
    with pytest.raises(DataError, match="no UTF-8") as caught:
        Schema.of(("a\udcff", 1), 4)
    assert caught.value.code == "bad_sample"


def widened(*samples: Any) -> tuple[Field, ...]:
    schema = Schema.of(samples[0])
    return schema.widened([schema.measure(sample, index) for index, sample in enumerate(samples)]).fields


def test_arrays_of_one_or_two_dimensions_become_ragged_where_the_first_one_differs() -> None:
    assert widened(np.zeros(3, "f4"), np.zeros(5, "f4")) == (Field("value", "float32", (), None, "ragged"),)
    assert widened(torch.zeros(3, 4), torch.zeros(0, 4)) == (Field("value", "float32", (4,), None, "ragged"),)
    assert widened(np.zeros(3), np.zeros(3)) == (Field("value", "float64", (3,)),)


def test_pictures_numbers_and_what_differs_otherwise_never_become_ragged() -> None:
    assert widened(Image.new("L", (4, 4)), Image.new("L", (4, 5)))[0].kind == "fixed"
    assert widened(np.zeros((3, 4, 4)), np.zeros((2, 4, 4)))[0].kind == "fixed"
    assert widened(np.zeros((3, 4)), np.zeros((3, 5)))[0].kind == "fixed"
    assert widened(np.zeros(3, "f4"), np.zeros(4, "f8"))[0].kind == "fixed"
    assert widened(1, np.zeros(3))[0].kind == "fixed"


def test_a_first_array_without_elements_is_ragged() -> None:
    assert Schema.of(np.zeros((0, 4))).fields == (Field("value", "float64", (4,), None, "ragged"),)


def test_a_declared_column_is_ragged_whatever_its_dimensions() -> None:
    sample = {"video": np.zeros((0, 3, 4, 4), "u1"), "boxes": np.zeros((2, 4), "f4"), "text": "x", "fixed": np.zeros(3)}
    assert Schema.of(sample, 0, ("video", "boxes", "text")).fields == (
        Field("video", "uint8", (3, 4, 4), None, "ragged"),
        Field("boxes", "float32", (4,), None, "ragged"),
        Field("text", "uint8", (), "utf8", "ragged"),
        Field("fixed", "float64", (3,)),
    )


@pytest.mark.parametrize("sample", [{"label": 1}, {"label": Image.new("L", (4, 4))}, {"other": np.zeros(3)}])
def test_what_has_no_length_cannot_be_declared_ragged(sample: Any) -> None:
    with pytest.raises(UserError, match="--ragged names 'label'") as caught:
        Schema.of(sample, 0, ("label",))
    assert (caught.value.code, bool(caught.value.remedy)) == ("bad_option", True)


@pytest.mark.parametrize(
    ("first", "other", "remedy"),
    [
        (np.zeros(3), np.zeros(4), "--ragged value"),
        (np.zeros((3, 4)), np.zeros((0, 4)), "--ragged value"),
        (np.zeros((7, 3, 4, 4)), np.zeros((8, 3, 4, 4)), "--ragged value"),
        (np.zeros((3, 4, 4)), np.zeros((1, 4, 4)), "--mode RGB"),
        (Image.new("L", (4, 4)), Image.new("RGB", (4, 4)), "--mode RGB"),
        (Image.new("L", (4, 4)), Image.new("L", (4, 5)), "--resize"),
        (np.zeros((3, 4)), np.zeros((3, 5)), "resizes, crops or pads"),
        (np.zeros(3, "f4"), np.zeros(4, "f8"), "resizes, crops or pads"),
    ],
)
def test_a_row_that_is_only_longer_is_told_how_its_column_is_declared(first: Any, other: Any, remedy: str) -> None:
    schema = Schema.of(first)
    with pytest.raises(DataError) as caught:
        schema.put(other, 1, 0, [np.zeros(1)])
    assert caught.value.code == "bad_schema"
    assert remedy in caught.value.remedy


def test_a_first_row_without_elements_of_three_dimensions_is_told_the_same() -> None:
    with pytest.raises(DataError, match=r"shape \(0, 4, 4\)") as caught:
        Schema.of({"value": np.zeros((0, 4, 4))})
    assert "--ragged value" in caught.value.remedy


@pytest.mark.parametrize(
    "other", [np.zeros(3, "f8"), np.zeros((3, 1), "f4"), np.float32(3), "text", np.zeros((), "f4")]
)
def test_a_row_that_does_not_fit_a_ragged_column_is_refused_with_both(other: Any) -> None:
    schema = Schema.of(np.zeros(0, "f4"))
    with pytest.raises(DataError, match="not float32 n"):
        schema.put(other, 1, 0, [np.zeros(1)])


def test_a_list_of_another_length_says_that_an_array_may_have_any() -> None:
    schema = Schema.of([1, 2, 3])
    with pytest.raises(DataError) as caught:
        schema.measure([1, 2], 1)
    assert "array" in caught.value.remedy


FIRST = {"image": np.zeros((3, 4, 4), np.uint8), "label": 1}


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({**FIRST, "image": np.zeros((3, 4, 5), np.uint8)}, "image is uint8 3 x 4 x 5, not uint8 3 x 4 x 4"),
        ({**FIRST, "image": np.zeros((3, 4, 4), np.float32)}, "image is float32 3 x 4 x 4, not uint8"),
        ({**FIRST, "label": 1.0}, "label is float64 one, not int64 one"),
        ({**FIRST, "label": True}, "label is bool one, not int64 one"),
        ({**FIRST, "label": np.int32(1)}, "label is int32 one, not int64 one"),
        ({**FIRST, "more": 1}, "a dict of 3, not a dict of 2"),
        ({"image": FIRST["image"]}, "a dict of 1, not a dict of 2"),
        ((FIRST["image"], 1), "a tuple of 2, not a dict of 2"),
        (7, "a int, not a dict of 2"),
    ],
)
def test_a_sample_that_differs_from_the_first_is_refused_with_both(sample: Any, reason: str) -> None:
    schema = Schema.of(FIRST)
    columns = [field.buffer(1) for field in schema.fields]
    with pytest.raises(DataError, match=reason) as caught:
        schema.put(sample, 17, 0, columns)
    assert caught.value.code == "bad_schema"
    assert "Sample 17" in caught.value.text
    assert caught.value.remedy


def test_keys_in_another_order_find_their_columns() -> None:
    schema = Schema.of({"a": 1, "b": 2})
    assert list(flatten({"b": 20, "a": 10}, schema.structure, 0)) == [10, 20]
