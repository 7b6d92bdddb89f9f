"""Samples to columns: what the first sample looks like, and putting each further one beside it.

A sample is a tensor, array, picture, number, bool, text or bytes, or a tuple, list, dict or named tuple of these, nested.
The first good one fixes structure, types and shapes; one that differs is bad, with both told, never a cast.

Which columns are ragged: text and bytes always; what the operator declares so (`--ragged NAME`: any array with a first
dimension, but no picture); arrays and tensors of one or two dimensions (tokens, waveforms, boxes `n x 4`) where the first
look (look.py) at samples spread over the source saw first dimensions that differ, or none at all (0). A later sample that
differs so is bad, and the remedy is to declare the column: to widen it in silence would change what a training loop gets
for one odd row. Pictures never are: their sizes are to be made equal by resizing.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, UserError

from . import images
from .layout import Field
from .sources import named
from .spec import nearest
from .writer import Rows


class Leaf(NamedTuple):
    """One field's value as it is stored: anything numpy assigns, its type by name, its shape, its meaning."""

    value: Any
    dtype: str
    shape: tuple[int, ...]
    logical: str | None = None


#: A value's type by name, its shape, its meaning: a `Leaf` without the value.
Measure = tuple[str, tuple[int, ...], str | None]


@dataclass(frozen=True, slots=True)
class Schema:
    """The structure of a sample (protocol/manifest.py) and its columns, in the structure's order."""

    structure: manifest.Structure
    fields: tuple[Field, ...]

    @classmethod
    def of(cls, sample: Any, index: int = 0, ragged: Collection[str] = ()) -> Schema:
        """The schema of that sample; ragged are text, bytes and the columns of these names. Raises `bad_sample`,
        `bad_schema`, and `bad_option` for a name that is no column's or none that can be ragged."""
        fields: list[Field] = []
        structure = _grow(sample, "", _Names(sample, ragged), fields, index, 0)
        if len(fields) > limits.COLUMNS:
            text = f"Sample {index} has {len(fields)} fields, more than {limits.COLUMNS}."
            raise DataError("bad_schema", text, "Stack fields of one type and shape into one array.")
        columns = [field.name for field in fields]
        for name in ragged:
            if name not in columns:
                text = f"--ragged names {name!r}, which is no column of sample {index}."
                raise UserError("bad_option", text, nearest(name, columns))
        return cls(structure, tuple(fields))

    @property
    def may_widen(self) -> bool:
        """Whether further samples could make a column ragged that is fixed by now."""
        return any(_may_be_ragged(field) for field in self.fields)

    def measure(self, sample: Any, index: int) -> list[Measure]:
        """Type, shape and meaning of each value of that sample, by column. Raises `bad_sample`, `bad_schema`."""
        found = flatten(sample, self.structure, index)
        return [_leaf(value, field.name, index)[1:] for field, value in zip(self.fields, found, strict=True)]

    def values(self, sample: Any, index: int) -> list[npt.NDArray[Any]]:
        """Each value of that sample as it would be stored, by column. Raises as `measure`."""
        found = flatten(sample, self.structure, index)
        leaves = (_leaf(value, field.name, index) for field, value in zip(self.fields, found, strict=True))
        return [np.asarray(leaf.value).astype(manifest.DTYPES[leaf.dtype], copy=False) for leaf in leaves]

    def widened(self, measures: Sequence[Sequence[Measure]]) -> Schema:
        """The schema with those columns ragged whose first dimension is another in one of these samples. A sample that
        differs in another way is not looked at: `put` will refuse it."""
        fields = list(self.fields)
        for index, field in enumerate(self.fields):
            found = [measure[index] for measure in measures]
            alike = {
                shape[0]
                for dtype, shape, logical in found
                if shape and (dtype, shape[1:], logical) == (field.dtype, field.shape[1:], field.logical)
            }
            if _may_be_ragged(field) and alike - {field.shape[0]}:
                fields[index] = field._replace(shape=field.shape[1:], kind="ragged")
        return Schema(self.structure, tuple(fields))

    def ragged_bytes(self, measure: Sequence[Measure]) -> int:
        """What the ragged columns of such a sample take."""
        pairs = zip(self.fields, measure, strict=True)
        return sum(field.item_bytes * shape[0] for field, (_, shape, _) in pairs if field.ragged and shape)

    def put(self, sample: Any, index: int, row: int, columns: Sequence[Rows]) -> None:
        """Writes the sample at that index of the source into that row of each column.

        Raises `bad_schema` where it does not fit, with both shapes, and `bad_sample`; the row may be put again then.
        """
        found = flatten(sample, self.structure, index)
        for field, column, value in zip(self.fields, columns, found, strict=True):
            leaf = _leaf(value, field.name, index)
            if not _fits(leaf, field):
                raise DataError(
                    "bad_schema",
                    f"Sample {index} does not fit the first one: {field.name} is {_show(leaf)}, not {_show(field)}.",
                    _remedy(field, leaf),
                )
            column[row] = leaf.value

    def put_block(self, block: Mapping[str, npt.NDArray[Any]], columns: Sequence[Rows]) -> None:
        """Writes whole arrays into whole columns: the samples of a source that has them so. They fit, as all rows of
        an array have one shape and type. Rows without elements are ragged ones."""
        for column, array in zip(columns, block.values(), strict=True):
            if isinstance(column, np.ndarray):
                column[: len(array)] = array
            else:
                for row, values in enumerate(array):
                    column[row] = values


