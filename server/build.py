"""One build: open the source, look whether it is there already, take the lock, fill the files, seal them.

It goes on with what a dead build has left; the bytes are the same however often it was interrupted, and whoever reads the
samples (crew.py).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, MachineError, UserError
from dataserve.protocol.manifest import Column, Manifest

from . import badsamples, fingerprint, leftovers, look, sources, store, writer
from .badsamples import BadSamples
from .crew import Crew
from .filling import Patience, from_map, to_map
from .fingerprint import Survey, Verdict
from .joining import kept_indices
from .journal import Chunk, Journal
from .layout import Layout
from .locks import BuildLocks
from .report import Reporter
from .schema import Schema
from .sources import Source
from .spec import DatasetSpec
from .uniform import merged
from .writer import StoreWriter

_log = logging.getLogger("dataserve")

#: After these a build is gone on with by the next start; after all other errors nothing is left of it.
_RESUMED = ("worker_died", "stuck")


@dataclass
class _Work:
    """A build under way."""

    source: Source
    seen: Survey
    files: StoreWriter
    schema: Schema
    layout: Layout
    journal: Journal
    chunks: dict[int, Chunk]  # the finished ones
    bad: BadSamples
    again: Chunk | None = None  #: of a source of unknown length: what the chunk that is made once more must be

    def done(self, chunk: Chunk) -> None:
        """One more chunk. Raises `bad_sample` where too many samples are bad."""
        self.bad.add(chunk.bad)
        self.journal.add(chunk)
        self.chunks[chunk.chunk] = chunk

    def scanned(self) -> int:
        """Samples that were looked at."""
        return sum(chunk.scanned for chunk in self.chunks.values())


class Build:
    """The preparation of one spec into a store below the root. `workers` is their number, None where cost decides;
    `sample_timeout_s` is what one sample may take."""

    def __init__(
        self,
        spec: DatasetSpec,
        root: Path,
        workers: int | None,
        reporter: Reporter,
        sample_timeout_s: float | None = None,
    ) -> None:
        self._spec = sources.located(spec)
        self._root = root
        self._workers = workers
        self._reporter = reporter
        self._open_s = 0.0
        self._patience = Patience(forgiving=spec.on_error == "skip")
        if sample_timeout_s is not None:
            self._patience = self._patience._replace(sample_s=sample_timeout_s)
        badsamples.Limit(spec.max_bad, None)  # a mistake there is found before the source is opened

    def run(self, recalled: Verdict) -> None:
        """Makes the store, or finds it made. `recalled` is the miss that led here. Raises what stands in the way."""
        from . import pool

        os.environ.update({name: value for name, value in pool.ONE_THREAD.items() if name not in os.environ})
        if self._spec.scheme == "imagefolder":  # before the scan, which would take the store for a class
            self._refuse_inside(self._spec.target)
        self._reporter.progress("open", 0, None)
        began = time.monotonic()
        source = sources.open_source(self._spec)
        try:
            self._open_s = time.monotonic() - began
            pool.one_native_thread()
            if (scanned := source.scanned()) is not None:
                self._reporter.scanned(scanned)
            self._find_or_build(source, recalled)
        finally:
            source.close()

    def _refuse_inside(self, *places: str) -> None:
        """A store below what it is made from would be its own source, changed by each preparation. Raises `bad_option`."""
        here = os.path.realpath(self._root)
        for place in map(os.path.realpath, places):
            if os.path.commonpath((here, place)) == place and os.path.isdir(place):
                text = f"The store root {str(self._root)!r} lies in the source's folder {place!r}."
                raise UserError("bad_option", text, "Choose another with --store or $DATASERVE_STORE.")

    def _find_or_build(self, source: Source, recalled: Verdict) -> None:
        self._refuse_inside(*source.identity().roots, *self._spec.depends)
        seen = fingerprint.survey(self._spec, source.identity())
        target = self._root / f"{self._spec.name}-{seen.fingerprint[: limits.FINGERPRINT_DIGITS]}"
        if (found := writer.usable(target, seen.fingerprint)) is not None:
            self._found(found, seen)
            return
        self._reporter.verdict(fingerprint.miss(self._root, self._spec, recalled, seen))
        leftovers.clean(self._root, self._spec.name, but=seen.fingerprint)
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
        leftovers.clean(self._root, self._spec.name)
        self._reporter.sealed(found, hit=True)

    def _remember(self, seen: Survey, folder: str) -> None:
        """Leaves the record for the next `recall`. Without one the store is found all the same, only later."""
        try:
            fingerprint.remember(self._root, self._spec, seen, folder)
        except MachineError as error:
            _log.warning("%s", error)

    def _build(self, source: Source, seen: Survey, locks: BuildLocks) -> store.Sealed:
        locks.builder.note({"pid": os.getpid()})
        source.row_key = seen.fingerprint if self._spec.allow_random else None
        if source.length is None:
            self._reporter.iterated()
        files = StoreWriter(self._root, seen.fingerprint)
        how = (self._spec, source, self._open_s, self._workers, self._patience, self._reporter, locks, files.folder)
        try:
            crew = Crew(*how, died_before=files.folder.exists())
            work = None
            try:
                work = self._begin(source, seen, files, crew)
                self._fill(work, crew)
                crew.close(done=True)
            except BaseException:
                crew.close(done=False)
                raise
            finally:
                if work is not None:
                    work.journal.close()
            self._reporter.progress("seal", 0, None)
            return self._seal(work)
        except DataserveError as error:
            if error.code not in _RESUMED:
                files.wipe()
            raise

    def _begin(self, source: Source, seen: Survey, files: StoreWriter, crew: Crew) -> _Work:
        """What a dead build has left, or a new one."""
        table = badsamples.table_path(self._root, self._spec.name, seen.fingerprint)
        bad = BadSamples(source, badsamples.Limit(self._spec.max_bad, source.length), self._reporter, table)
        spec = json.loads(json.dumps(self._spec.to_map()))
        left = files.recall()
        if left is not None and left["spec"] == spec and left["layout"]["rows"] == source.length:
            schema, layout = from_map(left)
            journal, chunks = files.resume(layout, left)
            again = _to_make_again(chunks) if layout.rows is None else None
            work = _Work(source, seen, files, schema, layout, journal, chunks, bad, again)
            self._reporter.resuming(work.scanned(), layout.rows)
            for chunk in chunks.values():
                bad.add(chunk.bad)
            return work
        files.wipe()
        files.announce()
        try:
            schema, layout = crew.look()
        except look.NothingGoodError as nothing:
            if not nothing.bad:
                raise self._empty() from None
            bad.add(nothing.bad)
            raise bad.error(f"All {len(bad)} samples are bad.") from None
        self._check_manifest(source, schema, layout, seen)
        self._reporter.space(layout.needed_bytes, store.free_bytes(self._root))
        journal = files.create(layout, {"spec": spec, **to_map(schema, layout)})
        return _Work(source, seen, files, schema, layout, journal, {}, bad)

    def _fill(self, work: _Work, crew: Crew) -> None:
        """Prepares all chunks that are missing."""
        total = work.layout.chunks
        missing = None if total is None else [chunk for chunk in range(total) if chunk not in work.chunks]
        chunks = _stream(work) if missing is None else iter(missing)
        count = None if missing is None else len(missing)
        crew.fill(work.schema, work.layout, chunks, count, work.scanned(), work.done)

    def _empty(self) -> DataError:
        text = f"The source {self._spec.source!r} has no samples."
        return DataError("empty_source", text, "Look at its place and arguments.")

    def _seal(self, work: _Work) -> store.Sealed:
        chunks = [chunk for _, chunk in sorted(work.chunks.items())]
        work.bad.settle(work.scanned(), self._spec.on_error)
        if not any(chunk.kept for chunk in chunks):
            raise self._empty()
        self._check_unchanged(work.seen)
        origins = None
        path = work.source.path
        if len(work.bad) or path(0) is not None:
            origins = ((index, path(index) or b"") for index in kept_indices(work.layout, chunks))
        columns = work.files.assemble(work.layout, chunks, origins)
        found = self._manifest(work.source, work.schema, work.layout, work.seen, columns)
        rows = sum(chunk.kept for chunk in chunks)
        uniform = tuple(merged(work.layout.fields, [(chunk.kept, chunk.uniform) for chunk in chunks]))
        found = replace(found, rows=rows, skipped=work.bad.skipped(), uniform=uniform)
        manifest.parse(found.to_bytes())
        for words in uniform:
            self._reporter.uniform(**words, of=rows)
        return work.files.seal(found)

    def _check_unchanged(self, seen: Survey) -> None:
        if found := fingerprint.changed_since(self._spec, seen):
            text = f"The source changed while it was prepared: {'; '.join(found)}."
            raise DataError("source_changed", text, "Prepare it again when nothing writes to it.")

    def _check_manifest(self, source: Source, schema: Schema, layout: Layout, seen: Survey) -> None:
        """Finds a manifest that no reader would take before the work and not behind it. Raises `bad_store`."""
        one = replace(layout, rows=1)
        columns = tuple(writer.empty_column(field, one) for field in one.fields)
        manifest.parse(self._manifest(source, schema, one, seen, columns).to_bytes())

    def _manifest(
        self, source: Source, schema: Schema, layout: Layout, seen: Survey, columns: tuple[Column, ...]
    ) -> Manifest:
        versions = {name: fingerprint.installed(name) for name in seen.parts["versions"]}
        return Manifest(
            name=self._spec.name,
            fingerprint=seen.fingerprint,
            fingerprint_parts=seen.parts,
            rows=layout.rows or 1,
            chunk_rows=layout.chunk_rows,
            structure=schema.structure,
            columns=columns,
            classes=source.classes,
            versions={name: full for name, full in versions.items() if full is not None},
        )


def _to_make_again(chunks: dict[int, Chunk]) -> Chunk | None:
    """Of an interrupted build that must be read from front to back: leaves the chunks before the first gap but the last
    of them, and returns that one."""
    whole = next(number for number in count() if number not in chunks)
    for number in [number for number in chunks if number >= whole]:
        del chunks[number]
    return chunks.pop(whole - 1, None)


def _stream(work: _Work) -> Iterator[int]:
    """The missing chunks of a source of unknown length, one by one, until one is not full. The first must come out as it
    was before an interruption: a source that gives other samples each time cannot be gone on with."""
    for number in count(len(work.chunks)):
        yield number
        made = work.chunks[number]
        if work.again is not None and made != work.again:
            text = "The source gave other samples than before the interruption."
            raise DataError("source_changed", text, "Give it a fixed order; what was left of the build is removed.")
        work.again = None
        if made.scanned < work.layout.chunk_rows:
            return
