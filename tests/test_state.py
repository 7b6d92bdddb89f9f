"""client/state: what a state holds, and what is refused as one."""

from __future__ import annotations

from typing import Any

import pytest

from dataserve.client import state
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Cursor
from dataserve.protocol.plan import Plan

PLAN = Plan("shuffled", 100, 3)
GOOD = state.make("a" * 64, PLAN, Cursor(4, 32), 8, 2)


def test_it_is_plain_integers_and_text() -> None:
    held = {
        "format": 1,
        "store": "a" * 64,
        "plan": {"kind": "shuffled", "n": 100, "seed": 3},
        "digest": PLAN.digest(),
        "epoch": 4,
        "position": 32,
        "batch_size": 8,
        "world_size": 2,
    }
    assert held == GOOD
    assert state.read(GOOD, "a" * 64, PLAN) == Cursor(4, 32)


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    assert state.read({**GOOD, "position": 100}, "a" * 64, PLAN) == Cursor(5, 0)


@pytest.mark.parametrize(
    ("saved", "code", "text"),
    [
        (None, "bad_state", "NoneType"),
        ({}, "bad_state", "format None"),
        ({**GOOD, "format": 2}, "bad_state", "format 2, this is 1"),
        ({key: value for key, value in GOOD.items() if key != "epoch"}, "bad_state", "lacks epoch"),
        ({**GOOD, "position": 101}, "bad_state", r"101, no integer in \[0, 100\]"),
        ({**GOOD, "position": "3"}, "bad_state", "'3'"),
        ({**GOOD, "epoch": True}, "bad_state", "True"),
        ({**GOOD, "epoch": -1}, "bad_state", "-1"),
        ({**GOOD, "store": "b" * 64}, "state_mismatch", "bbbbbbbbbbbbbbbb, this is aaaaaaaaaaaaaaaa"),
        (state.make("a" * 64, Plan("shuffled", 100, 4), Cursor(0, 0), 1, 1), "state_mismatch", "'seed': 4.*'seed': 3"),
    ],
)
def test_anything_else_is_refused(saved: Any, code: str, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        state.read(saved, "a" * 64, PLAN)
    assert caught.value.code == code
