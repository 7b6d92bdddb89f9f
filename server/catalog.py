"""The data sets that a daemon serves, or will: their states and what is known of each. Pure.

preparing ──► ready ◄──► confirming
    │           │            │
    └───────────┴──► failed ◄┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dataserve.protocol import limits
from dataserve.protocol.errors import ServerError, UserError
from dataserve.protocol.messages import Described, Message, Preparing, printable

from .events import (
    ConfirmationEnded,
    ConfirmationStarted,
    DatasetSealed,
    MemoryLooked,
    PreparationAdvanced,
    PreparationFailed,
)

SERVED = ("ready", "confirming")
STORY = 8  #: events that a data set remembers, for an illegal transition's text

News = PreparationAdvanced | DatasetSealed | PreparationFailed | ConfirmationStarted | ConfirmationEnded

#: What each event makes of each state; what is not here is illegal. The same state again is news of it.
TRANSITIONS: dict[str, dict[type[News], str]] = {
    "preparing": {PreparationAdvanced: "preparing", DatasetSealed: "ready", PreparationFailed: "failed"},
    "ready": {DatasetSealed: "ready", ConfirmationStarted: "confirming", PreparationFailed: "failed"},
    "confirming": {ConfirmationEnded: "ready", PreparationFailed: "failed"},
    "failed": {PreparationFailed: "failed"},
}


class IllegalTransitionError(RuntimeError):
    """A fault of the daemon's own: an event came that its state does not allow."""


@dataclass(slots=True)
class Dataset:
    """One data set that is, or will be, served."""

    name: str
    state: str = "preparing"
    done: int = 0
    total: int | None = None
    eta_s: float | None = None
    sealed: DatasetSealed | None = None
    error: PreparationFailed | None = None
    resident: float | None = None
    locked: float | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY))

    def describe(self) -> Message:
        """What a client is told of it. Raises `preparation_failed`."""
        if self.state == "failed":
            raise self.failure()
        found = self.sealed
        if found is None:
            return Preparing(self.name, self.state, self.done, self.total, self.eta_s)
        return Described(
            self.name, found.path, found.store_id, found.fingerprint, found.rows, found.size_bytes, found.columns
        )

    def failure(self) -> ServerError:
        """Why it is not served."""
        assert self.error is not None
        text = f"The data set {self.name!r} is not served: {self.error.text} [{self.error.code}]"
        return ServerError("preparation_failed", text, self.error.remedy)

    def row(self) -> dict[str, Any]:
        """Its line in `status`."""
        found, error = self.sealed, self.error
        return {
            "name": self.name,
            "fingerprint": found and found.fingerprint,
            "id": found and found.store_id,
            "path": found and found.path,
            "state": self.state,
            "rows": found and found.rows,
            "size_bytes": found and found.size_bytes,
            "done": self.done,
            "total": self.total,
            "eta_s": self.eta_s,
            "resident": self.resident,
            "locked": self.locked,
            "error": error and printable(f"{error.text} {error.remedy}".strip()),
        }


class Catalog:
    """All data sets by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._datasets = {name: Dataset(name) for name in names}

    def all(self) -> list[Dataset]:
        """In the order in which they were named."""
        return list(self._datasets.values())

    def names(self) -> str:
        """For a sentence."""
        return ", ".join(sorted(self._datasets)) or "none"

    def find(self, asked: str) -> Dataset:
        """The data set of NAME or NAME@prefix. Raises `unknown_dataset`."""
        name, _, prefix = asked.partition("@")
        dataset = self._datasets.get(name)
        if dataset is None:
            raise UserError("unknown_dataset", f"There is no data set {name!r}.", f"There are: {self.names()}.")
        if prefix and dataset.sealed is not None and not dataset.sealed.fingerprint.startswith(prefix):
            known = dataset.sealed.fingerprint[: limits.FINGERPRINT_DIGITS]
            raise UserError("unknown_dataset", f"{name!r} is served with the fingerprint {known}, not {prefix!r}.")
        return dataset

    def take(self, event: News) -> str | None:
        """Take in news of a data set; returns what the operator is told. Raises `IllegalTransitionError`."""
        dataset = self._enter(event)
        if isinstance(event, PreparationAdvanced):
            dataset.done, dataset.total, dataset.eta_s = event.done, event.total, event.eta_s
        elif isinstance(event, DatasetSealed):
            dataset.sealed, dataset.eta_s = event, None
            dataset.done = dataset.total = event.rows
            return f"{event.name}: ready, {event.rows} rows in {event.path}"
        elif isinstance(event, PreparationFailed):
            dataset.error = event
            return f"{event.name}: failed. {event.text} {event.remedy} [{event.code}]"
        elif isinstance(event, ConfirmationEnded) and event.text is not None:
            remedy = "Jobs that run go on; remove the store and prepare it again."
            return self.take(PreparationFailed(event.name, "bad_store", event.text, remedy))
        return None

    def note(self, event: MemoryLooked) -> None:
        """Take in how much of a data set is in memory: true in any state."""
        dataset = self._datasets[event.name]
        dataset.resident, dataset.locked = event.resident, event.locked

    def _enter(self, event: News) -> Dataset:
        """Move a data set on, if the table allows it."""
        dataset = self._datasets.get(event.name)
        if dataset is None:
            raise IllegalTransitionError(f"{event} is about a data set that does not exist; there are {self.names()}")
        state = TRANSITIONS[dataset.state].get(type(event))
        if state is None:
            story = "; ".join(dataset.story) or "nothing yet"
            raise IllegalTransitionError(f"{event.name} is {dataset.state}, where {event} cannot be. Before: {story}")
        dataset.state = state
        dataset.story.append(repr(event)[:200])
        return dataset

    def validate(self) -> None:
        """Asserts what must hold between any two events."""
        for dataset in self._datasets.values():
            assert dataset.state in TRANSITIONS
            assert dataset.state not in SERVED or dataset.sealed is not None
            assert (dataset.error is not None) == (dataset.state == "failed")
