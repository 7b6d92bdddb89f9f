"""The journal of a build: one line for each finished chunk, by which the next start knows what need not be done again.

A line is the CRC-32 of its JSON, 8 digits, a space, the JSON, a line feed. The first line says what is built and how;
each further one is a `Chunk`. Lines are appended by the one builder, after the chunk's data are written.

Nothing is synced here, neither lines nor data: a line is a claim, and the next start believes no claim before it has
compared the checksums of the data that it names. A line that is torn or damaged is a chunk that is not there. So a cut
of the power costs work, never correctness, and a chunk costs no `fsync`.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol.errors import MachineError

from . import store
from .badsamples import Bad
from .uniform import Uniform

FILE = "journal"
FORMAT = 1


class Chunk(NamedTuple):
    """A finished chunk: samples looked at, bad ones among them, for each field the CRC-32 of what it wrote, and the rows
    that are nearly one value.

    `crcs`: of a fixed field the kept rows at the start of the chunk's slot, of a ragged one its whole part file.
    `elements`: of a ragged field the elements in its part file, else 0.
    """

    chunk: int
    scanned: int
    crcs: tuple[int, ...]
    elements: tuple[int, ...]
    bad: tuple[Bad, ...] = ()
    uniform: tuple[Uniform, ...] = ()

    @property
    def kept(self) -> int:
        """Rows that it gives to the store."""
        return self.scanned - len(self.bad)

    @classmethod
    def from_list(cls, items: list[Any]) -> Chunk:
        """The chunk of a line, or of a worker's word."""
        chunk, scanned, crcs, elements, bad, uniform = items
        alike = tuple(Uniform(field, count, tuple(rows)) for field, count, rows in uniform)
        return cls(chunk, scanned, tuple(crcs), tuple(elements), tuple(Bad(*each) for each in bad), alike)


class Journal:
    """A journal that is written. Raises `no_space`, `no_access`."""

    def __init__(self, path: Path, header: Mapping[str, Any], chunks: Iterable[Chunk] = ()) -> None:
        """A new one in the place of the old, holding what was found whole."""
        self._path = path
        fresh = path.with_name(f"{FILE}.new")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(_line({"format": FORMAT, **header}))
                file.writelines(_line(chunk) for chunk in chunks)
            os.replace(fresh, path)
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error) from None

    def add(self, chunk: Chunk) -> None:
        """One more line, by one write."""
        data = _line(chunk)
        try:
            if os.write(self._handle, data) != len(data):  # torn by a full disk: the next start ignores it
                raise OSError(28, os.strerror(28))
        except OSError as error:
            raise self._refused(error) from None

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._handle)

    def _refused(self, error: OSError) -> MachineError:
        return store.machine_error(error, self._path, "The journal cannot be written")


def read(path: Path) -> tuple[dict[str, Any], dict[int, Chunk]] | None:
    """What a build is and the chunks that it claims; None where there is no journal of this format, or its first line
    is damaged. Lines that are damaged are left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return None
    header = _value(lines[0])
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        return None
    chunks = {}
    for line in lines[1:]:
        try:
            chunk = Chunk.from_list(_value(line))
        except (TypeError, ValueError):
            continue
        chunks[chunk.chunk] = chunk
    return header, chunks


def _line(value: Any) -> bytes:
    data = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _value(line: bytes) -> Any:
    """What a line holds, or None where it is damaged."""
    data = line[9:]
    if line[:9] != b"%08x " % zlib.crc32(data):
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None
