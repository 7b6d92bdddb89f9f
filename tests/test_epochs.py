"""client/epochs: every way in which loader workers come, lag and go takes each epoch once, together."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.client.epochs import MAIN, Epochs, Handle
from dataserve.protocol import limits
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Cursor

TOKEN = 12345


def worker(page: Epochs) -> Epochs:
    """The page as a fresh worker process sees it: nothing of its own taken yet."""
    return Epochs(0, page.handle())


def test_the_main_process_takes_one_epoch_after_the_other() -> None:
    page = Epochs(TOKEN)
    assert page.latest() is None
    assert [page.take(MAIN) for _ in range(3)] == [Cursor(0, 0), Cursor(1, 0), Cursor(2, 0)]
    assert page.next() == Cursor(3, 0)
    assert page.latest() == (Cursor(2, 0), False)


def test_the_first_iteration_takes_the_cursor_and_the_next_begins_at_the_start() -> None:
    page = Epochs(TOKEN, None, Cursor(5, 128))
    assert page.next() == Cursor(5, 128)
    assert [page.take(MAIN) for _ in range(2)] == [Cursor(5, 128), Cursor(6, 0)]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_that_are_new_in_each_epoch_stay_together(workers: int) -> None:
    page = Epochs(TOKEN)
    for epoch in range(4):
        fresh = [worker(page) for _ in range(workers)]
        order = random.Random(epoch).sample(range(workers), workers)
        assert {fresh[index].take(index + 1, tag=epoch) for index in order} == {Cursor(epoch, 0)}
        assert page.latest() == (Cursor(epoch, 0), True)


def test_a_worker_that_a_broken_off_epoch_never_started_joins_its_siblings() -> None:
    page = Epochs(TOKEN)
    assert worker(page).take(1, tag=7) == Cursor(0, 0)  # and worker 1 never came
    fast, slow = worker(page), worker(page)
    assert fast.take(1, tag=8) == Cursor(1, 0)
    assert slow.take(2, tag=8) == Cursor(1, 0)
    fast, slow = worker(page), worker(page)
    assert slow.take(2, tag=9) == Cursor(2, 0)
    assert fast.take(1, tag=9) == Cursor(2, 0)


def test_a_loader_seeded_alike_in_each_epoch_still_goes_on() -> None:
    page = Epochs(TOKEN)
    for epoch in range(3):
        first, second = worker(page), worker(page)
        assert first.take(1, tag=7) == Cursor(epoch, 0)
        assert second.take(2, tag=7) == Cursor(epoch, 0)


def test_persistent_workers_count_on_by_themselves() -> None:
    page = Epochs(TOKEN)
    first, second = worker(page), worker(page)
    for epoch in range(3):
        assert {first.take(1, tag=7), second.take(2, tag=7)} == {Cursor(epoch, 0)}
    for epoch in range(3, 5):
        assert {second.take(2, tag=7), first.take(1, tag=7)} == {Cursor(epoch, 0)}


def test_a_moved_cursor_reaches_persistent_and_new_workers() -> None:
    page = Epochs(TOKEN)
    first, second = worker(page), worker(page)
    first.take(1)
    second.take(2)
    page.move(Cursor(7, 64))
    assert page.latest() is None
    assert {first.take(1), second.take(2)} == {Cursor(7, 64)}
    assert {second.take(2), first.take(1)} == {Cursor(8, 0)}
    page.move(Cursor(2, 0))
    assert worker(page).take(1, tag=3) == Cursor(2, 0)


def test_main_and_workers_take_turns() -> None:
    page = Epochs(TOKEN)
    assert page.take(MAIN) == Cursor(0, 0)
    first, second = worker(page), worker(page)
    assert {first.take(1, tag=1), second.take(2, tag=1)} == {Cursor(1, 0)}
    assert page.take(MAIN) == Cursor(2, 0)
    assert {first.take(1, tag=1), second.take(2, tag=1)} == {Cursor(3, 0)}


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["fresh", "persistent", "main", "move"]), st.integers(0, 2**16 - 1), st.randoms()),
        max_size=12,
    ),
)
def test_in_any_mixture_all_workers_agree_and_no_epoch_comes_twice(
    workers: int, story: list[tuple[str, int, random.Random]]
) -> None:
    page = Epochs(TOKEN)
    expected = 0
    running: list[Epochs] = []
    for tag, (kind, number, chance) in enumerate(story):
        if kind == "move":
            expected = number
            page.move(Cursor(number, 0))
            continue
        if kind == "main":
            taken = {page.take(MAIN)}
        else:
            if kind == "fresh" or not running:
                running = [worker(page) for _ in range(workers)]
                running_tag = tag
            # At least one comes; in a broken-off epoch of new workers the others never do.
            coming = chance.sample(range(workers), workers if kind == "persistent" else chance.randint(1, workers))
            taken = {running[index].take(index + 1, running_tag) for index in coming}
            if len(coming) < workers or kind == "fresh":
                running = running if len(coming) == workers else []
        if kind == "persistent":
            assert len({cursor.epoch for cursor in taken}) == 1
            expected = next(iter(taken)).epoch + 1
        else:
            assert taken == {Cursor(expected, 0)}
            expected += 1
        if kind == "main":
            running = []  # the next loader is a new one


def test_epochs_end() -> None:
    page = Epochs(TOKEN, None, Cursor(limits.EPOCH - 1, 0))
    assert page.take(MAIN).epoch == limits.EPOCH - 1
    with pytest.raises(UserError, match="does not exist"):
        page.take(MAIN)


def test_generations_come_round() -> None:
    page = Epochs(TOKEN)
    for number in range(2**16 + 5):
        page.move(Cursor(number % 50, 0))
    assert page.take(MAIN) == Cursor((2**16 + 4) % 50, 0)


def test_a_pickled_handle_finds_the_page_of_a_living_process() -> None:
    page = Epochs(TOKEN)
    page.take(MAIN)
    other = Epochs(1, Handle(*pickle.loads(pickle.dumps(tuple(page.handle())))))
    assert other.take(1, tag=5) == Cursor(1, 0)
    assert page.latest() == (Cursor(1, 0), True)


@pytest.mark.parametrize("what", ["gone process", "gone descriptor", "another file", "a pipe", "another page"])
def test_where_the_page_is_gone_a_new_one_starts_at_the_pickled_cursor(what: str, tmp_path: Any) -> None:
    read, write = os.pipe()
    other = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    page = Epochs(TOKEN)
    good = page.handle()
    handle = {
        "gone process": good._replace(pid=2**22 + 1),
        "gone descriptor": good._replace(descriptor=999),
        "another file": good._replace(descriptor=other),
        "a pipe": good._replace(descriptor=read),
        "another page": good._replace(token=TOKEN + 1),
    }[what]
    try:
        fresh = Epochs(5, handle, Cursor(3, 9))
        assert fresh.owner_pid == os.getpid()
        assert fresh.take(MAIN) == Cursor(3, 9)
        assert page.latest() is None
    finally:
        for descriptor in (read, write, other):
            os.close(descriptor)


def take_in_child(page: Any, slot: int, answers: Any) -> None:
    answers.put(tuple(page.take(slot, 3)))


def test_forked_children_share_the_page() -> None:
    page = Epochs(TOKEN)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [context.Process(target=take_in_child, args=(page, slot, answers)) for slot in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert {answers.get(), answers.get()} == {(0, 0)}
    assert page.latest() == (Cursor(0, 0), True)
    answers.close()


def test_no_descriptor_outlives_the_page() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pages = [Epochs(TOKEN) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before + 10
    pages.clear()
    assert len(os.listdir("/proc/self/fd")) == before
