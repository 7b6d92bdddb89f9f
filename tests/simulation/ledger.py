"""What a job was given, checked with none of the product's arithmetic: an order by the dumb rule, a partition by counting.

A job's epoch is right if the positions that its ranks were given, read step by step and rank by rank, are 0, 1, 2, ... to
the end, each once, across all the places where it was resumed; and if the row at each is the one that PROTOCOL.md says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .clock import FaultError
from .plans import Order


@dataclass
class _Iteration:
    """What the ranks were given of one iteration, by (step, rank): positions, padding left out."""

    epoch: int
    position: int
    given: dict[tuple[int, int], range] = field(default_factory=dict)


class Ledger:
    """One job's deliveries. `begin` iterations in order, `give` batches of any that has begun, `end` them in order."""

    def __init__(self, name: str, n: int, order: Order) -> None:
        self.batches = 0
        self.epochs = 0
        self._name = name
        self._n = n
        self._order = order
        self._reached: dict[int, int] = {}  # by epoch: all below was given; a checkpoint of then may come back
        self._open: dict[int, _Iteration] = {}

    def begin(self, number: int, epoch: int, position: int) -> None:
        """An iteration begins there."""
        self._open[number] = _Iteration(epoch, position)

    def give(self, number: int, step: int, rank: int, places: range, valid: int, rows: list[int]) -> None:
        """That rank's loop was given a batch as its step-th of that iteration."""
        iteration = self._open[number]
        expected = self._order(iteration.epoch)
        if [expected[place] for place in places] != rows:
            raise FaultError(f"{self._name} was given the rows {rows} at {places} of epoch {iteration.epoch}")
        if (step, rank) in iteration.given:
            raise FaultError(f"rank {rank} of {self._name} was given its batch {step} twice")
        self.batches += 1
        iteration.given[step, rank] = places[:valid]

    def end(self, number: int, *, whole: bool, tail: int) -> None:
        """All ranks have drawn what they wanted; where `whole`, all but a tail of at most so many positions."""
        epoch = self._open[number].epoch
        left = self._n - self._settle(number)
        if whole and not 0 <= left <= tail:
            raise FaultError(f"{self._name} ends epoch {epoch}, and {left} of its {self._n} positions were not given")
        self.epochs += whole

    def abandon(self) -> None:
        """The job was killed: some ranks may lack the batches that others have."""
        for number in sorted(self._open):
            self._settle(number)

    def _settle(self, number: int) -> int:
        """Read what was given, in order: it must be what comes next, behind all that was before the cursor. Returns how
        far that is."""
        iteration = self._open.pop(number)
        epoch, reached = iteration.epoch, iteration.position
        if self._reached.get(epoch, 0) < reached:
            raise FaultError(
                f"{self._name} begins at {reached} of epoch {epoch}, and was given {self._reached.get(epoch, 0)}"
            )
        for (step, rank), places in sorted(iteration.given.items()):
            if not places:
                continue
            if places.start < reached:
                raise FaultError(
                    f"rank {rank} of {self._name} was given {places} of epoch {epoch} as its batch {step}, "
                    f"and all before {reached} had been given"
                )
            if places.start > reached:
                break  # a rank's batch is missing; whoever goes on behind it is found out
            reached = places.stop
        self._reached = {known: value for known, value in self._reached.items() if known > epoch - 8}
        self._reached[epoch] = max(reached, self._reached.get(epoch, 0))
        return reached
