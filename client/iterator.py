"""One iteration: ranges to batches, ahead of the loop or in step with it, and the time that the loop waits.

The chain is `Draw` (assembles batch i; knows neither loop nor data set), `Ahead` (a thread that draws into a bounded queue) and
`BatchIterator` (what the user holds). The thread holds no reference to the iterator, so an abandoned one is collected
and its end ends the thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dataserve.protocol import limits
from dataserve.protocol.errors import MachineError, UserError
from dataserve.protocol.partition import Range
from dataserve.protocol.plan import Plan

from .epochs import Epochs
from .events import Iteration, Progress
from .gather import Gatherer
from .leave import Leave
from .order import Order, Windows
from .places import Places, Rows
from .transport import Link

POLL_S = 1.0  #: a wait for the thread looks this often whether it still lives


class Info(NamedTuple):
    """What a batch holds: `rows[i]` of the store, `row_seeds[i]` for its augmentation, by (seed, epoch, row) alone; where a row
    may come twice (`weights` with replacement) by (seed, epoch, position).

    `rows` and `row_seeds` are int64, `valid` is bool, all `(len(batch),)`; a row that is not valid is padding that makes
    the ranks' batch counts equal. `start` is the batch's first position in the epoch's sequence.
    """

    epoch: int
    start: int
    rows: torch.Tensor
    valid: torch.Tensor
    row_seeds: torch.Tensor

    def __repr__(self) -> str:
        """Numbers, and the first rows only: a batch may have thousands."""
        first = ", ".join(str(int(row)) for row in self.rows[:3])
        more = ", ..." if len(self.rows) > 3 else ""
        counts = f"{len(self.rows)} rows [{first}{more}], {int(self.valid.sum())} valid"
        return f"Info(epoch={self.epoch}, start={self.start}, {counts})"


class Run:
    """How far the loop is, shared by the iterator and the data set: counts only what the loop was given."""

    def __init__(self, iteration: Iteration, epochs: Epochs, drawn: int = 0, *, in_worker: bool = False) -> None:
        """`drawn` batches lie behind it already. A loader worker measures nothing that matters: there the times are those that
        the loop's own process has noted in `epochs`."""
        self.iteration = iteration
        self.epoch = iteration.open.epoch
        self.given = drawn
        self.samples = 0
        self.wait_s = 0.0
        self.busy_s = 0.0
        self.replaced_by: str | None = None
        self._in_worker = in_worker
        self._epochs = epochs
        self._generation = epochs.generation
        self._times_before = epochs.times()

    @property
    def overtaken(self) -> bool:
        """Whether another process has moved the cursor since this loader worker began."""
        return self._in_worker and self._epochs.generation != self._generation

    def progress(self) -> Progress:
        """For the daemon. Called on the link's thread too: the fields may be a batch apart, which does no harm."""
        if not self._in_worker:
            return Progress(self.given, self.samples, self.wait_s, self.busy_s)
        times = self._epochs.times()
        if times is None:
            return Progress(self.given, self.samples, None, None)
        before = self._times_before or (0.0, 0.0)
        return Progress(self.given, self.samples, times[0] - before[0], times[1] - before[1])


class Drawn(NamedTuple):
    """A batch before its transform."""

    batch: Any
    info: Info | None
    place: Range


