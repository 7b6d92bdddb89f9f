"""What the preparing child tells its parent: JSON lines, each written at once, progress at most ten times a second."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dataserve.protocol.errors import DataserveError

from . import store
from .fingerprint import Verdict

PROGRESS_S = 0.1


class Reporter:
    """Writes events to a descriptor. Any thread may call it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._stage = ""
        self._stage_since = 0.0
        self._stage_from = 0
        self._last = 0.0
        self._waiting_for: int | None = None

    def verdict(self, verdict: Verdict) -> None:
        """HIT or MISS and why."""
        self._say("verdict", hit=verdict.hit, fingerprint=verdict.fingerprint, reasons=verdict.reasons)

    def waiting(self, words: dict[str, Any]) -> None:
        """Another process builds the same: its pid once, then its progress as it told it."""
        if self._waiting_for != words.get("pid"):
            self._waiting_for = words.get("pid")
            self._say("waiting", pid=self._waiting_for)
        if {"stage", "done", "total"} <= words.keys():
            self.progress(words["stage"], words["done"], words["total"])

    def space(self, need_bytes: int | None, free_bytes: int) -> None:
        """The room that the build needs, None where only its end will tell, and the room that there is."""
        self._say("space", need_bytes=need_bytes, free_bytes=free_bytes)

    def iterated(self) -> None:
        """The source says no length: it is read from front to back, by one process."""
        self._say("iterated")

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """How far the stage has come; dropped where the last one is less than a tenth of a second old, unless it is a
        new stage or its end."""
        now = time.monotonic()
        with self._lock:
            if stage != self._stage:
                self._stage, self._stage_since, self._stage_from = stage, now, done
            elif now - self._last < PROGRESS_S and done != total:
                return
            if done == self._stage_from:
                self._stage_since = now  # workers that still start are no part of the rate
            self._last = now
            took = now - self._stage_since
            rate = (done - self._stage_from) / took if took > 0 and done > self._stage_from else None
            eta = (total - done) / rate if rate and total is not None else None
        rounded = None if rate is None else round(rate, 1), None if eta is None else round(eta, 1)
        self._say("progress", stage=stage, done=done, total=total, rate=rounded[0], eta_s=rounded[1])

    def scanned(self, found: Mapping[str, Any]) -> None:
        """What a scan for samples found and what it left out."""
        self._say("scanned", **found)

    def rows(self, digests: Mapping[int, str]) -> None:
        """Hashes of the samples that were asked for."""
        self._say("rows", digests=digests)

    def confirming(self) -> None:
        """Some rows of a store that is there are prepared again."""
        self._say("confirming")

    def confirmed(self, rows: int) -> None:
        """So many rows came out as they are stored."""
        self._say("confirmed", rows=rows)

    def resuming(self, done: int, total: int | None) -> None:
        """So many samples of an interrupted build need not be done again."""
        self._say("resuming", done=done, total=total)

    def bad(self, index: int, path: str | None, stage: str, cause: str) -> None:
        """A bad sample: one of the first."""
        self._say("bad", index=index, path=path, stage=stage, cause=cause)

    def bad_samples(self, count: int, table: str | None, remedy: str | None) -> None:
        """How many are bad in all, the file that lists them, None where it could not be written, and what would have kept
        some of those that were left out."""
        self._say("bad_samples", count=count, table=table, remedy=remedy)

    def uniform(self, column: str, count: int, rows: Sequence[int], of: int) -> None:
        """So many rows of that column, of all, are nearly one value; these are the first."""
        self._say("uniform", column=column, count=count, rows=rows, of=of)

    def sealed(self, found: store.Sealed, *, hit: bool) -> None:
        """The store is there."""
        self._say(
            "sealed",
            path=found.path,
            id=found.id,
            fingerprint=found.manifest.fingerprint,
            rows=found.manifest.rows,
            size_bytes=found.manifest.size_bytes,
            hit=hit,
        )

    def failed(self, error: DataserveError) -> None:
        """It cannot be done."""
        self._say("failed", code=error.code, text=error.text, remedy=error.remedy)

    def _say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        try:
            with self._lock:
                done = 0
                while done < len(line):
                    done += os.write(self._handle, line[done:])
        except BrokenPipeError:
            os._exit(1)  # the parent is gone; so are we, and the workers see it

    def close(self) -> None:
        """Gives the descriptor back: the parent reads the end."""
        os.close(self._handle)
