"""server/ahead.py: what the thread brings into memory, what it leaves alone, and that nobody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.protocol.messages import Describe, Described
from dataserve.protocol.partition import Partition
from dataserve.protocol.plan import Plan
from dataserve.server import transport
from dataserve.server.ahead import Ahead, Scene
from dataserve.server.columns import Stores
from dataserve.server.pages import Pages
from dataserve.server.readahead import Reading

from .cold import ROWS, big_store, consumer, drop, rows_in_memory
from .daemons import LIMIT_S, Daemon, daemon, until
from .stores import write_store

GIB = 1 << 30
PLAN = Plan("shuffled", ROWS, 3)
BATCH = 4
AHEAD = 16 * BATCH  # AHEAD_BATCHES, for a consumer whose rate is not known


@contextmanager
def ahead(available: int = 64 * GIB) -> Iterator[Ahead]:
    """The thread alone; it ends with the block."""
    made = Ahead("/nowhere", lambda: available)
    made.start()
    try:
        yield made
    finally:
        made.close()
        assert "dataserve-ahead" not in {thread.name for thread in threading.enumerate()}


def reading(folder: Path, **changes: Any) -> Reading:
    made = Reading(1, str(folder), PLAN.to_map(), PLAN.digest(), 0, Partition(ROWS, BATCH), 0, 0, 1, 0, 0, None)
    return made._replace(**changes)


def scene(folder: Path, **changes: Any) -> Scene:
    return Scene([reading(folder, **changes)], frozenset([str(folder)]))


def order(epoch: int = 0) -> np.ndarray[Any, Any]:
    found = PLAN.order(epoch)
    assert found is not None
    return found


def await_rows(folder: Path, rows: np.ndarray[Any, Any]) -> None:
    """Until all of those rows are in memory."""

    def there() -> bool:
        return bool((rows_in_memory(folder / "image.npy")[rows] == 1).all())

    until(there, "the rows ahead in memory")


# --- a real daemon --------------------------------------------------------------------------------------------------


def described(serving: Daemon) -> dict[str, Any]:
    """The data set's row, once it was seen how much of it is in memory."""

    def row() -> dict[str, Any] | None:
        status = serving.status()
        found: dict[str, Any] | None = status["datasets"][0] if status else None
        return found if found and found["resident"] is not None else None

    found: dict[str, Any] = until(row, "a look at the memory")
    return found


def test_the_daemon_fetches_what_a_paused_job_reads_next_and_nothing_far_away(isolated: Path) -> None:
    folder = big_store(isolated / "store")
    with daemon(f"store:{folder}", "--name", "digits") as serving:
        row = described(serving)
        drop(folder)  # what opening and checking it has brought in
        with consumer(serving.address, row, PLAN, BATCH) as job:
            await_rows(folder, order()[:AHEAD])
            near, far = rows_in_memory(folder / "image.npy"), order()[AHEAD:]
            assert near[far].sum() < 1, "rows that are not due, but for a page at the edge"
            job.done(200)
            await_rows(folder, order()[200 : 200 + AHEAD])
            assert rows_in_memory(folder / "image.npy")[order()[200 + AHEAD :]].sum() < 1
        until(lambda: 0 < described(serving)["resident"] < 1, "the same in the status")


