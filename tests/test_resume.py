"""An interrupted build is gone on with: server/journal.py, writer.py and build.py under kills, cuts of power and damage."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataserve.protocol import limits, manifest
from dataserve.server import joining, journal, leftovers, store
from dataserve.server.badsamples import Bad
from dataserve.server.journal import Chunk, Journal
from dataserve.server.layout import Field, Layout
from dataserve.server.locks import BuildLocks
from dataserve.server.spec import DatasetSpec
from dataserve.server.writer import ChunkWriter, StoreWriter

from .preparing import Child, archive, content, group, named, start, until

__all__ = ["start"]  # the fixture

STEPS = """
import time
import numpy as np
def mixed(sample):
    index = int(sample["label"])
    if index % 11 == 5:
        raise ValueError(f"number {index} will not do")
    time.sleep(0.02)
    return np.full((64, 64, 64), index, np.int32), "x" * (index * 1000), np.full(index, index, np.int16)
"""
ROWS = 60


@pytest.fixture
def mixed(isolated: Path) -> dict[str, Any]:
    """A spec of 60 samples: a fixed column, two ragged ones, five bad samples; some twenty chunks, 20 ms a sample."""
    (isolated / "steps.py").write_text(STEPS)
    return DatasetSpec("data", archive(isolated, ROWS), {}, "steps:mixed", on_error="skip").to_map()


def whole(start: Callable[..., Child], isolated: Path, spec: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of an uninterrupted build by one worker."""
    status, events, words = start(spec=spec, workers=1, store=str(isolated / "whole")).end()
    assert status == 0, (events, words)
    return content(named(events, "sealed")[0]["path"])


def finished(isolated: Path) -> int:
    """Chunks in the journal of the one build that lies there."""
    found = list((isolated / "store" / store.BUILDING).glob("*/journal"))
    read = journal.read(found[0]) if found else None
    return len(read[1]) if read else 0


def kill_all(child: Child) -> None:
    child.kill()
    until(lambda: not group(child.process.pid), "the group is dead")


def test_a_killed_build_is_gone_on_with_and_its_bytes_are_those_of_an_uninterrupted_one(
    start: Callable[..., Child], isolated: Path, mixed: dict[str, Any]
) -> None:
    expected = whole(start, isolated, mixed)
    child = start(spec=mixed, workers=2)
    until(lambda: finished(isolated) >= 5, "five chunks are done")
    kill_all(child)
    done = finished(isolated)
    status, events, words = start(spec=mixed, workers=1).end()
    assert status == 0, (events, words)
    (resuming,) = named(events, "resuming")
    assert resuming["done"] >= 3 * done - 2
    assert content(named(events, "sealed")[0]["path"]) == expected
    assert os.listdir(isolated / "store" / store.BUILDING) == []


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {}


def damage(function: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], None]:
    DAMAGES[function.__name__] = function
    return function


