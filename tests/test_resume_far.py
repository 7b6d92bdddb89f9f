"""A resume at position 10^8 of 2 x 10^8 costs what a start costs: counted in rows drawn and bytes held, not in seconds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataserve.client import order
from dataserve.protocol import draws
from dataserve.protocol.blocks import BlocksPlan
from dataserve.protocol.partition import Partition
from dataserve.protocol.plan import Plan

N, FAR, BATCH = 2 * 10**8, 10**8, 256


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most memory that the action holds at once."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("world_size", [1, 7, 64])
@pytest.mark.parametrize("workers", [1, 8])
def test_the_ranges_of_a_far_resume_hold_no_more_than_those_of_a_start(world_size: int, workers: int) -> None:
    def first_window(origin: int) -> None:
        cut = Partition(N, BATCH, world_size, "even", origin)
        window = cut.window(world_size - 1, workers - 1, workers, 0, 256)
        assert window[0].start == origin + (world_size * workers - 1) * BATCH
        assert cut.cursor(3, 0, 1) == (3, origin + world_size * BATCH)

    assert peak_bytes(lambda: first_window(FAR)) < 1.5 * peak_bytes(lambda: first_window(0)) + 10_000


def test_sequential_rows_are_made_for_the_batch_alone() -> None:
    plan = Plan("sequential", N)
    assert plan.rows(0, FAR, FAR + BATCH).tolist() == list(range(FAR, FAR + BATCH))
    assert peak_bytes(lambda: plan.rows(0, FAR, FAR + BATCH)) < 100 * BATCH


def test_blocks_draw_the_windows_that_the_batch_lies_in_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BlocksPlan(N, 1, block_rows=1000, window_blocks=10)
    drawn: list[int] = []
    right = draws.in_key_order

    def counted(count: int, *arguments: Any) -> Any:
        drawn.append(count)
        return right(count, *arguments)

    for start in (0, FAR, FAR + 10_000 - BATCH // 2, N - BATCH):
        rows = order.of(plan, 2, None)
        assert isinstance(rows, order.Windows)
        drawn.clear()
        with monkeypatch.context() as patch:
            patch.setattr(draws, "in_key_order", counted)
            found = rows[start : start + BATCH]
        assert len(np.unique(found)) == BATCH
        assert sum(drawn) <= 2 * 10_000