def test_a_disk_that_stalls_delays_no_reply_and_not_the_end(isolated: Path) -> None:
    folder = big_store(isolated / "store")
    code = (
        "import sys, threading; from dataserve.server import cli, pages\n"
        "def stall(*_): open('stalled', 'w').close(); threading.Event().wait(600)\n"
        "pages.Pages.advise = stall\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    words = [sys.executable, "-P", "-c", code, "start", f"store:{folder}", "--name", "digits"]
    address = os.environ["DATASERVE_ADDRESS"]
    with subprocess.Popen(words, cwd=isolated, stdout=subprocess.DEVNULL) as process:
        try:
            row = until(lambda: _row(address), "a served data set")
            with consumer(address, row, PLAN, BATCH) as job:
                until((isolated / "stalled").exists, "a stall")
                began = time.monotonic()
                for position in range(0, 200, 4):
                    job.done(position)
                    assert isinstance(transport.ask([address], Describe("digits"), 5.0), Described)
                assert time.monotonic() - began < 10, "100 answers, of less than a millisecond each"
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


def _row(address: str) -> dict[str, Any] | None:
    try:
        found = transport.ask([address], Describe("digits"), 1.0)
    except Exception:  # noqa: BLE001 - it is not there yet
        return None
    return {"name": "digits", "id": found.store_id} if isinstance(found, Described) else None


# --- the thread -----------------------------------------------------------------------------------------------------


def test_what_is_in_memory_costs_no_call_a_row(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = big_store(isolated / "store")
    (folder / "image.npy").read_bytes()
    asked: list[int] = []
    monkeypatch.setattr(Pages, "advise", lambda _self, offset, _length: asked.append(offset))
    with ahead() as thread:
        thread.follow(scene(folder))
        until(lambda: thread.resident, "a look")
        assert thread.resident == {str(folder): 1.0}
        assert not thread.wants, "nobody needs to say who reads what"
        for position in range(0, ROWS, BATCH):
            thread.follow(scene(folder, position=position, samples_per_s=1e6))
        until(thread._wake.empty, "the last scene")
    assert asked == []


def test_near_the_end_of_an_epoch_the_next_one_is_fetched(isolated: Path) -> None:
    folder = big_store(isolated / "store")
    with ahead() as thread:
        thread.follow(scene(folder, position=ROWS - BATCH))
        await_rows(folder, order(1)[: AHEAD - BATCH])
        assert rows_in_memory(folder / "image.npy")[order()[:100]].mean() < 0.9


def test_it_never_goes_further_than_a_part_of_the_memory_there_is(isolated: Path) -> None:
    folder = big_store(isolated / "store")
    with ahead(available=8 * 10 * 1_000_000) as thread:  # 10 MB: 64 rows, 16 batches, of 154,624 bytes with their edges
        thread.follow(scene(folder, samples_per_s=1e6))
        await_rows(folder, order()[: 16 * BATCH])
        thread.follow(scene(folder, samples_per_s=1e6))
        until(thread._wake.empty, "another round")
    assert rows_in_memory(folder / "image.npy")[order()[16 * BATCH :]].sum() < 1


def test_what_was_asked_for_is_not_asked_for_again(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = big_store(isolated / "store")
    asked: list[int] = []
    monkeypatch.setattr(Pages, "advise", lambda _self, offset, _length: asked.append(offset))
    with ahead() as thread:
        for position in (0, 0, 8, 8):
            thread.follow(scene(folder, position=position))
            until(thread._wake.empty, "a round")
    assert len(asked) == len(set(asked)) > 0


def test_rows_of_several_lengths_are_found_through_their_offsets(isolated: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 255, int(length), np.uint8) for length in rng.integers(0, 200_000, 200)]
    folder, _ = write_store(isolated / "store", {}, ragged={"tokens": texts})
    os.sync()
    drop(folder)
    stores = Stores()
    stores.keep({str(folder)})
    try:
        stores.look(0)
        (column,) = stores.cold(str(folder))
        rows = np.array([3, 150, 7])
        column.ask(rows, joins=False)
        ends = np.cumsum([0, *map(len, texts)])
        pages = sorted(
            {at for row in rows for at in range((4096 + ends[row]) // 4096, -(-(4096 + ends[row + 1]) // 4096))}
        )
        until(lambda: column.values.resident(pages) == len(pages), "the pages of three rows")
        assert column.values.residency().sum() < len(pages) + 16
    finally:
        stores.keep(set())


def test_a_plan_whose_list_only_the_clients_have_is_left_alone(isolated: Path) -> None:
    folder = big_store(isolated / "store")
    fields = {"kind": "something", "n": ROWS, "seed": 1}
    with ahead() as thread:
        thread.follow(scene(folder, plan=fields, digest="0" * 64))
        until(lambda: thread.resident, "a look")
        thread.follow(scene(folder, plan=fields, digest="0" * 64))
        until(thread._wake.empty, "another round")
        assert thread.said.empty()
    assert rows_in_memory(folder / "image.npy").sum() < 1


def test_a_fault_is_told_once_and_ends_nothing(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = big_store(isolated / "store")
    rounds: list[int] = []

    def broken(_self: Stores, turn: int) -> Any:
        rounds.append(turn)
        raise RuntimeError("a bug")

    monkeypatch.setattr(Stores, "look", broken)
    with ahead() as thread:
        for number in range(3):
            thread.follow(scene(folder))
            until(lambda number=number: len(rounds) > number, "a round")  # type: ignore[misc]
    assert thread.said.get_nowait() == "read-ahead: RuntimeError: a bug"
    assert thread.said.empty()


def test_a_store_that_cannot_be_opened_is_told_and_the_others_are_fetched(isolated: Path) -> None:
    folder = big_store(isolated / "store")
    with ahead() as thread:
        thread.follow(Scene([reading(folder)], frozenset([str(folder), "/not/there"])))
        await_rows(folder, order()[:AHEAD])
        assert "/not/there" in thread.said.get(timeout=LIMIT_S)
