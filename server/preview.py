"""What a contact sheet of a store shows: which rows, which column, and what each is called. sheet.py draws it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol.errors import UserError
from dataserve.protocol.manifest import Column, Manifest

from . import sheet, store
from .display import size
from .rows import Rows, Value, class_name, described, sample_columns, shape_text
from .sources import shown
from .spec import nearest

WAVE_VALUES = 64  #: a row of so many numbers is drawn as a curve
TEXT_CHARS = 600

_Array = npt.NDArray[Any]


class _Scale(NamedTuple):
    """What is black and what is white, or the two ends of a curve: the same for all rows of the sheet."""

    low: float
    high: float


def preview(sealed: store.Sealed, count: int, seed: int, column: str | None) -> bytes:
    """A contact sheet of `count` rows, or all where there are fewer, drawn without repetition from that seed: a PNG.

    Raises `unknown_column`.
    """
    found = sealed.manifest
    shows = _chosen(found, column)
    generator = np.random.default_rng(seed)
    numbers = sorted(int(row) for row in generator.choice(found.rows, min(count, found.rows), replace=False))
    rows = Rows(sealed)
    values = [rows.value(shows.name, row) for row in numbers]
    scale = _scale(shows, values)
    cells = []
    for row, value in zip(numbers, values, strict=True):
        caption, note = _caption(found, rows, shows, row)
        cells.append(sheet.Cell(_content(shows, value, scale), caption, note))
    title = f"{store.label(sealed.path)}: {found.rows:,} rows, {size(found.size_bytes)}"
    return sheet.draw(title, _subtitle(found, shows, len(numbers), seed, scale), cells)


def _chosen(found: Manifest, name: str | None) -> Column:
    """The column that is shown: the one that is named, else the first that shows best."""
    columns = {column.name: column for column in sample_columns(found)}
    if name is not None and name not in columns:
        text = f"The store {found.name!r} has no column {name!r} in its sample."
        raise UserError("unknown_column", text, nearest(name, columns))
    if name is not None:
        return columns[name]
    return max(columns.values(), key=_merit)


def _merit(column: Column) -> int:
    """How well a column shows what a row is; of equal ones the first is taken."""
    ranks = (column.logical == "image", _is_picture(column), _is_curve(column), column.logical == "utf8")
    return len(ranks) - ranks.index(True) if True in ranks else 0


def _is_picture(column: Column) -> bool:
    """Whether a row is `C x H x W`, C 1, 3 or 4, or `H x W`, and no mere handful of numbers."""
    shape = column.shape
    plain = column.dtype not in ("complex64", "complex128")
    layers = len(shape) == 3 and shape[0] in (1, 3, 4) or len(shape) == 2
    return plain and column.kind == "fixed" and layers and min(shape[-2:]) >= 4


def _is_curve(column: Column) -> bool:
    real = column.dtype not in ("bool", "complex64", "complex128") and column.logical is None
    long = column.kind == "ragged" and column.shape == () or len(column.shape) == 1 and column.shape[0] >= WAVE_VALUES
    return real and long


def _scale(column: Column, values: list[Value]) -> _Scale | None:
    """None where values are shown as they are: bytes of a picture, and texts."""
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.size]
    if not arrays or not (_is_picture(column) and column.dtype != "uint8" or _is_curve(column)):
        return None
    low = min(float(np.nanmin(value)) for value in arrays)
    high = max(float(np.nanmax(value)) for value in arrays)
    return _Scale(low, high)


def _content(column: Column, value: Value, scale: _Scale | None) -> _Array | str:
    if isinstance(value, np.ndarray) and (_is_picture(column) or column.logical == "image") and value.ndim in (2, 3):
        layers = value[None] if value.ndim == 2 else value
        if layers.shape[0] in (1, 3, 4) and layers.size:
            picture: _Array = np.moveaxis(layers if scale is None else _levels(layers, scale), 0, -1)
            return picture
    if isinstance(value, np.ndarray) and scale is not None and value.ndim == 1 and value.size >= WAVE_VALUES:
        most = max(abs(scale.low), abs(scale.high)) or 1.0
        curve: _Array = np.nan_to_num(value.astype(np.float64) / most, posinf=1.0, neginf=-1.0).clip(-1, 1)
        return curve
    return value[:TEXT_CHARS] if isinstance(value, str) else described(value, TEXT_CHARS)


def _levels(values: _Array, scale: _Scale) -> _Array:
    """Those values as 0 to 255."""
    span = scale.high - scale.low or 1.0
    share = np.nan_to_num((values.astype(np.float64) - scale.low) / span, posinf=1.0, neginf=0.0)
    levels: _Array = (share.clip(0, 1) * 255).round().astype(np.uint8)
    return levels


def _caption(found: Manifest, rows: Rows, shows: Column, row: int) -> tuple[str, str]:
    """What stands below: the other fields that are short, then the row and its origin."""
    texts = []
    for column in sample_columns(found):
        if column.name == shows.name or not (column.kind == "fixed" and column.shape == () or column.logical == "utf8"):
            continue
        value = rows.value(column.name, row)
        name = class_name(found, column.name, value)
        texts.append(
            shown(name)
            if name is not None
            else f"{column.name} {value if isinstance(value, str) else described(value)}"
        )
    origin = rows.origin(row)
    path = "" if origin.path is None else f" \N{MIDDLE DOT} {shown(origin.path).rpartition('/')[2]}"
    return ", ".join(texts), f"row {row:,}{path}"


def _subtitle(found: Manifest, shows: Column, count: int, seed: int, scale: _Scale | None) -> str:
    words = [f"{count:,} rows drawn with seed {seed}" if count < found.rows else "all rows"]
    shape = shape_text(shows.shape if shows.kind == "fixed" else ("n", *shows.shape))
    kind = shows.logical or shows.dtype
    words.append(f"{shows.name} {shape}" if kind == shows.name else f"{shows.name} {kind} {shape}")
    if scale is not None:
        words.append(f"values {scale.low:.4g} to {scale.high:.4g}")
    if found.classes is not None:
        words.append(f"{len(found.classes):,} classes")
    return " \N{MIDDLE DOT} ".join(words)
