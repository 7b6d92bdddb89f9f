"""The partition against a dumb version: a loop that deals positions out by hand."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import LASTS, Cursor, Partition, Range

worlds = st.integers(1, 9) | st.integers(10, 64)
cases = st.tuples(st.integers(1, 400), st.integers(1, 20), worlds, st.sampled_from(LASTS), st.integers(0, 400))


def build(n: int, batch: int, world: int, last: str, origin: int) -> Partition:
    assume(origin <= n)
    assume(last != "drop" or origin or n >= batch * world)
    return Partition(n, batch, world, last, origin)


def deal(n: int, batch: int, world: int, last: str, origin: int) -> list[list[list[int]]]:
    """Batches of each rank as lists of positions, with padding as negative numbers: -1 - position."""
    left = list(range(origin, n))
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    while len(left) >= batch * world:
        for rank in range(world):
            ranks[rank].append(left[:batch])
            del left[:batch]
    if last == "drop" or not left:
        return ranks
    sizes = [0] * world
    for index in range(len(left)):
        sizes[index % world] += 1
    wrapped = 0
    for rank, size in enumerate(sizes):
        if size:
            ranks[rank].append(left[:size])
            del left[:size]
        elif last == "even":
            ranks[rank].append([-1 - wrapped % n])
            wrapped += 1
    return ranks


@given(cases)
def test_the_partition_equals_the_dealt_one(case: tuple[int, int, int, str, int]) -> None:
    partition, dealt = build(*case), deal(*case)
    for rank in range(case[2]):
        batches = [partition.batch(rank, index) for index in range(partition.count(rank))]
        found = [
            [position if index < valid else -1 - position for index, position in enumerate(range(start, stop))]
            for start, stop, valid in batches
        ]
        assert found == dealt[rank]


@given(cases)
def test_positions_come_exactly_once(case: tuple[int, int, int, str, int]) -> None:
    n, _, world, last, origin = case
    partition = build(*case)
    seen = sorted(
        position
        for rank in range(world)
        for index in range(partition.count(rank))
        for position in range(*partition.batch(rank, index)[:2])[: partition.batch(rank, index).valid]
    )
    stop = n - partition.tail if last == "drop" else n
    assert seen == list(range(origin, stop))


@given(cases)
def test_counts_are_equal_and_no_batch_is_empty(case: tuple[int, int, int, str, int]) -> None:
    _, batch, world, last, _ = case
    partition = build(*case)
    counts = [partition.count(rank) for rank in range(world)]
    assert max(counts) - min(counts) <= (1 if last == "short" else 0)
    sizes = [
        stop - start
        for rank in range(world)
        for start, stop, _ in partition.window(rank, 0, 1, 0, partition.count(rank))
    ]
    assert all(1 <= size <= batch for size in sizes)
    tails = [part.stop - part.start for rank in range(world) if (part := partition.tail_range(rank))]
    assert not tails or max(tails) - min(tails) <= 1


@given(cases, st.integers(1, 9), st.integers(1, 7))
def test_loader_workers_take_turns_in_the_ranks_order(
    case: tuple[int, int, int, str, int], workers: int, window: int
) -> None:
    partition = build(*case)
    rank = case[2] - 1
    queues = []
    for worker in range(workers):
        count = partition.worker_count(rank, worker, workers)
        queues.append(
            [
                item
                for first in range(0, count, window)
                for item in partition.window(rank, worker, workers, first, window)
            ]
        )
    turns = [queues[index % workers][index // workers] for index in range(partition.count(rank))]
    assert turns == [partition.batch(rank, index) for index in range(partition.count(rank))]
    assert sum(map(len, queues)) == len(turns)


@given(cases, st.data())
def test_a_resume_on_any_other_geometry_delivers_exactly_the_rest(
    case: tuple[int, int, int, str, int], data: st.DataObject
) -> None:
    n, _, world, last, _ = case
    assume(last != "drop")
    partition = build(*case)
    done = data.draw(st.integers(0, partition.count(0)))
    cursor = partition.cursor(4, 0, done)
    if cursor.epoch == 5:
        assert cursor == Cursor(5, 0)
        return
    before = {
        position
        for rank in range(world)
        for index in range(done)
        for position in range(*partition.batch(rank, index)[:2])
    }
    assert before == set(range(case[4], cursor.position))
    other = Partition(n, data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9)), last, cursor.position)
    after = sorted(
        position
        for rank in range(other.world_size)
        for start, stop, valid in other.window(rank, 0, 1, 0, 10**6)
        for position in range(start, stop)[:valid]
    )
    assert after == list(range(cursor.position, n))


parts = st.lists(st.tuples(st.integers(1, 20), worlds, st.integers(0, 8), st.integers(0, 10**6)), max_size=6)


@given(st.integers(1, 400), parts, st.sampled_from(("even", "short")), st.integers(1, 20), worlds)
def test_an_epoch_cut_anywhere_and_gone_on_with_in_any_shape_gives_each_position_once(
    n: int, story: list[tuple[int, int, int, int]], last: str, last_batch: int, last_world: int
) -> None:
    """Each part has a batch size, ranks and loader workers of its own and ends after so many batches of each rank."""
    cursor, seen = Cursor(3, 0), []
    for batch, world, workers, cut in [*story, (last_batch, last_world, 0, 10**9)]:
        partition = Partition(n, batch, world, last, cursor.position)
        batches = cut % (partition.full + 1) if cut < 10**9 else max(map(partition.count, range(world)))
        places = [drawn(partition, rank, max(1, workers))[:batches] for rank in range(world)]
        seen += [position for rank in places for start, stop, valid in rank for position in range(start, stop)[:valid]]
        after = [partition.cursor(cursor.epoch, rank, min(batches, partition.count(rank))) for rank in range(world)]
        cursor = after[0]
        # Under `short` a rank may have had its last batch one step before the others: it says that the epoch is over.
        over = Cursor(4, 0) if last == "short" and batches == partition.full else cursor
        assert set(after) <= {cursor, over}
        if cursor.epoch > 3:
            break
    assert cursor == Cursor(4, 0)
    assert sorted(seen) == list(range(n))


def drawn(partition: Partition, rank: int, workers: int) -> list[Range]:
    """The batches of a rank as a `DataLoader` gives them: its workers by turns."""
    queues = [
        iter(partition.window(rank, worker, workers, 0, partition.worker_count(rank, worker, workers)))
        for worker in range(workers)
    ]
    return [next(queues[index % workers]) for index in range(partition.count(rank))]


@given(cases)
def test_padding_is_what_the_ranges_say(case: tuple[int, int, int, str, int]) -> None:
    partition = build(*case)
    ranges = [item for rank in range(case[2]) for item in partition.window(rank, 0, 1, 0, 10**6)]
    assert partition.padding() == sum(stop - start - valid for start, stop, valid in ranges)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ((10, 0, 1, "even", 0), "batch_size is 0"),
        ((10, -3, 1, "even", 0), "batch_size is -3"),
        ((10, 1, 0, "even", 0), "world_size is 0"),
        ((10, 1, 1, "even", 11), "origin is 11"),
        ((0, 1, 1, "even", 0), "n is 0"),
        ((10, 1, 1, "odd", 0), "last='odd'"),
        ((10, 4, 3, "drop", 0), "10 rows do not fill one global batch of 3 ranks x 4 rows"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(case: tuple[int, int, int, str, int], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        Partition(*case)


def test_a_state_beyond_the_last_batch_is_refused() -> None:
    with pytest.raises(UserError, match="after 4 batches: rank 0 has 3"):
        Partition(10, 4).cursor(0, 0, 4)


def test_an_end_at_a_great_position_costs_no_loop() -> None:
    partition = Partition(2**32, 1, 1, "even", 10**8)
    assert partition.batch(0, 2**32 - 10**8 - 1) == (2**32 - 1, 2**32, 1)
    assert partition.worker_count(0, 3, 8) == -(-(2**32 - 10**8 - 3) // 8)
