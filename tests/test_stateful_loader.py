"""torchdata's `StatefulDataLoader` over a served data set: what follows a state is exactly the rest, batch for batch."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.client import ServedDataset
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.plan import Plan

from .fakes import FakeDaemon, fake_daemon
from .stores import write_store

torchdata = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # torchdata calls it in newer torch
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than a small machine has cores
]

N, B = 100, 8
BATCHES = 13


def slow(*values: Any) -> Any:
    """A case for `scripts/test --all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_store(tmp_path_factory.mktemp("stateful"), {"label": np.arange(N)})


@pytest.fixture
def daemon(sealed: Any, isolated: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(*sealed) as serving:
        yield serving


def served(**options: Any) -> ServedDataset:
    return ServedDataset("digits", **{"batch_size": B, "seed": 5, "columns": "label", **options})


def stateful(train: ServedDataset, workers: int, **options: Any) -> Any:
    return torchdata.StatefulDataLoader(train, batch_size=None, num_workers=workers, **options)


def batches(epoch: int) -> list[list[int]]:
    order = Plan("shuffled", N, 5).order(epoch)
    assert order is not None
    return [[int(row) for row in order[start : start + B]] for start in range(0, N, B)]


def rows(loader: Any, stop: int | None = None) -> list[list[int]]:
    return [[int(row) for row in batch] for batch in itertools.islice(loader, stop)]


NEW_PROCESS = """
import pickle, sys
from torchdata.stateful_dataloader import StatefulDataLoader
from dataserve.client import ServedDataset
saved, workers = pickle.load(sys.stdin.buffer)
loader = StatefulDataLoader(ServedDataset("digits", batch_size=8, seed=5, columns="label"), None, num_workers=workers)
loader.load_state_dict(saved)
print([[[int(row) for row in batch] for batch in loader] for _ in range(3)])
"""


@pytest.mark.parametrize(("workers", "epochs", "given"), [slow(0, 0, 5), (0, 1, 13), (2, 0, 5), slow(2, 1, 13)])
def test_a_new_process_goes_on_with_exactly_the_rest(daemon: FakeDaemon, workers: int, epochs: int, given: int) -> None:
    loader = stateful(served(), workers)
    for _ in range(epochs):
        list(loader)
    assert rows(loader, given) == batches(epochs)[:given]
    saved = pickle.dumps((loader.state_dict(), workers))
    ended = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS], input=saved, stdout=subprocess.PIPE, timeout=100, check=True
    )
    drawn, rest = json.loads(ended.stdout), batches(epochs)[given:]
    # A loader with workers that was saved behind its last batch, but before it said so, says so first: an empty epoch.
    empty = [[]] if workers and not rest else []
    assert drawn == [*empty, *filter(None, [rest, batches(epochs + 1), batches(epochs + 2), batches(epochs + 3)])][:3]


@pytest.mark.parametrize("workers", [0, slow(1), 2, slow(4)])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_state_at_any_batch_is_exact(daemon: FakeDaemon, workers: int, persistent: bool) -> None:
    keep = {"persistent_workers": persistent and workers > 0}
    loader = stateful(served(), workers, **keep)
    states = [loader.state_dict()]
    for batch in loader:
        assert [int(row) for row in batch] == batches(0)[len(states) - 1]
        states.append(loader.state_dict())
    assert len(states) == BATCHES + 1
    del loader
    for given in (0, 6, 12, 13):
        later = stateful(served(), workers, **keep)
        later.load_state_dict(pickle.loads(pickle.dumps(states[given])))
        if given < BATCHES or workers:
            assert rows(later) == batches(0)[given:]
        assert rows(later) == batches(1)
        assert rows(later) == batches(2)
        del later


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_behind_a_finished_epoch_goes_on_with_the_next_one_at_once(daemon: FakeDaemon, workers: int) -> None:
    loader = stateful(served(), workers)
    list(loader)
    later = stateful(served(), workers)
    later.load_state_dict(loader.state_dict())
    assert rows(later) == batches(1)
    assert rows(later) == batches(2)


@pytest.mark.parametrize("workers", [0, 2, slow(3)])
def test_several_states_in_one_epoch_each_loaded_into_the_loader_before(daemon: FakeDaemon, workers: int) -> None:
    train = served()
    given: list[list[int]] = []
    saved: Any = None
    for step in (3, 1, 5, 2):
        loader = stateful(train if workers else served(), workers)
        if saved is not None:
            loader.load_state_dict(saved)
        given += rows(loader, step)
        saved = loader.state_dict()
        del loader
    last = stateful(train, workers)
    last.load_state_dict(saved)
    assert given + rows(last) == batches(0)
    last.load_state_dict(saved)  # an older state, once more, in the same loader
    assert rows(last) == batches(0)[11:]
    assert rows(last) == batches(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_between_two_snapshots_is_exact_too(daemon: FakeDaemon, workers: int) -> None:
    loader = stateful(served(), workers, snapshot_every_n_steps=4)
    rows(loader, 6)
    later = stateful(served(), workers, snapshot_every_n_steps=4)
    later.load_state_dict(loader.state_dict())
    assert rows(later) == batches(0)[6:]


def test_workers_that_go_on_from_a_plain_state_keep_their_own_from_there(daemon: FakeDaemon) -> None:
    train = served()
    rows(train, 4)
    saved = train.state_dict()
    loader = stateful(train, 2)
    train.load_state_dict(saved)
    assert rows(loader, 3) == batches(0)[4:7]
    later = stateful(served(batch_size=B), 2)
    later.load_state_dict(loader.state_dict())
    assert rows(later) == batches(0)[7:]


def refusal(action: Callable[[], Any]) -> DataserveError:
    """What the action raises. Without its traceback, which would keep a loader's workers for the collector."""
    try:
        action()
    except DataserveError as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


def test_the_main_process_says_that_it_does_not_know_where_resumed_workers_are(daemon: FakeDaemon) -> None:
    loader = stateful(served(), 2)
    rows(loader, 3)
    train = served()
    later = stateful(train, 2)
    later.load_state_dict(loader.state_dict())
    rows(later, 2)
    error = refusal(lambda: train.state_dict(batches=2))
    assert (error.code, "Ask the loader for its state" in str(error)) == ("bad_state", True)
    rows(later, 2)
    assert train.state_dict(batches=2)["position"] == 2 * B


@pytest.mark.parametrize(
    ("options", "workers", "words"),
    [
        ({"batch_size": 4}, 2, "worker {} of 2, 8 rows a batch, world size 1; this is worker {} of 2, 4 rows"),
        ({"seed": 6}, 2, "'seed': 6}}: the order is another"),
        ({}, 1, "worker 0 of 2, 8 rows a batch, world size 1; this is worker 0 of 1, 8 rows"),
    ],
)
def test_another_shape_or_order_is_refused_in_the_loop_with_both(
    daemon: FakeDaemon, options: Any, workers: int, words: str
) -> None:
    loader = stateful(served(), 2)
    rows(loader, 3)
    saved = loader.state_dict()
    del loader
    later = stateful(served(**options), workers)
    later.load_state_dict(saved)
    error = refusal(lambda: next(iter(later)))
    assert error.code == "state_mismatch"
    assert any(words.format(worker, worker) in str(error) for worker in range(2))


def test_a_loader_workers_state_is_refused_in_the_main_process(daemon: FakeDaemon) -> None:
    loader = stateful(served(), 2)
    rows(loader, 3)
    (first, _) = loader.state_dict()["_snapshot"]["_worker_snapshots"].values()
    error = refusal(lambda: served().load_state_dict(first["dataset_state"]))
    assert (error.code, "one loader worker's, of 2" in str(error)) == ("bad_state", True)
