"""Which epoch an `iter()` draws: a small page shared by an object, its forks and its pickles.

Under `DataLoader` workers the parent's `iter()` is never called, and the workers may be new processes in each epoch; so
the count cannot live in any of them. The page holds the cursor from which epochs count on (its *generation* rises when
`set_epoch` or `load_state_dict` moves it) and, for the main process and each worker, the last epoch that it took.

A plain counter a worker would not do: a worker that a broken-off epoch never started would lag behind its siblings for
ever. So a fresh worker joins the epoch that a sibling of the same `DataLoader` iteration has taken, and the first one
there takes the next after all.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from dataserve.protocol import limits
from dataserve.protocol.errors import MachineError, UserError
from dataserve.protocol.partition import Cursor

PAGE_BYTES = 4096
START = Cursor(0, 0)  #: where a fresh object begins, whatever a daemon remembers
MAIN = 0  #: the main process's slot; worker w has w + 1
SLOTS = limits.WORKERS + 1

# Words of 8 bytes, each stored and loaded at once.
_TOKEN, _GENERATION, _BASES = 0, 1, 2
_ALONE, _OPENED, _TIMED, _WAIT_US, _BUSY_US, _JOINED = range(6, 12)
_SLOTS = 16
assert 8 * (_SLOTS + SLOTS) <= PAGE_BYTES

_GENERATIONS = 2**16
_TAGS = 2**16


class Handle(NamedTuple):
    """How another process finds the page: a descriptor of a living process. The token says that it is the page."""

    pid: int
    descriptor: int
    token: int


class _Taken(NamedTuple):
    """A slot's word: who took which epoch, counted from which cursor. `epoch` is -1 where it says nothing now."""

    generation: int
    tag: int
    epoch: int