@damage
def cut_the_power(build: Path, chance: random.Random) -> None:
    """What was not synced is lost: files end anywhere, or hold zeros there."""
    for path in [*build.glob("parts/*"), build / "journal"]:
        size = path.stat().st_size
        if chance.random() < 0.5:
            os.truncate(path, chance.randint(0, size))
    for path in build.glob("slots/*"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            start = chance.randint(0, size)
            file.seek(start)
            file.write(bytes(min(size - start, 3 << 20)))


@damage
def lose_the_journal(build: Path, chance: random.Random) -> None:
    (build / "journal").unlink()


@damage
def garble_lines(build: Path, chance: random.Random) -> None:
    data = bytearray((build / "journal").read_bytes())
    start = data.index(b"\n") + 1
    for _ in range(5):
        data[chance.randrange(start, len(data))] ^= 1 << chance.randrange(8)
    (build / "journal").write_bytes(data + b"half a line")


@damage
def lose_the_slots(build: Path, chance: random.Random) -> None:
    shutil.rmtree(build / "slots")
    (build / "slots").mkdir()


#: Each in `scripts/test --all`; the quick suite has the two that stand for the others.
QUICK = ("cut_the_power", "garble_lines")


@pytest.mark.parametrize("how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.slow) for how in DAMAGES])
def test_whatever_is_lost_of_a_killed_build_is_made_again(
    start: Callable[..., Child], isolated: Path, mixed: dict[str, Any], how: str
) -> None:
    expected = whole(start, isolated, mixed)
    child = start(spec=mixed, workers=2)
    until(lambda: finished(isolated) >= 6, "six chunks are done")
    kill_all(child)
    (build,) = (path for path in (isolated / "store" / store.BUILDING).iterdir() if path.is_dir())
    DAMAGES[how](build, random.Random(7))
    status, events, words = start(spec=mixed, workers=2).end()
    assert status == 0, (events, words)
    assert content(named(events, "sealed")[0]["path"]) == expected


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_kills_at_random_moments_of_anybody_end_in_the_same_bytes(
    start: Callable[..., Child], isolated: Path, mixed: dict[str, Any], seed: int
) -> None:
    """Four kills a seed, twenty in all; scripts/torture_prepare does hundreds."""
    chance = random.Random(seed)
    expected = whole(start, isolated, mixed)
    for _ in range(4):
        child = start(spec=mixed, workers=2)
        deadline = time.monotonic() + chance.uniform(0.05, 4.0)
        while time.monotonic() < deadline and child.process.poll() is None:
            time.sleep(0.01)
        victims = sorted(group(child.process.pid))
        if victims and chance.random() < 0.5:
            os.kill(chance.choice(victims), signal.SIGKILL)
            until(lambda child=child: child.process.poll() is not None, "it ends, or ends its work")  # type: ignore[misc]
        kill_all(child)
        assert store.list_damaged(isolated / "store") == []
        for sealed in store.list_sealed(isolated / "store"):
            assert content(sealed.path) == expected
    status, events, words = start(spec=mixed, workers=2).end()
    assert status == 0, (events, words)
    assert content(named(events, "sealed")[0]["path"]) == expected
    assert os.listdir(isolated / "store" / store.BUILDING) == []


# --- the seal, stopped after each of its steps ----------------------------------------------------------------------

FIELDS = (Field("x", "int64", ()), Field("text", "uint8", (), "utf8", "ragged"))
LAYOUT = Layout(2500, FIELDS, 4096)  # three chunks
STEPS_OF_A_SEAL = [
    *((os, name) for name in ("rename", "pwrite", "fsync", "fchmod", "ftruncate")),
    *((joining.ColumnFile, name) for name in ("append", "finish")),
]


class PowerCutError(BaseException):
    """Stands in for a kill; faked, so that it can come between any two calls."""


def written(files: StoreWriter, skip: bool) -> list[Chunk]:
    writer, chunks = ChunkWriter(files.folder, LAYOUT), []
    for number in range(LAYOUT.chunks or 0):
        start, stop = LAYOUT.span(number)
        bad = (Bad(start, "open", "OSError: gone."),) if skip and number == 1 else ()
        rows = stop - start - len(bad)
        writer.begin(number)
        numbers, text = writer.columns
        assert isinstance(numbers, np.ndarray)
        numbers[:rows] = np.arange(stop - rows, stop)
        for row in range(rows):
            text[row] = np.frombuffer(b"%d" % (row % 1000), "u1")
        chunks.append(Chunk(number, stop - start, *writer.finish(number, rows), bad))
    writer.close()
    return chunks


@pytest.mark.parametrize("skip", [False, True])
def test_a_faked_cut_between_any_two_steps_of_the_seal_can_be_gone_on_from(
    isolated: Path, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    root = store.make_root(isolated / "store")
    files = StoreWriter(root, "a" * 64)
    files.create(LAYOUT, {"spec": 1}).close()
    chunks = written(files, skip)
    Journal(files.folder / journal.FILE, {"spec": 1}, chunks).close()
    columns = files.assemble(LAYOUT, chunks, None)
    rows = sum(chunk.kept for chunk in chunks)
    structure = {"tuple": [{"column": "x"}, {"column": "text"}]}
    made = manifest.Manifest("data", "a" * 64, {}, rows, LAYOUT.chunk_rows, structure, columns)
    expected = {**content(str(files.folder / "sealed")), manifest.FILE: made.to_bytes()}
    for cut in range(200):
        again, found = StoreWriter(root, "a" * 64).resume(LAYOUT, {"spec": 1})
        again.close()
        assert sorted(found.values()) == chunks, "nothing needs to be made again"
        with monkeypatch.context() as patch:
            steps = itertools.count()
            for place, name in STEPS_OF_A_SEAL:
                patch.setattr(place, name, cutting(getattr(place, name), steps, cut))
            with contextlib.suppress(PowerCutError):
                assert files.assemble(LAYOUT, chunks, None) == columns
                files.seal(made)
        assert store.list_damaged(root) == []
        if sealed := store.list_sealed(root):
            break
    assert cut > 10
    assert content(sealed[0].path) == expected
    files.wipe()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.booleans(), min_size=30, max_size=60), st.integers(0, 80), st.sampled_from([(8,), (200,)]))
def test_holes_are_closed_in_place_and_a_faked_kill_costs_one_chunk_at_most(
    isolated: Path, bad: list[bool], kill_at: int, wide: tuple[int, ...]
) -> None:
    """The kill comes in the middle of a write. 8 rows a chunk of one piece, or one row of several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "CHUNK_BYTES", 64)
        layout = Layout(len(bad), (Field("x", "uint8", wide),))
        files = StoreWriter(store.make_root(isolated / "store"), "a" * 64)
        files.wipe()
        files.create(layout, {}).close()
        writer, chunks = ChunkWriter(files.folder, layout), []
        for number in range(layout.chunks or 0):
            places = range(*layout.span(number))
            kept = [place for place in places if not bad[place]]
            for row, place in enumerate(kept):
                writer.columns[0][row] = np.full(wide, place, np.uint8)
            left_out = tuple(Bad(place, "open", "gone") for place in places if bad[place])
            chunks.append(Chunk(number, len(places), *writer.finish(number, len(kept)), left_out))
        writer.close()
        Journal(files.folder / journal.FILE, {}, chunks).close()
        expected = np.flatnonzero(~np.array(bad)).astype(np.uint8)
        slots = files.folder / "slots" / "x.npy"
        pwrite, count = os.pwrite, itertools.count()

        def torn(handle: int, view: memoryview, at: int) -> int:
            if next(count) == kill_at:
                pwrite(handle, view[: len(view) // 2], at)
                raise PowerCutError
            return pwrite(handle, view, at)

        patch.setattr(os, "pwrite", torn)
        with contextlib.suppress(PowerCutError):
            joining.close_holes(slots, layout, 0, chunks)
        kill_at = -1
        again, found = files.resume(layout, {})
        again.close()
        assert set(chunks) >= set(found.values())
        assert len(found) >= len(chunks) - 1
        for number in {chunk.chunk for chunk in chunks} - found.keys():
            start, _ = layout.span(number)
            rows = [place for place in range(*layout.span(number)) if not bad[place]]
            lost = np.repeat(np.array(rows, np.uint8), wide[0]).tobytes()
            with slots.open("r+b") as file:
                file.seek(limits.HEADER_BYTES + start * wide[0])
                file.write(lost)
        crcs = joining.close_holes(slots, layout, 0, chunks)
        rows_ = np.frombuffer(slots.read_bytes()[limits.HEADER_BYTES :], np.uint8).reshape(-1, *wide)[: len(expected)]
        np.testing.assert_array_equal(rows_, np.repeat(expected, wide[0]).reshape(-1, *wide))
        span = layout.chunk_rows
        assert crcs == tuple(zlib.crc32(rows_[row : row + span].tobytes()) for row in range(0, len(rows_), span))
        files.wipe()


def cutting(original: Callable[..., Any], steps: Iterator[int], cut: int) -> Callable[..., Any]:
    def step(*args: Any, **more: Any) -> Any:
        if next(steps) >= cut:
            raise PowerCutError
        return original(*args, **more)

    return step


# --- the journal ----------------------------------------------------------------------------------------------------

CHUNKS = st.lists(
    st.builds(
        Chunk,
        st.integers(0, 20),
        st.integers(0, 9),
        st.tuples(st.integers(0, 2**32 - 1)),
        st.tuples(st.integers(0, 99)),
        st.tuples(st.builds(Bad, st.integers(0, 9), st.just("open"), st.text(max_size=5))),
    ),
    max_size=8,
    unique_by=lambda chunk: chunk.chunk,
)


@given(chunks=CHUNKS, data=st.data())
def test_a_journal_gives_back_what_it_was_given_or_less_never_something_else(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[Chunk], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("journal") / journal.FILE
    written = Journal(path, {"spec": {"name": "é"}}, chunks[:2])
    for chunk in chunks[2:]:
        written.add(chunk)
    written.close()
    assert journal.read(path) == ({"spec": {"name": "é"}}, {chunk.chunk: chunk for chunk in chunks})
    content = bytearray(path.read_bytes())
    del content[data.draw(st.integers(0, len(content))) :]
    if content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(0, 255))
    path.write_bytes(content)
    found = journal.read(path)
    assert found is None or found[0] == {"spec": {"name": "é"}}
    assert found is None or all(chunk in chunks for chunk in found[1].values())


# --- leftovers ------------------------------------------------------------------------------------------------------


def left(root: Path, digit: str, name: str, age_s: float = 0.0) -> Path:
    """A dead build of that data set."""
    files = StoreWriter(root, digit * 64)
    files.create(LAYOUT, {"spec": {"name": name}}).close()
    when = time.time() - age_s
    os.utime(files.folder / journal.FILE, (when, when))
    return files.folder


def test_leftovers_of_the_same_data_set_and_stale_ones_are_removed_and_no_others(isolated: Path) -> None:
    root = store.make_root(isolated / "store")
    superseded, current = left(root, "a", "data"), left(root, "b", "data")
    stale, others = left(root, "c", "other", leftovers.KEPT_S + 60), left(root, "d", "other")
    (root / store.BUILDING / ("e" * 64 + ".builder.lock")).touch()  # of a build that ended without a folder
    (root / store.BUILDING / "notes.txt").touch()
    leftovers.clean(root, "data", but="b" * 64)
    assert not superseded.exists()
    assert not stale.exists()
    assert current.exists()
    assert others.exists()
    assert sorted(os.listdir(root / store.BUILDING)) == [current.name, others.name, "notes.txt"]


@pytest.mark.parametrize("who", ["builder", "writers"])
def test_what_a_living_process_builds_or_writes_is_never_removed(isolated: Path, who: str) -> None:
    root = store.make_root(isolated / "store")
    build, locks = left(root, "a", "data"), BuildLocks(root, "a" * 64)
    held = getattr(locks, who)
    assert held.try_take(shared=who == "writers")
    leftovers.clean(root, "data")
    assert build.exists()
    held.release()
    leftovers.clean(root, "data")
    assert os.listdir(root / store.BUILDING) == []
