"""The plan kind `subset`: members in the order of another plan, named by a range or by a digest."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import draws, limits
from dataserve.protocol.blocks import BlocksPlan
from dataserve.protocol.errors import UserError
from dataserve.protocol.kinds import plan_of
from dataserve.protocol.plan import Plan
from dataserve.protocol.subset import SubsetPlan

from .simulation import dumb

ROWS = 400
seeds = st.integers(0, limits.SEED - 1)
epochs = st.integers(0, limits.EPOCH - 1)
lists = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=100, unique=True)
ranges = st.builds(range, st.integers(0, 99), st.integers(100, ROWS), st.integers(1, 500))


def inner_of(kind: str, n: int, seed: int) -> tuple[Plan, Any]:
    """A plan over n numbers, and its dumb order by epoch."""
    if kind == "sequential":
        return Plan("sequential", n), lambda _: list(range(n))
    if kind == "blocks":
        plan = BlocksPlan(n, seed, block_rows=min(n, 7), window_blocks=3)
        return plan, lambda epoch: dumb.blocks(n, seed, epoch, min(n, 7), 3)
    return Plan("shuffled", n, seed), lambda epoch: dumb.shuffled(n, dumb.base(seed, epoch))


@given(lists | ranges, st.sampled_from(["sequential", "shuffled", "blocks"]), seeds, epochs, st.data())
def test_it_is_its_members_in_the_order_of_the_inner_plan(
    members: list[int] | range, kind: str, seed: int, epoch: int, data: st.DataObject
) -> None:
    inner, order = inner_of(kind, len(members), seed)
    plan = SubsetPlan.of(ROWS, members if isinstance(members, range) else np.array(members, np.uint32), inner)
    expected = [members[number] for number in order(epoch)]
    assert plan.order(epoch).dtype == np.uint32
    assert plan.order(epoch).tolist() == expected
    start = data.draw(st.integers(0, plan.n))
    stop = data.draw(st.integers(start, plan.n))
    assert plan.rows(epoch, start, stop).tolist() == expected[start:stop]
    windows = plan.windows(epoch)
    assert (windows is not None) == (kind == "blocks")
    if windows is not None:
        assert windows.rows(start, stop).tolist() == expected[start:stop]


@given(lists, seeds)
def test_an_order_leaves_the_list_as_it_was(members: list[int], seed: int) -> None:
    listed = np.array(members, np.uint32)
    listed.flags.writeable = False
    for inner in (Plan("sequential", len(members)), Plan("shuffled", len(members), seed)):
        SubsetPlan.of(ROWS, listed, inner).order(0)
    assert listed.tolist() == members


def test_a_long_list_is_gathered_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = np.arange(500, dtype=np.uint32)[::-1].copy()
    plan = SubsetPlan.of(500, listed, Plan("shuffled", 500, 3))
    whole = plan.order(2).tolist()
    monkeypatch.setattr(draws, "SLICE", 64)
    assert plan.order(2).tolist() == whole


@given(lists | ranges, seeds)
def test_a_map_keeps_all_but_the_list(members: list[int] | range, seed: int) -> None:
    known = members if isinstance(members, range) else np.array(members, np.uint32)
    plan = SubsetPlan.of(ROWS, known, Plan("shuffled", len(members), seed))
    again = plan_of(plan.to_map())
    assert (again, again.digest(), again.n, again.store_rows) == (plan, plan.digest(), len(members), ROWS)
    if isinstance(members, range):
        assert again.rows(0, 0, plan.n).tolist() == plan.rows(0, 0, plan.n).tolist()
    else:
        digest = hashlib.sha256(b"".join(row.to_bytes(4, "little") for row in members)).hexdigest()
        assert plan.to_map()["members"] == {"sha256": digest}
        for asked in (lambda: again.order(0), lambda: again.rows(0, 0, 1)):
            with pytest.raises(UserError, match=f"names its members by the SHA-256 {digest[:16]} alone"):
                asked()


def test_windows_of_unknown_members_are_refused_at_once() -> None:
    inner = BlocksPlan(2, 0, block_rows=1, window_blocks=1)
    with pytest.raises(UserError, match="its rows are not known"):
        plan_of(SubsetPlan.of(9, np.array([3, 1], np.uint32), inner).to_map()).windows(0)


def test_it_pickles_with_its_list() -> None:
    plan = SubsetPlan.of(9, np.array([3, 1, 8], np.uint32), Plan("shuffled", 3, 1))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.order(5).tolist() == plan.order(5).tolist()


def test_equal_ranges_have_one_map() -> None:
    maps = [
        SubsetPlan.of(90, members, Plan("sequential", len(members))).to_map()["members"]
        for members in (range(3, 12, 4), range(3, 15, 4), range(5, 6, 9), range(5, 6))
    ]
    assert maps == [{"start": 3, "stop": 12, "step": 4}] * 2 + [{"start": 5, "stop": 6, "step": 1}] * 2


def test_folds_of_one_size_are_different_plans() -> None:
    digests = {
        SubsetPlan.of(90, np.arange(start, 90, 3, dtype=np.uint32), Plan("shuffled", 30, 1)).digest()
        for start in range(3)
    }
    assert len(digests) == 3


LISTED = SubsetPlan.of(9, np.array([3, 1, 8], np.uint32), Plan("shuffled", 3, 1)).to_map()
RANGED = SubsetPlan.of(9, range(2, 9, 3), Plan("sequential", 3)).to_map()


@pytest.mark.parametrize(
    ("good", "changes", "words"),
    [
        (LISTED, {"members": {"sha256": "x" * 64}}, "no SHA-256"),
        (LISTED, {"members": {"sha256": 5}}, "no SHA-256"),
        (LISTED, {"members": {"sha256": "a" * 64, "start": 0}}, "this one has sha256, start"),
        (LISTED, {"members": [1, 2, 3]}, "no map"),
        (LISTED, {"members": {}}, "has the fields start, stop, step; this one has none"),
        (LISTED, {"rows": 2}, r"rows is 2; it must lie in \[3,"),
        (LISTED, {"rows": 2**32 + 1}, "rows is"),
        (LISTED, {"n": 4}, "the n and the seed of its inner one"),
        (LISTED, {"seed": 2}, "the n and the seed of its inner one"),
        (LISTED, {"inner": 3}, "of the kind None inside"),
        (LISTED, {"inner": LISTED}, "of the kind 'subset' inside"),
        (LISTED, {"inner": {"kind": "shuffled", "n": 3}}, "A shuffled plan has the fields"),
        (LISTED, {"inner": {"kind": "shuffled", "n": 3, "seed": 1, "x": 1}}, "A shuffled plan has the fields"),
        (LISTED, {"weights": "a" * 64}, "A subset plan has the fields"),
        (RANGED, {"members": {"start": 2, "stop": 8, "step": 3}}, "do not end behind the last of them, 5"),
        (RANGED, {"members": {"start": 2, "stop": 12, "step": 3}}, "not 3 of 9 rows"),
        (RANGED, {"members": {"start": 5, "stop": 12, "step": 3}}, "not 3 of 9 rows"),
        (RANGED, {"members": {"start": 2, "stop": 2, "step": 3}}, "stop is 2"),
        (RANGED, {"members": {"start": 2, "stop": 9, "step": 0}}, "step is 0"),
        (RANGED, {"members": {"start": 2, "stop": 9, "step": -1}}, "step is -1"),
        (RANGED, {"members": {"start": 2, "stop": 9, "step": True}}, "no integer"),
        (RANGED, {"members": {"start": 2**32, "stop": 2**32 + 1, "step": 1}}, "start is"),
    ],
)
def test_one_that_cannot_be_is_refused(good: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        plan_of({**good, **changes})
    assert caught.value.code == "bad_plan"
