"""How fast a consumer is and what it waits for: exponentially weighted over some ten seconds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 10.0  #: a report this old weighs 1/e
DATA_BOUND = 0.1  #: a job that waits for data longer than this share of its time is bound by data


@dataclass(slots=True)
class Rates:
    """The rates of one consumer since `since`; None while nothing is known."""

    since: float
    samples_per_s: float | None = None
    wait_share: float | None = None

    def add(self, now: float, samples: int, wait_s: float | None, busy_s: float | None) -> None:
        """Takes in one report: samples since the last, and how that time was spent."""
        took = now - self.since
        if took <= 0:
            return
        weight = 1 - math.exp(-took / MEMORY_S)
        self.samples_per_s = _blend(self.samples_per_s, samples / took, weight)
        spent = None if wait_s is None or busy_s is None else wait_s + busy_s
        if spent is None:
            self.wait_share = None
        elif spent > 0:
            assert wait_s is not None
            self.wait_share = _blend(self.wait_share, wait_s / spent, weight)
        self.since = now

    def samples_per_s_at(self, now: float) -> float | None:
        """The rate as seen now: a consumer that reports nothing fades."""
        if self.samples_per_s is None:
            return None
        return self.samples_per_s * math.exp(-max(0.0, now - self.since - MEMORY_S / 5) / MEMORY_S)

    @property
    def bound(self) -> str:
        """`data` where it waits for data for more than `DATA_BOUND` of its time, `compute`, or `unknown`."""
        if self.wait_share is None:
            return "unknown"
        return "data" if self.wait_share > DATA_BOUND else "compute"


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