def flatten(sample: Any, structure: manifest.Structure, index: int) -> list[Any]:
    """The values of a sample in the order of the structure. Raises `bad_schema` where it has another one."""
    found: list[Any] = []
    _take(sample, structure, index, found)
    return found


def _take(sample: Any, structure: manifest.Structure, index: int, found: list[Any]) -> None:
    """Appends them to `found`."""
    ((kind, inner),) = structure.items()
    if kind == "column":
        found.append(sample)
        return
    if kind == "dict":
        if isinstance(sample, Mapping) and len(sample) == len(inner) and all(key in sample for key, _ in inner):
            for key, below in inner:
                _take(sample[key], below, index, found)
            return
    elif kind == "namedtuple":
        if isinstance(sample, tuple) and getattr(sample, "_fields", None) == tuple(key for key, _ in inner["fields"]):
            for value, (_, below) in zip(sample, inner["fields"], strict=True):
                _take(value, below, index, found)
            return
    elif isinstance(sample, tuple if kind == "tuple" else list) and len(sample) == len(inner):
        for value, below in zip(sample, inner, strict=True):
            _take(value, below, index, found)
        return
    expected = f"a {kind} of {len(inner['fields'] if kind == 'namedtuple' else inner)}"
    size = f" of {len(sample)}" if isinstance(sample, tuple | list | Mapping) else ""
    text = f"Sample {index} has another structure than the first: a {type(sample).__name__}{size}, not {expected}."
    remedy = "Give all samples the same fields, with a --transform for instance."
    if kind == "list":
        remedy = "A list has one column an item: make one array of it in a --transform, whose length may then differ."
    raise DataError("bad_schema", text, remedy)


class _Names:
    """Names of columns: sanitised, unique, and short enough for a file."""

    def __init__(self, sample: Any, ragged: Collection[str]) -> None:
        self.ragged = ragged  # those that were declared so
        self._taken = {manifest.ORIGINS}
        pair = type(sample) is tuple and len(sample) == 2 and _is_image(sample[0]) and _is_label(sample[1])
        self._pair = {"0": "image", "1": "label"} if pair else {}
        self._bare = "image" if _is_image(sample) else "value"

    def name(self, path: str) -> str:
        """A column name for the field at that path, its steps joined by `/`."""
        if path in self._pair:
            plain = self._pair[path]
        else:
            plain = re.sub(r"[^A-Za-z0-9_-]+", "_", path) or self._bare
            if plain[0].isdigit():
                plain = f"field_{plain}"
        plain = plain.lstrip("-")[: limits.COLUMN_CHARS - 8] or "field"  # room for _2, .values, .offsets
        name, number = plain, 2
        while name in self._taken:
            name, number = f"{plain}_{number}", number + 1
        self._taken.add(name)
        return name


