"""All checksums of a sealed store, on several cores: which chunks of which files are not as they were written; and where
these are right, whether offsets and origins say what FORMAT.md has them say.

Pages of the file cache are dropped first where nobody maps them, so that the disk is read and not a memory of it.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataserve.protocol import limits, manifest
from dataserve.protocol.manifest import Column, Part

from . import offsets
from .offsets import Mismatch
from .store import Sealed

PIECE_BYTES = 1 << 20  #: read and summed while it is in the processor's cache

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class Span(NamedTuple):
    """The bytes `[start, stop)` of a file, which have one checksum: `chunk` is its number."""

    column: Column
    part: Part
    chunk: int
    start: int
    stop: int
    crc: int


def spans(sealed: Sealed) -> Iterator[Span]:
    """All that has a checksum, file by file."""
    found = sealed.manifest
    for column in found.columns:
        size = column.span_bytes(found.chunk_rows)
        for part in (*column.parts, *column.offsets):
            for chunk, crc in enumerate(part.crcs):
                start = limits.HEADER_BYTES + chunk * size
                yield Span(column, part, chunk, start, min(start + size, part.size_bytes), crc)


def verify(sealed: Sealed, threads: int, progress: Callable[[int, int], None]) -> list[Mismatch]:
    """Every mismatch, file by file. `progress(done, total)` hears of bytes. The store was opened, so its sizes and
    headers are right. zlib and the kernel work beside each other: threads are enough."""
    wanted = list(spans(sealed))
    total = sum(span.stop - span.start for span in wanted)
    done, found = 0, _wrong_fingerprint(sealed)
    with ThreadPoolExecutor(threads, "verify") as pool:
        try:
            causes = pool.map(lambda span: _cause(sealed.path, span), wanted)
            for span, cause in zip(wanted, causes, strict=True):
                if cause is not None:
                    found.append(Mismatch(span.part.file, span.chunk, rows_of(sealed, span), cause))
                done += span.stop - span.start
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    damaged = {mismatch.file for mismatch in found}
    for column in sealed.manifest.columns:
        if damaged.isdisjoint(part.file for part in (*column.parts, *column.offsets)):  # else it is told already
            found += offsets.check(Path(sealed.path), column, sealed.manifest)
    return found


def rows_of(sealed: Sealed, span: Span) -> tuple[int, int]:
    """The rows `[start, stop)` that have anything in that span."""
    rows, column = sealed.manifest.rows, span.column
    if column.kind == "fixed":
        start = span.chunk * sealed.manifest.chunk_rows
        return start, min(start + sealed.manifest.chunk_rows, rows)
    ragged = span.part in column.parts
    size = column.item_bytes if ragged else 8
    first, last = (span.start - limits.HEADER_BYTES) // size, -(-(span.stop - limits.HEADER_BYTES) // size)
    if not ragged:  # an offset ends one row and begins the next
        return max(first - 1, 0), min(last, rows)
    ends = np.load(Path(sealed.path, column.offsets[0].file), mmap_mode="r", allow_pickle=False)
    start = int(np.searchsorted(ends, first, "right")) - 1
    stop = int(np.searchsorted(ends, last, "left"))
    return max(0, min(start, rows - 1)), min(max(stop, start + 1), rows)  # damaged offsets may say anything


def _cause(folder: str, span: Span) -> str | None:
    """What is wrong with those bytes; None where they are as they were written."""
    buffer = bytearray(PIECE_BYTES)
    crc, at = 0, span.start
    try:
        handle = os.open(os.path.join(folder, span.part.file), _READ)
        try:
            os.posix_fadvise(handle, span.start, span.stop - span.start, os.POSIX_FADV_DONTNEED)
            while at < span.stop:
                view = memoryview(buffer)[: min(PIECE_BYTES, span.stop - at)]
                count = os.preadv(handle, [view], at)
                if count == 0:
                    return f"the file ends at byte {at}"
                crc = zlib.crc32(view[:count], crc)
                at += count
        finally:
            os.close(handle)
    except OSError as error:  # a disk that cannot read this can read the rest
        return f"byte {at} cannot be read: {error.strerror}"
    return None if crc == span.crc else f"CRC {crc:08x} instead of {span.crc:08x}"


def _wrong_fingerprint(sealed: Sealed) -> list[Mismatch]:
    """The manifest has no checksum of its own; its parts have the fingerprint."""
    found = sealed.manifest
    digest = hashlib.sha256(manifest.canonical(found.fingerprint_parts)).hexdigest()
    if digest == found.fingerprint:
        return []
    cause = f"its parts have the fingerprint {digest[:16]}... instead of {found.fingerprint[:16]}..."
    return [Mismatch(manifest.FILE, 0, (0, found.rows), cause)]
