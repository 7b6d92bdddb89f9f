"""The plan kind `weighted`: rows drawn by weight.

Weights are integers, and a logarithm is made of `+ - * /` alone: no machine's mathematical library has a say in which rows
come. Each arithmetic step is one numpy operation, so that none is fused with the next. PROTOCOL.md section 5 has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from . import draws, limits
from .errors import UserError
from .plan import Plan, Rows, exactly, hexadecimal, integer, no_list, sha256

LARGEST = 2**31 - 1  #: the integer of the largest weight
LN2 = 0.6931471805599453  # 0x1.62e42fefa39efp-1
SQRT2 = 1.4142135623730951  # 0x1.6a09e667f3bcdp+0
TERMS = 10  #: of the series: the first that is left out is below 2^-55 of the sum


def quantised(weights: npt.NDArray[Any]) -> Rows:
    """Integers in proportion to the weights, `LARGEST` for the largest, at least 1 where there is any, uint32 `(N,)`.

    Raises `bad_option` for weights that are not finite numbers of at least 0, or all 0.
    """
    exact = weights.astype(np.float64)
    wrong = ~(np.isfinite(exact) & (exact >= 0))
    if wrong.any():
        row = int(wrong.argmax())
        text = f"The weight of row {row} is {weights[row]}; {int(wrong.sum())} of {len(weights)} are no weights."
        raise UserError("bad_option", text, "Give finite numbers of at least 0.")
    largest = exact.max()
    if largest == 0:
        raise UserError("bad_option", f"All {len(weights)} weights are 0: no row could ever come.")
    some = exact > 0
    np.divide(exact, largest, out=exact)
    np.multiply(exact, np.float64(LARGEST), out=exact)
    np.rint(exact, out=exact)
    return np.maximum(exact, some).astype(np.uint32)


def cumulated(integers: Rows) -> npt.NDArray[np.uint64]:
    """The sums of the integers up to and with each row, uint64 `(N,)`; below 2^63."""
    return np.cumsum(integers, dtype=np.uint64)


def with_replacement(sums: npt.NDArray[np.uint64], base: int, start: int, stop: int) -> Rows:
    """The rows at the positions `[start, stop)`, each drawn by itself, uint32; `sums` are cumulated integers."""
    order = np.empty(stop - start, np.uint32)
    for first, end in draws.slices(stop - start):
        points = _scaled(draws.draws(base, np.arange(start + first, start + end)), int(sums[-1]))
        rising = np.argsort(points)  # a search for the next larger point finds the last one's path in the cache
        order[first + rising] = np.searchsorted(sums, points[rising], side="right")
    return order


def _scaled(drawn: npt.NDArray[np.uint64], total: int) -> npt.NDArray[np.uint64]:
    """The high 64 bits of `drawn * total`, by halves: as even in [0, total) as 64 bits can be."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    high_total, low_total = np.uint64(total >> 32), np.uint64(total & (2**32 - 1))
    high, rest = drawn >> half, drawn & low
    middle = high * low_total + (rest * low_total >> half)
    other = rest * high_total + (middle & low)
    scaled: npt.NDArray[np.uint64] = high * high_total + (middle >> half) + (other >> half)
    return scaled


def without_replacement(integers: Rows, n: int, pick_base: int, base: int) -> Rows:
    """n rows, each at most once, uint32: which ones by weight (the n smallest of exponential numbers with the weights as
    rates), in which order by the shuffle, so that no part of an epoch has heavier rows than another."""
    bits = draws.row_bits(len(integers))
    low = np.uint64((1 << bits) - 1)
    some = np.flatnonzero(integers).astype(np.uint64)
    keys = np.empty(len(some), np.uint64)
    for start, stop in draws.slices(len(some)):
        part = some[start:stop]
        times = exponential(draws.draws(pick_base, part))
        np.divide(times, integers[part].astype(np.float64), out=times)
        keys[start:stop] = times.view(np.uint64) & ~low | part
    chosen = np.partition(keys, n - 1)[:n] & low
    return draws.in_key_order(n, lambda start, stop: chosen[start:stop], bits, base)


