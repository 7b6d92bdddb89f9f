"""server/unfinished.py, and `list` and `remove` of builds that have not come to their end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataserve.protocol.errors import MachineError, UserError
from dataserve.server import cli, journal, leftovers, store, unfinished
from dataserve.server.layout import Field, Layout
from dataserve.server.locks import BuildLocks
from dataserve.server.writer import StoreWriter

from .preparing import Child, archive, group, named, spec, start, until

__all__ = ["start"]  # the fixture

STEPS = """
import time
import numpy as np
def slow(sample):
    time.sleep(0.02)
    return np.full((1024, 1024), int(sample["label"]), np.float32)
"""


@pytest.fixture
def slow(isolated: Path) -> dict[str, Any]:
    """A spec of 200 samples that take 20 ms each, every one a chunk."""
    (isolated / "steps.py").write_text(STEPS)
    return spec(archive(isolated, 200), "steps:slow")


def build(root: Path, digit: str, name: str, rows: int | None = 10) -> Path:
    """A dead build as its first moment leaves it."""
    files = StoreWriter(root, digit * 64)
    files.create(
        Layout(rows, (Field("x", "int64", ()),)),
        {"spec": {"name": name}, "layout": {"rows": rows, "fields": [["x", "int64", []]], "ragged_bytes": 0}},
    ).close()
    return files.folder


def finished(root: Path) -> int:
    found = list((root / store.BUILDING).glob("*/journal"))
    read = journal.read(found[0]) if found else None
    return len(read[1]) if read else 0


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 1
    return capsys.readouterr().err


def test_a_living_build_is_listed_and_not_removed_and_a_dead_one_is_both(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    root = isolated / "store"
    child = start(spec=slow, workers=2)
    until(lambda: finished(root) >= 3, "three chunks are done")
    (living,) = unfinished.list_unfinished(root)
    assert (living.name, living.total, living.alive) == ("data", 200, True)
    assert child.process.pid in living.pids
    assert "End these processes first" in refused(["remove", "data"], capsys)
    assert cli.main(["list"]) == 0
    assert f"{living.label}: being built by pid {child.process.pid}" in capsys.readouterr().out
    child.kill()
    until(lambda: not group(child.process.pid), "the group is dead")

    (dead,) = unfinished.list_unfinished(root)
    assert (dead.alive, dead.pids, dead.total, dead.path) == (False, (), 200, living.path)
    assert 3 <= dead.done < 200
    assert dead.size_bytes >= dead.done * 4 * 1024 * 1024
    assert cli.main(["list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stores"] == []
    assert told["unfinished"] == [{**dead._asdict(), "pids": []}]
    assert cli.main(["list"]) == 0
    assert f"{dead.label}: unfinished: {dead.done} of 200 samples" in capsys.readouterr().out

    assert cli.main(["remove", dead.fingerprint[:6]]) == 0
    assert "Removed the unfinished build" in capsys.readouterr().out
    assert os.listdir(root / store.BUILDING) == []
    assert not (root / store.TRASH).exists()
    status, events, _ = start(spec={**slow, "transform": None}).end()
    assert (status, bool(named(events, "sealed"))) == (0, True)


@pytest.mark.parametrize(
    ("who", "words"), [("builder", "is being built by pid"), ("writers", "workers of a dead build")]
)
def test_a_build_that_a_process_holds_is_not_removed(isolated: Path, who: str, words: str) -> None:
    root = store.make_root(isolated / "store")
    path = build(root, "a", "data")
    held = getattr(BuildLocks(root, "a" * 64), who)
    assert held.try_take(shared=who == "writers")
    (found,) = unfinished.list_unfinished(root)
    assert (found.alive, found.pids) == (True, (os.getpid(),))
    with pytest.raises(UserError, match=words) as caught:
        unfinished.remove(root, found)
    assert (caught.value.code, str(os.getpid()) in caught.value.text) == ("in_use", True)
    assert path.exists()
    held.release()
    unfinished.remove(root, found)
    assert os.listdir(root / store.BUILDING) == []


def test_one_that_died_before_its_first_look_has_no_name_and_goes_by_its_digits(
    isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = store.make_root(isolated / "store")
    StoreWriter(root, "ab" * 32).announce()
    (found,) = unfinished.list_unfinished(root)
    assert (found.name, found.done, found.total, found.label) == (None, 0, None, "abababab")
    assert cli.main(["list"]) == 0
    assert "abababab: unfinished: 0 of ? samples" in capsys.readouterr().out
    assert "There is no store called 'aba'" in refused(["remove", "aba"], capsys), "too few digits"
    assert cli.main(["remove", "abab"]) == 0
    assert unfinished.list_unfinished(root) == []


def test_a_name_that_means_two_is_refused_with_both(isolated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prepare", archive(isolated), "--name", "data"]) == 0
    root = isolated / "store"
    build(root, "a", "data")
    build(root, "b", "other", rows=None)
    words = refused(["remove", "data"], capsys)
    assert "'data' names 2: data@" in words
    assert "data@aaaaaaaa (unfinished)" in words
    assert cli.main(["remove", "data@aaaa"]) == 0
    assert [found.name for found in unfinished.list_unfinished(root)] == ["other"]
    assert len(store.list_sealed(root)) == 1
    build(root, "c", "other")
    assert "other@bbbbbbbb, other@cccccccc" in refused(["remove", "other"], capsys)


def test_trash_of_a_removal_that_was_killed_is_gone_with_the_next_start_or_removal(isolated: Path) -> None:
    root = store.make_root(isolated / "store")
    for act in (lambda: leftovers.clean(root, "data"), lambda: store.discard(root, build(root, "a", "data"))):
        left = root / store.TRASH / "old-0123456789abcdef.55"
        left.mkdir(parents=True)
        (left / "x.npy").write_bytes(b"data")
        act()
        assert not (root / store.TRASH).exists()


def test_builds_of_another_user_are_none_and_hide_no_sealed_store(
    isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    building = isolated / "store" / store.BUILDING
    building.mkdir(parents=True, mode=0o700)

    def refused(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    other = building.stat().st_uid + 1
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refused)
        with pytest.raises(MachineError, match="cannot be listed"):
            unfinished.list_unfinished(isolated / "store")
        patched.setattr(os, "geteuid", lambda: other)
        assert unfinished.list_unfinished(isolated / "store") == []
