"""Reads ahead: a thread that has the kernel fetch what the jobs read next, where it is not in memory.

The daemon's loop lays down what it knows (`follow`) and picks up what was seen (`resident`, `said`); neither ever waits for the
other. While all of a column is in memory nothing is asked of the kernel but a sample of its pages, every other second. A disk
that stalls stalls this thread alone, and a fault of it is told once and ends nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from dataserve.protocol import limits, memory

from .columns import ColumnPages, Stores
from .orders import Orders
from .pages import read_text
from .readahead import Reading, batches_ahead, budget, due

STEP_BYTES = 16 * 1024 * 1024  #: of one consumer, before the next one has its turn
LOOK_SHARE = 200  #: looking what is in memory takes one part in so many of the time at most
JOIN_S = 2.0  #: a thread that a disk holds longer than this is left to end with the process


class Scene(NamedTuple):
    """What the loop knows at one moment: who reads, and the folder of each store that is served."""

    readings: Sequence[Reading]
    paths: frozenset[str]


class Ahead:
    """The thread. `available()` says how many bytes of memory can be had, None where nobody knows."""

    def __init__(self, orders_folder: str, available: Callable[[], int | None] | None = None) -> None:
        self._available = available or (lambda: memory.available_bytes(read_text))
        self._stores = Stores()
        self._orders = Orders(orders_folder)
        self._scene = Scene((), frozenset())
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closing = False
        self._frontiers: dict[tuple[int, int], int] = {}  # by stream and epoch: the batch up to which was asked
        self._turn = 0
        self._look_at = 0.0
        self._looked: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self.wants = True  #: whether anything is missing, so that it must be known who reads what
        self.resident: Mapping[str, float | None] = {}  #: the share of each store that is in memory, by folder
        self.said: SimpleQueue[str] = SimpleQueue()  #: for the operator
        self._thread = threading.Thread(target=self._run, name="dataserve-ahead", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def follow(self, scene: Scene) -> None:
        """What the loop knows now. Waits for nothing: one reference is replaced."""
        self._scene = scene
        if self._wake.empty():
            self._wake.put(None)

    def close(self) -> None:
        """End; waits `JOIN_S` at most."""
        self._closing = True
        self._wake.put(None)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(Empty):
                self._wake.get(timeout=limits.RESIDENT_EACH_S)
            try:
                self._work()
            except Exception as error:  # noqa: BLE001 - without read-ahead the jobs read by themselves
                self._say(f"read-ahead: {type(error).__name__}: {error}")
        self._stores.keep(set())

    def _say(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.said.put(text)

    def _work(self) -> None:
        """One round: to where the jobs have come, or until the loop knows more."""
        scene = self._scene
        self._stores.keep(set(scene.paths))
        self._look(scene.paths)
        for path, why in self._stores.failed.items():
            self._say(f"read-ahead: nothing of {path}: {why}")
        streams = {reading.stream for reading in scene.readings}
        self._frontiers = {key: batch for key, batch in self._frontiers.items() if key[0] in streams}
        waiting = [(reading, self._stores.cold(reading.path)) for reading in scene.readings]
        waiting = [(reading, columns) for reading, columns in waiting if columns]
        wanted = {(each.digest, each.epoch + more) for each, _ in waiting for more in (0, 1)}
        self._orders.keep(wanted)
        if not waiting:
            return
        available = self._available() or 0
        turns = [self._steps(*each, budget(available, len(waiting)), available) for each in waiting]
        while turns:
            for turn in list(turns):
                if self._closing:
                    return
                if next(turn, None) is None:
                    turns.remove(turn)
            if self._scene is not scene:
                return  # whoever is further than was known comes first; what was asked for stays asked for

    def _look(self, paths: frozenset[str]) -> None:
        """See what is in memory, if it is time, or if there are others to look at."""
        began = time.monotonic()
        if began < self._look_at and paths == self._looked:
            return
        self.resident = self._stores.look(self._turn)
        self.wants = any(self._stores.cold(path) for path in paths)
        self._turn += 1
        self._looked = paths
        self._look_at = began + max(limits.RESIDENT_EACH_S, LOOK_SHARE * (time.monotonic() - began))

    def _steps(self, reading: Reading, columns: list[ColumnPages], budget_bytes: int, available: int) -> Iterator[int]:
        """Asks for what is due, a step a time; gives the bytes of each."""
        row_bytes = sum(column.row_bytes for column in columns)
        step = max(1, int(STEP_BYTES / (row_bytes * reading.partition.batch_size)))
        for part, begin, stop in due(reading, batches_ahead(reading, row_bytes, budget_bytes)):
            key = (part.stream, part.epoch)
            for first in range(max(begin, self._frontiers.get(key, 0)), stop, step):
                until = min(first + step, stop)
                rows = self._orders.rows(part.plan, part.digest, part.epoch, part.positions(first, until))
                if rows is None:
                    return
                self._frontiers[key] = until
                local = self._orders.is_local(part.digest, part.epoch)
                yield sum(
                    column.ask(rows, joins=local or column.values.size_bytes * 2 <= available) for column in columns
                )
