"""A thread that tells the parent, and those who wait for the same build, how far it is."""

from __future__ import annotations

import os
import threading
import time

from dataserve.protocol.errors import MachineError

from .filling import IDLE, Page, Patience
from .locks import BuildLocks
from .report import Reporter

TICK_S = 0.1


class Ticker:
    """Tells it ten times a second, from `base` samples that were done before to `total`.

    Where the build runs in this process alone (`watch`) it also ends it when one sample takes for ever: no other thread
    can interrupt code that does not return. The next start goes on where it was.
    """

    def __init__(
        self,
        reporter: Reporter,
        locks: BuildLocks,
        page: Page,
        base: int,
        total: int | None,
        watch: Patience | None,
        stage: str = "prepare",
    ) -> None:
        self._stage = stage
        self._reporter = reporter
        self._locks = locks
        self._page = page
        self._base = base
        self._total = total
        self._watch = watch
        self._beat = 0
        self._moved = (IDLE, time.monotonic())
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataserve-ticker", daemon=True)

    def __enter__(self) -> None:
        self._tick()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._tick()

    def _run(self) -> None:
        while not self._end.wait(TICK_S):
            self._tick()

    def _tick(self) -> None:
        done = self._base + self._page.done()
        self._beat += 1
        words = {"pid": os.getpid(), "stage": self._stage, "done": done, "total": self._total, "beat": self._beat}
        self._locks.builder.note(words)
        self._reporter.progress(self._stage, done, self._total)
        if self._watch is not None:
            self._look(self._watch.sample_s)

    def _look(self, sample_s: float) -> None:
        current, now = self._page.at(0), time.monotonic()
        if current == IDLE or current != self._moved[0]:
            self._moved = (current, now)
        elif now - self._moved[1] > sample_s:
            text = f"Sample {current} has taken {now - self._moved[1]:.0f} s."
            remedy = "See what that sample is; a source or transform may wait for ever."
            self._reporter.failed(MachineError("stuck", text, remedy))
            os._exit(1)
