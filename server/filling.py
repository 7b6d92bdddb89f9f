"""One process's share of a preparation: samples in, chunks out. The same code runs alone and in each worker."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, UserError

from . import randomness, uniform
from .badsamples import Bad
from .journal import Chunk
from .layout import Layout
from .reading import Reader, blame
from .schema import Schema
from .sources import Source
from .writer import ChunkWriter

IDLE = -1
_WORDS = 2
_WORD_BYTES = 8


class Patience(NamedTuple):
    """How long one sample may take, and whether one that takes longer, or kills its worker, may be left out."""

    sample_s: float = 300.0
    forgiving: bool = False


class Page:
    """A page of memory that the workers of one preparation share with their parent: where each one is.

    Each slot has two aligned 64-bit words, written by its worker alone: the index of the sample that it is at (`IDLE`
    between chunks) and how many rows it has finished in all.
    """

    def __init__(self, slots: int, handle: int | None = None) -> None:
        self.slots = slots
        self.handle = os.memfd_create("dataserve-progress") if handle is None else handle
        size = slots * _WORDS * _WORD_BYTES
        if handle is None:
            os.ftruncate(self.handle, size)
        self._map = mmap.mmap(self.handle, size)
        self._words = memoryview(self._map).cast("q")
        if handle is None:
            for slot in range(slots):
                self._words[slot * _WORDS] = IDLE

    @classmethod
    def of_parent(cls, pid: int, handle: int, slots: int) -> Page:
        """The page of a living parent, by its process id and its descriptor there."""
        return cls(slots, os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR | os.O_CLOEXEC))

    def words(self, slot: int) -> memoryview:
        """The slot's two words."""
        return self._words[slot * _WORDS : (slot + 1) * _WORDS]

    def at(self, slot: int) -> int:
        """The index of the sample that this worker is at, or `IDLE`."""
        return self._words[slot * _WORDS]

    def finished(self, slot: int) -> int:
        """Rows that this worker has finished."""
        return self._words[slot * _WORDS + 1]

    def reset(self, slot: int, rows: int) -> None:
        """Puts a slot, whose worker is gone, to `IDLE` and so many finished rows."""
        self._words[slot * _WORDS] = IDLE
        self._words[slot * _WORDS + 1] = rows

    def close(self) -> None:
        """Gives the descriptor back; the memory goes with the last view of it."""
        os.close(self.handle)

    def done(self) -> int:
        """Rows that all workers have finished."""
        return sum(self._words[slot * _WORDS + 1] for slot in range(self.slots))


class Filler:
    """Fills chunks of a build from a source: reads, transforms, checks and writes one after another.

    Memory: what a `ChunkWriter` takes, and what the source takes.
    """

    def __init__(
        self, reader: Reader, source: Source, schema: Schema, layout: Layout, folder: str, words: memoryview
    ) -> None:
        self._reader = reader
        self._source = source
        self._schema = schema
        self._layout = layout
        self._words = words
        self._writer = ChunkWriter(folder, layout)

    def fill(self, chunk: int) -> Chunk:
        """Prepares that chunk. Raises `no_space`, ...; bad samples are in what it returns."""
        start, stop = self._layout.span(chunk)
        before = self._words[1]
        self._words[0] = start
        self._writer.begin(chunk)
        generators = randomness.states()
        block = self._source.block(start, stop) if self._reader.plain else None
        if block is not None:
            self._schema.put_block(block, self._writer.columns)
            scanned, bad = stop - start, list[Bad]()
        else:
            scanned, bad = self._one_by_one(start, stop)
        randomness.refuse_moved(generators, self._source, self._reader, range(start, start + scanned))
        alike = uniform.find(self._layout.fields, self._writer.columns, scanned - len(bad))
        crcs, elements = self._writer.finish(chunk, scanned - len(bad))
        self._words[1] = before + scanned
        self._words[0] = IDLE
        return Chunk(chunk, scanned, crcs, elements, tuple(bad), alike)

    def _one_by_one(self, start: int, stop: int) -> tuple[int, list[Bad]]:
        """(samples looked at, the bad ones among them)."""
        words, columns, put, read = self._words, self._writer.columns, self._schema.put, self._reader.read
        bad: list[Bad] = []
        row = 0
        for index in range(start, stop):
            try:
                put(read(index), index, row, columns)
                row += 1
            except StopIteration:
                return index - start, bad
            except DataError as error:
                bad.append(blame(error, index))
            words[1] += 1
        if self._layout.rows is None and stop > limits.ROWS:
            raise UserError("bad_source", f"The source has more than {limits.ROWS} samples.", "Split it into several.")
        return stop - start, bad

    def close(self) -> None:
        """Gives the files back."""
        self._writer.close()


def to_map(schema: Schema, layout: Layout) -> dict[str, Any]:
    """Schema and layout as JSON for the workers and the journal."""
    return {"structure": schema.structure, "layout": layout.to_map()}


def from_map(fields: Mapping[str, Any]) -> tuple[Schema, Layout]:
    """What `to_map` made."""
    layout = Layout.from_map(fields["layout"])
    structure: manifest.Structure = fields["structure"]
    return Schema(structure, layout.fields), layout