def _grow(sample: Any, path: str, names: _Names, fields: list[Field], index: int, depth: int) -> dict[str, Any]:
    """The structure of a sample; its columns are added to `fields`."""
    if depth > limits.STRUCTURE_DEPTH:
        text = f"Sample {index} is nested deeper than {limits.STRUCTURE_DEPTH}."
        raise DataError("bad_schema", text, "Flatten it with a --transform.")

    def below(key: object, value: Any) -> dict[str, Any]:
        return _grow(value, f"{path}/{key}" if path else str(key), names, fields, index, depth + 1)

    if isinstance(sample, tuple | list | Mapping) and not sample:
        raise DataError("bad_schema", f"Sample {index} is empty at {path or 'its top'}.", "Leave that field out.")
    if isinstance(sample, Mapping):
        for key in sample:
            if type(key) is not str or not key.isprintable():
                text = f"Sample {index} has the key {key!r} at {path or 'its top'}; keys are printable text."
                raise DataError("bad_schema", text, "Rename it with a --transform.")
        return {"dict": [[key, below(key, value)] for key, value in sample.items()]}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        pairs = [[key, below(key, value)] for key, value in zip(sample._fields, sample, strict=True)]
        return {"namedtuple": {"name": type(sample).__name__, "fields": pairs}}
    if isinstance(sample, tuple | list):
        kind = "tuple" if isinstance(sample, tuple) else "list"
        return {kind: [below(key, value) for key, value in enumerate(sample)]}
    field = _field(sample, names.name(path), names.ragged, index)
    fields.append(field)
    return {"column": field.name}


def _field(sample: Any, name: str, ragged: Collection[str], index: int) -> Field:
    """The column of that value, of which the operator has said that those are ragged."""
    leaf = _leaf(sample, name, index)
    field = Field(name, leaf.dtype, leaf.shape, leaf.logical)
    declared = name in ragged
    if declared and (not leaf.shape or leaf.logical == "image"):
        remedy = "Only arrays and tensors with a first dimension can be ragged; pictures take --resize and --crop."
        raise UserError("bad_option", f"--ragged names {name!r}, which is {_show(leaf)} in sample {index}.", remedy)
    if declared or leaf.logical in ("utf8", "bytes") or _may_be_ragged(field) and leaf.shape[0] == 0:
        field = Field(name, leaf.dtype, leaf.shape[1:], leaf.logical, "ragged")
    if 0 in field.shape or len(leaf.shape) > limits.RANK or field.item_bytes > limits.ROW_BYTES:
        text = f"Sample {index}: {name} has the shape {leaf.shape} of {leaf.dtype}, which a store cannot hold."
        remedy = f"At least 1 element, {limits.RANK} dimensions at most, {limits.ROW_BYTES} bytes."
        if leaf.shape[0] == 0 and 0 not in leaf.shape[1:]:
            remedy = f"If its rows differ in length, declare that: {_declaration(name)}."
        raise DataError("bad_schema", text, remedy)
    return field


def _leaf(value: Any, name: str, index: int) -> Leaf:
    """One value as it is stored. Raises `bad_sample` for what cannot be stored."""
    kind: type = type(value)
    if (taker := _taker(kind)) is not None:
        return taker(value, name, index)
    text = f"Sample {index}: {name} is a {kind.__name__}, which a store cannot hold."
    remedy = "Return tensors, arrays, pictures, numbers, bools, text or bytes: use a --transform."
    raise DataError("bad_sample", text, remedy)


@functools.lru_cache(256)
def _taker(kind: type) -> Callable[[Any, str, int], Leaf] | None:
    """What makes leaves of values of that type; None where nothing does."""
    if issubclass(kind, images.Pixels):
        return _pixels
    if issubclass(kind, str | bytes | bytearray):  # numpy's among them
        return _text
    if issubclass(kind, np.ndarray | np.generic):  # before the numbers: np.float64 is a float too
        return _array
    if issubclass(kind, bool | int | float | complex):
        return _number
    if issubclass(kind, _loaded("PIL.Image", "Image")):
        return _picture
    return _tensor if issubclass(kind, _loaded("torch", "Tensor")) else None


def _loaded(module: str, name: str) -> Any:
    """That type, or no type where its module is not loaded: then no value is of it."""
    return getattr(sys.modules.get(module), name, ())


def _pixels(value: images.Pixels, name: str, index: int) -> Leaf:  # noqa: ARG001 - as its neighbours
    return Leaf(value, "uint8", value.shape, "image")


def _text(value: str | bytes | bytearray, name: str, index: int) -> Leaf:
    """Text as its UTF-8, bytes as they are."""
    logical = "utf8" if isinstance(value, str) else "bytes"
    try:
        data = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError:
        text = f"Sample {index}: {name} is text that is no UTF-8: {value[:40]!r}."
        raise DataError("bad_sample", text, "Return it as bytes, or decode it rightly.") from None
    array = np.frombuffer(data, np.uint8)
    return Leaf(array, "uint8", array.shape, logical)


def _number(value: complex, name: str, index: int) -> Leaf:
    """Python's own numbers: 64 bits hold each exactly, or it is refused."""
    if isinstance(value, bool):
        return Leaf(value, "bool", ())
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise DataError("bad_sample", f"Sample {index}: {name} is {value}, which int64 cannot hold.")
        return Leaf(int(value), "int64", ())
    return Leaf(value, "float64" if isinstance(value, float) else "complex128", ())


