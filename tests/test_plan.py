"""Plans against a dumb version: the order as PROTOCOL.md words it, one Python integer at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError
from dataserve.protocol.kinds import plan_of
from dataserve.protocol.plan import Plan

from .simulation import dumb

seeds = st.integers(0, limits.SEED - 1)
epochs = st.integers(0, limits.EPOCH - 1)


@given(st.integers(1, 300), seeds, epochs)
def test_the_shuffle_equals_the_dumb_one(n: int, seed: int, epoch: int) -> None:
    order = Plan("shuffled", n, seed).order(epoch)
    assert order is not None
    assert order.dtype == np.uint32
    assert order.tolist() == dumb.shuffled(n, dumb.base(seed, epoch))


@pytest.mark.parametrize("n", [2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 7])
def test_a_long_order_is_a_permutation_across_slices(n: int) -> None:
    order = Plan("shuffled", n, 5).order(1)
    assert order is not None
    assert np.array_equal(np.sort(order), np.arange(n, dtype=np.uint32))


@given(st.integers(1, 200), seeds, epochs, st.data())
def test_rows_are_a_slice_of_the_order(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert (
        Plan("shuffled", n, seed).rows(epoch, start, stop).tolist()
        == dumb.shuffled(n, dumb.base(seed, epoch))[start:stop]
    )
    assert Plan("sequential", n).rows(epoch, start, stop).tolist() == list(range(start, stop))


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    orders = [Plan("shuffled", 1000, seed).order(epoch) for seed in range(6) for epoch in range(6)]
    for index, first in enumerate(orders):
        for second in orders[index + 1 :]:
            assert first is not None
            assert second is not None
            assert (first == second).sum() < 15  # one fixed point is expected
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def test_each_row_comes_to_each_place_equally_often() -> None:
    counts = np.zeros((8, 8))
    for seed in range(4000):
        order = Plan("shuffled", 8, seed).order(0)
        assert order is not None
        counts[np.arange(8), order] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 100  # chi-square with 49 degrees of freedom: 85 at one in a thousand


@given(st.integers(1, limits.ROWS), seeds)
def test_a_plan_survives_its_map(n: int, seed: int) -> None:
    assert plan_of(Plan("shuffled", n, seed).to_map()) == Plan("shuffled", n, seed)


def test_numpy_integers_make_the_same_plan() -> None:
    first, second = Plan("shuffled", np.int64(7), np.uint64(2**63)), Plan("shuffled", 7, 2**63)
    assert first == second
    assert first.digest() == second.digest()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "shuffled", "n": 5},
        {"kind": "shuffled", "n": 5, "seed": 0, "window": 3},
        {"kind": "random", "n": 5, "seed": 0},
        {"kind": 3, "n": 5, "seed": 0},
        {"kind": "shuffled", "n": 0, "seed": 0},
        {"kind": "shuffled", "n": 2**32 + 1, "seed": 0},
        {"kind": "shuffled", "n": 5, "seed": -1},
        {"kind": "shuffled", "n": 5, "seed": 2**64},
        {"kind": "shuffled", "n": 5.0, "seed": 0},
        {"kind": "shuffled", "n": True, "seed": 0},
        {"kind": "sequential", "n": 5, "seed": 1},
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UserError) as caught:
        plan_of(fields)
    assert caught.value.code == "bad_plan"
