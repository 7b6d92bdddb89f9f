"""The workers of a preparation: a forkserver pool in which each one opens the source and writes its chunks itself.

Only chunk numbers and what became of them cross the pipes. A worker that dies, or is at one sample for longer than
`Patience.sample_s`, is named with that sample. It ends the preparation; or, where bad samples are left out, a new one
takes its place, and a sample that has cost two workers is left out too. Workers end with their parent.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol.errors import DataserveError, MachineError, ServerError, from_code

from . import sources
from .filling import IDLE, Filler, Page, Patience, from_map
from .journal import Chunk
from .layout import Layout
from .locks import Lock
from .look import pack_look, unpack_look
from .reading import Reader
from .schema import Schema
from .spec import DatasetSpec

START_S = 120.0  #: a worker may take this long to open its source
DEATHS = 2  #: a sample that costs so many workers is bad
IDLE_DEATHS = 3  #: so many workers may die where no sample is to blame
_TICK_S = 0.1
_END_S = 5.0

#: Set before numpy, torch or OpenCV are imported: one native thread a worker, or N workers make N x cores of them.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class _Worker(NamedTuple):
    slot: int
    process: BaseProcess
    pipe: Connection


class Pool:
    """Workers on the job that `job` describes: `{"spec", "folder", "writers_lock", "row_key"}`. None is started before
    there is something to do; at most as many as the page has slots."""

    def __init__(self, job: dict[str, Any], page: Page, preload: list[str], patience: Patience) -> None:
        self._page = page
        self._patience = patience
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])
        self._job = json.dumps({**job, "slots": page.slots, "page": page.handle, "parent": os.getpid()})
        self._workers: dict[int, _Worker] = {}  # by slot
        self._ready: set[int] = set()
        self._waiting: deque[dict[str, Any]] = deque()  # orders
        self._order: dict[int, dict[str, Any]] = {}  # by slot: what it works on
        self._moved: dict[int, tuple[int, float]] = {}  # by slot: the sample it was last seen at, since when
        self._finished: Counter[int] = Counter()  # by slot: rows of whole chunks
        self._deaths: Counter[int] = Counter()  # by sample
        self._condemned: dict[int, str] = {}

    def _start(self, slot: int) -> None:
        try:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_work, args=(slot, self._job, theirs), name=f"dataserve-worker-{slot}"
            )
            process.start()
            theirs.close()
        except (OSError, EOFError) as error:
            text = f"Worker {slot} of {self._page.slots} cannot be started: {error}."
            raise MachineError("worker_died", text, "Take fewer with --workers, or raise the limits.") from None
        self._workers[slot] = _Worker(slot, process, ours)
        self._moved[slot] = (IDLE, time.monotonic())

    def look(self) -> tuple[Schema, Layout]:
        """Has a worker take the first look. Raises as `look.look`, `randomness.check`, and as `run`."""
        found: list[Any] = []
        self._drive([{}], 1, found.append)
        return unpack_look(found[0])

    def run(self, chunks: Iterable[int], build: Mapping[str, Any], workers: int, done: Callable[[Chunk], None]) -> None:
        """Has all these chunks of the build (`filling.to_map`) prepared; `done` hears of each, in any order.

        Raises what a worker raised, `worker_died` or `stuck`; the pool is of no use then. May be called again.
        """
        orders = [{"chunk": chunk, "build": build} for chunk in chunks]
        self._drive(orders, workers, lambda found: done(Chunk.from_list(found)))

    def _drive(self, orders: list[dict[str, Any]], workers: int, done: Callable[[Any], None]) -> None:
        self._waiting.extend(orders)
        missing = len(self._waiting)
        for slot in range(min(workers, missing)):
            if slot not in self._workers:
                self._start(slot)
        for worker in list(self._workers.values()):
            self._feed(worker)
        while missing:
            by_pipe = {worker.pipe: worker for worker in self._workers.values()}
            # A dead worker's pipe reads as its end, but only behind what it still had to say.
            for pipe in wait(list(by_pipe), timeout=_TICK_S):
                assert isinstance(pipe, Connection)
                missing -= self._attend(by_pipe[pipe], done)
            for worker in list(self._workers.values()):
                self._look(worker)

    def _attend(self, worker: _Worker, done: Callable[[Any], None]) -> int:
        """Hears a worker and gives it more to do; how many orders it has finished."""
        try:
            words: dict[str, Any] = json.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._lost(worker, *self._death(worker))
            return 0
        if "failed" in words:
            raise from_code(*words["failed"])
        self._ready.add(worker.slot)
        finished = 0
        if "done" in words:
            self._order.pop(worker.slot, None)
            self._finished[worker.slot] = self._page.finished(worker.slot)
            done(words["done"])
            finished = 1
        self._feed(worker)
        return finished

    def _feed(self, worker: _Worker) -> None:
        if not self._waiting or worker.slot not in self._ready or worker.slot in self._order:
            return
        order = self._order[worker.slot] = self._waiting.popleft()
        self._moved[worker.slot] = (IDLE, time.monotonic())
        try:
            _say(worker.pipe, {**order, "condemned": list(self._condemned.items())})
        except OSError:
            self._lost(worker, *self._death(worker))

    def _look(self, worker: _Worker) -> None:
        """Whether a worker that has something to do still moves."""
        slot, now = worker.slot, time.monotonic()
        if slot in self._ready and slot not in self._order:
            return
        at, since = self._moved[slot]
        current = self._page.at(slot)
        if current != at:
            self._moved[slot] = (current, now)
        elif now - since > (self._patience.sample_s if slot in self._ready else START_S):
            where = f"at sample {current}" if current != IDLE else "opening its source"
            text = f"Worker {slot} (pid {worker.process.pid}) has been {where} for {now - since:.0f} s."
            remedy = "See what that sample is; a source or transform may wait for ever."
            worker.process.kill()
            self._lost(worker, MachineError("stuck", text, remedy), f"It took more than {now - since:.0f} s.")

    def _death(self, worker: _Worker) -> tuple[MachineError, str]:
        """What there is to say of a worker that ended: as an error, and as a sample's cause."""
        worker.process.join(_END_S)
        code = worker.process.exitcode
        how = "ended without a word"
        if code is not None:
            how = f"was killed by {_signal(-code)}" if code < 0 else f"ended with status {code}"
        at = self._page.at(worker.slot)
        where = f"at sample {at}" if at != IDLE else "between samples"
        text = f"Worker {worker.slot} (pid {worker.process.pid}) {how} {where}."
        remedy = "Prepare again, it goes on where it was: if it recurs, look at that sample" + (
            "; the machine may have run out of memory: take fewer --workers." if code == -signal.SIGKILL else "."
        )
        return MachineError("worker_died", text, remedy), f"The worker {how}."

    def _lost(self, worker: _Worker, error: MachineError, cause: str) -> None:
        """A worker is gone: raises the error, or has another one take its place and its chunk."""
        slot, at = worker.slot, self._page.at(worker.slot)
        if not self._patience.forgiving:
            raise error
        self._deaths[at] += 1
        if at == IDLE and self._deaths[at] >= IDLE_DEATHS:
            raise error
        if at != IDLE and self._deaths[at] >= DEATHS:
            self._condemned[at] = cause
        worker.process.join(_END_S)
        worker.pipe.close()
        self._ready.discard(slot)
        if (order := self._order.pop(slot, None)) is not None:
            self._waiting.appendleft(order)
        self._page.reset(slot, self._finished[slot])
        self._start(slot)

    def close(self) -> None:
        """Ends the workers that have nothing to do any more."""
        for worker in self._workers.values():
            with contextlib.suppress(OSError):
                _say(worker.pipe, {"stop": True})
        for worker in self._workers.values():
            worker.process.join(_END_S)
        self.kill()

    def kill(self) -> None:
        """Ends them whatever they do, and waits until they are gone."""
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.join(_END_S)
            worker.pipe.close()
        self._workers = {}


