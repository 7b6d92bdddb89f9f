"""The workers of a preparation: a forkserver pool in which each one opens the source and writes its chunks itself.

Only chunk numbers and checksums cross the pipes. A worker that dies or hangs is named with the sample that it was at,
and ends the preparation; workers end with their parent.
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
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol.errors import DataserveError, MachineError, ServerError, from_code

from . import sources
from .filling import IDLE, Filler, Page, from_map
from .locks import Lock
from .spec import DatasetSpec

HUNG_S = 300.0  #: one sample may take this long
START_S = 120.0  #: a worker may take this long to open its source
_TICK_S = 0.1
_END_S = 5.0
_STOP = -1

#: Set before numpy, torch or OpenCV are imported: one native thread a worker, or N workers make N x cores of them.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class _Worker(NamedTuple):
    slot: int
    process: BaseProcess
    pipe: Connection


class Pool:
    """`count` workers on the job that `job` describes: `{"spec", "folder", "writers_lock", ...}` and `filling.to_map`."""

    def __init__(self, job: dict[str, Any], page: Page, preload: list[str]) -> None:
        self._page = page
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])
        self._workers: list[_Worker] = []
        self._chunk: dict[int, int] = {}  # by slot: what it works on
        self._moved: dict[int, tuple[int, float]] = {}  # by slot: the sample it was last seen at, since when
        text = json.dumps({**job, "slots": page.slots, "page": page.handle, "parent": os.getpid()})
        try:
            for slot in range(page.slots):
                self._workers.append(self._start(slot, text))
        except (OSError, EOFError) as error:
            self.kill()
            text = f"{page.slots} workers cannot be started: {error}."
            raise MachineError("worker_died", text, "Take fewer with --workers, or raise the limits.") from None

    def _start(self, slot: int, job: str) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(slot, job, theirs), name=f"dataserve-worker-{slot}")
        process.start()
        theirs.close()
        return _Worker(slot, process, ours)

    def run(self, chunks: list[int], done: Callable[[int, tuple[int, ...]], None]) -> None:
        """Has all these chunks prepared; `done` hears of each with its checksums, in any order.

        Raises what a worker raised, `worker_died` or `stuck`. The pool is of no use afterwards.
        """
        waiting = list(reversed(chunks))
        missing = len(chunks)
        now = time.monotonic()
        self._moved = {worker.slot: (IDLE, now) for worker in self._workers}
        by_pipe = {worker.pipe: worker for worker in self._workers}
        ready: set[int] = set()
        while missing:
            # A dead worker's pipe reads as its end, but only behind what it still had to say.
            for pipe in wait(list(by_pipe), timeout=_TICK_S):
                assert isinstance(pipe, Connection)
                worker = by_pipe[pipe]
                words = self._hear(worker)
                if "failed" in words:
                    raise from_code(*words["failed"])
                ready.add(worker.slot)
                if "chunk" in words:
                    done(words["chunk"], tuple(words["crcs"]))
                    missing -= 1
                self._chunk.pop(worker.slot, None)
                if waiting:
                    self._give(worker, waiting.pop())
            self._look(ready)

    def _hear(self, worker: _Worker) -> dict[str, Any]:
        try:
            words: dict[str, Any] = json.loads(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._death(worker) from None
        return words

    def _give(self, worker: _Worker, chunk: int) -> None:
        self._chunk[worker.slot] = chunk
        self._moved[worker.slot] = (IDLE, time.monotonic())
        try:
            worker.pipe.send_bytes(chunk.to_bytes(8, "little", signed=True))
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(worker) from None

    def _look(self, ready: set[int]) -> None:
        """Whether every worker that has something to do still moves."""
        now = time.monotonic()
        for worker in self._workers:
            if worker.slot in ready and worker.slot not in self._chunk:
                continue
            at, since = self._moved[worker.slot]
            current = self._page.at(worker.slot)
            if current != at:
                self._moved[worker.slot] = (current, now)
            elif now - since > (HUNG_S if worker.slot in ready else START_S):
                where = f"at sample {current}" if current != IDLE else "opening its source"
                text = f"Worker {worker.slot} (pid {worker.process.pid}) has been {where} for {now - since:.0f} s."
                raise MachineError("stuck", text, "See what that sample is; a source or transform may wait for ever.")

    def _death(self, worker: _Worker) -> MachineError:
        worker.process.join(_END_S)
        code = worker.process.exitcode
        how = "ended without a word"
        if code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        at = self._page.at(worker.slot)
        where = f"at sample {at}" if at != IDLE else "between samples"
        text = f"Worker {worker.slot} (pid {worker.process.pid}) {how} {where}."
        remedy = "Prepare again: if it recurs, look at that sample" + (
            "; the machine may have run out of memory: take fewer --workers." if code == -signal.SIGKILL else "."
        )
        return MachineError("worker_died", text, remedy)

    def close(self) -> None:
        """Ends the workers that have nothing to do any more."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(_STOP.to_bytes(8, "little", signed=True))
        for worker in self._workers:
            worker.process.join(_END_S)
        self.kill()

    def kill(self) -> None:
        """Ends them whatever they do, and waits until they are gone."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(_END_S)
            worker.pipe.close()
        self._workers = []


def _work(slot: int, text: str, pipe: Connection) -> None:
    """A worker's life: opens the source, then fills the chunks that its pipe names until it is told to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    try:
        job = json.loads(text)
        lock = Lock(Path(job["writers_lock"]))
        if not lock.try_take(shared=True):
            raise ServerError("internal", "A worker's lock is held by another build.")
        spec = DatasetSpec.from_map(job["spec"])
        schema, layout = from_map(job)
        page = Page.of_parent(job["parent"], job["page"], job["slots"])
        filler = Filler(spec, sources.open_source(spec), schema, layout, job["folder"], page.words(slot))
        one_native_thread()
        _say(pipe, {"ready": slot})
        while (chunk := int.from_bytes(pipe.recv_bytes(), "little", signed=True)) != _STOP:
            _say(pipe, {"chunk": chunk, "crcs": filler.fill(chunk)})
    except DataserveError as error:
        _say(pipe, {"failed": [error.code, error.text, error.remedy, error.retryable]})
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    except MemoryError:
        _say(pipe, {"failed": ["worker_died", "A worker has no memory left.", "Take fewer with --workers.", False]})


def _say(pipe: Connection, words: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(words).encode())


def _end_with(sentinel: int) -> None:
    wait([sentinel])  # without a time-out: the one event that ends this process whatever it does
    os._exit(1)


def one_native_thread() -> None:
    """Keeps the native libraries that are loaded from making threads of their own."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
