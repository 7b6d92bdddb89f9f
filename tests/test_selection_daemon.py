"""Parts and weights against the real daemon: folds side by side, resumed elsewhere, and the same in every process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.client import Balanced, Blocks, Fold, ServedDataset
from dataserve.protocol.errors import UserError
from dataserve.protocol.folds import fold_of_rows

from . import daemons
from .daemons import Daemon
from .stores import write_store

N = 997
CLASSES = np.arange(N) ** 2 % 7
SCORE = np.random.default_rng(5).random(N)
FOLDS = 4


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("parts"), {"row": np.arange(N), "label": CLASSES, "score": SCORE})[0]


@pytest.fixture
def daemon(sealed: Path, isolated: Path) -> Iterator[Daemon]:
    with daemons.daemon(f"store:{sealed}", "--name", "digits") as serving:
        yield serving


def served(**options: Any) -> ServedDataset:
    return ServedDataset("digits", **{"batch_size": 8, "columns": "row", **options})


def rows(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch]


def held_out(k: int) -> set[int]:
    return set(np.flatnonzero(fold_of_rows(N, FOLDS, 0, CLASSES) == k).tolist())


def part(k: int, **options: Any) -> ServedDataset:
    return served(job="folds", subset=Fold(k, of=FOLDS, by="label", part="held_out"), **options)


def test_folds_of_one_job_in_turn_in_one_process_are_exact_and_disjoint(daemon: Daemon) -> None:
    parts = [part(k) for k in range(FOLDS)]
    for epoch in range(2):
        loops = [iter(one) for one in parts]
        given: list[list[int]] = [[] for _ in parts]
        for turn in zip_longest(*loops):
            for found, batch in zip(given, turn, strict=True):
                found.extend(() if batch is None else batch.tolist())
        for k, found in enumerate(given):
            assert found == parts[k].plan.rows(epoch, 0, parts[k].samples).tolist()
            assert set(found) == held_out(k)
            assert len(found) == len(held_out(k))
    status = daemon.await_answer()
    shown = [held for job in status["jobs"] if job["job"] == "folds" for held in job["consumers"]]
    assert sorted(held["position"] for held in shown) == sorted(len(held_out(k)) for k in range(FOLDS))
    assert not any(held["alone"] for held in shown)


def test_ranks_of_two_folds_of_one_job_are_in_nobodys_way(daemon: Daemon) -> None:
    ranks = {
        (k, rank): part(k, rank=rank, world_size=2, last="short", batch_size=8 + k) for k in (0, 1) for rank in (0, 1)
    }
    loops = {where: iter(one) for where, one in ranks.items()}
    given = {where: rows(loop) for where, loop in loops.items()}
    for k in (0, 1):
        assert sorted(given[k, 0] + given[k, 1]) == sorted(held_out(k))


RESUMED = """
import json, pickle, sys
from dataserve.client import ServedDataset
for number, (options, state) in enumerate(pickle.loads(sys.stdin.buffer.read())):  # ranks share a part, each part is a job
    train = ServedDataset("digits", columns="row", job=f"resumed-{number}", info=True, last="short", **options)
    train.load_state_dict(state)
    print(json.dumps([[info.start, rows.tolist()] for rows, info in train]), flush=True)
"""

PARTS: list[dict[str, Any]] = [
    {"subset": Fold(1, of=FOLDS, by="label")},
    {"subset": Fold(1, of=FOLDS, by="label"), "shuffle": Blocks(16, 3)},
    {"weights": Balanced("label"), "samples": 700},
]


def test_the_rest_of_an_epoch_follows_in_other_processes_on_another_world_and_batch_size(daemon: Daemon) -> None:
    trains = [served(job="first", seed=7, batch_size=13, **one) for one in PARTS]
    given = []
    for train in trains:
        train.set_epoch(3)
        given.append(rows(islice(train, 21)))
    told = [{**one, "seed": 7, "batch_size": 10, "world_size": 2} for one in PARTS]
    ranks = []
    for rank in range(2):
        words = pickle.dumps(
            [({**one, "rank": rank}, train.state_dict()) for one, train in zip(told, trains, strict=True)]
        )
        ranks.append(subprocess.Popen([sys.executable, "-c", RESUMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert ranks[-1].stdin is not None
        ranks[-1].stdin.write(words)
        ranks[-1].stdin.close()
        ranks[-1].stdin = None  # communicate() does not look for it then
    said = [rank.communicate(timeout=daemons.LIMIT_S)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for number, train in enumerate(trains):
        rest = sorted(batch for lines in said for batch in json.loads(lines[number]))
        assert (
            given[number] + [row for _, found in rest for row in found] == train.plan.rows(3, 0, train.samples).tolist()
        )


WEIGHTED = """
import json, sys
from dataserve.client import Balanced, ServedDataset
for part in ({"weights": Balanced("label")}, {"weights": "score", "samples": 300, "replacement": False}):
    train = ServedDataset("digits", batch_size=32, columns="row", seed=2, info=True, **part)
    for _ in range(2):
        print(json.dumps([[*rows.tolist(), *info.row_seeds.tolist()] for rows, info in train]))
"""


def test_weighted_epochs_and_their_row_seeds_are_the_same_in_every_process(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", WEIGHTED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=daemons.LIMIT_S, check=True)
    exec(compile(WEIGHTED, "weighted", "exec"), {})  # noqa: S102 - our own words
    assert ended.stdout == capsys.readouterr().out
    epochs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(epochs) == 4
    assert epochs[0] != epochs[1]
    assert epochs[2] != epochs[3]


def test_a_state_of_another_part_is_refused_with_both_ids_and_changes_nothing(daemon: Daemon) -> None:
    one, other = part(0), part(1)
    next(iter(one))
    with pytest.raises(UserError) as caught:
        other.load_state_dict(one.state_dict())
    assert caught.value.code == "state_mismatch"
    for plan in (one.plan, other.plan):
        assert plan.to_map()["members"]["sha256"] in str(caught.value)
    assert set(rows(other)) == held_out(1)
