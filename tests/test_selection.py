"""client/selection: options to plans over a store on disk, each mistake a sentence; and what a loop is given by each kind of plan."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dataserve.client import Balanced, Blocks, Fold, Info, ServedDataset, order, selection
from dataserve.client.mapping import Store
from dataserve.protocol import draws, manifest
from dataserve.protocol.blocks import BlocksPlan
from dataserve.protocol.errors import UserError
from dataserve.protocol.folds import fold_of_rows
from dataserve.protocol.kinds import plan_of
from dataserve.protocol.messages import Open
from dataserve.protocol.plan import Plan
from dataserve.protocol.subset import SubsetPlan
from dataserve.protocol.weighted import WeightedPlan, quantised

from .fakes import FakeDaemon, fake_daemon
from .stores import write_store

N = 101
ROW = np.arange(N)
CLASSES = ROW**2 % 7
SCORE = np.random.default_rng(4).random(N).astype(np.float32)
COLUMNS = {
    "row": ROW,
    "label": CLASSES.astype(np.int16),
    "score": SCORE,
    "half": (SCORE.view(np.uint32) >> 16).astype(np.uint16),
    "flag": ROW % 3 == 0,
    "image": np.zeros((N, 1, 2, 2), np.uint8),
}
TEXTS = ["x" * (row % 9) for row in range(N)]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, manifest.Manifest]:
    root = tmp_path_factory.mktemp("selected")
    return write_store(root, COLUMNS, bfloat16=("half",), ragged={"text": TEXTS})


@pytest.fixture
def store(sealed: Any) -> Iterator[Store]:
    opened = Store(str(sealed[0]), sealed[1].id)
    yield opened
    opened._columns.clear()  # its maps are gone before descriptors are counted
    opened._ragged.clear()


@pytest.fixture
def daemon(sealed: Any, isolated: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(*sealed) as serving:
        yield serving


def made(store: Store, seed: int = 3, **options: Any) -> Plan:
    chosen = {"shuffle": True, "subset": None, "weights": None, "replacement": True, "samples": None, **options}
    return selection.plan(selection.check(**chosen), store, seed)


def served(**options: Any) -> ServedDataset:
    return ServedDataset("digits", **{"batch_size": 8, "columns": "row", **options})


def members(plan: Plan) -> list[int]:
    """The rows of an epoch, rising."""
    return sorted(plan.rows(0, 0, plan.n).tolist())


# --- options to plans -------------------------------------------------------------------------------------------------


def test_without_a_part_the_plans_are_what_they_were(store: Store) -> None:
    assert made(store) == Plan("shuffled", N, 3)
    assert made(store, shuffle=False) == Plan("sequential", N)


@pytest.mark.parametrize(
    ("subset", "rows"),
    [
        (slice(10, 50), range(10, 50)),
        (slice(None, None, 7), range(0, N, 7)),
        (slice(-5, None), range(96, N)),
        (slice(90, 500), range(90, N)),
        (slice(20, 10, -3), [20, 17, 14, 11]),
        (range(5, 60, 5), range(5, 60, 5)),
        (range(60, 5, -5), list(range(60, 5, -5))),
        ([4, 2, 100], [4, 2, 100]),
        ((0,), [0]),
        (np.array([7, 3], np.uint8), [7, 3]),
        (torch.tensor([7, 3]), [7, 3]),
        (ROW % 2 == 0, range(0, N, 2)),
        (torch.from_numpy(ROW % 2 == 0), range(0, N, 2)),
        ([row % 2 == 0 for row in range(N)], range(0, N, 2)),
        (lambda columns: columns["label"] == 2, [row for row in range(N) if CLASSES[row] == 2]),
        (lambda columns: np.flatnonzero(columns["score"] > 0.5), np.flatnonzero(SCORE > 0.5)),
        (lambda columns: columns.lengths("text") > 6, [row for row in range(N) if row % 9 > 6]),
        (lambda columns: columns["half"] >= 0.5, np.flatnonzero(SCORE >= 0.5)),
        (lambda columns: slice(len(columns)), range(6)),
        (lambda columns: Fold(0, of=4), np.flatnonzero(fold_of_rows(N, 4, 0) != 0)),
    ],
)
def test_a_subset_is_those_rows_in_that_order(store: Store, subset: Any, rows: Any) -> None:
    plan = made(store, subset=subset, shuffle=False)
    assert plan.rows(0, 0, plan.n).tolist() == list(rows)
    assert plan.store_rows == N
    assert made(store, subset=subset) == SubsetPlan(N, plan.members, Plan("shuffled", plan.n, 3))  # type: ignore[attr-defined]


def test_a_subset_is_kept_as_it_was_when_it_was_given(store: Store) -> None:
    rows = np.array([5, 6, 7], np.uint32)
    plan = made(store, subset=rows, shuffle=False)
    rows[:] = 0
    assert members(plan) == [5, 6, 7]


@pytest.mark.parametrize("by", [None, "label", "flag"])
def test_folds_are_the_published_ones_and_divide_the_store(store: Store, by: str | None) -> None:
    expected = fold_of_rows(N, 5, 9, None if by is None else COLUMNS[by])
    held_out = [members(made(store, subset=Fold(k, of=5, by=by, part="held_out", seed=9))) for k in range(5)]
    assert held_out == [np.flatnonzero(expected == k).tolist() for k in range(5)]
    for k in range(5):
        assert members(made(store, subset=Fold(k, of=5, by=by, seed=9))) == sorted(set(range(N)) - set(held_out[k]))


@pytest.mark.parametrize(
    ("weights", "numbers"),
    [
        (SCORE, SCORE),
        (SCORE.tolist(), SCORE),
        (torch.from_numpy(SCORE), SCORE),
        (ROW % 2 == 0, ROW % 2 == 0),
        ("score", SCORE),
        ("label", CLASSES),
        ("flag", ROW % 3 == 0),
        (Balanced("label"), 1 / np.bincount(CLASSES)[CLASSES]),
    ],
)
def test_weights_are_those_numbers(store: Store, weights: Any, numbers: Any) -> None:
    integers = quantised(np.asarray(numbers, np.float64))
    assert made(store, weights=weights) == WeightedPlan.of(integers, N, 3, replacement=True)
    assert made(store, weights=weights, samples=7).n == 7
    assert made(store, weights=weights, samples=12, replacement=False) == WeightedPlan.of(
        integers, 12, 3, replacement=False
    )


@pytest.mark.parametrize("subset", [range(20, 60), np.arange(59, 19, -1), slice(20, 60)])
def test_weights_of_a_part_are_0_outside_of_it(store: Store, subset: Any) -> None:
    inside = (ROW >= 20) & (ROW < 60)
    assert made(store, subset=subset, weights="score") == WeightedPlan.of(
        quantised(np.where(inside, SCORE, 0)), 40, 3, replacement=True
    )
    counts = np.bincount(CLASSES[inside], minlength=7)
    balanced = np.where(inside, 1 / np.maximum(counts, 1)[CLASSES], 0)
    assert made(store, subset=subset, weights=Balanced("label")) == WeightedPlan.of(
        quantised(balanced), 40, 3, replacement=True
    )


def test_balanced_classes_come_equally_often(store: Store) -> None:
    rows = made(store, weights=Balanced("flag"), samples=30_000).rows(0, 0, 30_000)
    assert 0.48 < COLUMNS["flag"][rows].mean() < 0.52  # a third of the rows


def test_blocks_are_as_long_as_the_stores_chunks_unless_told(store: Store, sealed: Any) -> None:
    assert made(store, shuffle=Blocks()) == BlocksPlan(N, 3, block_rows=N, window_blocks=selection.WINDOW_BLOCKS)
    assert sealed[1].chunk_rows > N
    assert made(store, shuffle=Blocks(4, 2)) == BlocksPlan(N, 3, block_rows=4, window_blocks=2)
    part = made(store, shuffle=Blocks(4, 2), subset=range(50))
    assert part == SubsetPlan.of(N, range(50), BlocksPlan(50, 3, block_rows=4, window_blocks=2))


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"shuffle": None}, "bad_option", "neither True nor False nor Blocks"),
        ({"shuffle": 1}, "bad_option", "neither True nor False nor Blocks"),
        ({"samples": 5}, "bad_option", "samples=5 says .* there are no weights"),
        ({"replacement": False}, "bad_option", "replacement=False says .* there are no weights"),
        ({"replacement": 0, "weights": "score"}, "bad_option", "replacement=0"),
        ({"samples": 0, "weights": "score"}, "bad_option", "samples is 0"),
        ({"samples": 2.0, "weights": "score"}, "bad_option", "no integer"),
        ({"replacement": False, "weights": "score"}, "bad_option", "Give samples="),
        (
            {"replacement": False, "weights": "flag", "samples": 35},
            "bad_option",
            "samples=35, and 34 rows have a weight",
        ),
        ({"shuffle": False, "weights": "score"}, "bad_option", "shuffle=False contradicts weights"),
        ({"shuffle": Blocks(), "weights": "score"}, "bad_option", "contradicts weights"),
        ({"subset": []}, "bad_option", r"subset \[\] has none of the 101 rows"),
        ({"subset": slice(7, 7)}, "bad_option", "has none of the 101 rows"),
        ({"subset": slice(1.5)}, "bad_option", "slice indices must be integers"),
        ({"subset": ROW > N}, "bad_option", "has none"),
        ({"subset": ROW[1:] > 3}, "bad_option", "mask in subset= has 100 values, the store 101 rows"),
        ({"subset": [3, 101, -1]}, "bad_option", r"names the row 101, and 2 in all that are not in \[0, 101\)"),
        ({"subset": [-1]}, "bad_option", "not from behind"),
        ({"subset": range(90, 102)}, "bad_option", r"the row 101, and 1 in all"),
        ({"subset": [9, 3, 9, 3, 3]}, "bad_option", "the row 3 more than once; 3 of its 5 are repeats. .*weights="),
        ({"subset": [1.0, 2.0]}, "bad_option", "are float64, neither row numbers nor a mask"),
        ({"subset": ["row"]}, "bad_option", "neither row numbers nor a mask"),
        ({"subset": "label"}, "bad_option", "has 0 dimensions"),
        ({"subset": 5}, "bad_option", "has 0 dimensions"),
        ({"subset": {1, 2}}, "bad_option", "has 0 dimensions"),
        ({"subset": [[1, 2]]}, "bad_option", "has 2 dimensions"),
        ({"subset": [[1], [2, 3]]}, "bad_option", "is no array"),
        ({"subset": torch.zeros(2, device="meta")}, "bad_option", "is no array"),
        ({"subset": lambda columns: None}, "bad_option", "0 dimensions"),
        ({"subset": lambda columns: columns["lable"]}, "unknown_column", "There are: row, label, score"),
        ({"subset": lambda columns: columns["text"]}, "bad_option", r"columns\.lengths\('text'\)"),
        ({"subset": lambda columns: columns.lengths("row")}, "bad_option", "all of one length"),
        (
            {"subset": Fold(0, of=3, by="score")},
            "bad_option",
            "names the column 'score', .* an integer or a bool a row",
        ),
        ({"subset": Fold(0, of=3, by="image")}, "bad_option", "names the column 'image'"),
        ({"subset": Fold(0, of=3, by="text")}, "bad_option", "names the column 'text', whose rows are ragged"),
        ({"subset": Fold(0, of=3, by="lable")}, "unknown_column", "There are"),
        ({"subset": Fold(101, of=102, part="held_out")}, "bad_option", "has none of the 101 rows"),
        ({"weights": "image"}, "bad_option", "whose rows are fixed uint8 .* a number a row"),
        ({"weights": "text"}, "bad_option", "names the column 'text'"),
        ({"weights": Balanced("score")}, "bad_option", "an integer or a bool a row"),
        ({"weights": [1.0, 2.0]}, "bad_option", "has 2 numbers, the store 101 rows"),
        ({"weights": SCORE - 1}, "bad_option", "101 of 101 are no weights"),
        ({"weights": SCORE * 0}, "bad_option", "All 101 weights are 0"),
        ({"weights": SCORE * 1j}, "bad_option", "are complex64, which are no numbers"),
        ({"weights": "label", "subset": CLASSES == 0}, "bad_option", "All 101 weights are 0"),
        ({"weights": 3}, "bad_option", "has 0 dimensions"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(store: Store, options: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        made(store, **options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Fold(5, of=5), "k is 5; it must lie in"),
        (lambda: Fold(-1, of=5), "k is -1"),
        (lambda: Fold(0, of=1), "of is 1"),
        (lambda: Fold(0, of=5, part="test"), "Known: train, held_out"),
        (lambda: Fold(0, of=5, seed=-1), "seed is -1"),
        (lambda: Blocks(0), "block_rows is 0"),
        (lambda: Blocks(window_blocks=0), "window_blocks is 0"),
    ],
)
def test_a_mistake_in_a_fold_or_blocks_is_told_where_it_is_made(make: Any, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        make()
    assert caught.value.code == "bad_option"


def test_an_error_of_a_predicate_comes_out_with_where_it_was(store: Store) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        made(store, subset=lambda columns: 1 // 0)
    assert caught.value.__notes__ == ["in the predicate that was given as subset="]


def test_a_predicate_sees_the_columns_and_cannot_write(store: Store) -> None:
    columns = selection.Columns(store)
    assert sorted(columns) == sorted(COLUMNS)
    assert len(columns) == 6
    assert "label" in columns
    assert "text" not in columns
    assert columns["half"].dtype == np.float32
    assert columns.lengths("text").tolist() == list(map(len, TEXTS))
    with pytest.raises(ValueError, match="read-only"):
        columns["label"][0] = 1


# --- what a loop is given ---------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "slice": {"subset": slice(10, 90)},
    "slice in order": {"subset": slice(10, 90), "shuffle": False},
    "rows": {"subset": np.flatnonzero(CLASSES < 3)},
    "rows in order": {"subset": np.flatnonzero(CLASSES < 3)[::-1], "shuffle": False},
    "predicate": {"subset": lambda columns: columns["flag"]},
    "fold": {"subset": Fold(1, of=4, by="label")},
    "blocks": {"shuffle": Blocks(5, 3)},
    "blocks of a part": {"shuffle": Blocks(5, 3), "subset": range(1, N, 2)},
    "weighted": {"weights": Balanced("label"), "samples": 150},
    "without replacement": {"weights": "score", "samples": 60, "replacement": False},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_loop_is_given_the_plans_rows_epoch_by_epoch(daemon: FakeDaemon, store: Store, kind: str) -> None:
    plan = made(store, seed=5, **KINDS[kind])
    train = served(seed=5, info=True, **KINDS[kind])
    assert train.plan == plan
    assert (train.rows, train.samples, len(train)) == (N, plan.n, -(-plan.n // 8))
    for epoch in range(2):
        expected = plan.rows(epoch, 0, plan.n)
        batches = list(train)
        assert len(batches) == len(train)
        assert torch.cat([rows for rows, _ in batches]).tolist() == expected.tolist()
        assert torch.cat([info.rows for _, info in batches]).tolist() == expected.tolist()
        seeds = torch.cat([info.row_seeds for _, info in batches])
        assert seeds.tolist() == plan.seeds(5, epoch, 0, expected).tolist()
    (first, *_) = daemon.of(Open)
    assert isinstance(first, Open)
    assert plan_of(first.plan) == plan
    assert len(pickle.dumps(first.plan)) < 1000  # never a list of rows


@kinds
@pytest.mark.parametrize("last", ["even", "short", "drop"])
def test_ranks_share_it_out(daemon: FakeDaemon, store: Store, kind: str, last: str) -> None:
    plan = made(store, **KINDS[kind])
    given: Counter[int] = Counter()
    counts = []
    for rank in range(3):
        info: list[Info] = [
            info for _, info in served(seed=3, job="j", rank=rank, world_size=3, last=last, info=True, **KINDS[kind])
        ]
        counts.append(len(info))
        for item in info:
            given.update(item.rows[item.valid].tolist())
    expected = Counter(plan.rows(0, 0, plan.n if last != "drop" else plan.n // 24 * 24).tolist())
    assert given == expected
    assert last == "short" or len(set(counts)) == 1


@kinds
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_rest_follows_on_another_world_and_batch_size(
    daemon: FakeDaemon, store: Store, kind: str, data: st.DataObject
) -> None:
    plan = made(store, **KINDS[kind])
    train = served(seed=3, batch_size=data.draw(st.integers(1, 20)), job="first", **KINDS[kind])
    train.set_epoch(2)
    stop = data.draw(st.integers(1, len(train)))
    given = [row for rows in itertools.islice(train, stop) for row in rows.tolist()]
    state = train.state_dict()
    world, batch_size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    by_position = {}
    for rank in range(world):
        shape = {"rank": rank, "world_size": world, "batch_size": batch_size, "last": "short", "job": "second"}
        part = served(seed=3, info=True, **shape, **KINDS[kind])
        part.load_state_dict(state)
        for _, info in part:
            if info.epoch == 2:
                by_position |= dict(
                    zip(range(info.start, info.start + len(info.rows)), info.rows.tolist(), strict=True)
                )
    assert given + [by_position[place] for place in sorted(by_position)] == plan.rows(2, 0, plan.n).tolist()


@kinds
def test_a_state_of_another_part_is_refused_with_both(daemon: FakeDaemon, kind: str) -> None:
    state = served(**KINDS[kind]).state_dict()
    with pytest.raises(
        UserError, match=r"The state is of the plan .*, this is .*: the order is another. .* subset and weights"
    ):
        served(subset=[1, 2, 3]).load_state_dict(state)


@kinds
def test_forked_loader_workers_share_it_out(daemon: FakeDaemon, store: Store, kind: str) -> None:
    plan = made(store, **KINDS[kind])
    loader = DataLoader(served(seed=3, **KINDS[kind]), batch_size=None, num_workers=2)
    assert torch.cat(list(loader)).tolist() == plan.rows(0, 0, plan.n).tolist()


SPAWNING = """
import json, torch
from torch.utils.data import DataLoader
from dataserve.client import Balanced, Blocks, ServedDataset

