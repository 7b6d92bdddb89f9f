"""`--warm` and `--lock`: every byte of the stores that are served, into memory, and kept there.

A thread reads one store after another from start to end, once they are ready; clients may attach meanwhile. With `--lock` the
daemon maps and locks what it has read: a lock lives as long as the daemon. One that is killed lets go of it, the pages
stay until the memory is needed, and the next daemon finds them there. What cannot be locked is known before a byte is read, and
such a data set is not served: a lock that does not hold is worse than none.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from dataserve.protocol import memory

from .display import duration, size
from .events import DatasetSealed, PreparationFailed
from .pages import READ_BYTES, Pages, lockable_bytes, read_text
from .store import open_sealed

Hold = Literal["warm", "lock"]
LOOK_EACH_S = 1.0  #: whether there is another store, or the end
JOIN_S = 2.0  #: as in ahead.py


class Warming(NamedTuple):
    """How far it is with one store: bytes, and seconds since it began."""

    name: str
    done: int
    total: int
    spent_s: float

    def __str__(self) -> str:
        words = f"{100 * self.done // self.total} % of {size(self.total)} read into memory"
        if not self.done or not self.spent_s:
            return words
        rate = self.done / self.spent_s
        return f"{words}, {size(int(rate))}/s, {duration((self.total - self.done) / rate)} left"


class Warmer:
    """The thread, for one `hold` and all stores. `available()` and `lockable()` are what the machine has and allows."""

    def __init__(
        self,
        hold: Hold,
        available: Callable[[], int | None] = lambda: memory.available_bytes(read_text),
        lockable: Callable[[], int | None] = lockable_bytes,
    ) -> None:
        self._hold = hold
        self._available = available
        self._lockable = lockable
        self._queue: SimpleQueue[DatasetSealed] = SimpleQueue()
        self._promised: dict[str, int] = {}  # bytes by data set that are, or will be, read and locked
        self._kept: list[Pages] = []
        self._locked_bytes = 0
        self._closing = False
        self.locked: Mapping[str, float] = {}  #: the share of each store that is locked, by folder
        self.progress: Warming | None = None
        self.said: SimpleQueue[str] = SimpleQueue()  #: for the operator
        self._thread = threading.Thread(target=self._run, name="dataserve-warm", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def admit(self, event: DatasetSealed) -> DatasetSealed | PreparationFailed:
        """A store that is to be served, and is queued; or why it cannot be held as the operator wants it."""
        if event.name in self._promised:
            return event
        others = sum(self._promised.values())
        refusal = self._refusal(event, others)
        if refusal is not None and self._hold == "lock":
            return PreparationFailed(event.name, "no_memory", *refusal)
        if refusal is not None:
            self.said.put(f"{event.name}: not warmed: {' '.join(refusal)}")
            return event
        self._promised[event.name] = event.size_bytes
        self._queue.put(event)
        return event

    def _refusal(self, event: DatasetSealed, others: int) -> tuple[str, str] | None:
        """(what is missing, the remedy) for this store beside `others` bytes of earlier ones, or None."""
        need = event.size_bytes + others
        beside = f", with the data sets before it {need:,}" if others else ""
        needs = f"{event.name!r} has {event.size_bytes:,} bytes{beside}"
        limit = self._lockable() if self._hold == "lock" else None
        if limit is not None and need > limit:
            remedy = (
                "Raise it (`ulimit -l unlimited` before the start, LimitMEMLOCK=infinity in a systemd unit, memlock in "
                "/etc/security/limits.conf), or leave --lock out."
            )
            return f"{needs}; this process may lock {limit:,} (RLIMIT_MEMLOCK).", remedy
        available = self._available()
        if available is not None and need - self._locked_bytes > available:  # what is locked is available no more
            return (
                f"{needs}; {available:,} of memory are available.",
                f"Leave --{self._hold} out: what jobs need next is read ahead in any case.",
            )
        return None

    def close(self) -> None:
        """End; waits `JOIN_S` at most."""
        self._closing = True
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._closing:
            try:
                event = self._queue.get(timeout=LOOK_EACH_S)
            except Empty:
                continue
            try:
                self._take(event)
            except Exception as error:  # noqa: BLE001 - it is served all the same, and the operator is told
                held = "locked" if self._hold == "lock" else "warmed"
                self.said.put(f"{event.name}: not {held} to its end: {type(error).__name__}: {error}")
            self.progress = None
        for pages in self._kept:
            pages.close()

    def _take(self, event: DatasetSealed) -> None:
        """All files of one store."""
        files = [
            part.file for column in open_sealed(event.path).manifest.columns for part in column.parts + column.offsets
        ]
        buffer = bytearray(READ_BYTES)
        began, done = time.monotonic(), 0
        for file in files:
            pages = Pages(os.path.join(event.path, file))
            if self._hold == "lock":
                self._kept.append(pages)
            try:
                for offset in range(0, pages.size_bytes, READ_BYTES):
                    if self._closing:
                        return
                    done += self._piece(pages, offset, buffer)
                    self._note(event, done, began)
            finally:
                if self._hold != "lock":
                    pages.close()
        kept = "locked there" if self._hold == "lock" else "the kernel may drop it again"
        self.said.put(f"{event.name}: {size(done)} read into memory in {time.monotonic() - began:.1f} s; {kept}")

    def _piece(self, pages: Pages, offset: int, buffer: bytearray) -> int:
        """Read, and with `lock` lock, what lies there; how many bytes."""
        count = pages.read(offset, buffer)
        if self._hold == "lock":
            pages.lock(offset, count)
            self._locked_bytes += count
        return count

    def _note(self, event: DatasetSealed, done: int, began: float) -> None:
        self.progress = Warming(event.name, done, event.size_bytes, time.monotonic() - began)
        if self._hold == "lock":
            self.locked = {**self.locked, event.path: min(1.0, done / event.size_bytes)}
