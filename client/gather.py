"""Assembles batches: rows of mapped columns into recycled buffers, converted and normalised, in the source's structure.

`dtype`'s rule: it is the type of floating columns, of images (uint8 of three dimensions, values kept at 0 to 255 unless they are
normalised) and of whatever is normalised. Labels and other integers, booleans and complex numbers stay as stored.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError, UserError
from dataserve.protocol.manifest import Column, Manifest, Structure

from .buffers import Pool
from .mapping import Store

FLOATS = ("float16", "float32", "float64", "bfloat16")
TORCH_FLOATS = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
BLOCK_BYTES = 1 << 19  #: normalisation goes over this much at a time, so that its passes find the values in the cache

Stats = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """How a column leaves: as the torch type `dtype`, `(x - mean) * scale` before, if they are there.

    `mean` and `scale` are float32 (float64 for float64), of the shape of a row or broadcast to it, on the stored scale.
    """

    column: Column
    dtype: torch.dtype
    mean: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def stored(self) -> bool:
        """Whether the rows leave as they are stored."""
        return self.mean is None and self.dtype is getattr(torch, self.column.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it leaves."""
        return int(np.prod(self.column.shape, dtype=np.int64)) * self.dtype.itemsize


def select(structure: Structure, columns: str | Sequence[str] | None, known: Manifest) -> Structure:
    """The structure with only the named columns in it; one name as text gives that column bare, None gives all.

    Raises `unknown_column`, which lists those there are, and `not_built` for ragged ones.
    """
    there = [column.name for column in known.columns]
    wanted = manifest.leaves(structure) if columns is None else [columns] if isinstance(columns, str) else list(columns)
    for name in wanted:
        if name not in there:
            raise UserError(
                "unknown_column", f"The data set has no column {name!r}.", f"There are: {', '.join(there)}."
            )
        if known.column(name).kind != "fixed":
            fixed = [column.name for column in known.columns if column.kind == "fixed"]
            raise UserError(
                "not_built",
                f"The column {name!r} is ragged: columns={name!r} is not built yet.",
                f"Choose among the fixed ones with columns={fixed}."
                if fixed
                else "It is announced for a later version.",
            )
    if not wanted or len(set(wanted)) != len(wanted):
        raise UserError("bad_option", f"columns={columns!r} must name at least one column, and each once.")
    if isinstance(columns, str):
        return {"column": columns}
    kept = _keep(structure, set(wanted))
    if kept is None:
        raise UserError("bad_option", f"columns={columns!r} names nothing of a sample.")
    return kept


def _keep(structure: Structure, wanted: set[str]) -> Structure | None:
    ((kind, inner),) = structure.items()
    if kind == "column":
        return structure if inner in wanted else None
    if kind in ("tuple", "list"):
        items = [kept for item in inner if (kept := _keep(item, wanted)) is not None]
        return {kind: items} if items else None
    pairs = inner if kind == "dict" else inner["fields"]
    left = [[key, kept] for key, item in pairs if (kept := _keep(item, wanted)) is not None]
    if not left:
        return None
    return {"dict": left} if kind == "dict" else {"namedtuple": {"name": inner["name"], "fields": left}}


def outputs(columns: Sequence[Column], dtype: object, normalize: object) -> dict[str, Output]:
    """How each column leaves, by name. Raises `bad_option`, `unknown_column` for options that do not fit them."""
    if dtype is not None and dtype not in TORCH_FLOATS:
        names = ", ".join(f"torch.{name}" for name in FLOATS)
        raise UserError("bad_option", f"dtype={dtype!r} is no type for batches.", f"Give one of {names}.")
    assert dtype is None or isinstance(dtype, torch.dtype)
    stats = _normalized(columns, normalize)
    return {column.name: _output(column, dtype, stats.get(column.name)) for column in columns}