if __name__ == "__main__":
    parts = [
        {"subset": lambda columns: columns["flag"]},
        {"shuffle": Blocks(5, 3), "subset": range(1, 101, 2)},
        {"weights": Balanced("label"), "samples": 150},
    ]
    for part in parts:
        train = ServedDataset("digits", batch_size=8, columns="row", seed=3, **part)
        loader = DataLoader(train, batch_size=None, num_workers=1, multiprocessing_context="spawn")
        print(json.dumps(torch.cat(list(loader)).tolist()))
"""


def test_spawned_loader_workers_have_what_was_looked_up(daemon: FakeDaemon, store: Store, tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)  # a process of its own: multiprocessing's tracker stays with it
    command = [sys.executable, str(tmp_path / "spawning.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    plans = [made(store, **KINDS[kind]) for kind in ("predicate", "blocks of a part", "weighted")]
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [
        plan.rows(0, 0, plan.n).tolist() for plan in plans
    ]


@kinds
def test_it_pickles_with_what_was_looked_up(daemon: FakeDaemon, kind: str) -> None:
    train = served(**KINDS[kind])
    data = pickle.dumps(train)
    again = pickle.loads(data)
    assert again.plan == train.plan
    assert len(data) < 3000
    assert torch.cat(list(again)).tolist() == train.plan.rows(0, 0, train.samples).tolist()


def test_a_predicate_is_called_once(daemon: FakeDaemon) -> None:
    calls = []

    def even(columns: Any) -> Any:
        calls.append(os.getpid())
        return columns["row"] % 2 == 0

    train = served(subset=even)
    for _ in range(2):
        list(train)
    list(pickle.loads(pickle.dumps(train)))
    assert calls == [os.getpid()]


@kinds
def test_large_orders_are_files_by_digest_and_windows_are_none(
    daemon: FakeDaemon, store: Store, kind: str, tmp_path: Path
) -> None:
    plan = made(store, **KINDS[kind])
    found = order.of(plan, 4, str(tmp_path), shared_rows=1)
    assert found is not None
    assert found[0 : plan.n].tolist() == plan.rows(4, 0, plan.n).tolist()
    shared = not (plan.is_fixed or plan.is_windowed)
    assert [path.name for path in tmp_path.iterdir()] == ([f"{plan.digest()[:16]}-4.npy"] if shared else [])


def test_folds_and_validation_of_one_job_live_side_by_side(daemon: FakeDaemon) -> None:
    options: dict[str, Any] = {"job": "j", "rank": 0, "world_size": 1}
    parts = [served(subset=Fold(k, of=3, part=part), **options) for k in range(3) for part in selection.PARTS]
    loops = [iter(part) for part in parts]
    given = [set(itertools.chain.from_iterable(rows.tolist() for rows in loop)) for loop in loops]
    for train, held_out in zip(given[::2], given[1::2], strict=True):
        assert train | held_out == set(range(N))
        assert not train & held_out
    assert len({opened.digest for opened in daemon.of(Open) if isinstance(opened, Open)}) == 6


def test_a_row_that_comes_twice_is_not_augmented_alike(daemon: FakeDaemon) -> None:
    train = served(weights="score", subset=[3, 4], samples=80, info=True)
    infos = [info for _, info in train]
    assert set(torch.cat([info.rows for info in infos]).tolist()) == {3, 4}
    assert len(set(torch.cat([info.row_seeds for info in infos]).tolist())) == 80


def test_its_repr_says_how_long_an_epoch_is(daemon: FakeDaemon) -> None:
    assert "rows=101, samples=40, columns=" in repr(served(subset=slice(40)))


def test_windows_give_any_slice(store: Store) -> None:
    plan = made(store, shuffle=Blocks(4, 3))
    windows = order.of(plan, 1, None)
    assert isinstance(windows, order.Windows)
    expected = plan.rows(1, 0, N).tolist()
    for start, stop in [(0, N), (50, 53), (7, 60), (60, 7 + 60), (3, 3), (N - 1, N), (0, 1)]:
        assert windows[start:stop].tolist() == expected[start:stop]


def test_a_loop_makes_each_window_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(store, shuffle=Blocks(4, 3))
    windows = order.of(plan, 1, None)
    sizes: list[int] = []
    sort = draws.in_key_order
    monkeypatch.setattr(draws, "in_key_order", lambda count, *rest: sizes.append(count) or sort(count, *rest))  # type: ignore[func-returns-value]
    assert windows is not None
    for start in range(0, N, 5):
        windows[start : min(N, start + 5)]
    assert sum(sizes) == N
