"""The plan kind `weighted` against its dumb version, bit by bit; and whether rows come as often as their weights say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import draws, limits, weighted
from dataserve.protocol.errors import UserError
from dataserve.protocol.kinds import plan_of
from dataserve.protocol.weighted import WeightedPlan, quantised

from .simulation import dumb

seeds = st.integers(0, limits.SEED - 1)
epochs = st.integers(0, limits.EPOCH - 1)
weights = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e308), st.floats(0, 1)), min_size=1, max_size=60).filter(any)


def plan_over(integers: list[int], n: int, seed: int, *, replacement: bool) -> WeightedPlan:
    return WeightedPlan.of(np.array(integers, np.uint32), n, seed, replacement=replacement)


@given(weights)
def test_weights_become_the_dumb_ones_integers(numbers: list[float]) -> None:
    found = quantised(np.array(numbers))
    assert found.tolist() == dumb.quantised(numbers)
    assert [number > 0 for number in numbers] == (found > 0).tolist()


@given(weights, st.integers(1, 100), seeds, epochs, st.data())
def test_with_replacement_it_equals_the_dumb_one(
    numbers: list[float], n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    integers = dumb.quantised(numbers)
    plan = plan_over(integers, n, seed, replacement=True)
    expected = dumb.with_replacement(integers, n, seed, epoch)
    assert plan.order(epoch).dtype == np.uint32
    assert plan.order(epoch).tolist() == expected
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert plan.rows(epoch, start, stop).tolist() == expected[start:stop]


@given(weights, seeds, epochs, st.data())
def test_without_replacement_it_equals_the_dumb_one(
    numbers: list[float], seed: int, epoch: int, data: st.DataObject
) -> None:
    integers = dumb.quantised(numbers)
    n = data.draw(st.integers(1, sum(integer > 0 for integer in integers)))
    plan = plan_over(integers, n, seed, replacement=False)
    expected = dumb.without_replacement(integers, n, seed, epoch)
    assert plan.order(epoch).dtype == np.uint32
    assert plan.order(epoch).tolist() == expected
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert plan.rows(epoch, start, stop).tolist() == expected[start:stop]


@given(st.integers(0, 2**64 - 1))
def test_the_logarithm_is_the_dumb_one_and_right(drawn: int) -> None:
    (found,) = weighted.exponential(np.array([drawn], np.uint64)).tolist()
    assert found == dumb.minus_log(drawn)
    exact = -math.log(((drawn >> 12) + 0.5) * 2.0**-52)
    assert abs(found - exact) <= 4 * math.ulp(exact)
    assert dumb.bits_of(found) == int(np.float64(found).view(np.uint64))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(1, 2**63 - 1))
def test_scaling_is_the_high_half_of_the_product(drawn: list[int], total: int) -> None:
    assert weighted._scaled(np.array(drawn, np.uint64), total).tolist() == [number * total >> 64 for number in drawn]


@pytest.mark.parametrize("replacement", [True, False])
def test_a_long_order_does_not_depend_on_its_slices(replacement: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_over(list(range(500)), 300, 3, replacement=replacement)
    whole = plan.order(2).tolist()
    monkeypatch.setattr(draws, "SLICE", 64)
    assert plan.order(2).tolist() == whole


def test_with_replacement_rows_come_as_often_as_their_weights_say() -> None:
    integers = quantised(np.array([0, 1, 2, 4, 0, 8, 0.5]))
    counts = np.bincount(WeightedPlan.of(integers, 100_000, 5, replacement=True).order(0), minlength=7)
    expected = integers / integers.sum() * 100_000
    assert counts[[0, 4]].tolist() == [0, 0]
    some = expected > 0
    # chi-square with 4 degrees of freedom: 18.5 at one in a thousand
    assert ((counts[some] - expected[some]) ** 2 / expected[some]).sum() < 18.5


def test_draws_of_neighbouring_positions_are_unrelated() -> None:
    order = WeightedPlan.of(np.ones(10, np.uint32), 100_000, 5, replacement=True).order(0)
    pairs = np.bincount(order[:-1].astype(int) * 10 + order[1:], minlength=100)
    assert ((pairs - 1000) ** 2 / 1000).sum() < 149  # chi-square with 99 degrees of freedom: 149 at one in a thousand


def test_without_replacement_rows_are_chosen_as_successive_draws_would() -> None:
    """Of the weights 1, 2, 3, two are chosen: the chance of each pair is known."""
    counts = {frozenset(pair): 0 for pair in ((0, 1), (0, 2), (1, 2))}
    for seed in range(6000):
        order = plan_over([1, 2, 3], 2, seed, replacement=False).order(0)
        counts[frozenset(order.tolist())] += 1
    chances = {(0, 1): 1 / 6 * 2 / 5 + 2 / 6 * 1 / 4, (0, 2): 1 / 6 * 3 / 5 + 3 / 6 * 1 / 3}
    chances[1, 2] = 1 - sum(chances.values())
    square = sum((counts[frozenset(pair)] - 6000 * chance) ** 2 / (6000 * chance) for pair, chance in chances.items())
    assert square < 13.9  # chi-square with 2 degrees of freedom, at one in a thousand


def test_without_replacement_no_part_of_an_epoch_is_heavier_than_another() -> None:
    integers = np.where(np.arange(20_000) % 2 == 0, 1, 9).astype(np.uint32)
    order = WeightedPlan.of(integers, 10_000, 1, replacement=False).order(0)
    assert len(set(order.tolist())) == 10_000
    heavy = (order % 2 == 1).reshape(4, 2500).mean(axis=1)
    assert heavy.min() > 0.75  # 0.82 where light rows are a ninth as likely to be drawn
    assert np.ptp(heavy) < 0.05


def test_seeds_are_by_position_where_a_row_may_come_twice() -> None:
    often = plan_over([1, 1], 100, 4, replacement=True)
    rows = often.rows(2, 10, 30)
    seeds = often.seeds(4, 2, 10, rows).tolist()
    assert seeds == draws.place_seeds(4, 2, 10, 30).tolist()
    assert len(set(seeds)) == 20
    once = plan_over([1] * 50, 40, 4, replacement=False)
    assert once.seeds(4, 2, 10, rows).tolist() == draws.row_seeds(4, 2, rows).tolist()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([1.0, math.nan, -2.0], "weight of row 1 is nan; 2 of 3"),
        ([1.0, math.inf], "row 1 is inf"),
        ([0.5, -0.5], r"row 1 is -0\.5"),
        ([0.0, 0.0], "All 2 weights are 0"),
    ],
)
def test_what_is_no_weight_is_refused(numbers: list[float], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        quantised(np.array(numbers))
    assert caught.value.code == "bad_option"


def test_a_map_keeps_all_but_the_weights() -> None:
    plan = plan_over([5, 0, 7], 2, 3, replacement=False)
    again = plan_of(plan.to_map())
    assert (again, again.digest(), again.n, again.store_rows) == (plan, plan.digest(), 2, 3)
    with pytest.raises(UserError, match=r"names its weights by the SHA-256 [0-9a-f]{16} alone") as caught:
        again.order(0)
    assert caught.value.code == "bad_plan"


GOOD = plan_over([5, 0, 7], 2, 3, replacement=False).to_map()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "a" * 63}, "no SHA-256"),
        ({"replacement": 1}, "neither true nor false"),
        ({"rows": 1}, "Without replacement there are 1 rows to draw an epoch from, and n is 2"),
        ({"rows": 0}, "rows is 0"),
        ({"n": 2**32 + 1, "replacement": True}, "n is"),
        ({"inner": {}}, "A weighted plan has the fields"),
    ],
)
def test_one_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        plan_of({**GOOD, **changes})
    assert caught.value.code == "bad_plan"


def test_rows_of_weight_0_are_none_to_draw_from() -> None:
    with pytest.raises(UserError, match="there are 2 rows to draw an epoch from, and n is 3"):
        plan_over([5, 0, 7], 3, 3, replacement=False)
