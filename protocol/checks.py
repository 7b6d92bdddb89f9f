"""Checks of fields: each takes a decoded value and gives it back typed, or raises `ValueError` with what was wrong.

Used by the messages and the manifest, which trust nothing that they read.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], Any]


def integer(low: int, high: int) -> Check:
    """An integer in `[low, high]`; a bool is none."""

    def check(value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"is {_show(value)}, not an integer")
        if not low <= value <= high:
            raise ValueError(f"is {value}, outside [{low}, {high}]")
        return value

    return check


def number(low: float, high: float) -> Check:
    """A finite float or integer in `[low, high]`, as a float."""

    def check(value: Any) -> float:
        if type(value) not in (int, float):
            raise ValueError(f"is {_show(value)}, not a number")
        if not low <= value <= high:  # NaN fails too
            raise ValueError(f"is {value}, outside [{low}, {high}]")
        return float(value)

    return check


def flag(value: Any) -> bool:
    """A bool."""
    if type(value) is not bool:
        raise ValueError(f"is {_show(value)}, not true or false")
    return value


def text(chars: int, pattern: re.Pattern[str] | None = None, *, surrogates: bool = False) -> Check:
    """A str of at most so many characters, matching the whole pattern, with no control characters but line feeds.

    `surrogates` admits the lone surrogates by which Python carries a path that is no UTF-8.
    """

    def check(value: Any) -> str:
        if type(value) is not str:
            raise ValueError(f"is {_show(value)}, not text")
        if len(value) > chars:
            raise ValueError(f"has {len(value)} characters, more than {chars}")
        if pattern is not None and pattern.fullmatch(value) is None:
            raise ValueError(f"is {_show(value)}, which does not match {pattern.pattern}")
        if any(ord(letter) < 32 and letter != "\n" or ord(letter) == 127 for letter in value):
            raise ValueError(f"is {_show(value)}, which holds control characters")
        if not surrogates and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError(f"is {_show(value)}, which is no UTF-8")
        return value

    return check


def blob(size: int) -> Check:
    """Bytes of exactly that size."""

    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise ValueError(f"is {_show(value)}, not {size} bytes")
        return value

    return check


def one_of(*values: str) -> Check:
    """One of the given words."""

    def check(value: Any) -> str:
        if type(value) is not str or value not in values:
            raise ValueError(f"is {_show(value)}, not one of {', '.join(values)}")
        return value

    return check


def optional(inner: Check) -> Check:
    """Null, or what the inner check takes."""
    return lambda value: None if value is None else inner(value)


def list_of(inner: Check, most: int, least: int = 0) -> Check:
    """A list of `least` to `most` items, each checked; given back as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ValueError(f"is {_show(value)}, not a list")
        if not least <= len(value) <= most:
            raise ValueError(f"has {len(value)} items, not {least} to {most}")
        return tuple(at(f"[{index}]", inner, item) for index, item in enumerate(value))

    return check


def triples(high: int, most: int) -> Check:
    """At most that many lists of three integers in `[0, high]`, given back as tuples; at a tenth of the price of a check for each,
    which only says what is wrong where something is."""
    each = list_of(list_of(integer(0, high), 3, 3), most)

    def check(value: Any) -> tuple[Any, ...]:
        if (
            type(value) is list
            and 0 < len(value) <= most
            and {*map(type, value)} == {list}
            and {*map(len, value)} == {3}
        ):
            flat = [*itertools.chain.from_iterable(value)]
            if {*map(type, flat)} == {int} and min(flat) >= 0 and max(flat) <= high:
                return tuple(map(tuple, value))
        return tuple(each(value))

    return check


def record(fields: dict[str, Check]) -> Check:
    """A map with at least these keys, each checked; further keys are ignored and left out."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError(f"is {_show(value)}, not a map")
        missing = fields.keys() - value.keys()
        if missing:
            raise ValueError(f"lacks {', '.join(sorted(missing))}")
        return {key: at(f".{key}", inner, value[key]) for key, inner in fields.items()}

    return check


def map_of(inner: Check, most: int, key_chars: int) -> Check:
    """A map of at most so many text keys, each value checked."""
    key_check = text(key_chars)

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise ValueError(f"is {_show(value)}, not a map")
        if len(value) > most:
            raise ValueError(f"has {len(value)} keys, more than {most}")
        return {at(" key", key_check, key): at(f".{_show(key)}", inner, item) for key, item in value.items()}

    return check


def by_type(inner: dict[type, Check]) -> Check:
    """A value of one of these types, as the check of its type takes it."""

    def check(value: Any) -> Any:
        if type(value) not in inner:
            raise ValueError(f"is {_show(value)}, not one of {', '.join(kind.__name__ for kind in inner)}")
        return inner[type(value)](value)

    return check


def tree(leaf: Check, most: int, key_chars: int, depth: int) -> Check:
    """A map of at most so many text keys, each value a leaf or a further such map, `depth` deep in all."""
    inner = leaf if depth == 1 else tree(leaf, most, key_chars, depth - 1)
    return map_of(lambda value: (inner if type(value) is dict else leaf)(value), most, key_chars)


def at(place: str, inner: Check, value: Any) -> Any:
    """The inner check, with the place put before what it raises."""
    try:
        return inner(value)
    except ValueError as error:
        raise ValueError(f"{place} {error}" if str(error)[:1] not in ".[" else f"{place}{error}") from None


def _show(value: Any) -> str:
    """A value as text of bounded length, whatever it is."""
    if isinstance(value, str | bytes):
        shown = repr(value[:40])
        return shown if len(value) <= 40 else f"{shown} and {len(value) - 40} more"
    if isinstance(value, list | dict | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:60]
