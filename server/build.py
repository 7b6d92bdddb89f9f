"""One build: open the source, look whether it is there already, take the lock, fill the files, seal them.

It runs alone or through the pool by one rule (`_wants_pool`); the bytes are the same.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, MachineError
from dataserve.protocol.manifest import Manifest

from . import fingerprint, sources, store, writer
from .filling import IDLE, Filler, Page, to_map
from .fingerprint import Survey, Verdict
from .locks import BuildLocks
from .report import Reporter
from .schema import Schema
from .sources import Source
from .spec import DatasetSpec
from .writer import Layout, StoreWriter

_log = logging.getLogger("dataserve")

TICK_S = 0.1
PROBE_S = 0.25  #: time spent on measuring what a sample costs
PROBE_ROWS = 64
POOL_S = 1.0  #: what a pool costs beside its imports


class Build:
    """The preparation of one spec into a store below the root."""

    def __init__(self, spec: DatasetSpec, root: Path, workers: int | None, reporter: Reporter) -> None:
        self._spec = sources.located(spec)
        self._root = root
        self._workers = workers
        self._reporter = reporter
        self._open_s = 0.0

    def run(self, recalled: Verdict) -> None:
        """Makes the store, or finds it made. `recalled` is the miss that led here. Raises what stands in the way."""
        from . import pool

        os.environ.update({name: value for name, value in pool.ONE_THREAD.items() if name not in os.environ})
        self._reporter.progress("open", 0, None)
        began = time.monotonic()
        source = sources.open_source(self._spec)
        try:
            self._open_s = time.monotonic() - began
            pool.one_native_thread()
            self._find_or_build(source, recalled)
        finally:
            source.close()

    def _find_or_build(self, source: Source, recalled: Verdict) -> None:
        seen = fingerprint.survey(self._spec, source.identity())
        target = self._root / f"{self._spec.name}-{seen.fingerprint[: limits.FINGERPRINT_DIGITS]}"
        if (found := writer.usable(target, seen.fingerprint)) is not None:
            self._found(found, seen)
            return
        self._reporter.verdict(Verdict(False, None, seen.fingerprint, self._reasons(recalled, seen)))
        locks = BuildLocks(self._root, seen.fingerprint)
        locks.take(self._reporter.waiting)
        try:
            found = writer.usable(target, seen.fingerprint)  # another may have built it while we waited
            fresh = found is None
            if found is None:
                found = self._build(source, seen, locks)
            self._remember(seen, target.name)
        finally:
            locks.release()
        self._reporter.sealed(found, hit=not fresh)

    def _found(self, found: store.Sealed, seen: Survey) -> None:
        """A hit that only the full fingerprint could show."""
        self._remember(seen, Path(found.path).name)
        self._reporter.verdict(fingerprint.hit(Path(found.path)))
        self._reporter.sealed(found, hit=True)

    def _remember(self, seen: Survey, folder: str) -> None:
        """Leaves the record for the next `recall`. Without one the store is found all the same, only later."""
        try:
            fingerprint.remember(self._root, self._spec, seen, folder)
        except MachineError as error:
            _log.warning("%s", error)

    def _reasons(self, recalled: Verdict, seen: Survey) -> list[str]:
        """Why nothing that is there will do. Without a record, the stores of this name say what differs."""
        if any(not reason.startswith("never") for reason in recalled.reasons):
            return recalled.reasons
        named = [item for item in store.list_sealed(self._root) if item.manifest.name == self._spec.name]
        if not named:
            return recalled.reasons
        differences = [fingerprint.changes(item.manifest.fingerprint_parts, seen.parts) for item in named]
        return min(differences, key=len) or recalled.reasons  # the nearest one

    def _build(self, source: Source, seen: Survey, locks: BuildLocks) -> store.Sealed:
        locks.builder.note({"pid": os.getpid()})
        schema = Schema.of(self._first(source))
        layout = Layout(source.length, schema.fields)
        # A manifest that no reader would take is found before the work and not behind it.
        self._manifest(source, schema, layout, seen, [(0,) * len(schema.fields)] * layout.chunks)
        files = StoreWriter(self._root, seen.fingerprint, layout)
        files.wipe()
        self._reporter.space(*files.check_room())
        files.create()
        try:
            crcs = self._fill(source, schema, layout, files, locks)
            self._reporter.progress("seal", 0, None)
            self._check_unchanged(seen)
            return files.seal(self._manifest(source, schema, layout, seen, crcs))
        except (DataserveError, KeyboardInterrupt):
            files.wipe()
            raise

    def _first(self, source: Source) -> Any:
        """The sample that fixes the schema."""
        transform = None if self._spec.transform is None else sources.load_transform(self._spec.transform)
        return sources.read_sample(source, transform, 0)

    def _fill(
        self, source: Source, schema: Schema, layout: Layout, files: StoreWriter, locks: BuildLocks
    ) -> list[tuple[int, ...]]:
        """Prepares all chunks; their checksums by chunk."""
        count = min(self._workers or len(os.sched_getaffinity(0)), layout.chunks)
        if self._workers is None and count > 1 and not self._wants_pool(source, schema, layout, count):
            count = 1
        page = Page(count)
        try:
            with _Ticker(self._reporter, locks, page, layout.rows, watch=count == 1):
                fill = self._fill_alone if count == 1 else self._fill_by_pool
                crcs = fill(source, schema, layout, files, locks, page)
        finally:
            page.close()
        return [crcs[chunk] for chunk in range(layout.chunks)]

    def _fill_alone(
        self, source: Source, schema: Schema, layout: Layout, files: StoreWriter, _: BuildLocks, page: Page
    ) -> dict[int, tuple[int, ...]]:
        filler = Filler(self._spec, source, schema, layout, str(files.folder), page.words(0))
        try:
            return {chunk: filler.fill(chunk) for chunk in range(layout.chunks)}
        finally:
            filler.close()

    def _fill_by_pool(
        self, _: Source, schema: Schema, layout: Layout, files: StoreWriter, locks: BuildLocks, page: Page
    ) -> dict[int, tuple[int, ...]]:
        from . import pool

        job = {
            "spec": self._spec.to_map(),
            "folder": str(files.folder),
            "writers_lock": str(locks.writers.path),
            **to_map(schema, layout),
        }
        preload: list[str] = [name for name in ("torch", "torchvision.datasets") if name in sys.modules]
        crcs: dict[int, tuple[int, ...]] = {}
        workers = pool.Pool(job, page, preload)
        try:
            workers.run(list(range(layout.chunks)), crcs.__setitem__)
            workers.close()
        finally:
            workers.kill()
        return crcs

    def _wants_pool(self, source: Source, schema: Schema, layout: Layout, count: int) -> bool:
        """Whether `count` workers would be done sooner than this process alone: they save their share of the remaining
        time, and cost what opening the source has cost here, imports included, and `POOL_S`. Measured on some samples
        spread over the source; whole arrays are copied faster by one than they are opened by many."""
        if self._spec.transform is None and source.block(0, 1) is not None:
            return False
        transform = None if self._spec.transform is None else sources.load_transform(self._spec.transform)
        buffers = [field.buffer(1) for field in layout.fields]
        began, rows = time.monotonic(), 0
        step = max(1, layout.rows // PROBE_ROWS)
        for index in range(0, layout.rows, step):
            schema.put(sources.read_sample(source, transform, index), index, 0, buffers)
            rows += 1
            if time.monotonic() - began > PROBE_S:
                break
        alone_s = (time.monotonic() - began) / rows * layout.rows
        return alone_s * (1 - 1 / count) > self._open_s + POOL_S

    def _check_unchanged(self, seen: Survey) -> None:
        now = fingerprint.survey(self._spec, seen.identity)
        if now.fingerprint != seen.fingerprint:
            found = fingerprint.changes(seen.parts, now.parts, seen.files, now.files)
            text = f"The source changed while it was prepared: {'; '.join(found)}."
            raise DataError("source_changed", text, "Prepare it again when nothing writes to it.")

    def _manifest(
        self, source: Source, schema: Schema, layout: Layout, seen: Survey, crcs: list[tuple[int, ...]]
    ) -> Manifest:
        versions = {name: fingerprint.installed(name) for name in seen.parts["versions"]}
        found = Manifest(
            name=self._spec.name,
            fingerprint=seen.fingerprint,
            fingerprint_parts=seen.parts,
            rows=layout.rows,
            chunk_rows=layout.chunk_rows,
            structure=schema.structure,
            columns=layout.columns(crcs),
            classes=source.classes,
            versions={name: full for name, full in versions.items() if full is not None},
        )
        manifest.parse(found.to_bytes())
        return found


class _Ticker:
    """A thread that tells the parent and those who wait how far the build is, ten times a second.

    Where the build runs in this process alone (`watch`) it also ends it when one sample takes for ever: no other thread
    can interrupt code that does not return.
    """

    def __init__(self, reporter: Reporter, locks: BuildLocks, page: Page, total: int, *, watch: bool) -> None:
        self._reporter = reporter
        self._locks = locks
        self._page = page
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
        done = self._page.done()
        self._beat += 1
        words = {"pid": os.getpid(), "stage": "prepare", "done": done, "total": self._total, "beat": self._beat}
        self._locks.builder.note(words)
        self._reporter.progress("prepare", done, self._total)
        if self._watch:
            self._look()

    def _look(self) -> None:
        from . import pool

        current, now = self._page.at(0), time.monotonic()
        if current == IDLE or current != self._moved[0]:
            self._moved = (current, now)
        elif now - self._moved[1] > pool.HUNG_S:
            text = f"Sample {current} has taken {now - self._moved[1]:.0f} s."
            remedy = "See what that sample is; a source or transform may wait for ever."
            self._reporter.failed(MachineError("stuck", text, remedy))
            os._exit(1)