def _work(slot: int, text: str, pipe: Connection) -> None:
    """A worker's life: opens the source, then fills the chunks that its pipe names until it is told to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    with contextlib.suppress(OSError):  # the parent may be gone
        try:
            _fill(slot, json.loads(text), pipe)
        except DataserveError as error:
            _say(pipe, {"failed": [error.code, error.text, error.remedy, error.retryable]})
        except MemoryError:
            _say(pipe, {"failed": ["worker_died", "A worker has no memory left.", "Take fewer with --workers.", False]})
        except EOFError:
            pass


def _fill(slot: int, job: dict[str, Any], pipe: Connection) -> None:
    lock = Lock(Path(job["writers_lock"]))
    if not lock.try_take(shared=True):
        raise ServerError("internal", "A worker's lock is held by another build.")
    spec = DatasetSpec.from_map(job["spec"])
    page = Page.of_parent(job["parent"], job["page"], job["slots"])
    source = sources.open_source(spec)
    source.row_key = job["row_key"]
    reader = Reader(source, spec, page.words(slot))
    filler = None
    one_native_thread()
    _say(pipe, {"ready": slot})
    while "stop" not in (order := json.loads(pipe.recv_bytes())):
        reader.condemned = dict(order["condemned"])
        if "chunk" not in order:
            found = pack_look(source, reader)
            page.reset(slot, 0)
            _say(pipe, {"done": found})
            continue
        if filler is None:
            filler = Filler(reader, source, *from_map(order["build"]), job["folder"], page.words(slot))
        _say(pipe, {"done": filler.fill(order["chunk"])})


def _say(pipe: Connection, words: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(words).encode())


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"


def _end_with(sentinel: int) -> None:
    wait([sentinel])  # without a time-out: the one event that ends this process whatever it does
    os._exit(1)


def one_native_thread() -> None:
    """Keeps the native libraries that are loaded from making threads of their own."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
