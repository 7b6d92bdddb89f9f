"""server/locks.py: one builder, its last words, and orphans that still write."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dataserve.protocol.errors import MachineError
from dataserve.server import locks, pidlock, store
from dataserve.server.locks import BuildLocks, Lock

DIGITS = "a" * 64


@pytest.fixture
def root(isolated: Path) -> Path:
    return store.make_root(isolated / "store")


def unheard(words: dict[str, Any]) -> None:
    pytest.fail(f"nobody should wait, but heard {words}")


def test_a_lock_has_one_holder_and_leaves_no_file(root: Path) -> None:
    one, other = Lock(root / "x" / "lock"), Lock(root / "x" / "lock")
    assert one.try_take()
    assert not other.try_take()
    one.release(unlink=True)
    assert other.try_take()
    other.release(unlink=True)
    assert os.listdir(root / "x") == []


def test_a_shared_lock_has_many_and_keeps_out_the_one(root: Path) -> None:
    one, other, builder = (Lock(root / "lock") for _ in range(3))
    assert one.try_take(shared=True)
    assert other.try_take(shared=True)
    assert not builder.try_take()
    one.release()
    other.release()
    assert builder.try_take()
    builder.release()


def test_a_lock_is_not_taken_through_a_link(root: Path) -> None:
    (root / "target").touch()
    (root / "lock").symlink_to("target")
    with pytest.raises(MachineError, match="lock"):
        Lock(root / "lock").try_take()


def test_the_lock_of_a_killed_process_is_free_at_once_and_its_words_are_gone(root: Path) -> None:
    code = (
        f"import os; from pathlib import Path; from dataserve.server.locks import BuildLocks\n"
        f"locks = BuildLocks(Path({str(root)!r}), {DIGITS!r}); locks.take(print)\n"
        "locks.builder.note({'pid': os.getpid()}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    mine = BuildLocks(root, DIGITS)
    assert mine.builder.read_note() is not None
    mine.take(unheard)
    assert mine.builder.read_note() == {}
    mine.release()
    assert os.listdir(root / store.BUILDING) == []


def test_a_builder_waits_until_the_orphans_of_a_dead_build_are_gone(root: Path) -> None:
    mine, orphan = BuildLocks(root, DIGITS), Lock(BuildLocks(root, DIGITS).writers.path)
    assert orphan.try_take(shared=True)
    end = threading.Timer(0.3, orphan.release)
    end.start()
    mine.take(unheard)
    assert end.finished.is_set(), "it was taken beside a writer"
    end.join()
    mine.release()


def test_orphans_that_never_end_are_an_error_that_says_where_to_look(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "ORPHANS_S", 0.2)
    mine, orphan = BuildLocks(root, DIGITS), Lock(BuildLocks(root, DIGITS).writers.path)
    assert orphan.try_take(shared=True)
    with pytest.raises(MachineError, match="still hold") as caught:
        mine.take(unheard)
    assert caught.value.code == "stuck"
    assert str(orphan.path) in caught.value.text
    assert f"pid {os.getpid()}" in caught.value.text
    mine.release()
    assert orphan.path.exists(), "or the next builder would not see it"
    orphan.release()


def test_a_builder_that_falls_silent_is_named_with_its_pid(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "SILENT_HOLDER_S", 0.3)
    holder, mine = BuildLocks(root, DIGITS), BuildLocks(root, DIGITS)
    holder.take(unheard)
    holder.builder.note({"pid": 4711, "done": 3})
    heard: list[dict[str, Any]] = []
    with pytest.raises(MachineError, match="Process 4711") as caught:
        mine.take(heard.append)
    assert caught.value.code == "stuck"
    assert heard[0] == {"pid": 4711, "done": 3}
    holder.release()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without flock, as some network ones are."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


def test_without_flock_a_faked_lock_still_has_one_holder_or_many_shared_ones(root: Path, no_flock: None) -> None:
    one, two, three = (Lock(root / "x" / "lock") for _ in range(3))
    assert one.try_take()
    assert not two.try_take()
    assert not two.try_take(shared=True)
    one.release()
    assert two.try_take(shared=True)
    assert three.try_take(shared=True)
    assert not one.try_take()
    two.release()
    three.release(unlink=True)
    assert one.try_take()
    one.release(unlink=True)
    assert os.listdir(root / "x") == []


def test_without_flock_a_faked_claim_of_a_dead_process_counts_no_more(root: Path, no_flock: None) -> None:
    code = (
        "import errno, fcntl, os\n"
        "def refuse(*_): raise OSError(errno.EOPNOTSUPP, 'x')\n"
        "fcntl.flock = refuse\n"
        f"from pathlib import Path; from dataserve.server.locks import Lock\n"
        f"assert Lock(Path({str(root / 'lock')!r})).try_take(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == -9
    assert len(os.listdir(root)) == 2, "the lock and the claim of the dead"
    mine = Lock(root / "lock")
    assert mine.try_take()
    mine.release(unlink=True)
    assert os.listdir(root) == []


def test_without_flock_a_faked_claim_of_another_host_counts_until_it_is_old(root: Path, no_flock: None) -> None:
    theirs = root / "lock.claim.alone.elsewhere-0a1b2c3d.17-4711-aabbccdd"
    theirs.touch()
    mine = Lock(root / "lock")
    assert not mine.try_take()
    old = time.time() - pidlock.CLAIM_S - 1
    os.utime(theirs, (old, old))
    assert mine.try_take()
    assert not theirs.exists()
    mine.release()


def test_without_flock_eight_faked_builders_at_once_are_one_after_another(root: Path, no_flock: None) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def build() -> None:
        nonlocal inside, most
        mine = BuildLocks(root, DIGITS)
        mine.take(lambda words: None)
        with lock:
            inside += 1
            most = max(most, inside)
        with lock:
            inside -= 1
        mine.release()

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (inside, most) == (0, 1)
    assert os.listdir(root / store.BUILDING) == []
