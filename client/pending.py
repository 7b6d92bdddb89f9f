"""The requests of one conversation that still lack their replies: ids, and when each is sent (again). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dataserve.protocol.messages import Message


@dataclass(slots=True)
class Pending:
    """A request without its reply: to be sent (again) at, and how long after that; None for never."""

    message: Message
    due: float
    pace_s: float | None


class Requests(dict[int, Pending]):
    """By id. An id is never given twice, also where a request is forgotten: its late reply must find nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.last_id = 0

    def add(self, message: Message, due: float, pace_s: float | None) -> int:
        """A new one; its id."""
        self.last_id += 1
        self[self.last_id] = Pending(message, due, pace_s)
        return self.last_id

    def answered(self, identifier: int) -> Pending | None:
        """Take out the one whose reply has come, and those before it that are never sent again: answers come in order, so
        theirs were lost. None for a reply that is late, or to nothing that was asked."""
        found = self.pop(identifier, None)
        if found is not None:
            for older in [number for number, entry in self.items() if entry.pace_s is None and number < identifier]:
                del self[older]
        return found

    def dues(self) -> list[float]:
        """When each that is sent again is due."""
        return [entry.due for entry in self.values() if entry.pace_s is not None]

    def take_due(self, now: float) -> list[tuple[int, Message]]:
        """Those that must be sent now, with their ids; each is due again after its pace."""
        found = []
        for identifier, entry in self.items():
            if entry.pace_s is not None and entry.due <= now:
                entry.due = now + entry.pace_s
                found.append((identifier, entry.message))
        return found
