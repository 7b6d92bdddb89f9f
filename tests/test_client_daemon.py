"""The client against the real daemon: registration, refusals, and a daemon that is killed and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.client import ServedDataset
from dataserve.protocol import limits
from dataserve.protocol.errors import UserError
from dataserve.protocol.plan import Plan

from . import daemons
from .daemons import Daemon, until
from .stores import write_store

N = 997
WAIT_S = daemons.LIMIT_S


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("real"), {"label": np.arange(N)})[0]


@pytest.fixture
def daemon(sealed: Path, isolated: Path) -> Iterator[Daemon]:
    with daemons.daemon(*source(sealed)) as serving:
        yield serving


def source(sealed: Path) -> tuple[str, ...]:
    return f"store:{sealed}", "--name", "digits"


def jobs(daemon: Daemon) -> dict[str, Any]:
    """What `status` says of each job."""
    status = daemon.status()
    return {} if status is None else {job["job"]: job for job in status["jobs"]}


def served(**options: Any) -> ServedDataset:
    options.setdefault("batch_size", 8)
    return ServedDataset("digits", **options)


def rows(batches: Any) -> list[int]:
    return [int(row) for (labels,) in batches for row in labels]


def sequence(epoch: int, seed: int = 0) -> list[int]:
    order = Plan("shuffled", N, seed).order(epoch)
    assert order is not None
    return [int(row) for row in order]


RANK = """
from dataserve.client import ServedDataset
train = ServedDataset("digits", batch_size=16, job="ranks", last="short")
for _ in range(3):
    print(*(int(row) for (labels,) in train for row in labels))
"""


def test_three_ranks_at_once_share_three_epochs_exactly(daemon: Daemon) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=WAIT_S)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    for epoch in range(3):
        assert Counter(int(word) for lines in said for word in lines[epoch].split()) == Counter(range(N))


def test_two_jobs_at_once_each_get_all_in_their_own_order_and_status_shows_them(daemon: Daemon) -> None:
    orders: dict[int, list[int]] = {}
    loops = {seed: served(job=f"seed-{seed}", seed=seed) for seed in (1, 2)}

    def run(seed: int) -> None:
        orders[seed] = rows(loops[seed])

    threads = [threading.Thread(target=run, args=(seed,)) for seed in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert orders == {1: sequence(0, 1), 2: sequence(0, 2)}
    shown = jobs(daemon)
    assert {name: [(held["position"], held["alone"]) for held in job["consumers"]] for name, job in shown.items()} == {
        "seed-1": [(N, False)],
        "seed-2": [(N, False)],
    }


def test_a_killed_daemon_costs_no_row_and_a_new_one_picks_the_job_up(
    daemon: Daemon, sealed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "SILENT_S", 0.5)
    monkeypatch.setattr(limits, "BEAT_S", 0.2)
    train = served(job="survivor", batch_size=1)
    batches = iter(train)
    given = rows(islice(batches, 100))
    daemon.kill()
    given += rows(islice(batches, 500))
    until(lambda: train._course.epochs.alone, "to be alone")
    given += rows(islice(batches, 50))
    with daemons.daemon(*source(sealed)) as later:
        until(lambda: not train._course.epochs.alone, "to be registered again")
        given += rows(islice(batches, 50))
        until(lambda: jobs(later)["survivor"]["consumers"][0]["position"] == 700, "its place in status")
        assert given + rows(batches) == sequence(0)
        assert rows(train) == sequence(1)
        messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "has not answered" in messages[0]
    assert "answers again" in messages[1]


def test_a_rank_that_another_object_here_holds_is_refused_at_once_and_free_after_it(daemon: Daemon) -> None:
    first = served(job="one")
    next(iter(first))
    second = served(job="one")
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"Another ServedDataset of this process holds rank 0 of the job 'one'"
    ) as caught:
        iter(second)
    assert time.monotonic() - began < 2
    assert caught.value.code == "rank_taken"
    assert second.epoch == 0
    cycle: list[Any] = [first]
    cycle.append(cycle)  # garbage that only the collector finds refuses nobody
    del first, cycle
    assert rows(second) == sequence(0)


def test_ranks_that_disagree_are_refused_with_both_values(daemon: Daemon) -> None:
    first = served(job="two", rank=0, world_size=2)
    next(iter(first))
    with pytest.raises(UserError, match=r"batch_size=9.*batch_size=8") as caught:
        iter(served(job="two", rank=1, world_size=2, batch_size=9))
    assert caught.value.code == "job_mismatch"


def test_an_unknown_data_set_is_refused_with_the_names_there_are(daemon: Daemon) -> None:
    served()  # it is up
    with pytest.raises(UserError, match="digits") as caught:
        ServedDataset("digit", batch_size=8)
    assert caught.value.code == "unknown_dataset"
