"""client/order: made once a process, or once a machine above a threshold, and never trusted blindly."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dataserve.client import order
from dataserve.protocol import limits
from dataserve.protocol.plan import Plan

PLAN = Plan("shuffled", 1000, 7)
DIGITS = PLAN.digest()[:16]


def test_it_is_the_plans_and_read_only() -> None:
    made = order.of(PLAN, 3, None)
    assert made is not None
    assert np.array_equal(made, PLAN.order(3))
    assert not made.flags.writeable
    assert order.of(Plan("sequential", 1000), 3, None) is None


def test_it_is_shared_while_somebody_holds_it_and_then_let_go() -> None:
    made = order.of(PLAN, 0, None)
    assert order.of(PLAN, 0, None) is made
    assert (PLAN.digest(), 0) in order._orders
    del made
    gc.collect()
    assert (PLAN.digest(), 0) not in order._orders


def test_above_the_threshold_it_is_one_file_for_all(tmp_path: Path) -> None:
    folder = tmp_path / "orders"
    made = order.of(PLAN, 4, str(folder), shared_rows=999)
    file = folder / f"{DIGITS}-4.npy"
    assert np.array_equal(np.load(file), PLAN.order(4))
    assert file.stat().st_mode & 0o777 == 0o400
    assert folder.stat().st_mode & 0o777 == 0o700
    assert np.array_equal(made, PLAN.order(4))
    written = file.stat().st_mtime_ns, file.stat().st_ino
    del made
    gc.collect()
    assert np.array_equal(order.of(PLAN, 4, str(folder), shared_rows=999), PLAN.order(4))
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == written
    assert os.listdir(folder) == [file.name]


def test_at_the_threshold_nothing_is_written(tmp_path: Path) -> None:
    order.of(PLAN, 4, str(tmp_path / "orders"), shared_rows=1000)
    assert not (tmp_path / "orders").exists()


def test_older_epochs_of_the_same_plan_go_and_others_stay(tmp_path: Path) -> None:
    other = Plan("shuffled", 1000, 8)
    held = order.of(PLAN, 1, str(tmp_path), shared_rows=1)
    order.of(other, 0, str(tmp_path), shared_rows=1)
    order.of(PLAN, 12, str(tmp_path), shared_rows=1)
    order.of(PLAN, 2, str(tmp_path), shared_rows=1)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f"{other.digest()[:16]}-0.npy", f"{DIGITS}-12.npy", f"{DIGITS}-2.npy"]
    )
    assert np.array_equal(held, PLAN.order(1))


def test_what_nobody_has_used_for_an_hour_goes_with_the_next_that_is_written(tmp_path: Path) -> None:
    now = time.time()
    names = {
        "0123456789abcdef-7.npy": 3700.0,
        "1123456789abcdef-7.npy": 3500.0,
        ".0123456789abcdef-8.npy.0123456789abcdef": 3700.0,
        ".0123456789abcdef-9.npy.0123456789abcdef": 3500.0,
        "notes.npy": 3700.0,
    }
    for name, age_s in names.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age_s, now - age_s))
    order.of(PLAN, 0, str(tmp_path), shared_rows=1)
    kept = ["1123456789abcdef-7.npy", ".0123456789abcdef-9.npy.0123456789abcdef", "notes.npy", f"{DIGITS}-0.npy"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_a_file_that_a_new_process_maps_counts_as_used(tmp_path: Path) -> None:
    order.of(PLAN, 0, str(tmp_path), shared_rows=1)
    gc.collect()
    os.utime(tmp_path / f"{DIGITS}-0.npy", (1.0, 1.0))
    order.of(PLAN, 0, str(tmp_path), shared_rows=1)
    order.of(Plan("shuffled", 1000, 8), 0, str(tmp_path), shared_rows=1)
    assert (tmp_path / f"{DIGITS}-0.npy").exists()


@pytest.mark.parametrize("damage", ["short", "header", "writable"])
def test_a_file_that_is_not_right_is_made_again(tmp_path: Path, damage: str) -> None:
    order.of(PLAN, 0, str(tmp_path), shared_rows=1)
    gc.collect()
    file = tmp_path / f"{DIGITS}-0.npy"
    file.chmod(0o600)
    content = file.read_bytes()
    file.write_bytes(
        content[:-4] if damage == "short" else b"x" + content[1:] if damage == "header" else content[:-4] + b"\xff" * 4
    )
    file.chmod(0o666 if damage == "writable" else 0o400)
    assert np.array_equal(order.of(PLAN, 0, str(tmp_path), shared_rows=1), PLAN.order(0))
    assert file.read_bytes() == content


@pytest.mark.parametrize("folder", ["missing/orders", "file", "open"])
def test_without_a_usable_folder_it_is_made_in_memory(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = sorted(tmp_path.rglob("*"))
    assert np.array_equal(order.of(PLAN, 0, str(tmp_path / folder), shared_rows=1), PLAN.order(0))
    assert sorted(tmp_path.rglob("*")) == before


def ended(upcoming: order.Upcoming) -> None:
    upcoming.start()
    for thread in threading.enumerate():
        if thread.name == "dataserve-order":
            thread.join(10)


def test_the_next_order_is_made_ahead_and_held_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "AHEAD_ROWS", PLAN.n)
    upcoming = order.Upcoming(PLAN, 6, "")
    assert upcoming._order is None
    ended(upcoming)
    made = order._orders[PLAN.digest(), 6]
    assert order.of(PLAN, 6, None) is made
    assert np.array_equal(made, PLAN.order(6))
    del made, upcoming
    gc.collect()
    assert (PLAN.digest(), 6) not in order._orders


@pytest.mark.parametrize("case", ["small", "sequential", "last epoch", "worker"])
def test_no_order_is_made_ahead_where_it_would_not_pay(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(order, "AHEAD_ROWS", PLAN.n + (case == "small"))
    plan = Plan("sequential", PLAN.n) if case == "sequential" else PLAN
    upcoming = order.Upcoming(plan, limits.EPOCH if case == "last epoch" else 6, "", lasts=case != "worker")
    ended(upcoming)
    assert upcoming._order is None


def test_a_worker_makes_ahead_what_is_a_file_for_all(tmp_path: Path) -> None:
    upcoming = order.Upcoming(PLAN, 6, str(tmp_path), shared_rows=1, lasts=False)
    ended(upcoming)
    assert np.array_equal(np.load(tmp_path / f"{DIGITS}-6.npy"), PLAN.order(6))


def test_a_forked_child_makes_orders_though_another_thread_was_at_it() -> None:
    with order._making:
        pid = os.fork()
        if pid == 0:
            made = order.of(PLAN, 8, None)
            os._exit(0 if np.array_equal(made, PLAN.order(8)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_process_has_the_same_order() -> None:
    code = "from dataserve.protocol.plan import Plan; print(*Plan('shuffled', 1000, 7).order(5)[:20])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    made = order.of(PLAN, 5, None)
    assert made is not None
    assert ended.stdout.split() == [str(row) for row in made[:20]]
