"""What a child says again and again, cut short for the operator: lines on its stderr, and bad samples of one kind.

Native libraries write a line for each damaged picture (libtiff: hundreds), and a folder of pictures of unequal size is
one fault told once a picture. Whatever is left out here is counted, and bad samples stand in their table all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, deque
from collections.abc import Iterable

PASSED_LINES = 20  #: of one child's stderr
KEPT_LINES = 30  #: the last ones, for the traceback of a child that fails comes behind whatever else it wrote
LINE_BYTES = 1000  #: what is longer is cut
PASSED_ALIKE = 5  #: bad samples of one kind
READ_BYTES = 64 * 1024
READS = 16  #: in one turn of the loop, as with the child's words


class Stderr:
    """The reading end of a child's stderr: never waited for, given back by `close`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._open = True
        self._rest = b""
        self._passed = 0
        self._left_out = 0
        self._kept: deque[str] = deque(maxlen=KEPT_LINES)
        os.set_blocking(handle, False)

    @property
    def descriptors(self) -> set[int]:
        """What to watch: nothing once it is at its end, which would be readable for ever."""
        return {self._handle} if self._open else set()

    def hear(self) -> list[str]:
        """The lines that have come and are passed on."""
        passed = []
        for _ in range(READS if self._open else 0):
            try:
                piece = os.read(self._handle, READ_BYTES)
            except BlockingIOError:
                break
            if not piece:
                self._open = False
                break
            *lines, rest = (self._rest + piece).split(b"\n")
            self._rest = rest[:LINE_BYTES]
            passed += self._pass(lines)
        return passed

    def end(self, *, failed: bool) -> list[str]:
        """What is still to be said when the child has gone: the last lines where it `failed`, and how many were not shown."""
        passed = self.hear() + self._pass([self._rest] if self._rest else [])
        self._rest = b""
        told = list(self._kept) if failed else []
        missing = self._left_out - len(told)
        if missing > 0:
            told.insert(0, f"{missing:,} more lines like these were left out")
        return passed + told

    def close(self) -> None:
        """Give the descriptor back. A process that still writes to it is told that nobody reads."""
        self._open = False
        with contextlib.suppress(OSError):
            os.close(self._handle)

    def _pass(self, lines: Iterable[bytes]) -> list[str]:
        passed = []
        for line in lines:
            text = line[:LINE_BYTES].decode(errors="backslashreplace").rstrip()
            if not text:
                continue
            if self._passed < PASSED_LINES:
                self._passed += 1
                passed.append(text)
            else:
                self._left_out += 1
                self._kept.append(text)
        return passed


class Alike:
    """Bad samples by kind: the stage and the cause, whatever numbers and names it quotes."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def shows(self, stage: str, cause: str) -> bool:
        """Whether one more of that kind is worth a line."""
        kind = stage, kind_of(cause)
        self._seen[kind] += 1
        return self._seen[kind] <= PASSED_ALIKE

    def left_out(self) -> int:
        """How many were not worth one, since the last call."""
        count = sum(max(0, seen - PASSED_ALIKE) for seen in self._seen.values())
        self._seen.clear()
        return count


def kind_of(cause: str) -> str:
    """What causes of one kind have in common: the sentence without its numbers and quotations."""
    return re.sub(r"'[^']*'|\d+", "#", cause)
