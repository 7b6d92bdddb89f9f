"""`scripts/simulate`: runs seeds of the simulation and prints what they went through; a failure prints its story."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .clock import FaultError
from .world import World


def main() -> int:
    """Run it; 1 if some seed fails."""
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the one seed to run")
    parser.add_argument("--seeds", metavar="A:B", help="run all seeds of [A, B) instead")
    parser.add_argument("--steps", type=int, default=20_000, help="events before the quiet end of each seed")
    parser.add_argument("--clients", type=int, help="about so many consumers; a few by default")
    chosen = parser.parse_args()
    first, stop = map(int, chosen.seeds.split(":")) if chosen.seeds else (chosen.seed, chosen.seed + 1)
    began = time.perf_counter()
    total: Counter[str] = Counter()
    failed = []
    for seed in range(first, stop):
        try:
            summary = World(seed, chosen.clients).run(chosen.steps)
        except FaultError as error:
            failed.append(seed)
            print(error)
            continue
        total += summary.counts + Counter(steps=summary.steps, seconds=round(summary.seconds))
        if stop - first == 1:
            print(f"trace {summary.digest}")
    print(
        f"{stop - first} seeds in {time.perf_counter() - began:.1f} s, {len(failed)} failed{': ' * bool(failed)}{failed or ''}"
    )
    print("  ".join(f"{name}={count}" for name, count in sorted(total.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
