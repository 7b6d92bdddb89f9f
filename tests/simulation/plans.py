"""The plans of simulated jobs: every kind there is, each with the order that a dumb version says it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np

from dataserve.protocol.blocks import BlocksPlan
from dataserve.protocol.plan import Plan
from dataserve.protocol.subset import SubsetPlan
from dataserve.protocol.weighted import WeightedPlan, quantised

from . import dumb

#: The rows of an epoch by position: PROTOCOL.md section 5, word for word.
Order = Callable[[int], Sequence[int]]


class Planned(NamedTuple):
    """A plan, and what it should be."""

    plan: Plan
    order: Order
    most_ranks: int = 4


def draw(random: Random, rows: int, seed: int) -> list[Planned]:
    """What one name is given over a store of so many rows: mostly one plan, sometimes two folds side by side,
    which have a rank each: ranks of two worlds under one name look like ranks that disagree, and are refused as such."""
    kind = random.choice(("shuffled", "shuffled", "blocks", "subset", "folds", "weighted", "picked"))
    if kind == "folds" and rows >= 6:
        folds = dumb.folds(rows, 3, seed, None)
        members = [[row for row in range(rows) if folds[row] == k] for k in (0, 1)]
        return [_subset(random, rows, fold, seed)._replace(most_ranks=1) for fold in members]
    if kind == "subset":
        start, stop, step = random.randint(0, rows // 4), random.randint(rows // 2 + 2, rows), random.randint(1, 2)
        listed = random.sample(range(rows), random.randint(2, rows))
        return [_subset(random, rows, random.choice((range(start, stop, step), listed)), seed)]
    if kind in ("weighted", "picked"):
        weights = [*(random.randint(0, 5) for _ in range(rows - 2)), 1, 2]
        return [_weighted(random, weights, seed, replacement=kind == "weighted")]
    return [_whole(random, rows, seed, blocks=kind == "blocks")]


def _whole(random: Random, n: int, seed: int, *, blocks: bool) -> Planned:
    """All of n rows, in order of their keys or in blocks."""
    if not blocks:
        return Planned(Plan("shuffled", n, seed), _cached(lambda epoch: dumb.shuffled(n, dumb.base(seed, epoch))))
    block_rows, window_blocks = random.randint(1, n), random.randint(1, 8)
    plan = BlocksPlan(n, seed, block_rows=block_rows, window_blocks=window_blocks)
    return Planned(plan, _cached(lambda epoch: dumb.blocks(n, seed, epoch, block_rows, window_blocks)))


def _subset(random: Random, rows: int, members: Sequence[int], seed: int) -> Planned:
    inner = _whole(random, len(members), seed, blocks=random.random() < 0.3)
    given = members if isinstance(members, range) else np.array(members, np.uint32)
    plan = SubsetPlan.of(rows, given, inner.plan)
    return Planned(plan, _cached(lambda epoch: [members[number] for number in inner.order(epoch)]))


def _weighted(random: Random, weights: Sequence[int], seed: int, *, replacement: bool) -> Planned:
    integers, dumb_integers = quantised(np.array(weights)), dumb.quantised(weights)
    n = random.randint(2, len(weights) if replacement else sum(map(bool, weights)))
    plan = WeightedPlan.of(integers, n, seed, replacement=replacement)
    rule = dumb.with_replacement if replacement else dumb.without_replacement
    return Planned(plan, _cached(lambda epoch: rule(dumb_integers, n, seed, epoch)))


def _cached(order: Order) -> Order:
    return lru_cache(8)(order)
