"""client/dataset: what a training loop sees of a served data set, over a real socket."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dataserve.client import Info, ServedDataset, order
from dataserve.protocol import draws, limits
from dataserve.protocol.errors import DataserveError, MachineError, UserError
from dataserve.protocol.messages import Describe, Done, Open
from dataserve.protocol.plan import Plan

from .fakes import FakeDaemon, fake_daemon
from .stores import write_store

N = 101
RNG = np.random.default_rng(2)
IMAGE = RNG.integers(0, 256, (N, 1, 4, 4), dtype=np.uint8)
WAIT_S = 10.0


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    columns = {"image": IMAGE, "label": np.arange(N)}
    return write_store(tmp_path_factory.mktemp("served"), columns, images=("image",), classes=("a", "b"))


@pytest.fixture
def daemon(sealed: Any, isolated: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(*sealed) as serving:
        yield serving


def served(**options: Any) -> ServedDataset:
    options.setdefault("batch_size", 8)
    return ServedDataset("digits", **options)


def labels(batches: Any) -> list[int]:
    """The rows of the batches, in order: label i is row i."""
    return [int(label) for _, batch in batches for label in batch]


def sequence(epoch: int, seed: int = 0) -> list[int]:
    order = Plan("shuffled", N, seed).order(epoch)
    assert order is not None
    return [int(row) for row in order]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {WAIT_S} s: {what}"
        time.sleep(0.01)


# --- what it is -------------------------------------------------------------------------------------------------------


def test_it_shows_what_it_is(daemon: FakeDaemon, sealed: Any) -> None:
    train = served(job="j", seed=3)
    assert (train.name, train.rows, train.columns, train.classes) == ("digits", N, ("image", "label"), ("a", "b"))
    assert (train.store_id, train.job, train.batch_size, train.seed, train.epoch) == (sealed[1].id, "j", 8, 3, 0)
    assert (train.rank, train.world_size, len(train)) == (0, 1, 13)
    assert repr(train) == (
        "ServedDataset('digits', rows=101, columns=['image', 'label'], batch_size=8, job='j', rank=0 of 1, shuffled, "
        "seed=3, epoch=0)"
    )


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"batch_size": 0}, "bad_batch", "batch_size is 0"),
        ({"batch_size": 2.0}, "bad_batch", "no integer"),
        ({"batch_size": True}, "bad_batch", "no integer"),
        ({"seed": -1}, "bad_option", "seed is -1"),
        ({"seed": 2**64}, "bad_option", "seed is"),
        ({"last": "pad"}, "bad_option", "Known: even, drop, short"),
        ({"last": "short", "drop_last": True}, "bad_option", "both say it"),
        ({"last": "even", "drop_last": True}, "bad_option", "both say it"),
        ({"drop_last": 1}, "bad_option", "neither True nor False"),
        ({"shuffle": None}, "bad_option", "neither True nor False"),
        ({"device": "meta"}, "not_built", "device='meta'"),
        ({"resident": True}, "bad_option", "resident=True is for batches on a GPU"),
        ({"memory_format": torch.channels_last}, "bad_option", "memory_format is for"),
        ({"memory_format": "nhwc"}, "bad_option", "memory_format='nhwc'"),
        ({"device": "banana"}, "bad_option", "no device"),
        ({"dtype": torch.int32}, "bad_option", "torch.int32"),
        ({"dtype": "float32"}, "bad_option", "no torch.dtype"),
        ({"normalize": ((0.1, 0.2), (1.0, 1.0))}, "bad_option", "has 2 numbers"),
        ({"normalize": ((0.1,), (0.0,))}, "bad_option", "is 0"),
        ({"ragged": "wide"}, "bad_option", "Known: list, flat, padded"),
        ({"ragged": {"lable": "flat"}}, "unknown_column", "There are: image, label"),
        ({"ragged": {"label": "flat"}}, "bad_option", "they are stacked"),
        ({"ragged": 3}, "bad_option", "ragged=3"),
        ({"columns": ["lable"]}, "unknown_column", "There are: image, label"),
        ({"columns": 3}, "bad_option", "no list of names"),
        ({"prefetch": -1}, "bad_option", "prefetch is -1"),
        ({"info": 1}, "bad_option", "info=1"),
        ({"transform": 3}, "bad_option", "cannot be called"),
        ({"timeout_s": 0}, "bad_option", "no time"),
        ({"timeout_s": float("nan")}, "bad_option", "no time"),
        ({"address": "tcp://x"}, "bad_address", "Unix socket"),
        ({"rank": 1}, "no_world", "Give both or neither"),
        ({"rank": 2, "world_size": 2, "job": "j"}, "bad_batch", "rank is 2"),
        ({"rank": 0, "world_size": 2}, "no_job", "job"),
        ({"job": ""}, "bad_name", "no name"),
    ],
)
def test_a_wrong_option_is_refused_with_a_sentence(
    daemon: FakeDaemon, options: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(UserError, match=text) as caught:
        served(**options)
    assert caught.value.code == code


def test_a_wrong_name_is_refused_before_anybody_is_asked() -> None:
    with pytest.raises(UserError, match="MNIST") as caught:
        ServedDataset("MNIST", batch_size=8)
    assert caught.value.code == "bad_name"


def test_nothing_left_by_drop_is_an_error_with_the_numbers(daemon: FakeDaemon) -> None:
    train = served(batch_size=200, drop_last=True)
    with pytest.raises(UserError, match="101 rows"):
        len(train)
    with pytest.raises(UserError, match="101 rows"):
        iter(train)
    assert train.epoch == 0


# --- the rows of an epoch ---------------------------------------------------------------------------------------------


def test_an_epoch_is_the_published_order_and_the_next_iter_takes_the_next(daemon: FakeDaemon) -> None:
    train = served(seed=5)
    for epoch in range(3):
        assert train.epoch == epoch
        batches = list(train)
        assert len(batches) == len(train)
        assert labels(batches) == sequence(epoch, 5)
        for images, label in batches:
            assert torch.equal(images, torch.from_numpy(IMAGE[label.numpy()]))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine of two cores
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_ranks_and_loader_workers_share_an_epoch_exactly(daemon: FakeDaemon, world_size: int, workers: int) -> None:
    counts: list[Counter[int]] = [Counter() for _ in range(3)]
    lengths = set()
    for rank in range(world_size):
        train = served(batch_size=4, rank=rank, world_size=world_size, job="j", last="short")
        loader = DataLoader(train, batch_size=None, num_workers=workers, persistent_workers=workers > 1)
        for epoch in range(3 if workers < 2 else 2):
            batches = list(loader)
            assert len(batches) == len(loader) == len(train)
            counts[epoch].update(labels(batches))
        lengths.add(len(train))
        del loader, train
    assert [count for count in counts if count and count != Counter(range(N))] == []
    assert max(lengths) - min(lengths) <= 1


def test_even_ranks_have_equally_many_batches_and_mark_their_padding(daemon: FakeDaemon) -> None:
    seen: Counter[int] = Counter()
    for rank in range(3):
        train = served(batch_size=25, rank=rank, world_size=3, job="j", info=True)
        assert len(train) == 2
        for _, info in train:
            seen.update(info.rows[info.valid].tolist())
    assert seen == Counter(range(N))


def test_sequential_is_the_stores_order(daemon: FakeDaemon) -> None:
    train = served(shuffle=False, batch_size=10)
    assert labels(train) == labels(train) == list(range(N))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_epochs_advance_under_a_loader(daemon: FakeDaemon, workers: int, persistent: bool, whole: bool) -> None:
    train = served(seed=1)
    loader = DataLoader(train, batch_size=None, num_workers=workers, persistent_workers=persistent and workers > 0)
    for epoch in range(3):
        batches = list(loader) if whole else list(itertools.islice(loader, 2))
        expected = sequence(epoch, 1)
        assert labels(batches) == (expected if whole else expected[:16])
    assert labels(train) == sequence(3, 1)


SPAWNING = """
import sys
from torch.utils.data import DataLoader
from dataserve.client import ServedDataset

