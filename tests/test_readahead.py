"""server/readahead.py: what is due, against dumb versions of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Partition
from dataserve.protocol.plan import Plan
from dataserve.server.readahead import GAP_BYTES, PAGE, Reading, batches_ahead, budget, due, pieces, runs

MB = 1 << 20


def reading(**changes: Any) -> Reading:
    """A job of one rank over 1,000 rows in batches of 10, at its start, unless told."""
    plan = Plan("shuffled", 1000, 7)
    made = Reading(1, "/s", plan.to_map(), plan.digest(), 0, Partition(1000, 10), 0, 0, 1, 0, 0, None)
    return made._replace(**changes)


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    n = draw(st.integers(1, 300))
    workers = draw(st.integers(1, 3))
    fields = n, draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.sampled_from(["even", "drop", "short"]))
    try:
        partition = Partition(*fields, origin=draw(st.integers(0, n)))
    except UserError:  # `drop` of less than a batch
        partition = Partition(n, 1, 1)
    made = reading(
        partition=partition,
        rank=draw(st.integers(0, partition.world_size - 1)),
        worker=draw(st.integers(0, workers - 1)),
        workers=workers,
        samples_per_s=draw(st.none() | st.floats(0, 1e7)),
    )
    given_batches = draw(st.integers(0, made.total))
    return made._replace(position=position_after(made, given_batches))


def position_after(made: Reading, batches: int) -> int:
    """The position that a client tells after so many batches: client/events.py's `Iteration.cursor`."""
    if batches >= made.total:
        return made.partition.n
    drawn = (batches - 1) * made.workers + made.worker + 1 if batches else 0
    return made.partition.cursor(0, made.rank, drawn).position


@given(st.data())
def test_the_next_batch_is_the_one_behind_those_that_were_told(data: st.DataObject) -> None:
    made = data.draw(readings())
    batches = data.draw(st.integers(0, made.total))
    assert made._replace(position=position_after(made, batches)).next_batch == batches


def test_a_window_that_was_asked_for_moves_the_next_batch_on_between_two_reports() -> None:
    half = limits.WINDOW_BATCHES // 2
    many = reading(partition=Partition(100_000, 10), asked=2 * limits.WINDOW_BATCHES)
    assert many.next_batch == 3 * half
    assert many._replace(position=40_000).next_batch == 4_000


@given(st.data())
def test_positions_are_those_of_the_batches(data: st.DataObject) -> None:
    made = data.draw(readings())
    first = data.draw(st.integers(0, made.total))
    stop = data.draw(st.integers(first, made.total))
    found = made.positions(first, stop).tolist()
    ranges = [made.partition.worker_batch(made.rank, made.worker, made.workers, at) for at in range(first, stop)]
    assert found == [at for start, end, _ in ranges for at in range(start, end)]


@given(readings(), st.floats(1, 1e6), st.integers(0, 1 << 32))
def test_what_is_due_stays_within_its_budget(made: Reading, row_bytes: float, budget_bytes: int) -> None:
    count = batches_ahead(made, row_bytes, budget_bytes)
    assert count * made.partition.batch_size * row_bytes <= budget_bytes + 1
    if count >= limits.AHEAD_BATCHES:
        return
    assert (count + 1) * made.partition.batch_size * row_bytes > budget_bytes


def test_a_fast_consumer_is_read_ahead_by_time_and_a_slow_one_by_batches() -> None:
    assert batches_ahead(reading(), 1.0, MB) == limits.AHEAD_BATCHES
    assert batches_ahead(reading(samples_per_s=1.0), 1.0, MB) == limits.AHEAD_BATCHES
    assert batches_ahead(reading(samples_per_s=1e4), 1.0, MB) == 1e4 * limits.AHEAD_S / 10


def test_all_consumers_together_take_their_share_of_the_memory_and_no_more() -> None:
    assert budget(1 << 50, 1) == limits.AHEAD_BYTES
    assert budget(8 * MB * limits.AHEAD_SHARE, 4) == 2 * MB
    assert budget(0, 4) == 0


@given(readings(), st.integers(0, 500))
def test_due_batches_follow_the_next_one_and_go_over_into_the_next_epoch(made: Reading, ahead: int) -> None:
    found = due(made, ahead)
    first, begin, stop = found[0]
    assert (first, begin) == (made, made.next_batch)
    assert stop == min(made.total, begin + ahead)
    if len(found) == 2:
        following, start, end = found[1]
        assert (following.epoch, following.position, start) == (made.epoch + 1, 0, 0)
        assert following.partition == dataclasses.replace(made.partition, origin=0)
        assert stop == made.total
        assert end == min(following.total, ahead - (stop - begin))
    else:
        assert len(found) == 1


def test_behind_the_last_epoch_there_is_none() -> None:
    last = reading(epoch=limits.EPOCH - 1, position=990)
    assert due(last, 16) == [(last, 99, 100)]


spans = st.lists(st.tuples(st.integers(0, 2 * MB), st.integers(0, 3 * PAGE)), max_size=40)


@given(spans, st.integers(1, 2 * MB), st.booleans())
def test_runs_cover_each_page_of_each_row_and_without_room_no_other(
    rows: list[tuple[int, int]], size_bytes: int, joins: bool
) -> None:
    starts = np.array([start for start, _ in rows], np.int64)
    stops = starts + np.array([length for _, length in rows], np.int64)
    low, high = runs(starts, stops, size_bytes, joins=joins)
    wanted = {
        page
        for start, length in rows
        for page in range(start // PAGE, -(-min(start + length, size_bytes) // PAGE))
        if length or start % PAGE
    }
    found = {page for start, stop in zip(low, high, strict=True) for page in range(start // PAGE, stop // PAGE)}
    assert found >= wanted
    assert all(low < high)
    gaps = low[1:] - high[:-1]
    assert all(gaps > (GAP_BYTES if joins else 0))
    if not joins:
        assert found == wanted
    assert max(found, default=-1) * PAGE < size_bytes


@given(spans, st.integers(1, 300_000))
def test_pieces_are_the_runs_cut_small(rows: list[tuple[int, int]], most: int) -> None:
    starts = np.array([start for start, _ in rows], np.int64)
    low, high = runs(starts, starts + PAGE, 1 << 40, joins=False)
    cut = list(pieces(low, high, most))
    assert all(0 < length <= most for _, length in cut)
    assert sum(length for _, length in cut) == int((high - low).sum())
    assert [offset for offset, _ in cut] == sorted({offset for offset, _ in cut})