def _array(value: npt.NDArray[Any] | np.generic, name: str, index: int) -> Leaf:
    dtype = value.dtype.name  # the same for both byte orders: assignment converts
    if dtype not in manifest.DTYPES or isinstance(value, np.ma.MaskedArray):
        what = "a masked array" if isinstance(value, np.ma.MaskedArray) else f"of the type {value.dtype}"
        text = f"Sample {index}: {name} is {what}, which a store cannot hold."
        raise DataError("bad_sample", text, f"Convert it to one of: {', '.join(manifest.DTYPES)}.")
    return Leaf(value, dtype, value.shape)


def _tensor(value: Any, name: str, index: int) -> Leaf:
    torch: Any = sys.modules["torch"]
    try:
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.dtype == torch.bfloat16:
            bits = value.contiguous().view(torch.int16).numpy().view(np.uint16)
            return Leaf(bits, "bfloat16", bits.shape)
        return _array(value.numpy(), name, index)
    except (TypeError, RuntimeError) as error:  # sparse, quantised, float8, meta
        text = f"Sample {index}: {name} is a tensor of {value.dtype} that numpy cannot take: {error}"
        raise DataError("bad_sample", text, "Convert it in a --transform.") from None


def _picture(value: Any, name: str, index: int) -> Leaf:
    try:
        pixels = images.to_array(value)
    except DataserveError as error:
        raise DataError("bad_sample", f"Sample {index}: {name}: {error.text}", error.remedy) from None
    except Exception as error:  # noqa: BLE001 - Pillow raises OSError, SyntaxError, ValueError and more while it decodes
        text = f"Sample {index}: {name} failed at the stage decode: {named(error)}"
        raise DataError("bad_sample", text, "Mend or remove it, then prepare again.") from None
    return Leaf(pixels, "uint8", pixels.shape, "image")


def _is_image_object(value: Any) -> bool:
    return isinstance(value, _loaded("PIL.Image", "Image"))


def _is_image(value: Any) -> bool:
    """What a pair's first place must be to be called `image`."""
    return _is_image_object(value) or len(getattr(value, "shape", ())) == 3


def _is_label(value: Any) -> bool:
    """What a pair's second place must be to be called `label`: one integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return False
    return getattr(value, "shape", ()) == ()


def _fits(leaf: Leaf, field: Field) -> bool:
    """Whether it has the type, shape and meaning of the column's rows."""
    if field.kind == "fixed":
        return leaf[1:] == field[1:4]
    return leaf.shape != () and (leaf.dtype, leaf.shape[1:], leaf.logical) == field[1:4]


def _may_be_ragged(field: Field) -> bool:
    return not field.ragged and field.logical is None and len(field.shape) in (1, 2)


def _remedy(field: Field, leaf: Leaf) -> str:
    """What to do about a sample that does not fit."""
    if _differ_in_channels(field, leaf):
        return "Bring all pictures to the same channels, with --mode RGB or in a --transform."
    if field.logical == "image" and leaf.logical == "image":
        return "Bring all pictures to one size with --resize and --crop, or pad them in a --transform."
    longer = not field.ragged and field.shape != () and leaf.shape != ()
    longer = longer and (leaf.dtype, leaf.shape[1:], leaf.logical) == (field.dtype, field.shape[1:], field.logical)
    if longer:
        how = _declaration(field.name)
        return f"If rows of {field.name} differ in length, declare that: {how}. Else pad this one in a --transform."
    return "Bring all samples to one shape and type, with a --transform that resizes, crops or pads."


def _differ_in_channels(field: Field, leaf: Leaf) -> bool:
    """Whether both look like pictures, whose first dimensions are no lengths."""
    if field.ragged or len(field.shape) != 3 or len(leaf.shape) != 3:
        return False
    return field.shape[0] != leaf.shape[0] and {field.shape[0], leaf.shape[0]} <= {1, 3, 4}


def _declaration(name: str) -> str:
    return f'--ragged {name} (in a file: ragged = ["{name}"])'


def _show(item: Leaf | Field) -> str:
    dimensions = ["n", *item.shape] if isinstance(item, Field) and item.ragged else [*item.shape]
    shape = " x ".join(map(str, dimensions)) if dimensions else "one"
    return f"{item.dtype} {shape}" + (f" ({item.logical})" if item.logical else "")
