"""Rows that are nearly one value: more than `SHARE` of each channel of a picture, or of an array like one, is equal.

So look a 16-bit picture that was read as all white, a float one that became all black, a decoder that gave grey. It may
also be a mask without an object: it is a warning and never an error. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .layout import Field

SHARE = 0.99
SMALLEST = 64  #: values of a channel; fewer say nothing
LISTED = 5  #: rows of one chunk, and of the store, that are named
_PROBES = 32  #: values of each channel that are looked at first,
_ALIKE = 24  #: and how many of them must be equal for all to be counted
_BLOCK = 256  #: channels that are counted at once


class Uniform(NamedTuple):
    """Of one chunk: the place of the column among the fields, how many of its rows are nearly one value, and the first
    of them, counted from the chunk's first kept row."""

    field: int
    how_many: int
    rows: tuple[int, ...]


def find(fields: Sequence[Field], columns: Sequence[Any], rows: int) -> tuple[Uniform, ...]:
    """What there is of them in the first `rows` rows of these columns: arrays `(n, *shape)` for fixed ones."""
    found = []
    for place, (field, column) in enumerate(zip(fields, columns, strict=True)):
        if rows and _is_like_a_picture(field):
            which = np.flatnonzero(_nearly_one_value(column[:rows]))
            if len(which):
                found.append(Uniform(place, len(which), tuple(which[:LISTED].tolist())))
    return tuple(found)


def merged(fields: Sequence[Field], chunks: Sequence[tuple[int, Sequence[Uniform]]]) -> Iterator[dict[str, Any]]:
    """The manifest's words by column, from (kept rows, `find`'s answer) of all chunks in their order."""
    for place, field in enumerate(fields):
        first, count = 0, 0
        rows: list[int] = []
        for kept, found in chunks:
            for each in found:
                if each.field == place:
                    count += each.how_many
                    rows += [first + row for row in each.rows][: LISTED - len(rows)]
            first += kept
        if count:
            yield {"column": field.name, "count": count, "rows": rows}


def _is_like_a_picture(field: Field) -> bool:
    return not field.ragged and len(field.shape) >= 3 and int(np.prod(field.shape[1:])) >= SMALLEST


def _nearly_one_value(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For each row whether each of its channels is so: `(n, channels, ...)` to `(n,)`."""
    channels = rows.reshape(rows.shape[0] * rows.shape[1], -1)
    # By the golden ratio: spread evenly, and along no line of a picture.
    places = (np.arange(_PROBES) * 0x9E3779B9 % 2**32) * channels.shape[1] >> 32
    probes = channels[:, places]
    common = np.sort(probes, axis=1)[:, _PROBES // 2]  # what most are equal to, if there is such a value
    alike = np.count_nonzero(probes == common[:, np.newaxis], axis=1) >= _ALIKE
    alike = alike.reshape(rows.shape[:2]).all(axis=1).repeat(rows.shape[1])
    chosen = np.flatnonzero(alike)
    for start in range(0, len(chosen), _BLOCK):
        block = chosen[start : start + _BLOCK]
        counts = np.count_nonzero(channels[block] == common[block, np.newaxis], axis=1)
        alike[block] = counts > SHARE * channels.shape[1]
    whole: npt.NDArray[np.bool_] = alike.reshape(rows.shape[:2]).all(axis=1)
    return whole
