"""What the daemon does about memory, as its loop sees it: read-ahead, warming, locking. Nothing here waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Empty

from .ahead import Ahead, Scene
from .events import DatasetSealed, MemoryLooked, PreparationFailed
from .readahead import Reading
from .warm import Hold, Warmer, Warming

Seen = tuple[float | None, float | None]


class Residence:
    """The two threads of a daemon. `log(text)` tells the operator, `progress(Warming)` shows how far warming is."""

    def __init__(
        self,
        orders_folder: str,
        hold: Hold | None,
        log: Callable[[str], None],
        progress: Callable[[Warming], None],
    ) -> None:
        self._ahead = Ahead(orders_folder)
        self._warmer = None if hold is None else Warmer(hold)
        self._log = log
        self._progress = progress
        self._seen: dict[str, Seen] = {}

    def start(self) -> None:
        """Begin."""
        self._ahead.start()
        if self._warmer is not None:
            self._warmer.start()

    def admit(self, event: DatasetSealed) -> DatasetSealed | PreparationFailed:
        """A store that is to be served; or why it cannot be held in memory as the operator wants it."""
        return event if self._warmer is None else self._warmer.admit(event)

    @property
    def wants_readings(self) -> bool:
        """Whether anything may have to be read ahead."""
        return self._ahead.wants

    def follow(self, readings: Sequence[Reading], stores: Mapping[str, str]) -> None:
        """Who reads what next, and the folder of each data set that is served, by name."""
        self._ahead.follow(Scene(readings, frozenset(stores.values())))

    def collect(self, stores: Mapping[str, str]) -> Iterator[MemoryLooked]:
        """What was seen since the last call, of these data sets; tells what there is to tell."""
        for said in [self._ahead.said] if self._warmer is None else [self._ahead.said, self._warmer.said]:
            with contextlib.suppress(Empty):
                while True:
                    self._log(said.get_nowait())
        if self._warmer is not None and (how_far := self._warmer.progress) is not None:
            self._progress(how_far)
        locked = {} if self._warmer is None else self._warmer.locked
        for name, path in stores.items():
            seen = self._ahead.resident.get(path), locked.get(path)
            if self._seen.get(name, (None, None)) != seen:
                self._seen[name] = seen
                yield MemoryLooked(name, *seen)

    def close(self) -> None:
        """End both."""
        self._ahead.close()
        if self._warmer is not None:
            self._warmer.close()