if __name__ == "__main__":
    train = ServedDataset("digits", batch_size=8, seed=1)
    for persistent in (False, True):
        loader = DataLoader(train, None, num_workers=2, persistent_workers=persistent, multiprocessing_context="spawn")
        for _ in range(2):
            print(*(int(row) for _, batch in loader for row in batch))
"""


@pytest.mark.slow
def test_spawned_workers_share_the_epoch_too(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)  # a process of its own: multiprocessing's tracker stays with it
    command = [sys.executable, str(tmp_path / "spawning.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert [[int(word) for word in line.split()] for line in ended.stdout.splitlines()] == [
        sequence(epoch, 1) for epoch in range(4)
    ]


def test_set_epoch_reaches_persistent_workers(daemon: FakeDaemon) -> None:
    train = served()
    loader = DataLoader(train, batch_size=None, num_workers=2, persistent_workers=True)
    assert labels(loader) == sequence(0)
    train.set_epoch(7)
    assert labels(loader) == sequence(7)
    assert labels(loader) == sequence(8)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_next_order_is_there_before_the_epoch_ends_and_no_third_is_held(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, workers: int, prefetch: int
) -> None:
    monkeypatch.setattr(order, "AHEAD_ROWS", N)
    gc.collect()
    train = served(seed=77, prefetch=prefetch, transform=orders_held)
    loader = DataLoader(train, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    epochs = [list(loader) for _ in range(3)]
    for epoch, held in enumerate(epochs):
        assert held[0] <= ({epoch} if epoch == 0 or not workers else {epoch, epoch + 1})
        # A worker's first epoch may be its only one.
        assert held[-1] == ({epoch} if workers and epoch == 0 else {epoch, epoch + 1})


def orders_held(batch: Any) -> set[int]:
    """Epochs whose order of the seed 77 is in memory, once no thread makes one any more."""
    wait_for(lambda: all(thread.name != "dataserve-order" for thread in threading.enumerate()), "the thread's end")
    return {epoch for digest, epoch in list(order._orders) if digest == Plan("shuffled", N, 77).digest()}


def test_two_jobs_at_once_each_get_all_in_their_own_order(daemon: FakeDaemon) -> None:
    first, second = served(job="a", seed=1), served(job="b", seed=2, batch_size=3)
    pairs = list(itertools.zip_longest(first, second))
    assert labels(one for one, _ in pairs if one is not None) == sequence(0, 1)
    assert labels(two for _, two in pairs if two is not None) == sequence(0, 2)


def test_the_same_seed_gives_the_same_order_in_another_process(daemon: FakeDaemon) -> None:
    code = (
        "from dataserve.client import ServedDataset\n"
        "print(*(int(row) for _, batch in ServedDataset('digits', batch_size=7, seed=9) for row in batch))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [int(word) for word in ended.stdout.split()] == labels(served(seed=9, batch_size=11)) == sequence(0, 9)


# --- cursor and state -------------------------------------------------------------------------------------------------


def test_set_epoch_keeps_the_cursor_of_its_own_epoch(daemon: FakeDaemon) -> None:
    train = served()
    next(iter(train))
    saved = train.state_dict()
    train.load_state_dict(saved)
    train.set_epoch(0)
    assert labels(train) == sequence(0)[8:]
    train.set_epoch(0)
    assert labels(train) == sequence(0)
    train.load_state_dict(saved)
    train.set_epoch(2)
    assert labels(train) == sequence(2)
    for wrong in (-1, 1.5, True, limits.EPOCH):
        with pytest.raises(UserError, match="set_epoch"):
            train.set_epoch(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_state_counts_what_the_loop_was_given(daemon: FakeDaemon, prefetch: int) -> None:
    train = served(prefetch=prefetch)
    assert train.state_dict()["position"] == 0
    positions = []
    for _ in train:
        saved = train.state_dict()
        positions.append((saved["epoch"], saved["position"]))
    assert positions == [*((0, 8 * index) for index in range(1, 13)), (1, 0)]
    assert train.state_dict() == {
        "format": 1,
        "store": train.store_id,
        "plan": train.plan.to_map(),
        "digest": train.plan.digest(),
        "epoch": 1,
        "position": 0,
        "batch_size": 8,
        "world_size": 1,
    }


@pytest.mark.parametrize("before", [(1, 8, 0), (2, 4, 0), (3, 5, 0), (1, 8, 2)])
@pytest.mark.parametrize("after", [(1, 3, 2), (2, 16, 0), (5, 2, 0), (3, 4, 0)])
def test_a_resume_on_another_world_is_exactly_the_rest(daemon: FakeDaemon, before: Any, after: Any) -> None:
    (world, batch_size, workers), (later_world, later_size, later_workers) = before, after
    done: list[int] = []
    states = []
    for rank in range(world):
        train = served(batch_size=batch_size, rank=rank, world_size=world, job="j", seed=4)
        batches = iter(DataLoader(train, batch_size=None, num_workers=workers))
        done += labels(itertools.islice(batches, 3))
        saved = train.state_dict(3) if workers else train.state_dict()
        states.append({**saved, "rank": 0})
        del batches, train
    assert all(state == states[0] for state in states)
    rest: list[int] = []
    following: Counter[int] = Counter()
    for rank in range(later_world):
        train = served(batch_size=later_size, rank=rank, world_size=later_world, job="j", seed=4, last="short")
        train.load_state_dict(pickle.loads(pickle.dumps(states[0])))
        loader = DataLoader(train, batch_size=None, num_workers=later_workers)
        rest += labels(loader)
        following.update(labels(loader))
        del loader, train
    assert Counter(done + rest) == Counter(range(N))
    assert sorted(done) == sorted(sequence(0, 4)[: 3 * world * batch_size])
    assert following == Counter(range(N))


def test_a_state_under_workers_needs_the_number_of_batches(daemon: FakeDaemon) -> None:
    train = served()
    loader = DataLoader(train, batch_size=None, num_workers=2)
    first = labels(itertools.islice(loader, 5))
    with pytest.raises(UserError, match=r"state_dict\(batches=i\)") as caught:
        train.state_dict()
    assert caught.value.code == "bad_state"
    with pytest.raises(UserError, match="14 batches: rank 0 has 13"):
        train.state_dict(14)
    saved = train.state_dict(5)
    train.load_state_dict(saved)
    assert first + labels(loader) == sequence(0)
    assert train.state_dict(8)["epoch"] == 1


def test_a_state_of_another_plan_or_store_is_refused_with_both(daemon: FakeDaemon) -> None:
    saved = served(seed=1).state_dict()
    with pytest.raises(UserError, match=r"'seed': 1.*'seed': 2"):
        served(seed=2).load_state_dict(saved)
    with pytest.raises(UserError, match="feed"):
        served(seed=1).load_state_dict({**saved, "store": "feed" * 16})


def test_a_newer_iter_ends_the_older_iterator_with_an_error(daemon: FakeDaemon) -> None:
    train = served()
    older = iter(train)
    next(older)
    newer = iter(train)
    with pytest.raises(UserError, match=r"newer iter\(\)"):
        next(older)
    assert labels(newer) == sequence(1)
    ended = iter(train)
    train.load_state_dict(train.state_dict())
    with pytest.raises(UserError, match="load_state_dict"):
        next(ended)


def test_a_fresh_object_begins_at_the_start_whatever_the_daemon_saw(daemon: FakeDaemon) -> None:
    for _ in range(2):
        given = labels(served(job="same"))  # outside of `assert`, which would keep the object
        assert given == sequence(0)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_kept_batches_and_views_stay_and_writing_reaches_nobody(daemon: FakeDaemon, sealed: Any) -> None:
    train, other = served(batch_size=4), served(batch_size=4, seed=9)
    kept = []
    for _ in range(40):
        for index, (images, label) in enumerate(train):
            if index % 9 == 0:
                kept.append((images[1:], images.numpy()[0], label[:2], images.clone(), label.clone()))
            else:
                images.fill_(7)
                label.fill_(-1)
    for view, array, some, images, label in kept:
        assert torch.equal(view, images[1:])
        assert np.array_equal(array, images[0].numpy())
        assert torch.equal(some, label[:2])
    assert labels(other) == sequence(0, 9)
    assert np.array_equal(np.load(sealed[0] / "image.npy"), IMAGE)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_info_names_rows_and_seeds(daemon: FakeDaemon, prefetch: int) -> None:
    train = served(info=True, seed=6, prefetch=prefetch)
    start = 0
    for (_, label), info in train:
        assert isinstance(info, Info)
        assert (info.epoch, info.start) == (0, start)
        assert (info.rows.dtype, info.valid.dtype, info.row_seeds.dtype) == (torch.int64, torch.bool, torch.int64)
        assert torch.equal(info.rows, label)
        assert info.valid.all()
        assert info.row_seeds.tolist() == draws.row_seeds(6, 0, label.numpy()).tolist()
        start += len(label)


def add_noise(batch: Any, info: Info) -> Any:
    return batch[0].float() + torch.rand(1), info.rows


def add_own_noise(batch: Any, generator: torch.Generator) -> Any:
    return batch[0].float() + torch.rand(1, generator=generator), batch[1]


@pytest.mark.parametrize("transform", [add_noise, add_own_noise])
def test_a_transform_draws_by_position_and_leaves_the_global_generator(daemon: FakeDaemon, transform: Any) -> None:
    train = served(transform=transform)
    torch.manual_seed(1)
    first = list(train)
    after = torch.rand(1)
    train.load_state_dict({**train.state_dict(), "epoch": 0, "position": 16})
    resumed = list(train)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(first[2:], resumed, strict=True))
    noises = {float(images[0, 0, 0, 0] - IMAGE[int(rows[0]), 0, 0, 0]) for images, rows in first}
    assert len(noises) > len(first) // 2
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))


def add_all_noise(batch: Any) -> Any:
    noise = [float(torch.rand(1)), float(np.random.rand()), float(np.random.randn()), random.random()]
    return torch.tensor(noise, dtype=torch.float64)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_global_generator_draws_by_position_and_epoch_and_is_as_it_was(daemon: FakeDaemon, workers: int) -> None:
    train = served(transform=add_all_noise)
    loader = DataLoader(train, batch_size=None, num_workers=workers)
    np.random.seed(1)
    random.seed(1)
    first, second = torch.stack(list(loader)), torch.stack(list(loader))
    after = np.random.rand(), random.random()
    np.random.seed(1)
    random.seed(1)
    assert after == (np.random.rand(), random.random())
    for column in torch.cat([first, second]).T:
        assert len(column.unique()) == 2 * len(train)
    train.load_state_dict({**train.state_dict(0), "epoch": 0, "position": 16})
    assert torch.equal(torch.stack(list(train)), first[2:])


def test_a_generator_of_the_users_own_choice_stays_numpys_global_one(daemon: FakeDaemon) -> None:
    before, mine = np.random.get_bit_generator(), np.random.PCG64(3)
    np.random.set_bit_generator(mine)
    try:
        with pytest.raises(ZeroDivisionError):
            next(iter(served(transform=fail)))
        assert np.random.get_bit_generator() is mine
    finally:
        np.random.set_bit_generator(before)


def fail(batch: Any) -> Any:
    raise ZeroDivisionError("mine")


def stop(batch: Any) -> Any:
    raise StopIteration


def test_a_transforms_error_comes_out_with_its_place_and_never_ends_the_epoch(daemon: FakeDaemon) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        next(iter(served(transform=fail)))
    assert "in the transform of epoch 0, batch at position 0" in caught.value.__notes__
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(served(transform=stop))


def test_columns_and_normalisation(daemon: FakeDaemon) -> None:
    (images,) = next(iter(served(columns=["image"], normalize=((0.5,), (0.25,)), shuffle=False)))
    expected = (torch.from_numpy(IMAGE[:8]).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(images, expected, rtol=1e-5, atol=1e-5)


# --- prefetch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 64])
def test_prefetch_changes_nothing_but_the_time(daemon: FakeDaemon, prefetch: int) -> None:
    train = served(prefetch=prefetch)
    assert labels(train) == sequence(0)
    assert labels(train) == sequence(1)


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dataserve-ahead"]


def test_an_abandoned_iterator_ends_its_thread(daemon: FakeDaemon) -> None:
    train = served(prefetch=2)
    batches = iter(train)
    next(batches)
    assert len(ahead_threads()) == 1
    del batches
    wait_for(lambda: not ahead_threads(), "the thread's end")
    for _ in train:
        break
    wait_for(lambda: not ahead_threads(), "the thread's end")


def test_an_error_ahead_comes_out_of_next_with_its_stage(daemon: FakeDaemon) -> None:
    train = served(prefetch=2)
    train._gatherer.assemble = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError) as caught:
        next(iter(train))
    assert any("batch 0 of epoch 0, positions [0, 8)" in note for note in caught.value.__notes__)
    assert any("prefetch" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_next_that_raised_gives_the_same_batch_again(
    daemon: FakeDaemon, prefetch: int, error: type[BaseException]
) -> None:
    calls = itertools.count()

    def wild(batch: Any, info: Info) -> Any:
        batch[1].add_(1000 * N)  # what is half transformed must not come again
        if next(calls) in (2, 3, 7):
            raise error
        batch[1].sub_(1000 * N)
        return batch

    train = served(prefetch=prefetch, transform=wild, info=True)
    batches, given, raised = iter(train), [], 0
    while True:
        before = train.state_dict()["position"]
        try:
            batch, info = next(batches)
        except error:
            raised += 1
            continue
        except StopIteration:
            break
        assert info.start == before
        given += batch[1].tolist()
    assert (raised, given) == (3, sequence(0))


def test_an_error_ahead_ends_the_thread_and_not_the_epoch(daemon: FakeDaemon) -> None:
    train = served(prefetch=2)
    gather, calls = train._gatherer.assemble, itertools.count()
    train._gatherer.assemble = lambda rows: fail(rows) if next(calls) == 3 else gather(rows)  # type: ignore[method-assign]
    batches = iter(train)
    given = labels(itertools.islice(batches, 3))
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert given + labels(batches) == sequence(0)


def test_info_prints_its_numbers_and_not_its_tensors(daemon: FakeDaemon) -> None:
    _, info = next(iter(served(info=True, shuffle=False)))
    assert repr(info) == "Info(epoch=0, start=0, 8 rows [0, 1, 2, ...], 8 valid)"


def test_a_batch_that_never_comes_is_reported_by_name(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    train = served(prefetch=1, timeout_s=0.1)
    released = threading.Event()
    monkeypatch.setattr("dataserve.client.iterator.limits.SILENT_S", 0.2)
    gather = train._gatherer.assemble
    train._gatherer.assemble = lambda rows: released.wait(WAIT_S) and gather(rows)  # type: ignore[method-assign]
    batches = iter(train)
    try:
        with pytest.raises(MachineError, match="Batch 0 was not there") as caught:
            next(batches)
        assert caught.value.code == "stuck"
    finally:
        released.set()


# --- the daemon comes and goes ----------------------------------------------------------------------------------------


def test_a_silent_daemon_costs_a_moment_and_never_the_loop(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "SILENT_S", 0.5)
    monkeypatch.setattr(limits, "BEAT_S", 0.1)
    train = served()
    assert labels(train) == sequence(0)
    daemon.silent = True
    for epoch in range(1, 4):
        assert labels(train) == sequence(epoch)
    wait_for(lambda: train._course.epochs.alone, "to be alone")
    began = time.monotonic()
    for epoch in range(4, 10):
        assert labels(train) == sequence(epoch)
    assert time.monotonic() - began < WAIT_S / 10
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    daemon.silent = False
    daemon.restart()
    wait_for(lambda: not train._course.epochs.alone, "to be registered again")
    assert labels(train) == sequence(10)
    assert daemon.of(Open)[-1].epoch == 10  # type: ignore[attr-defined]


def test_a_restarted_daemon_picks_the_loop_up_without_a_word(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    train = served(batch_size=1)
    batches = iter(train)
    given = labels(itertools.islice(batches, 50))
    before = len(daemon.of(Open))
    daemon.restart()
    wait_for(lambda: len(daemon.of(Open)) > before, "the second open")
    assert given + labels(batches) == sequence(0)
    assert caplog.records == []


@pytest.mark.parametrize("code", ["job_mismatch", "bad_plan"])
def test_a_refusal_reaches_the_user_before_the_first_batch(daemon: FakeDaemon, code: str) -> None:
    train = served()
    daemon.refusals.append(UserError(code, "Rank 1 says 7, rank 0 says 8."))
    with pytest.raises(DataserveError, match="rank 0 says 8") as caught:
        iter(train)
    assert caught.value.code == code
    assert labels(train) == sequence(0)


def test_a_taken_rank_is_waited_for_and_named(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    taken = UserError("rank_taken", "Rank 0 is held by process 77.", retryable=True)
    daemon.refusals += [taken, taken]
    assert labels(served()) == sequence(0)
    assert len(caplog.records) == 1
    assert "process 77" in caplog.text
    daemon.refusals += [taken] * 99
    with pytest.raises(UserError, match="process 77"):
        iter(served(timeout_s=0.7))


def test_wrong_ranges_of_the_daemon_are_not_followed(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.wrong_ranges = True
    assert labels(served()) == sequence(0)
    assert "wrong_ranges" in caplog.text


def test_the_daemon_hears_how_far_the_loop_is(daemon: FakeDaemon) -> None:
    train = served(job="told")
    list(train)
    wait_for(lambda: any(done.position == N for done in daemon.of(Done)), "the last done")  # type: ignore[attr-defined]
    assert sum(done.samples for done in daemon.of(Done)) == N  # type: ignore[attr-defined]
    assert all(done.wait_s is not None for done in daemon.of(Done))  # type: ignore[attr-defined]


@pytest.mark.parametrize("timed", [False, True])
def test_under_workers_the_wait_is_unknown_unless_the_loop_is_timed(daemon: FakeDaemon, timed: bool) -> None:
    train = served()
    loader = DataLoader(train, batch_size=None, num_workers=2, persistent_workers=True)
    batches = train.timed(loader) if timed else loader
    assert len(batches) == 13
    assert labels(batches) == sequence(0)
    wait_for(lambda: sum(done.samples for done in daemon.of(Done)) == N, "both workers' last done")  # type: ignore[attr-defined]
    assert {done.wait_s is not None for done in daemon.of(Done)} == {timed}  # type: ignore[attr-defined]


# --- other processes --------------------------------------------------------------------------------------------------


def test_it_pickles_small_and_goes_on_without_the_daemon_being_asked(daemon: FakeDaemon) -> None:
    train = served(seed=2)
    next(iter(train))
    saved = pickle.dumps(train)
    assert len(saved) < 1000
    again = pickle.loads(saved)
    assert len(daemon.of(Describe)) == 1
    assert labels(again) == sequence(1, 2)
    assert copy.copy(again).rows == N


def test_a_forked_process_counts_epochs_for_itself(daemon: FakeDaemon) -> None:
    train = served()
    assert labels(train) == sequence(0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            good = labels(train) == sequence(1) and labels(train) == sequence(2)
            os.write(write, b"y" if good else b"n")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write)
    assert labels(train) == sequence(1)


def test_an_iterator_does_not_cross_a_fork(daemon: FakeDaemon) -> None:
    batches = iter(served(prefetch=2))
    next(batches)
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except UserError as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert labels(batches) == sequence(0)[8:]


def raised_by_worker(loader: DataLoader[Any]) -> DataserveError:
    """What the loop over a loader gets. Without its traceback: that would keep the workers for the collector, for which
    torch ends them within 5 s only."""
    try:
        next(iter(loader))
    except DataserveError as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


def test_the_cursor_is_not_moved_in_a_loader_worker(daemon: FakeDaemon) -> None:
    def move(worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        info.dataset.set_epoch(3)  # type: ignore[attr-defined]

    loader = DataLoader(served(), batch_size=None, num_workers=1, worker_init_fn=move)
    error = raised_by_worker(loader)
    assert (type(error), error.code) == (UserError, "bad_state")
    assert error.text == "set_epoch() was called in a loader worker. Call it in the main process."
    assert error.__notes__ == ["Caught UserError in DataLoader worker process 0."]


def test_a_full_shared_memory_is_reported_and_not_died_of(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    train = served()
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((512, 512, 9, 9, 0, 9, 9, 9, 0, 255)))
    error = raised_by_worker(DataLoader(train, batch_size=None, num_workers=1))
    assert (type(error), error.code) == (MachineError, "no_space")
    assert "192 bytes must pass through /dev/shm, which has 0 free" in error.text


def test_a_refusal_in_a_worker_is_caught_by_its_class_in_the_loop(daemon: FakeDaemon) -> None:
    daemon.refusals.append(UserError("job_mismatch", "Rank 1 says 7, rank 0 says 8.", "Agree."))
    error = raised_by_worker(DataLoader(served(), batch_size=None, num_workers=1))
    assert (type(error), error.code) == (UserError, "job_mismatch")
    assert str(error) == "Rank 1 says 7, rank 0 says 8. Agree. [job_mismatch]"


def test_the_rank_is_frozen_by_its_first_use_and_not_by_the_constructor(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = served(job="j")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    again = pickle.loads(pickle.dumps(train))
    assert (len(train), train.rank, train.world_size) == (7, 1, 2)
    monkeypatch.setenv("RANK", "0")
    assert train.rank == 1
    assert pickle.loads(pickle.dumps(train)).rank == 1
    assert again.rank == 0


def test_importing_the_client_leaves_torch_alone() -> None:
    code = "import sys, dataserve.client; print('torch' in sys.modules, dir(dataserve.client))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "False ['Balanced', 'Blocks', 'Flat', 'Fold', 'Info', 'Padded', 'ServedDataset']"