class Draw:
    """Assembles the batches of one iteration by index, on any thread."""

    def __init__(
        self,
        iteration: Iteration,
        plan: Plan,
        order: Order | Windows | None,
        gatherer: Gatherer,
        seed: int,
        link: Link,
        leave: Leave,
        timeout_s: float,
        near_end: Callable[[], None],
        *,
        with_info: bool,
    ) -> None:
        """`near_end` is called when half of the batches are drawn and no more than a window of them is left."""
        self.total = iteration.total
        self.timeout_s = timeout_s
        self._iteration = iteration
        self._plan = plan
        self._places = Places(iteration, order, gatherer)
        self._assemble = gatherer.assemble
        self._seed = seed
        self._link = link
        self._leave = leave
        self._near_end = near_end
        self._near_end_at = max(self.total // 2, self.total - limits.WINDOW_BATCHES)
        self._with_info = with_info

    def __call__(self, index: int) -> Drawn:
        """Batch `index` of this consumer, once the daemon has granted it or has not answered in time."""
        if index >= self._leave.free:
            self._link.admit(self._leave, index, self.timeout_s)
        if index == self._near_end_at:
            self._near_end()
        try:
            place, rows = self._places(index)
            batch = self._assemble(rows)
        except Exception as error:
            opened = self._iteration.open
            start, stop, _ = self._iteration.partition.worker_batch(opened.rank, opened.worker, opened.workers, index)
            error.add_note(f"while batch {index} of epoch {opened.epoch}, positions [{start}, {stop}), was assembled")
            raise
        return Drawn(batch, self._info(place, rows) if self._with_info else None, place)

    def _info(self, place: Range, indices: Rows) -> Info:
        epoch = self._iteration.open.epoch
        listed = np.arange(place.start, place.stop) if isinstance(indices, slice) else indices.astype("int64")
        rows = torch.from_numpy(listed)  # a copy: the user's own
        valid = torch.arange(len(rows)) < place.valid
        seeds = self._plan.seeds(self._seed, epoch, place.start, rows.numpy())
        return Info(epoch, place.start, rows, valid, torch.from_numpy(seeds))

    def finish(self, progress: Progress) -> None:
        """Tell the daemon that the iteration is over."""
        self._link.finish(self._leave, progress)


class _Shelf:
    """What the loop and the thread ahead of it share: finished batches by index, and how far the loop is.

    The queues only wake the other side, which then looks: a Ctrl-C between any two steps loses a waking and nothing else.
    `SimpleQueue.put` is re-entrant, so that a finaliser may call `stop` inside any other call of the same thread.
    """

    def __init__(self, depth: int, first: int) -> None:
        self.depth = depth
        self.taken = first  # batches below this index have left or are leaving
        self.batches: dict[int, Drawn | Exception] = {}
        self.room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stopped = False

    def put(self, index: int, drawn: Drawn | Exception) -> None:
        """Lay batch `index` there."""
        self.batches[index] = drawn
        self.ready.put(None)

    def stop(self) -> None:
        """Have the thread end; waits for nothing."""
        self.stopped = True
        self.room.put(None)


class Ahead:
    """A thread that draws batches in order, at most `depth` before they are taken."""

    def __init__(self, draw: Draw, depth: int, first: int) -> None:
        self.failed = False  #: its error has been raised, and it draws no more
        self._timeout_s = draw.timeout_s + limits.SILENT_S
        self._shelf = _Shelf(depth, first)
        self._thread = threading.Thread(
            target=_work_ahead, args=(draw, self._shelf), name="dataserve-ahead", daemon=True
        )
        self._thread.start()

    def take(self, index: int) -> Drawn:
        """Batch `index`, which stays here until `release`. Raises what its drawing raised, and `stuck` where nothing comes."""
        deadline = time.monotonic() + self._timeout_s
        while (drawn := self._shelf.batches.get(index)) is None:
            try:
                self._shelf.ready.get(timeout=POLL_S)
            except queue.Empty:
                if self._thread.is_alive() and time.monotonic() < deadline:
                    continue
                state = "is still at it" if self._thread.is_alive() else "has died"
                raise MachineError(
                    "stuck",
                    f"Batch {index} was not there after {self._timeout_s:g} s; the thread that works ahead {state}.",
                    "If the store lies on a slow disk, give a longer timeout_s.",
                ) from None
        if isinstance(drawn, Exception):
            self.failed = True
            raise drawn
        self._shelf.taken = index + 1
        self._shelf.room.put(None)
        return drawn

    def release(self, index: int) -> None:
        """Let go of that batch and of older ones: whoever took it has it."""
        for number in [number for number in list(self._shelf.batches) if number <= index]:
            del self._shelf.batches[number]

    def stop(self) -> None:
        """Have the thread end; waits for nothing."""
        self._shelf.stop()


def _work_ahead(draw: Draw, shelf: _Shelf) -> None:
    for index in range(shelf.taken, draw.total):
        _wait_for_room(shelf, index)
        if shelf.stopped:
            return
        try:
            shelf.put(index, draw(index))
        except Exception as error:  # noqa: BLE001 - it comes out of next(), whatever it is
            error.add_note("in the thread that works ahead (prefetch)")
            shelf.put(index, error)
            return


def _wait_for_room(shelf: _Shelf, index: int) -> None:
    """Until the loop takes a batch or lets go. A loop may take a night over one, so a time-out only waits again."""
    while not shelf.stopped and index >= shelf.taken + shelf.depth:
        with contextlib.suppress(queue.Empty):
            shelf.room.get(timeout=limits.TIMEOUT_S)


class BatchIterator(Iterator[Any]):
    """What `iter(train)` gives. A newer `iter()`, `set_epoch` or `load_state_dict` ends it: `next()` then raises."""

    def __init__(
        self,
        draw: Draw | None,
        run: Run,
        prefetch: int,
        finish: Callable[[Drawn], Any],
        *,
        passes_on: bool,
    ) -> None:
        """`finish` makes of a drawn batch what the loop gets; `passes_on`: this is a loader worker, which sends it on."""
        self._pid = os.getpid()
        self._draw = draw
        self._run = run
        self._total = 0 if draw is None else draw.total
        self._finish = finish
        self._passes_on = passes_on
        self._last_s: float | None = None
        self._handed = -1  # the latest batch that the thread ahead has delivered
        self._ahead = Ahead(draw, prefetch, run.given) if draw is not None and prefetch else None

    def __next__(self) -> Any:
        asked_s = time.perf_counter()
        run = self._run
        self._check()
        if run.given >= self._total:
            self.close()
            raise StopIteration
        if run.overtaken:
            run.replaced_by = "set_epoch() or load_state_dict() in the main process"
            self._check()
        if self._last_s is not None:
            run.busy_s += asked_s - self._last_s
            self._last_s = None  # else a call that follows one that raised would count it again
        drawn = self._next_drawn(run.given)
        result = self._finish(drawn)
        if self._passes_on:
            _require_shared_memory(_tensor_bytes(result))
        self._last_s = time.perf_counter()
        run.wait_s += self._last_s - asked_s
        run.samples += drawn.place.valid
        run.given += 1  # last: no call follows, so that a Ctrl-C comes before it or after the return
        return result

    def _next_drawn(self, index: int) -> Drawn:
        """Batch `index`. One that has been handed to a transform that raised is drawn again: it may be half transformed."""
        assert self._draw is not None
        ahead = self._ahead
        if ahead is None or ahead.failed or self._handed == index:
            return self._draw(index)
        drawn = ahead.take(index)
        self._handed = index
        ahead.release(index)
        return drawn

    def _check(self) -> None:
        if self._run.replaced_by is not None:
            raise UserError(
                "bad_state",
                f"This iterator was ended by {self._run.replaced_by}.",
                "One ServedDataset is one consumer: it has one iterator at a time. Make another object for another loop.",
            )
        if os.getpid() != self._pid:
            raise UserError("bad_state", "An iterator does not cross a fork.", "Call iter() in the new process.")

    @property
    def running(self) -> bool:
        """Whether there are batches left in it."""
        return self._run.given < self._total

    def close(self) -> None:
        """End it: the thread that works ahead stops, the daemon hears of it. Harmless when repeated."""
        if self._ahead is not None:
            self._ahead.stop()
        if self._draw is not None:
            draw, self._draw, self._total = self._draw, None, self._run.given
            draw.finish(self._run.progress())

    def __del__(self) -> None:
        if self.__dict__.get("_pid") == os.getpid():
            self.close()


def _tensor_bytes(batch: Any) -> int:
    """Bytes of the tensors in a batch, nested in tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, tuple | list):
        return 0
    return sum(_tensor_bytes(item) for item in batch)


def _require_shared_memory(needed_bytes: int) -> None:
    """A loader worker's batch goes through /dev/shm: without room there the worker would die of a bus error."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes:
        raise MachineError(
            "no_space",
            f"A batch of {needed_bytes} bytes must pass through /dev/shm, which has {free_bytes} free.",
            "Use num_workers=0, which needs none; or give the container more (--shm-size).",
        )
