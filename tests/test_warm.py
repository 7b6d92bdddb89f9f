"""server/warm.py: `--warm` and `--lock`, by the real daemon and by its parts."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from dataserve.server.events import DatasetSealed, PreparationFailed
from dataserve.server.warm import Hold, Warmer, Warming

from .cold import big_store, drop, in_memory, may_lock
from .daemons import LIMIT_S, Daemon, daemon, run, until

MB = 1_000_000


def locked_kb(pid: int) -> int:
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index("VmLck:") + 1])


def row(serving: Daemon) -> dict[str, Any]:
    status = serving.status()
    assert status is not None
    found: dict[str, Any] = status["datasets"][0]
    return found


@pytest.fixture
def store(isolated: Path) -> Path:
    return big_store(isolated / "store")


def test_warm_brings_all_of_it_into_memory(store: Path) -> None:
    with daemon(f"store:{store}", "--warm", "--name", "digits") as serving:
        until(lambda: "digits: 60.2 MB read into memory" in serving.said, "the word that it is done")
        assert in_memory(store / "image.npy").all()
        until(lambda: row(serving)["resident"] == 1, "the same in the status")
        assert row(serving)["locked"] is None
        assert locked_kb(serving.pid) == 0
    assert in_memory(store / "image.npy").all(), "it stays when the daemon has gone"


def test_without_it_nothing_is_read(store: Path) -> None:
    with daemon(f"store:{store}") as serving:
        until(lambda: row(serving)["resident"] is not None, "a look")
        assert in_memory(store / "image.npy").mean() < 0.5


def test_lock_keeps_it_there_and_lets_go_at_the_end(isolated: Path) -> None:
    store = big_store(isolated / "store", 20)  # 3 MB: less than what a usual limit lets anybody lock
    size_bytes = (store / "image.npy").stat().st_size
    with daemon(f"store:{store}", "--lock", preexec_fn=functools.partial(may_lock, 4 * MB)) as serving:
        until(lambda: row(serving)["locked"] == 1, "all locked")
        assert locked_kb(serving.pid) * 1024 >= size_bytes
        with pytest.raises(pytest.skip.Exception, match="keeps its pages"):
            drop(store)
        shown = run("status").stdout
        assert "100%, 100% locked" in shown
        assert serving.stop() == 0
    drop(store)


def test_a_lock_above_the_limit_is_a_sentence_with_both_numbers_and_the_remedy(store: Path) -> None:
    ended = run("start", f"store:{store}", "--lock", "--name", "digits", preexec_fn=functools.partial(may_lock, 4 * MB))
    size_bytes = (store / "image.npy").stat().st_size
    assert ended.returncode == 1
    assert f"'digits' has {size_bytes:,} bytes; this process may lock 4,000,000 (RLIMIT_MEMLOCK)." in ended.stdout
    assert "ulimit -l unlimited" in ended.stdout
    assert "LimitMEMLOCK=infinity" in ended.stdout
    assert "[no_memory]" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_file_says_it_too(store: Path, isolated: Path) -> None:
    (isolated / "data.toml").write_text(f'warm = true\n[[dataset]]\nname = "digits"\nsource = "store:{store}"\n')
    with daemon("--config", str(isolated / "data.toml")) as serving:
        until(lambda: "digits: 60.2 MB read into memory" in serving.said, "the word that it is done")


def test_a_detached_start_returns_when_it_is_ready_and_fails_where_it_cannot_lock(store: Path) -> None:
    limited = functools.partial(may_lock, 4 * MB)
    ended = run("start", f"store:{store}", "--lock", "--detach", preexec_fn=limited)
    assert ended.returncode == 1
    assert "RLIMIT_MEMLOCK" in ended.stdout


# --- its parts ------------------------------------------------------------------------------------------------------


def sealed(name: str, size_bytes: int) -> DatasetSealed:
    return DatasetSealed(name, f"/s/{name}", "a" * 64, "b" * 64, 10, size_bytes, ("image",))


def warmer(hold: Hold, available: int | None, lockable: int | None = None) -> Warmer:
    return Warmer(hold, lambda: available, lambda: lockable)


def test_what_is_larger_than_the_memory_is_not_warmed_and_served_all_the_same() -> None:
    made = warmer("warm", 100)
    assert made.admit(sealed("a", 101)) == sealed("a", 101)
    assert made.said.get_nowait().startswith("a: not warmed: 'a' has 101 bytes; 100 of memory are available.")
    assert made._queue.empty()


def test_what_is_larger_than_the_memory_is_not_locked_and_not_served() -> None:
    refused = warmer("lock", 100).admit(sealed("a", 101))
    assert isinstance(refused, PreparationFailed)
    assert (refused.name, refused.code) == ("a", "no_memory")


@pytest.mark.parametrize("hold", ["warm", "lock"])
def test_data_sets_add_up(hold: Hold) -> None:
    made = warmer(hold, 100, 1000)
    assert made.admit(sealed("a", 60)) == sealed("a", 60)
    made.admit(sealed("b", 60))
    assert made._queue.qsize() == 1
    assert made.admit(sealed("c", 40)) == sealed("c", 40)
    assert made._queue.qsize() == 2


def test_the_limit_counts_what_was_promised_and_a_word_said_twice_counts_once() -> None:
    made = warmer("lock", 10_000, 100)
    for _ in range(2):
        assert made.admit(sealed("a", 60)) == sealed("a", 60)
    refused = made.admit(sealed("b", 60))
    assert isinstance(refused, PreparationFailed)
    assert "'b' has 60 bytes, with the data sets before it 120; this process may lock 100" in refused.text


def test_where_nothing_is_known_or_limited_all_is_tried() -> None:
    assert warmer("lock", None).admit(sealed("a", 1 << 60)) == sealed("a", 1 << 60)


def test_a_store_that_vanishes_meanwhile_is_told_and_the_next_one_is_read(store: Path) -> None:
    made = warmer("warm", None)
    made.start()
    try:
        made.admit(sealed("gone", 10))
        made.admit(sealed("digits", os.stat(store / "image.npy").st_size)._replace(path=str(store)))
        assert made.said.get(timeout=LIMIT_S).startswith("gone: not warmed to its end: ")
        assert made.said.get(timeout=LIMIT_S).startswith("digits: 60.2 MB read into memory")
    finally:
        made.close()
    assert in_memory(store / "image.npy").mean() > 0.99  # the kernel may have taken a page back already


def test_how_far_it_is_has_rate_and_time_left() -> None:
    told = str(Warming("digits", 25 * MB, 100 * MB, 0.5))
    assert told == "25 % of 100.0 MB read into memory, 50.0 MB/s, 2 s left"
    assert str(Warming("digits", 0, 100 * MB, 0.0)) == "0 % of 100.0 MB read into memory"
