"""Plans: the small map that defines every epoch's sequence of rows, as a pure function published in PROTOCOL.md.

A plan's order never changes between versions, machines or processes: test vectors in PROTOCOL.md hold it in place. A map
names long lists (the members of a subset, weights) by their SHA-256; a plan made of such a map alone knows how long its
epochs are, which is all that a daemon needs, but not their rows. Here are the kinds `sequential` and `shuffled` and what
all kinds have in common; kinds.py lists them all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from . import draws, limits
from .errors import UserError

if TYPE_CHECKING:
    from .blocks import BlockOrder

Rows = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Plan:
    """What defines an epoch's sequence: `kind`, `n` positions, `seed`. A sequential plan has seed 0."""

    KINDS: ClassVar[tuple[str, ...]] = ("sequential", "shuffled")

    kind: str
    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise UserError("bad_plan", f"The plan kind {self.kind!r} is unknown.", f"Known: {', '.join(self.KINDS)}.")
        object.__setattr__(self, "n", integer(self.n, 1, limits.ROWS + 1, "n"))
        object.__setattr__(self, "seed", integer(self.seed, 0, limits.SEED, "seed"))
        if self.kind == "sequential" and self.seed:
            raise UserError("bad_plan", f"A sequential plan has seed 0, not {self.seed}.")

    @classmethod
    def of_map(cls, fields: Mapping[str, Any]) -> Plan:
        """The plan of a map of one of this class's kinds, without its lists. Raises `bad_plan`."""
        exactly(fields, "kind n seed", f"A {fields['kind']} plan")
        return Plan(fields["kind"], fields["n"], fields["seed"])

    def to_map(self) -> dict[str, Any]:
        """The map that messages and states carry: text, integers, bools and such maps."""
        return {"kind": self.kind, "n": self.n, "seed": self.seed}

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the map as JSON with sorted keys and no spaces."""
        text = json.dumps(self.to_map(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def store_rows(self) -> int:
        """How many rows the store has whose rows these are."""
        return self.n

    @property
    def is_fixed(self) -> bool:
        """Whether each epoch has the same sequence, so that there is nothing to draw."""
        return self.kind == "sequential"

    @property
    def is_windowed(self) -> bool:
        """Whether a part of an epoch can be had without the rest: `windows`."""
        return False

    def order(self, epoch: int) -> Rows | None:
        """Rows of the whole epoch by position, uint32 `(n,)`; None where position and row are the same number.

        `shuffled` costs a sort of n 64-bit keys (1.28 M rows: some 50 ms) and 12 bytes a row while it works, 4 afterwards.
        Raises `bad_plan` where the plan was made of a map that names a list.
        """
        epoch = integer(epoch, 0, limits.EPOCH, "epoch")
        if self.kind == "sequential":
            return None
        return draws.shuffled(self.n, draws.epoch_base(self.seed, epoch))

    def rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Rows at the positions `[start, stop)` of that epoch, int64 `(stop - start,)`. For a window of an epoch that
        is already ordered, slice `order` instead."""
        if not 0 <= start <= stop <= self.n:
            raise UserError("bad_plan", f"The positions [{start}, {stop}) are not within the plan's {self.n}.")
        return self._rows(integer(epoch, 0, limits.EPOCH, "epoch"), start, stop)

    def _rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        order = self.order(epoch)
        if order is None:
            return np.arange(start, stop, dtype=np.int64)
        return order[start:stop].astype(np.int64)

    def windows(self, epoch: int) -> BlockOrder | None:  # noqa: ARG002 - other kinds need it
        """Where the plan is windowed, that epoch's order as such; else None."""
        return None

    def seeds(
        self,
        seed: int,
        epoch: int,
        start: int,  # noqa: ARG002 - other kinds need it
        rows: npt.NDArray[Any],
    ) -> npt.NDArray[np.int64]:
        """A seed for each of the rows, which are those from position `start` on, int64 of their shape."""
        return draws.row_seeds(seed, epoch, rows)


# --- what the kinds check their fields with -------------------------------------------------------------------------


def integer(value: object, low: int, high: int, what: str) -> int:
    """The value as an int of `[low, high)`. Raises `bad_plan`."""
    # A bool is an int to Python and never a count to a user; numpy's integers have __index__ and are welcome.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError("bad_plan", f"The plan's {what} is {value!r}, which is no integer.")
    number = int(value.__index__())
    if not low <= number < high:
        raise UserError("bad_plan", f"The plan's {what} is {number}; it must lie in [{low}, {high}).")
    return number


def hexadecimal(value: object, what: str) -> str:
    """The value, a SHA-256 in hexadecimal. Raises `bad_plan`."""
    if not isinstance(value, str) or limits.HEX256.fullmatch(value) is None:
        raise UserError("bad_plan", f"The plan's {what} is {value!r}, which is no SHA-256 in hexadecimal.")
    return value


def exactly(fields: object, names: str, what: str) -> Mapping[str, Any]:
    """The map, if it has those fields and no others: one that is unknown changes the sequence in a way that this version
    cannot follow. Raises `bad_plan`."""
    if not isinstance(fields, Mapping):
        raise UserError("bad_plan", f"{what} is {fields!r}, which is no map.")
    if set(fields) != set(names.split()):
        shown = ", ".join(sorted(map(str, fields)))
        raise UserError(
            "bad_plan", f"{what} has the fields {names.replace(' ', ', ')}; this one has {shown or 'none'}."
        )
    return fields


def sha256(numbers: Rows) -> str:
    """Of a list as little-endian uint32, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(numbers, "<u4").data).hexdigest()


def no_list(what: str, digest: str) -> UserError:
    """What a plan raises that was made of its map, and is asked for rows."""
    text = f"This plan was made of its map, which names its {what} by the SHA-256 {digest[:16]} alone: its rows are not known."
    return UserError("bad_plan", text, "Make it of the data.")
