"""Stores whose pages are not in memory, and a consumer that reads nothing itself: what comes in, others have fetched."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from dataserve.protocol import codec, limits
from dataserve.protocol.messages import Done, Hello, Message, More, Open, Opened
from dataserve.protocol.plan import Plan
from dataserve.server.pages import CAP_IPC_LOCK, Pages

from .daemons import LIMIT_S
from .stores import write_store

ROWS, ROW_BYTES = 400, 150_528
PR_CAPBSET_DROP = 24


def big_store(root: Path, rows: int = ROWS) -> Path:
    """A sealed store of so many rows of photographs' size, on the disk, and none in memory; skips where pages stay."""
    values = np.random.default_rng(0).integers(0, 255, (rows, ROW_BYTES), np.uint8)
    folder, _ = write_store(root, {"image": values})
    os.sync()
    drop(folder)
    return folder


def drop(folder: Path) -> None:
    """Have the kernel let go of all pages of the store, and see that it did."""
    for path in folder.glob("*.npy"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if in_memory(path).any():
            pytest.skip(f"the file system of {path} keeps its pages in memory")


def in_memory(path: Path) -> npt.NDArray[np.bool_]:
    """Of each page of a file whether it is in memory."""
    pages = Pages(str(path))
    try:
        return pages.residency()
    finally:
        pages.close()


def rows_in_memory(path: Path) -> npt.NDArray[np.float64]:
    """Of each row of `big_store` the share of its whole pages that is in memory."""
    found = in_memory(path)
    starts = limits.HEADER_BYTES + np.arange(ROWS) * ROW_BYTES
    return np.array([found[-(-start // 4096) : (start + ROW_BYTES) // 4096].mean() for start in starts.tolist()])


class Consumer:
    """One registered rank that says what a client says, and touches no data."""

    def __init__(self, connection: zmq.Socket[bytes], name: str, store_id: str, plan: Plan, batch_size: int) -> None:
        self._connection = connection
        self._number = 0
        hello = Hello((1,), os.getpid(), _start_time(), os.uname().nodename, os.stat("/proc/self/ns/pid").st_ino)
        self.say(hello)
        fields: dict[str, Any] = dict(dataset=name, store_id=store_id, job="cold", instance=b"i" * 16, rank=0)
        fields |= dict(world_size=1, worker=0, workers=1, batch_size=batch_size, last="even", epoch=0, position=0)
        opened = self.say(Open(**fields, plan=plan.to_map(), digest=plan.digest()))
        assert isinstance(opened, Opened), opened
        self._stream = opened.stream

    def done(self, position: int) -> None:
        """It has come so far."""
        self.say(Done(self._stream, 0, position, 0, 0.0, 1.0, False))

    def more(self, first: int) -> None:
        """It asks for that window."""
        self.say(More(self._stream, 0, first, limits.WINDOW_BATCHES))

    def say(self, message: Message) -> Message:
        """The answer to that message."""
        self._number += 1
        self._connection.send(codec.encode_request(self._number, message))
        assert self._connection.poll(LIMIT_S * 1000), f"no answer to {message}"
        return codec.decode_reply(self._connection.recv()).message


@contextmanager
def consumer(address: str, row: dict[str, Any], plan: Plan, batch_size: int) -> Iterator[Consumer]:
    """A consumer of the data set of that row of the status."""
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    try:
        connection.connect(address)
        yield Consumer(connection, row["name"], row["id"], plan, batch_size)
    finally:
        context.destroy(linger=0)


def _start_time() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def may_lock(size_bytes: int) -> None:
    """For a child before it begins: it may lock so much, whoever it runs as."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (size_bytes, size_bytes))