def _output(column: Column, dtype: torch.dtype | None, stats: Stats | None) -> Output:
    stored: torch.dtype = getattr(torch, column.dtype)
    convertible = column.dtype in FLOATS or _is_image(column)
    if stats is None:
        return Output(column, dtype if dtype is not None and convertible else stored)
    channels = _channels(column)
    unit = 255.0 if column.dtype == "uint8" else 1.0
    mean, std = (_values(column, what, values, channels) for what, values in zip(("mean", "std"), stats, strict=True))
    if not all(std):
        raise UserError(
            "bad_option", f"normalize: a std of {column.name!r} is 0: {std}.", "Rows cannot be divided by it."
        )
    default = torch.float32 if column.dtype == "uint8" else stored
    compute = torch.float64 if column.dtype == "float64" else torch.float32
    shape = (len(mean), *(1,) * (len(column.shape) - 1)) if column.shape else ()
    return Output(
        column,
        default if dtype is None else dtype,
        torch.tensor([value * unit for value in mean], dtype=compute).reshape(shape),
        torch.tensor([1.0 / (value * unit) for value in std], dtype=compute).reshape(shape),
    )


def _normalized(columns: Sequence[Column], normalize: object) -> dict[str, Stats]:
    """(mean, std) by column, as the option gives them."""
    if normalize is None:
        return {}
    if isinstance(normalize, Mapping):
        named = dict(normalize)
    else:
        images = [column.name for column in columns if _is_image(column)]
        if len(images) != 1:
            found = f"{len(images)} columns of images (uint8 of three dimensions)"
            raise UserError(
                "bad_option",
                f"normalize=(mean, std) needs one, and there are {found}.",
                "Name it: {'column': (mean, std)}.",
            )
        named = {images[0]: normalize}
    by_name = {column.name: column for column in columns}
    for name, stats in named.items():
        if name not in by_name:
            raise UserError("unknown_column", f"normalize names {name!r}.", f"There are: {', '.join(by_name)}.")
        if by_name[name].dtype not in (*FLOATS, "uint8"):
            raise UserError("bad_option", f"normalize: {name!r} is {by_name[name].dtype}, neither uint8 nor floating.")
        if not isinstance(stats, Sequence) or isinstance(stats, str) or len(stats) != 2:
            raise UserError("bad_option", f"normalize: {stats!r} for {name!r} is no pair of mean and std.")
    return {str(name): (stats[0], stats[1]) for name, stats in named.items()}


def _values(column: Column, what: str, values: Any, channels: int) -> list[float]:
    """One number for each channel, or one for all."""
    try:
        numbers = [float(value) for value in (values if hasattr(values, "__iter__") else [values])]
    except (TypeError, ValueError):
        raise UserError("bad_option", f"normalize: the {what} of {column.name!r} is {values!r}: no numbers.") from None
    if len(numbers) not in (1, channels):
        raise UserError(
            "bad_option",
            f"normalize: the {what} of {column.name!r} has {len(numbers)} numbers; its rows {column.shape} have "
            f"{channels} channel{'s' * (channels != 1)}.",
            "Give one for each channel, or one for all.",
        )
    if not np.isfinite(numbers).all():
        raise UserError("bad_option", f"normalize: the {what} of {column.name!r} is not finite: {numbers}.")
    return numbers


def _is_image(column: Column) -> bool:
    return column.dtype == "uint8" and len(column.shape) == 3


def _channels(column: Column) -> int:
    """The first dimension of images and of feature vectors; rows of other shapes have one channel."""
    return column.shape[0] if len(column.shape) in (1, 3) else 1


