"""All kinds of plans, and the plan of a map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .blocks import BlocksPlan
from .errors import UserError
from .plan import Plan
from .subset import SubsetPlan
from .weighted import WeightedPlan

KINDS: dict[str, type[Plan]] = {
    kind: found for found in (Plan, BlocksPlan, SubsetPlan, WeightedPlan) for kind in found.KINDS
}


def plan_of(fields: Mapping[str, Any]) -> Plan:
    """The plan of a map from a message or a state, without its lists. Raises `bad_plan`."""
    kind = fields.get("kind")
    if not isinstance(kind, str):
        raise UserError("bad_plan", f"The plan's kind is {kind!r}, which is no text.")
    if kind not in KINDS:
        raise UserError("bad_plan", f"The plan kind {kind!r} is unknown.", f"Known: {', '.join(KINDS)}.")
    return KINDS[kind].of_map(fields)
