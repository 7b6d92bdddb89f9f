"""Draws: the random numbers of an epoch, by counting instead of by state, and the order that they put rows in.

All are pure functions of a seed, an epoch and a row or position, the same on every machine and for ever: PROTOCOL.md
section 5 publishes them with test vectors. Each kind of draw has a salt of its own, so that none says anything of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import limits

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, splitmix64's increment
SALT_ROW = 0x726F77  # "row": sets row seeds apart from order keys
SALT_BATCH = 0x6261746368  # "batch": seeds of batches
SALT_PLACE = 0x706C616365  # "place": seeds of positions, where a row may come twice
SALT_BLOCK = 0x626C6F636B  # "block": the order of blocks
SALT_DRAW = 0x64726177  # "draw": rows by weight, with replacement
SALT_PICK = 0x7069636B  # "pick": rows by weight, without replacement
SALT_FOLD = 0x666F6C64  # "fold": who comes into which fold
SLICE = 1 << 20  # rows a pass: temporaries of 8 MB stay in the cache and out of the peak
RADIX_ROWS = (1 << 11, 1 << 22)
_MASK = limits.U64 - 1


def mix(x: int) -> int:
    """splitmix64's finaliser on one integer mod 2^64."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def epoch_base(seed: int, epoch: int, salt: int | None = None) -> int:
    """The one number from which all draws of an epoch come; with a salt, those of that kind."""
    base = mix(mix(seed + GOLDEN) + epoch)
    return base if salt is None else mix(base ^ salt)


def draw_into(numbers: npt.NDArray[np.uint64], base: int, temporary: npt.NDArray[np.uint64]) -> None:
    """Each number i becomes `mix(base + (i + 1) * G)`, in place; `temporary` is of the same shape."""
    np.add(numbers, np.uint64(1), out=numbers)
    np.multiply(numbers, np.uint64(GOLDEN), out=numbers)
    np.add(numbers, np.uint64(base), out=numbers)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(numbers, np.uint64(shift), out=temporary)
        np.bitwise_xor(numbers, temporary, out=numbers)
        np.multiply(numbers, np.uint64(factor), out=numbers)
    np.right_shift(numbers, np.uint64(31), out=temporary)
    np.bitwise_xor(numbers, temporary, out=numbers)


def draws(base: int, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """`mix(base + (i + 1) * G)` of each number i, uint64 of the same shape."""
    drawn = numbers.astype(np.uint64)
    draw_into(drawn, base, np.empty_like(drawn))
    return drawn


# --- seeds for augmentation -----------------------------------------------------------------------------------------


def row_seeds(seed: int, epoch: int, rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """A seed for each row, by (seed, epoch, row) alone: whatever the batch, rank or loader worker. In [0, 2^63)."""
    return _halved(draws(epoch_base(seed, epoch, SALT_ROW), rows))


def place_seeds(seed: int, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """A seed for each position of `[start, stop)`, by (seed, epoch, position) alone. In [0, 2^63)."""
    return _halved(draws(epoch_base(seed, epoch, SALT_PLACE), np.arange(start, stop)))


def batch_seed(seed: int, epoch: int, start: int) -> int:
    """A seed for the batch that starts at that position of the epoch. In [0, 2^63)."""
    return mix(epoch_base(seed, epoch, SALT_BATCH) + start) >> 1


def _halved(drawn: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return (drawn >> np.uint64(1)).astype(np.int64)


# --- orders ---------------------------------------------------------------------------------------------------------


def row_bits(n: int) -> int:
    """How many low bits of a key hold the row, of n rows."""
    return max(1, (n - 1).bit_length())


def slices(count: int) -> Iterator[tuple[int, int]]:
    """`[start, stop)` of the passes in which so many numbers are worked on."""
    for start in range(0, count, SLICE):
        yield start, min(start + SLICE, count)


def _sorted(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The keys by value. Their high bits are even, so that numpy's radix sort of 16 bits leaves next to nothing to its merge sort:
    less than half the time of `keys.sort()` where that has no vector instructions. For many rows the room is not worth it."""
    if not RADIX_ROWS[0] <= len(keys) <= RADIX_ROWS[1]:
        keys.sort()
        return keys
    keys = keys.take((keys >> np.uint64(48)).astype(np.uint16).argsort(kind="stable"))
    keys.sort(kind="stable")
    return keys


def shuffled(n: int, base: int) -> npt.NDArray[np.uint32]:
    """The rows `[0, n)` in the order of their keys, uint32 `(n,)`. 12 bytes a row while it works, 4 afterwards."""
    return in_key_order(n, lambda start, stop: np.arange(start, stop, dtype=np.uint64), row_bits(n), base)


def in_key_order(
    count: int, rows: Callable[[int, int], npt.NDArray[np.uint64]], bits: int, base: int
) -> npt.NDArray[np.uint32]:
    """So many different rows sorted by key, uint32 `(count,)`; `rows(start, stop)` gives some of them, in any order.

    A key's low `bits` are its row, so that there are no ties and no index sort: every sort gives the same.
    """
    low = np.uint64((1 << bits) - 1)
    keys = np.empty(count, np.uint64)
    temporary = np.empty(min(count, SLICE), np.uint64)
    for start, stop in slices(count):
        part, some = keys[start:stop], rows(start, stop)
        part[:] = some
        draw_into(part, base, temporary[: stop - start])
        np.bitwise_and(part, ~low, out=part)
        np.bitwise_or(part, some, out=part)
    keys = _sorted(keys)
    order = np.empty(count, np.uint32)
    for start, stop in slices(count):
        np.bitwise_and(keys[start:stop], low, out=temporary[: stop - start])
        order[start:stop] = temporary[: stop - start]
    return order