def exponential(drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """`-ln u` of `u = (drawn >> 12) * 2^-52 + 2^-53`, float64: positive, to some units in the last place."""
    u = (drawn >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    bits = u.view(np.uint64)
    exponents = (bits >> np.uint64(52)).astype(np.float64)
    exponents -= 1023.0
    m = (bits & np.uint64(2**52 - 1) | np.uint64(1023 << 52)).view(np.float64)  # u = m * 2^exponent, 1 <= m < 2
    large = m >= SQRT2
    np.divide(m, 2.0, out=m, where=large)
    exponents += large
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    sums = np.full_like(z, 1.0 / (2 * TERMS - 1))
    for k in reversed(range(TERMS - 1)):
        np.multiply(sums, z, out=sums)
        np.add(sums, 1.0 / (2 * k + 1), out=sums)
    np.multiply(sums, s, out=sums)
    np.multiply(sums, 2.0, out=sums)
    np.multiply(exponents, LN2, out=exponents)
    np.add(exponents, sums, out=exponents)
    return np.negative(exponents)


@dataclass(frozen=True)
class WeightedPlan(Plan):
    """`n` rows an epoch, drawn by weight from the `of_rows` of a store, with or without replacement.

    `weights` is the SHA-256 of `integers`, uint32 `(of_rows,)`, what `quantised` makes of weights.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("weighted",)

    kind: str = field(default="weighted", init=False)
    of_rows: int = field(kw_only=True)
    weights: str = field(kw_only=True)
    replacement: bool = field(default=True, kw_only=True)
    integers: Rows | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        object.__setattr__(self, "of_rows", integer(self.of_rows, 1, limits.ROWS + 1, "rows"))
        hexadecimal(self.weights, "weights' digest")
        if not isinstance(self.replacement, bool):
            raise UserError("bad_plan", f"The plan's replacement is {self.replacement!r}, neither true nor false.")
        most = self.of_rows if self.integers is None else int(np.count_nonzero(self.integers))
        if not self.replacement and self.n > most:
            text = f"Without replacement there are {most} rows to draw an epoch from, and n is {self.n}."
            raise UserError("bad_plan", text, "Draw fewer, or with replacement.")

    @classmethod
    def of(cls, integers: Rows, n: int, seed: int, *, replacement: bool) -> WeightedPlan:
        """The plan over weights that `quantised` has made integers of."""
        digest = sha256(integers)
        return cls(n, seed, of_rows=len(integers), weights=digest, replacement=replacement, integers=integers)

    @classmethod
    def of_map(cls, fields: Mapping[str, Any]) -> Plan:
        """As `Plan.of_map`."""
        exactly(fields, "kind n seed rows weights replacement", "A weighted plan")
        return cls(
            fields["n"],
            fields["seed"],
            of_rows=fields["rows"],
            weights=fields["weights"],
            replacement=fields["replacement"],
        )

    def to_map(self) -> dict[str, Any]:
        """As `Plan.to_map`."""
        own = {"rows": self.of_rows, "weights": self.weights, "replacement": self.replacement}
        return {**Plan.to_map(self), **own}

    @property
    def store_rows(self) -> int:
        """As `Plan.store_rows`."""
        return self.of_rows

    def order(self, epoch: int) -> Rows:
        """As `Plan.order`. Raises `bad_plan` in a plan without its weights."""
        epoch, integers = integer(epoch, 0, limits.EPOCH, "epoch"), self._integers()
        if self.replacement:
            return self._drawn(epoch, 0, self.n)
        pick_base = draws.epoch_base(self.seed, epoch, draws.SALT_PICK)
        return without_replacement(integers, self.n, pick_base, draws.epoch_base(self.seed, epoch))

    def _rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        rows = self._drawn(epoch, start, stop) if self.replacement else self.order(epoch)[start:stop]
        return rows.astype(np.int64)

    def _drawn(self, epoch: int, start: int, stop: int) -> Rows:
        base = draws.epoch_base(self.seed, epoch, draws.SALT_DRAW)
        return with_replacement(cumulated(self._integers()), base, start, stop)

    def seeds(self, seed: int, epoch: int, start: int, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """As `Plan.seeds`; with replacement by position, so that a row that comes twice is not augmented twice alike."""
        if self.replacement:
            return draws.place_seeds(seed, epoch, start, start + len(rows))
        return draws.row_seeds(seed, epoch, rows)

    def _integers(self) -> Rows:
        if self.integers is None:
            raise no_list("weights", self.weights)
        return self.integers
