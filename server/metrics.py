"""How fast a consumer is and what it waits for: decayed sums over some ten seconds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 10.0  #: what was this long ago weighs 1/e
PATIENCE_S = 2.0  #: silence that is no news: reports come about each second
LEAST_S = (
    0.5  #: of time spent, before which a rate is a number and no knowledge: one batch of 60 rows in 3 us is no 20 M/s
)
DATA_BOUND = 0.1  #: a job that waits for data longer than this share of its time is bound by data


@dataclass(slots=True)
class Rates:
    """The rates of one consumer, from its reports; `since` is when it was registered or last reported.

    A report says how many samples came and how that time was spent, which may be longer than the time since the last
    report: a client that was alone tells all at once.
    """

    since: float
    _samples: float = 0.0
    _spent_s: float = 0.0
    _wait_s: float | None = None

    def add(self, now: float, samples: int, wait_s: float | None, busy_s: float | None) -> None:
        """Takes in one report."""
        known = wait_s is not None and busy_s is not None
        spent_s = wait_s + busy_s if wait_s is not None and busy_s is not None else max(0.0, now - self.since)
        kept = math.exp(-spent_s / MEMORY_S)
        self._samples = self._samples * kept + samples
        self._spent_s = self._spent_s * kept + spent_s
        self._wait_s = (self._wait_s or 0.0) * kept + (wait_s or 0.0) if known else None
        self.since = now

    def samples_per_s(self, now: float) -> float | None:
        """The rate as seen now, None while less than `LEAST_S` is known; a consumer that reports nothing fades."""
        if self._spent_s < LEAST_S:
            return None
        silent_s = max(0.0, now - self.since - PATIENCE_S)
        return self._samples / self._spent_s * math.exp(-silent_s / MEMORY_S)

    @property
    def wait_share(self) -> float | None:
        """The share of its time that it waits for data, None where that cannot be known."""
        if self._wait_s is None or self._spent_s < LEAST_S:
            return None
        return min(1.0, self._wait_s / self._spent_s)

    @property
    def bound(self) -> str:
        """`data` where it waits for more than `DATA_BOUND` of its time, `compute`, or `unknown`."""
        share = self.wait_share
        if share is None:
            return "unknown"
        return "data" if share > DATA_BOUND else "compute"