class Epochs:
    """The page, as one process sees it. Raises nothing but `bad_state` where epochs run out."""

    def __init__(self, token: int, handle: Handle | None = None, cursor: Cursor = START) -> None:
        """A new page that starts at the cursor, or the one behind the handle if it is still there."""
        self._own: dict[int, tuple[int, _Taken]] = {}
        descriptor = None if handle is None else _find(handle)
        fresh = descriptor is None
        #: The process whose loader workers count here; any other one that iterates needs a page of its own.
        self.owner_pid = os.getpid() if fresh or handle is None else handle.pid
        if descriptor is None:
            descriptor = os.memfd_create("dataserve-epochs", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, PAGE_BYTES)
        self._descriptor = descriptor
        self._words = memoryview(mmap.mmap(descriptor, PAGE_BYTES)).cast("Q")
        if fresh:
            self._words[_TOKEN] = token
            self.move(cursor)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # an init that failed has none
            os.close(self._descriptor)

    def handle(self) -> Handle:
        """For a pickle."""
        return Handle(self.owner_pid, self._descriptor, self._words[_TOKEN])

    def take(self, slot: int, tag: int = 0) -> Cursor:
        """The epoch and origin of the iteration that begins now; counted at once, whatever becomes of it.

        `tag`: 16 bits that the workers of one `DataLoader` iteration have in common.
        """
        generation, base = self._base()
        epoch = self._next(slot, tag % _TAGS, generation, base.epoch)
        if epoch >= limits.EPOCH:
            raise UserError("bad_state", f"Epoch {epoch} does not exist: they end at {limits.EPOCH - 1}.")
        self._note(slot, _Taken(generation, tag % _TAGS, epoch))
        return Cursor(epoch, base.position if epoch == base.epoch else 0)

    def _note(self, slot: int, taken: _Taken) -> None:
        self._words[_SLOTS + slot] = _pack(taken)
        self._own[slot] = (os.getpid(), taken)

    def _next(self, slot: int, tag: int, generation: int, base: int) -> int:
        taken = [_unpack(word) for word in self._words[_SLOTS : _SLOTS + SLOTS].tolist()]  # one look at all
        current = [item.epoch if item.generation == generation else -1 for item in taken]
        pid, own = self._own.get(slot, (0, _Taken(-1, 0, -1)))
        if slot != MAIN and pid == os.getpid():  # a persistent worker: its siblings go on with it
            last = max(own.epoch, current[MAIN])
            return last + 1 if own.generation == generation else base
        if slot != MAIN:
            siblings = [
                epoch
                for epoch, item in zip(current[1:], taken[1:], strict=True)
                if item.tag == tag and epoch > current[slot]
            ]
            if siblings:
                return max(siblings)
        last = max(current)
        return last + 1 if last >= 0 else base

    def join(self, slot: int, tag: int, cursor: Cursor) -> None:
        """A loader worker begins at the cursor of a state that all workers of its `DataLoader` load: the first of them
        moves the page there, the others follow. Raises `stuck` where a sibling was stopped in the midst of it."""
        tag %= _TAGS
        with self._locked():
            generation, base = self._base()
            # Who has been there before loads the same state again.
            been = _unpack(self._words[_SLOTS + slot]).generation == generation
            if been or base != cursor or self._words[_JOINED] != generation << 16 | tag:
                generation = _following(generation)
                self._words[_JOINED] = generation << 16 | tag
                self.move(cursor)
            self._note(slot, _Taken(generation, tag, cursor.epoch))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the processes that share the page."""
        deadline = time.monotonic() + limits.SILENT_S
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise MachineError(
                        "stuck", f"Another loader worker has held the page of epochs for {limits.SILENT_S:g} s."
                    ) from None
                time.sleep(0.001)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    @property
    def generation(self) -> int:
        """Another number after each `move`."""
        return int(self._words[_GENERATION])

    @property
    def joined(self) -> bool:
        """Whether the latest epoch is one that loader workers have gone on with, each behind batches of its own."""
        generation, base = self._base()
        latest = self.latest()
        return self._words[_JOINED] >> 16 == generation and latest is not None and latest[0].epoch == base.epoch

    def move(self, cursor: Cursor) -> None:
        """Epochs count from this cursor on; the next `take` anywhere takes it."""
        generation = _following(self._words[_GENERATION])
        # Two places by turns, so that a reader of the older generation never sees half of the new cursor.
        place = _BASES + 2 * (generation & 1)
        self._words[place], self._words[place + 1] = cursor
        self._words[_GENERATION] = generation

    def next(self) -> Cursor:
        """What the main process would take now."""
        generation, base = self._base()
        epoch = self._next(MAIN, 0, generation, base.epoch)
        return Cursor(epoch, base.position if epoch == base.epoch else 0)

    def latest(self) -> tuple[Cursor, bool] | None:
        """The last iteration taken since the cursor was moved, and whether workers took it; None if none was."""
        generation, base = self._base()
        taken = [_unpack(word) for word in self._words[_SLOTS : _SLOTS + SLOTS].tolist()]
        current = [item.epoch if item.generation == generation else -1 for item in taken]
        epoch = max(current)
        if epoch < 0:
            return None
        return Cursor(epoch, base.position if epoch == base.epoch else 0), epoch > current[MAIN]

    def _base(self) -> tuple[int, Cursor]:
        while True:
            generation = self._words[_GENERATION]
            place = _BASES + 2 * (generation & 1)
            cursor = Cursor(self._words[place], self._words[place + 1])
            if self._words[_GENERATION] == generation:
                return generation, cursor

    # --- what else the processes of one object tell each other -------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether the daemon was silent when one of them last looked."""
        return bool(self._words[_ALONE])

    @property
    def opened(self) -> bool:
        """Whether one of them has ever been registered."""
        return bool(self._words[_OPENED])

    def note_link(self, alone: bool, opened: bool) -> None:
        """Tell the others how the link stands."""
        self._words[_ALONE], self._words[_OPENED] = alone, opened or self._words[_OPENED]

    def note_times(self, wait_s: float, busy_s: float) -> None:
        """Add to what the loop around a `DataLoader` has waited and worked."""
        self._words[_WAIT_US] += round(wait_s * 1e6)
        self._words[_BUSY_US] += round(busy_s * 1e6)
        self._words[_TIMED] = 1

    def times(self) -> tuple[float, float] | None:
        """Seconds waited and worked in all, if anybody measures."""
        if not self._words[_TIMED]:
            return None
        return self._words[_WAIT_US] / 1e6, self._words[_BUSY_US] / 1e6


def _find(handle: Handle) -> int | None:
    """A descriptor of the page, if its process lives and it is the page."""
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # the number may be anything's by now
            return None
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_size == PAGE_BYTES and os.pread(descriptor, 8, 0) == handle.token.to_bytes(
            8, "little"
        ):
            return descriptor
    os.close(descriptor)
    return None


def _following(generation: int) -> int:
    return generation % (_GENERATIONS - 1) + 1  # never 0, which an empty slot has


def _pack(taken: _Taken) -> int:
    return taken.generation << 48 | taken.tag << 32 | taken.epoch


def _unpack(word: int) -> _Taken:
    return _Taken(word >> 48, word >> 32 & (_TAGS - 1), word & (limits.EPOCH - 1))
