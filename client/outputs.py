"""How a column leaves in a batch: the options `dtype`, `normalize` and `ragged`, checked against the columns, and applied.

`dtype`'s rule: it is the type of floating columns, of images (uint8 of three dimensions, values kept at 0 to 255 unless they are
normalised) and of whatever is normalised. Labels and other integers, booleans and complex numbers stay as stored, text and
bytes too. Of a ragged column all this is said of an element, the part of a row that has a fixed shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataserve.protocol.errors import UserError
from dataserve.protocol.manifest import Column

FLOATS = ("float16", "float32", "float64", "bfloat16")
TORCH_FLOATS = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
FORMS = ("list", "flat", "padded")  #: of ragged columns: ragged.py has them

Stats = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """How a column leaves: as the torch type `dtype`, `(x - mean) * scale` before, if they are there.

    `mean` and `scale` are float64, `(channels, 1, 1)` for images and else broadcast to a row (to an element, if ragged), on the
    stored scale; convert.py has the arithmetic. `form` is one of `FORMS`, of no meaning where the column is fixed.
    """

    column: Column
    dtype: torch.dtype
    mean: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    form: str = FORMS[0]

    @property
    def stored(self) -> bool:
        """Whether the values leave as they are stored."""
        return self.mean is None and self.dtype is getattr(torch, self.column.dtype)

    @property
    def item_bytes(self) -> int:
        """Bytes of one row as it leaves, of one element of a ragged column."""
        return int(np.prod(self.column.shape, dtype=np.int64)) * self.dtype.itemsize

    def tensor(self, stored: npt.NDArray[Any]) -> torch.Tensor:
        """The stored values as a tensor of their type, which shares their memory."""
        if self.column.dtype == "bfloat16":
            return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(stored)


def outputs(columns: Sequence[Column], dtype: object, normalize: object, ragged: object = None) -> dict[str, Output]:
    """How each column leaves, by name. Raises `bad_option`, `unknown_column` for options that do not fit them."""
    if dtype is not None and dtype not in TORCH_FLOATS:
        names = ", ".join(f"torch.{name}" for name in FLOATS)
        raise UserError("bad_option", f"dtype={dtype!r} is no type for batches.", f"Give one of {names}.")
    assert dtype is None or isinstance(dtype, torch.dtype)
    stats, forms = _normalized(columns, normalize), _forms(columns, ragged)
    return {column.name: _output(column, dtype, stats.get(column.name), forms[column.name]) for column in columns}


def _output(column: Column, dtype: torch.dtype | None, stats: Stats | None, form: str) -> Output:
    stored: torch.dtype = getattr(torch, column.dtype)
    convertible = column.dtype in FLOATS or _is_image(column)
    if stats is None:
        return Output(column, dtype if dtype is not None and convertible else stored, form=form)
    channels = _channels(column)
    unit = 255.0 if column.dtype == "uint8" else 1.0
    mean, std = (_values(column, what, values, channels) for what, values in zip(("mean", "std"), stats, strict=True))
    if not all(std):
        raise UserError(
            "bad_option", f"normalize: a std of {column.name!r} is 0: {std}.", "Rows cannot be divided by it."
        )
    default = torch.float32 if column.dtype == "uint8" else stored
    shape = (len(mean), *(1,) * (len(column.shape) - 1)) if column.shape else ()
    return Output(
        column,
        default if dtype is None else dtype,
        torch.tensor([value * unit for value in mean], dtype=torch.float64).reshape(shape),
        torch.tensor([1.0 / (value * unit) for value in std], dtype=torch.float64).reshape(shape),
        form,
    )


def _forms(columns: Sequence[Column], ragged: object) -> dict[str, str]:
    """The form of each column, as the option gives it."""
    forms = {column.name: FORMS[0] for column in columns}
    if ragged is None:
        return forms
    kinds = {column.name: column.kind for column in columns}
    named: dict[str, Any] = dict(ragged) if isinstance(ragged, Mapping) else dict.fromkeys(forms, ragged)
    for name, form in named.items():
        if name not in kinds:
            raise UserError("unknown_column", f"ragged names {name!r}.", f"There are: {', '.join(kinds)}.")
        if isinstance(ragged, Mapping) and kinds[name] != "ragged":
            raise UserError("bad_option", f"ragged names {name!r}, whose rows are all of one shape: they are stacked.")
        if form not in FORMS:
            known = f"Known: {', '.join(FORMS)}; or {{'column': form}}."
            raise UserError("bad_option", f"ragged={form!r} is unknown.", known)
    return forms | named


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
        _require_numbers(by_name[name])
        if not isinstance(stats, Sequence) or isinstance(stats, str) or len(stats) != 2:
            raise UserError("bad_option", f"normalize: {stats!r} for {name!r} is no pair of mean and std.")
    return {str(name): (stats[0], stats[1]) for name, stats in named.items()}


def _require_numbers(column: Column) -> None:
    """Raises `bad_option` for a column that cannot be normalised."""
    if column.dtype not in (*FLOATS, "uint8"):
        raise UserError("bad_option", f"normalize: {column.name!r} is {column.dtype}, neither uint8 nor floating.")
    if column.logical in ("utf8", "bytes"):
        raise UserError("bad_option", f"normalize: {column.name!r} is {column.logical}, no numbers.")
    if column.logical == "image" and column.kind == "ragged":
        raise UserError(
            "bad_option",
            f"normalize: the images of {column.name!r} differ in size, so that channels are no dimension of their own.",
            "Normalise them in a transform, or prepare them with one size (--resize, --crop).",
        )


def _values(column: Column, what: str, values: Any, channels: int) -> list[float]:
    """One number for each channel, or one for all."""
    try:
        numbers = [float(value) for value in (values if hasattr(values, "__iter__") else [values])]
    except (TypeError, ValueError):
        raise UserError("bad_option", f"normalize: the {what} of {column.name!r} is {values!r}: no numbers.") from None
    if len(numbers) not in (1, channels):
        items = "elements" if column.kind == "ragged" else "rows"
        raise UserError(
            "bad_option",
            f"normalize: the {what} of {column.name!r} has {len(numbers)} numbers; its {items} {column.shape} have "
            f"{channels} channel{'s' * (channels != 1)}.",
            "Give one for each channel, or one for all.",
        )
    if not np.isfinite(numbers).all():
        raise UserError("bad_option", f"normalize: the {what} of {column.name!r} is not finite: {numbers}.")
    return numbers


def _is_image(column: Column) -> bool:
    return column.kind == "fixed" and column.dtype == "uint8" and len(column.shape) == 3


def _channels(column: Column) -> int:
    """The first dimension of images and of feature vectors; rows (elements, if ragged) of other shapes have one channel."""
    return column.shape[0] if len(column.shape) in (1, 3) else 1
