"""The plan kind `blocks` against its dumb version, what a part of it costs, and how well it shuffles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import draws, limits
from dataserve.protocol.blocks import BlockOrder, BlocksPlan
from dataserve.protocol.errors import UserError
from dataserve.protocol.kinds import plan_of

from .simulation import dumb

seeds = st.integers(0, limits.SEED - 1)
epochs = st.integers(0, limits.EPOCH - 1)


@st.composite
def plans(draw: Any) -> BlocksPlan:
    n = draw(st.integers(1, 300))
    return BlocksPlan(
        n, draw(seeds), block_rows=draw(st.integers(1, min(n, 40))), window_blocks=draw(st.integers(1, 50))
    )


@given(plans(), epochs, st.data())
def test_it_equals_the_dumb_one_and_parts_are_slices_of_it(plan: BlocksPlan, epoch: int, data: st.DataObject) -> None:
    expected = dumb.blocks(plan.n, plan.seed, epoch, plan.block_rows, plan.window_blocks)
    assert sorted(expected) == list(range(plan.n))
    order = plan.order(epoch)
    assert order.dtype == np.uint32
    assert order.tolist() == expected
    start = data.draw(st.integers(0, plan.n))
    stop = data.draw(st.integers(start, plan.n))
    assert plan.rows(epoch, start, stop).tolist() == expected[start:stop]


@given(plans(), epochs)
def test_windows_tile_the_epoch(plan: BlocksPlan, epoch: int) -> None:
    windows = plan.windows(epoch)
    number = position = 0
    while position < plan.n:
        assert windows.start(number) == position
        size = len(windows.window(number))
        assert {windows.window_of(place) for place in range(position, position + size)} == {number}
        number, position = number + 1, position + size
    assert windows.start(number) == plan.n


def test_a_part_makes_only_the_windows_that_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    whole = BlockOrder.window
    monkeypatch.setattr(BlockOrder, "window", lambda self, window: made.append(window) or whole(self, window))  # type: ignore[func-returns-value]
    plan = BlocksPlan(10**8, 1, block_rows=1000, window_blocks=10)
    plan.rows(3, 54_320_990, 54_330_010)
    plan.rows(3, 10**8 - 5, 10**8)
    assert made == [5432, 5433, 9999]


def test_one_window_is_the_shuffle() -> None:
    plan = BlocksPlan(1000, 7, block_rows=30, window_blocks=34)
    assert plan.order(4).tolist() == draws.shuffled(1000, draws.epoch_base(7, 4)).tolist()


@given(plans())
def test_it_survives_its_map(plan: BlocksPlan) -> None:
    assert plan_of(plan.to_map()) == plan
    assert plan_of(plan.to_map()).order(3).tolist() == plan.order(3).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_rows": 0}, "block_rows is 0"),
        ({"block_rows": 101}, r"block_rows is 101; it must lie in \[1, 101\)"),
        ({"window_blocks": 0}, "window_blocks is 0"),
        ({"window_blocks": 2**32 + 1}, "window_blocks is"),
        ({"window_blocks": True}, "no integer"),
        ({"block_rows": "4"}, "no integer"),
        ({"n": None}, "no integer"),
        ({"more": 1}, "has the fields kind, n, seed, block_rows, window_blocks; this one has"),
    ],
)
def test_one_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    good = BlocksPlan(100, 1, block_rows=10, window_blocks=2).to_map()
    with pytest.raises(UserError, match=words) as caught:
        plan_of({**good, **changes})
    assert caught.value.code == "bad_plan"
