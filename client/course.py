"""How far one object is: its page of epochs, the iteration that runs in this process, and the cursor that both make."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable

from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import Cursor, Partition

from . import world
from .epochs import MAIN, START, Epochs, Handle
from .iterator import BatchIterator, Run
from .world import Loading


class Course:
    """One object's way through the epochs, as one process sees it. What moves it ends the running iterator."""

    def __init__(self, handle: Handle | None = None, cursor: Cursor = START) -> None:
        """A new page that starts at the cursor, or the one behind the handle of a pickle."""
        self.epochs = Epochs(secrets.randbits(64), handle, cursor)
        self._run: Run | None = None
        self._iterator: weakref.ref[BatchIterator] | None = None
        self._set: Cursor | None = None  # the cursor that was set here last
        self._resumed: tuple[Cursor, int] | None = None  # what this loader worker has loaded, until it iterates

    @property
    def begun(self) -> bool:
        """Whether this process has iterated since the cursor was last moved here."""
        return self._run is not None

    @property
    def epoch(self) -> int:
        """The epoch of the running iteration; where none runs, the one that the next `iter()` takes."""
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None and iterator.running and self._run is not None:
            return self._run.epoch
        return self.epochs.next().epoch

    def take(self, loading: Loading | None) -> tuple[Cursor, int]:
        """Where the iteration that begins now starts, and how many batches of this loader worker lie behind it.

        A cursor that was set stays until its first batch: torchdata's loader calls `iter()` twice where a state ends an epoch.
        """
        if loading is not None:
            resumed, self._resumed = self._resumed, None
            return resumed or (self.epochs.take(loading.worker + 1, loading.seed), 0)
        run = self._run
        unused = run is not None and run.given == 0 < run.iteration.total
        if unused and self._set is not None and self.epochs.latest() == (self._set, False):
            self.epochs.move(self._set)
        return self.epochs.take(MAIN), 0

    def begin(self, run: Run, iterator: BatchIterator) -> None:
        """That iteration runs now; the iterator is the user's to hold."""
        self._run, self._iterator = run, weakref.ref(iterator)

    def end(self, why: str) -> None:
        """End the running iterator, whose `next()` then raises with what ended it."""
        if self._run is not None:
            self._run.replaced_by = why
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.close()
        self._iterator = None

    def settle(self) -> None:
        """A process that is neither the page's maker nor one of its loader workers counts epochs for itself: a rank
        that was spawned with the object, for instance."""
        if self.epochs.owner_pid != os.getpid() and world.loading() is None:
            self.epochs = Epochs(secrets.randbits(64), None, self.epochs.next())
            self._run = None

    def move(self, cursor: Cursor, why: str) -> None:
        """The next `iter()` goes on from there."""
        self.settle()
        self.end(why)
        self.epochs.move(cursor)
        self._run, self._set = None, cursor

    def set_epoch(self, epoch: int) -> None:
        """The next `iter()` takes that epoch: from the cursor if it stands in it, else from its start."""
        self.settle()
        upcoming = self.epochs.next()
        self.move(upcoming if upcoming.epoch == epoch else Cursor(epoch, 0), "set_epoch()")

    def cursor(self, partition: Callable[[int], Partition], rank: int, batches: int | None) -> Cursor:
        """What comes after the batches that the loop was given, or after so many of this epoch. `partition`: by origin.

        Raises `bad_state` where that number is not given and other processes draw, or where each of them knows its own only.
        """
        self.settle()
        latest, run = self.epochs.latest(), self._run
        if latest is None and batches is None:
            return self.epochs.next()
        cursor, in_workers = latest or (self.epochs.next(), False)
        if self.epochs.joined:
            raise UserError(
                "bad_state",
                f"Loader workers go on with epoch {cursor.epoch} from a state of their loader; this process does not know where.",
                "Ask the loader for its state, or ask again in the next epoch.",
            )
        if batches is not None:
            return partition(cursor.position).cursor(cursor.epoch, rank, batches)
        if in_workers or run is None:
            raise UserError(
                "bad_state",
                "The batches are drawn by loader workers; this process cannot see how many the loop was given.",
                "Count them: state_dict(batches=i) is the state after i batches of this epoch.",
            )
        return run.iteration.partition.cursor(run.epoch, run.iteration.open.rank, run.given)

    # --- in a loader worker, for a loader that keeps states itself (torchdata's StatefulDataLoader) ---------------------

    def drawn(self) -> tuple[Cursor, int]:
        """Where the iteration of this loader worker started, and how many batches the worker has drawn since."""
        if self._run is None:
            raise UserError("bad_state", "A loader worker has no state before it iterates.")
        opened = self._run.iteration.open
        return Cursor(opened.epoch, opened.position), self._run.given

    def resume(self, loading: Loading, cursor: Cursor, drawn: int) -> None:
        """This loader worker's next `iter()` goes on there, as those of its siblings do."""
        self.end("load_state_dict()")
        self.epochs.join(loading.worker + 1, loading.seed, cursor)
        self._resumed = cursor, drawn
