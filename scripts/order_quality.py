"""How well does an order of blocks shuffle?

Question: how far a row moves from its place in the store, and how many classes a batch has where the store is sorted by class (the
worst case, and what an image folder gives), for `shuffle=Blocks(block_rows, window_blocks)` beside the uniform shuffle.

Command: scripts/order_quality [--rows 1000000] [--classes 1000] [--batch 256] [--epochs 3]

`moved` is the mean of |position - row| over its expectation in a uniform shuffle (rows / 3): blocks come from anywhere,
so it is near 1 wherever there are many. `classes` is the mean number of different classes in a batch, `share` the same
over the uniform shuffle's. `neighbours` is the share of neighbouring rows of the store that come within one batch of
each other, over the uniform shuffle's. `open` is what is read from at a time, in rows.

2026-12-07, any machine (the orders are pure functions), --rows 1000000 --classes 1000 --batch 256:

| block_rows | window_blocks | open | moved | classes | share | neighbours |
| --- | --- | --- | --- | --- | --- | --- |
| uniform | | 1000000 | 0.999 | 226.0 | 1.00 | 1.0 |
| 256 | 16 | 4096 | 0.996 | 20.1 | 0.09 | 238.2 |
| 256 | 256 | 65536 | 0.996 | 156.4 | 0.69 | 15.8 |
| 2048 | 16 | 32768 | 1.007 | 44.1 | 0.19 | 30.8 |
| 2048 | 64 | 131072 | 1.003 | 124.7 | 0.55 | 8.0 |
| 16 | 1024 | 16384 | 0.996 | 204.5 | 0.90 | 57.9 |
| 1 | 4096 | 4096 | 1.000 | 226.0 | 1.00 | 1.0 |

So small blocks shuffle better for the same room: what counts on class-sorted data is how many blocks a window has.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from dataserve.protocol.kinds import plan_of
from dataserve.protocol.plan import Plan

CASES = ((256, 16), (256, 256), (2048, 16), (2048, 64), (16, 1024), (1, 4096))


class Quality(NamedTuple):
    """Means over epochs."""

    moved: float
    classes: float
    neighbours: float


def quality(plan: Plan, classes: int, batch: int, epochs: int) -> Quality:
    """Of the plan on a store that is sorted by classes of equal size."""
    n = plan.n
    whole = n - n % batch
    found = []
    for epoch in range(epochs):
        rows = np.asarray(plan.rows(epoch, 0, n)).astype(np.int64)
        places = np.empty(n, np.int64)
        places[rows] = np.arange(n)
        moved = float(np.abs(places - np.arange(n)).mean()) / (n / 3)
        labels = np.sort((rows * classes // n)[:whole].reshape(-1, batch), axis=1)
        different = float((np.diff(labels, axis=1) != 0).sum(axis=1).mean()) + 1
        found.append(Quality(moved, different, float((np.abs(np.diff(places)) < batch).mean())))
    return Quality(*(sum(each) / epochs for each in zip(*found, strict=True)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    chosen = parser.parse_args()
    print("| block_rows | window_blocks | open | moved | classes | share | neighbours |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    uniform = quality(Plan("shuffled", chosen.rows, 0), chosen.classes, chosen.batch, chosen.epochs)
    print(f"| uniform | | {chosen.rows} | {uniform.moved:.3f} | {uniform.classes:.1f} | 1.00 | 1.0 |", flush=True)
    for block_rows, window_blocks in CASES:
        fields = {"block_rows": block_rows, "window_blocks": window_blocks}
        plan = plan_of({"kind": "blocks", "n": chosen.rows, "seed": 0, **fields})
        found = quality(plan, chosen.classes, chosen.batch, chosen.epochs)
        share, near = found.classes / uniform.classes, found.neighbours / uniform.neighbours
        counts = f"{block_rows * window_blocks} | {found.moved:.3f} | {found.classes:.1f} | {share:.2f} | {near:.1f}"
        print(f"| {block_rows} | {window_blocks} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
