"""Who reads the samples of a build: this process alone, or workers of a pool, by cost and by danger.

Cost: a pool is started where it saves more time than it takes. Danger: where a sample that kills or hangs is to be left
out, where a build died here before, which may have been a sample's doing and is to be named this time, and where there
will be a pool anyway, this process reads none itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataserve.protocol.errors import DataError

from . import look
from .filling import Filler, Page, Patience, to_map
from .journal import Chunk
from .layout import Layout
from .locks import BuildLocks
from .reading import Reader
from .report import Reporter
from .schema import Schema
from .sources import Source
from .spec import DatasetSpec
from .ticker import Ticker

if TYPE_CHECKING:
    from .pool import Pool  # imported where one is started: it brings multiprocessing along

PROBE_S = 0.25  #: time spent on measuring what a sample costs
PROBE_ROWS = 64
POOL_S = 1.0  #: what a pool costs beside its imports


class Crew:
    """Those who do one build in that folder. `workers` is their number, None where cost decides; `open_s` is what opening
    the source has cost."""

    def __init__(
        self,
        spec: DatasetSpec,
        source: Source,
        open_s: float,
        workers: int | None,
        patience: Patience,
        reporter: Reporter,
        locks: BuildLocks,
        folder: Path,
        *,
        died_before: bool,
    ) -> None:
        self._spec = spec
        self._source = source
        self._open_s = open_s
        self._workers = workers
        self._patience = patience
        self._reporter = reporter
        self._locks = locks
        self._folder = folder
        self._page = Page(workers or len(os.sched_getaffinity(0)))
        self._pool: Pool | None = None
        try:
            self._reader = Reader(source, spec, self._page.words(0))
            whole = self._reader.plain and source.length is not None and source.block(0, 1) is not None
        except BaseException:
            self._page.close()
            raise
        self._whole = whole  # arrays, read by no code of the operator's
        self._apart = not whole and (patience.forgiving or died_before or (workers or 1) > 1)

    def look(self) -> tuple[Schema, Layout]:
        """The first look. Raises `look.NothingGoodError`, and what `randomness.check` raises."""
        with self._ticker("look", 0, None, watch=not self._apart):
            if self._apart:
                return self._start_pool().look()
            found = look.look(self._source, self._reader)
            self._page.reset(0, 0)
            return found

    def fill(
        self,
        schema: Schema,
        layout: Layout,
        chunks: Iterator[int],
        missing: int | None,
        base: int,
        done: Callable[[Chunk], None],
    ) -> None:
        """Prepares these chunks; `missing` is their number, None where only the source's end will tell: they are then made
        one after another. `base` samples were done before; `done` hears of each chunk, in any order."""
        workers = min(self._page.slots, 1 if missing is None else missing)
        if workers == 0:
            return
        total = layout.rows
        if self._workers is None and workers > 1:
            with self._ticker("prepare", base, total, watch=not self._apart):
                workers = workers if self._pays(schema, layout, workers, base) else 1
        if workers == 1 and not self._apart:
            with self._ticker("prepare", base, total, watch=True):
                self._alone(schema, layout, chunks, done)
            return
        build = to_map(schema, layout)
        with self._ticker("prepare", base, total, watch=False):
            pool = self._start_pool()
            if missing is not None:
                pool.run(chunks, build, workers, done)
            else:
                for chunk in chunks:
                    pool.run([chunk], build, 1, done)

    def _alone(self, schema: Schema, layout: Layout, chunks: Iterator[int], done: Callable[[Chunk], None]) -> None:
        filler = Filler(self._reader, self._source, schema, layout, str(self._folder), self._page.words(0))
        try:
            for chunk in chunks:
                done(filler.fill(chunk))
        finally:
            filler.close()

    def _start_pool(self) -> Pool:
        from . import pool

        if self._pool is None:
            job: dict[str, Any] = {
                "spec": self._spec.to_map(),
                "row_key": self._source.row_key,
                "folder": str(self._folder),
                "writers_lock": str(self._locks.writers.path),
            }
            preload: list[str] = [name for name in ("torch", "torchvision.datasets") if name in sys.modules]
            self._pool = pool.Pool(job, self._page, preload, self._patience)
        return self._pool

    def _pays(self, schema: Schema, layout: Layout, workers: int, base: int) -> bool:
        """Whether so many workers would be done sooner than this process alone: they save their share of the remaining
        time, and cost what opening the source has cost here, imports included, and `POOL_S`. Measured on some samples
        spread over the source; whole arrays are copied faster by one than they are opened by many."""
        if self._whole:
            return False
        if self._apart:  # a pool there is anyway
            return True
        assert layout.rows is not None
        began, rows = time.monotonic(), 0
        for index in range(0, layout.rows, max(1, layout.rows // PROBE_ROWS)):
            rows += 1
            with contextlib.suppress(DataError):  # it is told when its turn comes
                schema.measure(self._reader.read(index), index)
            if time.monotonic() - began > PROBE_S:
                break
        self._page.reset(0, 0)
        alone_s = (time.monotonic() - began) / rows * (layout.rows - base)
        return alone_s * (1 - 1 / workers) > self._open_s + POOL_S

    def _ticker(self, stage: str, base: int, total: int | None, *, watch: bool) -> Ticker:
        patience = self._patience if watch else None
        return Ticker(self._reporter, self._locks, self._page, base, total, patience, stage)

    def close(self, *, done: bool) -> None:
        """Ends the workers: once they have nothing to do, or whatever they do."""
        if self._pool is not None:
            if done:
                self._pool.close()
            self._pool.kill()
        self._page.close()
