"""Plans: the small map that defines every epoch's sequence of rows, as a pure function published in PROTOCOL.md.

A plan's order never changes between versions, machines or processes: test vectors in PROTOCOL.md hold it in place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import limits
from .errors import UserError

KINDS = ("sequential", "shuffled")

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, splitmix64's increment
SALT_ROW = 0x726F77  # "row": sets row seeds apart from order keys
SALT_BATCH = 0x6261746368  # "batch": sets batch seeds apart from both
_MASK = limits.U64 - 1
_SLICE = 1 << 20  # rows a pass: temporaries of 8 MB stay in the cache and out of the peak


def mix(x: int) -> int:
    """splitmix64's finaliser on one integer mod 2^64."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_into(x: npt.NDArray[np.uint64], temporary: npt.NDArray[np.uint64]) -> None:
    """`mix` on an array, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(x, np.uint64(shift), out=temporary)
        np.bitwise_xor(x, temporary, out=x)
        np.multiply(x, np.uint64(factor), out=x)
    np.right_shift(x, np.uint64(31), out=temporary)
    np.bitwise_xor(x, temporary, out=x)


def epoch_base(seed: int, epoch: int) -> int:
    """The one number from which all draws of an epoch come."""
    return mix(mix(seed + GOLDEN) + epoch)


def row_seeds(seed: int, epoch: int, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """A seed for each row, by (seed, epoch, row) alone: whatever the batch, rank or loader worker. In [0, 2^63)."""
    base = mix(epoch_base(seed, epoch) ^ SALT_ROW)
    keys = rows.astype(np.uint64)
    keys += np.uint64(1)
    keys *= np.uint64(GOLDEN)
    keys += np.uint64(base)
    _mix_into(keys, np.empty_like(keys))
    return (keys >> np.uint64(1)).astype(np.int64)


def batch_seed(seed: int, epoch: int, start: int) -> int:
    """A seed for the batch that starts at that position of the epoch. In [0, 2^63)."""
    return mix(mix(epoch_base(seed, epoch) ^ SALT_BATCH) + start) >> 1


def _integer(value: object, low: int, high: int, what: str) -> int:
    # A bool is an int to Python and never a count to a user; numpy's integers have __index__ and are welcome.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError("bad_plan", f"The plan's {what} is {value!r}, which is no integer.")
    number = int(value.__index__())
    if not low <= number < high:
        raise UserError("bad_plan", f"The plan's {what} is {number}; it must lie in [{low}, {high}).")
    return number


@dataclass(frozen=True, slots=True)
class Plan:
    """What defines an epoch's sequence: `kind`, `n` positions, `seed`. A sequential plan has seed 0."""

    kind: str
    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError("bad_plan", f"The plan kind {self.kind!r} is unknown.", f"Known: {', '.join(KINDS)}.")
        object.__setattr__(self, "n", _integer(self.n, 1, limits.ROWS + 1, "n"))
        object.__setattr__(self, "seed", _integer(self.seed, 0, limits.SEED, "seed"))
        if self.kind == "sequential" and self.seed:
            raise UserError("bad_plan", f"A sequential plan has seed 0, not {self.seed}.")

    @classmethod
    def from_map(cls, fields: Mapping[str, object]) -> Plan:
        """The plan of a map from a message or a state. Raises `bad_plan`; a field that is unknown changes the
        sequence in a way this version cannot follow, so it is refused too."""
        if set(fields) != {"kind", "n", "seed"}:
            names = ", ".join(sorted(map(str, fields)))
            raise UserError("bad_plan", f"A plan has the fields kind, n and seed; this one has {names or 'none'}.")
        kind = fields["kind"]
        if not isinstance(kind, str):
            raise UserError("bad_plan", f"The plan's kind is {kind!r}, which is no text.")
        n = _integer(fields["n"], 1, limits.ROWS + 1, "n")
        return cls(kind, n, _integer(fields["seed"], 0, limits.SEED, "seed"))

    def to_map(self) -> dict[str, str | int]:
        """The map that messages and states carry."""
        return {"kind": self.kind, "n": self.n, "seed": self.seed}

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the map as JSON with sorted keys and no spaces."""
        text = json.dumps(self.to_map(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def order(self, epoch: int) -> npt.NDArray[np.uint32] | None:
        """Rows of the whole epoch by position, uint32 `(n,)`; None where position and row are the same number.

        Costs a sort of n 64-bit keys (1.28 M rows: some 50 ms) and 12 bytes a row while it works, 4 afterwards.
        """
        epoch = _integer(epoch, 0, limits.EPOCH, "epoch")
        if self.kind == "sequential":
            return None
        return _shuffled(self.n, epoch_base(self.seed, epoch))

    def rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Rows at the positions `[start, stop)` of that epoch, int64 `(stop - start,)`. For a window of an epoch that
        is already ordered, slice `order` instead."""
        if not 0 <= start <= stop <= self.n:
            raise UserError("bad_plan", f"The positions [{start}, {stop}) are not within the plan's {self.n}.")
        order = self.order(epoch)
        if order is None:
            return np.arange(start, stop, dtype=np.int64)
        return order[start:stop].astype(np.int64)


def _shuffled(n: int, base: int) -> npt.NDArray[np.uint32]:
    """Sort n keys by value; the low bits of each are its row, so that there are no ties and no index sort."""
    bits = max(1, (n - 1).bit_length())
    low = np.uint64((1 << bits) - 1)
    keys = np.empty(n, np.uint64)
    temporary = np.empty(min(n, _SLICE), np.uint64)
    for start in range(0, n, _SLICE):
        stop = min(start + _SLICE, n)
        part, scratch = keys[start:stop], temporary[: stop - start]
        rows = np.arange(start, stop, dtype=np.uint64)
        np.add(rows, np.uint64(1), out=part)
        np.multiply(part, np.uint64(GOLDEN), out=part)
        np.add(part, np.uint64(base), out=part)
        _mix_into(part, scratch)
        np.bitwise_and(part, ~low, out=part)
        np.bitwise_or(part, rows, out=part)
    keys.sort()
    order = np.empty(n, np.uint32)
    for start in range(0, n, _SLICE):
        stop = min(start + _SLICE, n)
        np.bitwise_and(keys[start:stop], low, out=temporary[: stop - start])
        order[start:stop] = temporary[: stop - start]
    return order
