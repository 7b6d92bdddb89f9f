"""The orders of PROTOCOL.md section 5, word for word, one Python integer at a time: what the fast ones are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

G = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def mix(x: int) -> int:
    x = x % 2**64
    x = (x ^ x // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x // 2**27) * 0x94D049BB133111EB % 2**64
    return x ^ x // 2**31


def base(seed: int, epoch: int) -> int:
    return mix(mix(seed + G) + epoch)


def key(start: int, n: int, row: int) -> int:
    size = 2 ** max(1, (n - 1).bit_length())
    return mix(start + (row + 1) * G) // size * size + row


def shuffled(n: int, start: int) -> list[int]:
    return sorted(range(n), key=lambda row: key(start, n, row))


def blocks(n: int, seed: int, epoch: int, block_rows: int, window_blocks: int) -> list[int]:
    start = base(seed, epoch)
    count = -(-n // block_rows)
    sequence = shuffled(count, mix(start ^ 0x626C6F636B))
    found = []
    for first in range(0, count, window_blocks):
        rows = [
            row
            for block in sequence[first : first + window_blocks]
            for row in range(block * block_rows, min(n, (block + 1) * block_rows))
        ]
        found += sorted(rows, key=lambda row: key(start, n, row))
    return found


def quantised(weights: Sequence[float]) -> list[int]:
    largest = max(weights)
    return [max(1, round(weight / largest * 2147483647.0)) if weight > 0 else 0 for weight in weights]


def with_replacement(integers: Sequence[int], n: int, seed: int, epoch: int) -> list[int]:
    start = mix(base(seed, epoch) ^ 0x64726177)
    found = []
    for position in range(n):
        point = mix(start + (position + 1) * G) * sum(integers) >> 64
        row = 0
        while point >= integers[row]:
            point -= integers[row]
            row += 1
        found.append(row)
    return found


def minus_log(drawn: int) -> float:
    u = ((drawn >> 12) + 0.5) / 2.0**52
    m, exponent = math.frexp(u)  # exact: 0.5 <= m < 1
    m, exponent = m * 2, exponent - 1
    if m >= float.fromhex("0x1.6a09e667f3bcdp+0"):
        m, exponent = m / 2, exponent + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = 1.0 / 19.0
    for k in range(8, -1, -1):
        total = total * z
        total = total + 1.0 / (2 * k + 1)
    total = total * s
    total = total * 2.0
    return -(exponent * float.fromhex("0x1.62e42fefa39efp-1") + total)


def bits_of(number: float) -> int:
    """A positive float64 as the integer that its 64 bits are."""
    mantissa, exponent = math.frexp(number)
    return int(Fraction(mantissa) * 2**53) - 2**52 + (exponent + 1022 << 52)


def without_replacement(integers: Sequence[int], n: int, seed: int, epoch: int) -> list[int]:
    start = base(seed, epoch)
    pick = mix(start ^ 0x7069636B)
    rows = [row for row, integer in enumerate(integers) if integer]
    size = 2 ** max(1, (len(integers) - 1).bit_length())
    keys = {row: bits_of(minus_log(mix(pick + (row + 1) * G)) / integers[row]) // size * size + row for row in rows}
    chosen = set(sorted(rows, key=keys.__getitem__)[:n])
    return [row for row in shuffled(len(integers), start) if row in chosen]


def folds(n: int, of: int, seed: int, classes: Sequence[int] | None) -> list[int]:
    order = shuffled(n, mix(base(seed, 0) ^ 0x666F6C64))
    if classes is not None:
        order = [row for value in sorted(set(classes)) for row in order if classes[row] == value]
    found = [0] * n
    for place, row in enumerate(order):
        found[row] = place % of
    return found
