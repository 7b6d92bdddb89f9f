"""A `state_dict`: made, and read back as hostile input. PROTOCOL.md section 7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataserve.protocol import limits, version
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Cursor
from dataserve.protocol.plan import Plan

_REMEDY = "Give what state_dict() returned."


def make(store_id: str, plan: Plan, cursor: Cursor, batch_size: int, world_size: int) -> dict[str, Any]:
    """The state at that cursor. Batch and world size are information only: both may change on a resume."""
    return {
        "format": version.STATE_FORMAT,
        "store": store_id,
        "plan": plan.to_map(),
        "digest": plan.digest(),
        "epoch": cursor.epoch,
        "position": cursor.position,
        "batch_size": batch_size,
        "world_size": world_size,
    }


def read(saved: object, store_id: str, plan: Plan) -> Cursor:
    """The cursor of a state of this store and this plan. Raises `bad_state`, `state_mismatch` with both sides."""
    if not isinstance(saved, Mapping):
        raise UserError("bad_state", f"A {type(saved).__name__} is no state.", _REMEDY)
    if saved.get("format") != version.STATE_FORMAT:
        raise UserError(
            "bad_state", f"The state has the format {saved.get('format')!r}, this is {version.STATE_FORMAT}.", _REMEDY
        )
    missing = {"store", "plan", "digest", "epoch", "position"} - saved.keys()
    if missing:
        raise UserError("bad_state", f"The state lacks {', '.join(sorted(missing))}.", _REMEDY)
    if saved["store"] != store_id:
        raise UserError(
            "state_mismatch",
            f"The state is of the store {str(saved['store'])[:16]}, this is {store_id[:16]}: its rows are others.",
            "Serve the store that the run began with.",
        )
    if saved["digest"] != plan.digest():
        raise UserError(
            "state_mismatch",
            f"The state is of the plan {saved['plan']}, this is {plan.to_map()}: the order is another.",
            "Give the seed and shuffle that the run began with.",
        )
    epoch = _integer(saved, "epoch", limits.EPOCH - 1)
    position = _integer(saved, "position", plan.n)
    return Cursor(epoch, position) if position < plan.n else Cursor(epoch + 1, 0)


def _integer(saved: Mapping[str, Any], key: str, most: int) -> int:
    value = saved[key]
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() <= most:
        raise UserError("bad_state", f"The state's {key} is {value!r}, no integer in [0, {most}].", _REMEDY)
    return int(value.__index__())
