"""The first look at a source: what its samples are, before any of them is stored.

The first good sample fixes the schema, and the operator may say which columns are ragged. Where others may be, samples
spread over the source are looked at too: `SPREAD` of them by their place alone (of an iterable the first ones), so that
the answer is the same whoever asks and how often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dataserve.protocol.errors import DataError

from . import randomness
from .badsamples import Bad
from .filling import from_map, to_map
from .layout import Layout
from .reading import Reader, blame
from .schema import Measure, Schema
from .sources import Source

SPREAD = 64


class NothingGoodError(Exception):
    """No sample can be stored: `bad` are all of them."""

    def __init__(self, bad: list[Bad]) -> None:
        super().__init__(bad)
        self.bad = bad


def look(source: Source, reader: Reader) -> tuple[Schema, Layout]:
    """The schema and where rows will lie. Raises `NothingGoodError`, and what `randomness.check` raises."""
    randomness.check(source, reader)
    first, sample, schema = _first_good(source, reader)
    if not schema.may_widen and not any(field.ragged for field in schema.fields):
        return schema, Layout(source.length, schema.fields)
    measures = [schema.measure(sample, first), *_spread(source, reader, schema, first)]
    schema = schema.widened(measures)
    total = sum(schema.ragged_bytes(measure) for measure in measures)
    return schema, Layout(source.length, schema.fields, -(-total // len(measures)))


def pack_look(source: Source, reader: Reader) -> dict[str, Any]:
    """`look` as JSON, its outcome or that nothing is good."""
    try:
        return to_map(*look(source, reader))
    except NothingGoodError as nothing:
        return {"bad": nothing.bad}


def unpack_look(found: Mapping[str, Any]) -> tuple[Schema, Layout]:
    """What `pack_look` packed. Raises `NothingGoodError`."""
    if "bad" in found:
        raise NothingGoodError([Bad(*bad) for bad in found["bad"]])
    return from_map(found)


def _first_good(source: Source, reader: Reader) -> tuple[int, Any, Schema]:
    bad: list[Bad] = []
    index = 0
    while source.length is None or index < source.length:
        try:
            sample = reader.read(index)
            return index, sample, Schema.of(sample, index, reader.spec.ragged)
        except StopIteration:
            break
        except DataError as error:
            bad.append(blame(error, index))
        index += 1
    raise NothingGoodError(bad)


def _spread(source: Source, reader: Reader, schema: Schema, first: int) -> Iterator[list[Measure]]:
    """What good samples behind the first one are, spread over the source."""
    if source.length is None:
        places = range(first + 1, first + SPREAD)
    else:
        places = range(first + 1, source.length, max(1, (source.length - first - 1) // (SPREAD - 1)))
    for index in places[: SPREAD - 1]:
        try:
            yield schema.measure(reader.read(index), index)
        except StopIteration:
            return
        except DataError as error:
            blame(error, index)  # raises where the machine is to blame
