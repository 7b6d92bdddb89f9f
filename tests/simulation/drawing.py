"""How batches come from a session's leave to a loop: client/iterator.py's `Draw`, `Ahead` and `BatchIterator` in a model."""

from __future__ import annotations

from collections.abc import Callable

from dataserve.client.events import Iteration, Progress
from dataserve.protocol.partition import Range

from .clock import Loop, Process, Until
from .shell import Link

FOREVER_S = 1e9  #: a wait that others end
PREFETCH = 2  #: batches that a thread or a loader worker is ahead


class Shelf:
    """Batches that were drawn and not yet taken. `changed` pokes those who wait for it."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.places: list[Range] = []
        self.stopped = False
        self._changed = changed

    def put(self, place: Range) -> None:
        """One more."""
        self.places.append(place)
        self._changed()

    def take(self) -> Range:
        """The next."""
        place = self.places.pop(0)
        self._changed()
        return place

    def stop(self) -> None:
        """No more are wanted."""
        self.stopped = True
        self._changed()


class Drawn:
    """One iteration as one process draws it, for the loop in another or in the same."""

    def __init__(self, process: Process, link: Link, iteration: Iteration) -> None:
        self.shelf = Shelf(self._poke)
        self._loop = process
        self._link = link
        self._iteration = iteration
        self._given: Callable[[], int] = lambda: self._produced
        self._produced = 0
        self._leave = link.leave

    def _poke(self) -> None:
        self._loop.poke()
        self._link.process.poke()

    def _progress(self) -> Progress:
        given = self._given()
        return Progress(given, given)

    def begin(self, given: Callable[[], int] | None = None) -> Loop:
        """Register; `given` says how many batches the loop has, if it is not this process that counts them."""
        page = self._link.page
        self._given = given or self._given
        first = not page.opened and not page.alone
        self._leave = self._link.begin(self._iteration, self._progress)
        yield from self._link.await_registration(self._leave, first=first)

    def draw(self, index: int) -> Loop:
        """Put batch `index` on the shelf."""
        yield from self._link.admit(self._leave, index)
        opened = self._iteration.open
        self.shelf.put(self._iteration.partition.worker_batch(opened.rank, opened.worker, opened.workers, index))
        self._produced += 1

    def draw_all(self, depth: int) -> Loop:
        """Put all on the shelf, at most so many before they are taken."""
        for index in range(self._iteration.total):
            yield Until(lambda: self.shelf.stopped or len(self.shelf.places) < depth, FOREVER_S)
            if self.shelf.stopped:
                return
            yield from self.draw(index)

    def work(self) -> Loop:
        """A loader worker's part."""
        if self._iteration.total:
            yield from self.begin()
            yield from self.draw_all(PREFETCH)
            self.finish()

    def finish(self) -> None:
        """Drawn to the end, or broken off."""
        self._link.finish(self._leave, self._progress())
