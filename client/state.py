"""A `state_dict`: made, and read back as hostile input. PROTOCOL.md section 7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataserve.protocol import limits, version
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Cursor
from dataserve.protocol.plan import Plan

from .world import Loading

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
    checked = _checked(saved)
    if "workers" in checked:
        raise UserError(
            "bad_state",
            f"The state is one loader worker's, of {checked['workers']}: it says what that one has drawn.",
            "Give it to the loader that has made it; or save train.state_dict(batches=i), which any process can load.",
        )
    return _cursor(checked, store_id, plan)


def of_worker(made: dict[str, Any], loading: Loading, drawn: int) -> dict[str, Any]:
    """A loader worker's own state: the iteration's start, and the batches that it has drawn since."""
    return {**made, "worker": loading.worker, "workers": loading.workers, "drawn": drawn}


def read_worker(
    saved: object, store_id: str, plan: Plan, loading: Loading, batch_size: int, world_size: int
) -> tuple[Cursor, int]:
    """The iteration's start, and the batches of this worker behind it. The shape must be that of the saved run: the batches
    are counted in it. Raises `bad_state`, `state_mismatch`."""
    if not isinstance(saved, Mapping) or "workers" not in saved:
        raise UserError(
            "bad_state",
            "load_state_dict() of a data set was called in a loader worker.",
            "Call it in the main process.",
        )
    there = tuple(saved.get(name) for name in ("worker", "workers", "batch_size", "world_size"))
    here = (loading.worker, loading.workers, batch_size, world_size)
    if there != here:
        raise UserError(
            "state_mismatch",
            "The state is of loader worker {} of {}, {} rows a batch, world size {}; this is worker {} of {}, {} rows, world "
            "size {}.".format(*there, *here),
            "Resume in the same shape; or save train.state_dict(batches=i), which every shape can load.",
        )
    return _cursor(_checked(saved), store_id, plan), _integer(saved, "drawn", plan.n)


def _checked(saved: object) -> Mapping[str, Any]:
    if not isinstance(saved, Mapping):
        raise UserError("bad_state", f"A {type(saved).__name__} is no state.", _REMEDY)
    if saved.get("format") != version.STATE_FORMAT:
        raise UserError(
            "bad_state", f"The state has the format {saved.get('format')!r}, this is {version.STATE_FORMAT}.", _REMEDY
        )
    missing = {"store", "plan", "digest", "epoch", "position"} - saved.keys()
    if missing:
        raise UserError("bad_state", f"The state lacks {', '.join(sorted(missing))}.", _REMEDY)
    return saved


def _cursor(saved: Mapping[str, Any], store_id: str, plan: Plan) -> Cursor:
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
            "Give the seed, shuffle, subset and weights that the run began with.",
        )
    epoch = _integer(saved, "epoch", limits.EPOCH - 1)
    position = _integer(saved, "position", plan.n)
    return Cursor(epoch, position) if position < plan.n else Cursor(epoch + 1, 0)


def _integer(saved: Mapping[str, Any], key: str, most: int) -> int:
    value: Any = saved.get(key)
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value.__index__() <= most:
        raise UserError("bad_state", f"The state's {key} is {value!r}, no integer in [0, {most}].", _REMEDY)
    return int(value.__index__())
