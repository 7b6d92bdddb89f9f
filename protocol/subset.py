"""The plan kind `subset`: some rows of a store, in an order that another plan gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from . import draws, limits
from .blocks import BlockOrder, BlocksPlan
from .errors import UserError
from .plan import Plan, Rows, exactly, hexadecimal, integer, no_list, sha256


@dataclass(frozen=True)
class SubsetPlan(Plan):
    """Some rows of a store of `of_rows`, each once, in the order that another plan gives them: position i of an epoch is
    the member of the number `inner.order[i]`.

    `members` is a range, or the SHA-256 of what `listed` is: row numbers, uint32 `(n,)`.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("subset",)

    kind: str = field(default="subset", init=False)
    n: int = field(init=False)
    seed: int = field(init=False)
    of_rows: int
    members: range | str
    inner: Plan
    listed: Rows | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", self.inner.n)
        object.__setattr__(self, "seed", self.inner.seed)
        Plan.__post_init__(self)
        object.__setattr__(self, "of_rows", integer(self.of_rows, self.n, limits.ROWS + 1, "rows"))
        if isinstance(self.members, str):
            hexadecimal(self.members, "members' digest")
        elif len(self.members) != self.n or self.members.step < 1 or self.members[-1] >= self.of_rows:
            raise UserError("bad_plan", f"The members {self.members} are not {self.n} of {self.of_rows} rows.")

    @classmethod
    def of(cls, of_rows: int, members: range | Rows, inner: Plan) -> SubsetPlan:
        """The plan over these members. A list is not looked through: it has each row once, all below `of_rows`."""
        if isinstance(members, range):
            step = members.step if len(members) > 1 else 1
            return cls(of_rows, range(members.start, members[-1] + 1, step), inner)
        return cls(of_rows, sha256(members), inner, members)

    @classmethod
    def of_map(cls, fields: Mapping[str, Any]) -> Plan:
        """As `Plan.of_map`."""
        exactly(fields, "kind n seed rows members inner", "A subset plan")
        inner, kind = fields["inner"], fields["inner"].get("kind") if isinstance(fields["inner"], Mapping) else None
        if kind not in (*Plan.KINDS, *BlocksPlan.KINDS):
            raise UserError(
                "bad_plan", f"A subset is of the kind {kind!r} inside.", "It can be sequential, shuffled, blocks."
            )
        found = (BlocksPlan if kind in BlocksPlan.KINDS else Plan).of_map(inner)
        if (fields["n"], fields["seed"]) != (found.n, found.seed):
            raise UserError("bad_plan", "A subset plan has the n and the seed of its inner one.")
        return cls(fields["rows"], _members_of(fields["members"]), found)

    def to_map(self) -> dict[str, Any]:
        """As `Plan.to_map`."""
        named: dict[str, Any] = {"sha256": self.members}
        if isinstance(self.members, range):
            named = {"start": self.members.start, "stop": self.members.stop, "step": self.members.step}
        return {**Plan.to_map(self), "rows": self.of_rows, "members": named, "inner": self.inner.to_map()}

    @property
    def store_rows(self) -> int:
        """As `Plan.store_rows`."""
        return self.of_rows

    @property
    def is_fixed(self) -> bool:
        """As `Plan.is_fixed`."""
        return self.inner.is_fixed

    @property
    def is_windowed(self) -> bool:
        """As `Plan.is_windowed`."""
        return self.inner.is_windowed

    def order(self, epoch: int) -> Rows:
        """As `Plan.order`."""
        order = self.inner.order(epoch)
        if order is None:
            return self._all()
        return self._named(order)

    def _rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._named(self.inner.rows(epoch, start, stop).astype(np.uint32)).astype(np.int64)

    def windows(self, epoch: int) -> BlockOrder | None:
        """As `Plan.windows`."""
        if not isinstance(self.inner, BlocksPlan):
            return None
        if isinstance(self.members, str):
            self._all()  # there, or the error now
        return self.inner.windows(epoch, self._named)

    def _all(self) -> Rows:
        """All members, in their own order."""
        if isinstance(self.members, range):
            return np.arange(self.members.start, self.members.stop, self.members.step, dtype=np.uint32)
        if self.listed is None:
            raise no_list("members", self.members)
        return self.listed

    def _named(self, numbers: Rows) -> Rows:
        """The rows that are the members of these numbers; the numbers are not needed any more."""
        if isinstance(self.members, range):
            numbers *= np.uint32(self.members.step)
            numbers += np.uint32(self.members.start)
            return numbers
        listed = self._all()
        for start, stop in draws.slices(len(numbers)):
            numbers[start:stop] = listed[numbers[start:stop]]
        return numbers


def _members_of(fields: object) -> range | str:
    """The members as a plan's map names them."""
    if isinstance(fields, Mapping) and "sha256" in fields:
        return hexadecimal(exactly(fields, "sha256", "A list of members")["sha256"], "members' digest")
    named = exactly(fields, "start stop step", "A range of members")
    start = integer(named["start"], 0, limits.ROWS, "members' start")
    stop = integer(named["stop"], start + 1, limits.ROWS + 1, "members' stop")
    step = integer(named["step"], 1, limits.ROWS, "members' step")
    members = range(start, stop, step)
    if members[-1] + 1 != stop:
        raise UserError("bad_plan", f"The members {members} do not end behind the last of them, {members[-1]}.")
    return members
