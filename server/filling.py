"""One process's share of a preparation: samples in, chunks out. The same code runs alone and in each worker."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

from dataserve.protocol import manifest

from . import sources
from .schema import Schema
from .sources import Source
from .spec import DatasetSpec
from .writer import ChunkWriter, Layout

IDLE = -1
_WORDS = 2
_WORD_BYTES = 8


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

    def close(self) -> None:
        """Gives the descriptor back; the memory goes with the last view of it."""
        os.close(self.handle)

    def done(self) -> int:
        """Rows that all workers have finished."""
        return sum(self._words[slot * _WORDS + 1] for slot in range(self.slots))


class Filler:
    """Fills chunks of a build from a source: reads, transforms, checks and writes one after another.

    Memory: one chunk of buffers (`limits.CHUNK_BYTES`, or one row where that is more), and what the source takes.
    """

    def __init__(
        self, spec: DatasetSpec, source: Source, schema: Schema, layout: Layout, folder: str, words: memoryview
    ) -> None:
        self._source = source
        self._schema = schema
        self._layout = layout
        self._words = words
        self._transform = None if spec.transform is None else sources.load_transform(spec.transform)
        rows = min(layout.chunk_rows, layout.rows)
        self._buffers = [field.buffer(rows) for field in layout.fields]
        self._writer = ChunkWriter(folder, layout)

    def fill(self, chunk: int) -> tuple[int, ...]:
        """Prepares that chunk and returns its columns' CRC-32s. Raises `bad_sample`, `bad_schema`, `no_space`, ..."""
        start, stop = self._layout.span(chunk)
        before = self._words[1]
        self._words[0] = start
        block = self._source.block(start, stop) if self._transform is None else None
        if block is not None:
            self._schema.put_block(block, self._buffers)
        else:
            self._one_by_one(start, stop)
        crcs = self._writer.write(chunk, [buffer[: stop - start] for buffer in self._buffers])
        self._words[1] = before + stop - start
        self._words[0] = IDLE
        return crcs

    def _one_by_one(self, start: int, stop: int) -> None:
        words, buffers, put = self._words, self._buffers, self._schema.put
        source, transform = self._source, self._transform
        for index in range(start, stop):
            words[0] = index
            put(sources.read_sample(source, transform, index), index, index - start, buffers)
            words[1] += 1

    def close(self) -> None:
        """Gives the files back."""
        self._writer.close()


def to_map(schema: Schema, layout: Layout) -> dict[str, Any]:
    """Schema and layout as JSON for the workers."""
    return {"structure": schema.structure, "layout": layout.to_map()}


def from_map(fields: Mapping[str, Any]) -> tuple[Schema, Layout]:
    """What `to_map` made."""
    layout = Layout.from_map(fields["layout"])
    structure: manifest.Structure = fields["structure"]
    return Schema(structure, layout.fields), layout