class Gatherer:
    """Batches of at most `batch_size` rows, from any thread; what it gives belongs to the caller."""

    def __init__(self, store: Store, structure: Structure, leaving: Mapping[str, Output], batch_size: int) -> None:
        self._rows = store.manifest.rows
        self._structure = structure
        self._outputs = leaving
        self._columns = {name: store.column(name) for name in leaving}
        self._types = _tuple_types(structure)
        self._pools = {name: Pool(batch_size * output.row_bytes) for name, output in leaving.items()}
        self._stored = {
            name: Pool(batch_size * output.column.item_bytes, 2)
            for name, output in leaving.items()
            if not output.stored
        }

    def gather(self, rows: npt.NDArray[Any] | slice) -> Any:
        """The batch of those rows (indices, or a slice of the store), in the sample's structure.

        Raises `bad_store` for a row that is not there: an order can come from a file.
        """
        if isinstance(rows, slice):
            low, high, count = rows.start, rows.stop - 1, rows.stop - rows.start
        else:
            low, high, count = int(rows.min()), int(rows.max()), len(rows)
        if low < 0 or high >= self._rows:
            raise DataError("bad_store", f"The order names the rows {low} to {high}; the store has {self._rows}.")
        return self._build(self._structure, {name: self._tensor(name, rows, count) for name in self._outputs})

    def size_bytes(self, count: int) -> int:
        """Bytes of a batch of so many rows."""
        return count * sum(output.row_bytes for output in self._outputs.values())

    def _tensor(self, name: str, rows: npt.NDArray[Any] | slice, count: int) -> torch.Tensor:
        output, column = self._outputs[name], self._columns[name]
        pool = self._pools[name] if output.stored else self._stored[name]
        taken = pool.lease((count, *output.column.shape), column.dtype)
        if isinstance(rows, slice):
            np.copyto(taken, column[rows])
        else:
            np.take(
                column, rows, axis=0, out=taken, mode="clip"
            )  # "clip" writes straight into out; bounds were checked
        tensor = _as_tensor(taken, output.column)
        return tensor if output.stored else self._converted(name, tensor)

    def _converted(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        output = self._outputs[name]
        leased = self._pools[name].lease((len(stored) * output.row_bytes,), np.uint8)
        result = torch.from_numpy(leased).view(output.dtype).reshape(stored.shape)
        if output.mean is None or output.scale is None:
            return result.copy_(stored)
        step = max(1, BLOCK_BYTES // max(1, output.row_bytes))
        exact = output.dtype == output.mean.dtype
        for start in range(0, len(stored), step):
            part = result[start : start + step]
            # Half precision is reached at the end: its mantissa would not hold what lies between.
            work = (
                part.copy_(stored[start : start + step])
                if exact
                else stored[start : start + step].to(output.mean.dtype)
            )
            work.sub_(output.mean).mul_(output.scale)
            if not exact:
                part.copy_(work)
        return result

    def _build(self, structure: Structure, tensors: Mapping[str, torch.Tensor]) -> Any:
        ((kind, inner),) = structure.items()
        if kind == "column":
            return tensors[inner]
        if kind == "tuple":
            return tuple(self._build(item, tensors) for item in inner)
        if kind == "list":
            return [self._build(item, tensors) for item in inner]
        if kind == "dict":
            return {key: self._build(item, tensors) for key, item in inner}
        return self._types[_signature(inner)](*(self._build(item, tensors) for _, item in inner["fields"]))


def _as_tensor(array: npt.NDArray[Any], column: Column) -> torch.Tensor:
    if column.dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _signature(inner: Mapping[str, Any]) -> tuple[str, ...]:
    return (inner["name"], *(key for key, _ in inner["fields"]))


def _tuple_types(structure: Structure) -> dict[tuple[str, ...], Any]:
    """The named tuples of a structure, each made once, so that a loop sees one type in all batches."""
    ((kind, inner),) = structure.items()
    if kind == "column":
        return {}
    found: dict[tuple[str, ...], Any] = {}
    if kind == "namedtuple":
        signature = _signature(inner)
        found[signature] = _tuple_type(signature)
        inner, kind = inner["fields"], "dict"
    for item in inner:
        found |= _tuple_types(item[1] if kind == "dict" else item)
    return found


@functools.cache
def _tuple_type(signature: tuple[str, ...]) -> Any:
    """The named tuple of that name and fields. Its pickle names them, for a loader worker that has made no such type."""
    name, *words = signature
    base = namedtuple(name, words)  # type: ignore[misc]  # noqa: PYI024 - the fields are known only now
    return type(name, (base,), {"__slots__": (), "__reduce__": lambda batch: (_tuple_again, (signature, tuple(batch)))})


def _tuple_again(signature: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _tuple_type(signature)(*values)
