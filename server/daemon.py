"""The daemon's composition root: claims the address, puts the parts together, runs them, and leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dataserve.protocol import limits

from .builders import Builders, Manner
from .claim import Claim, claim
from .display import Display
from .engine import About, Engine
from .fingerprint import installed
from .service import Service
from .spec import DatasetSpec
from .store import make_root
from .transport import Hub

FAREWELL_S = 3  #: a daemon with nothing to serve tells those that wait why, for so long
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)


class Order(NamedTuple):
    """What to serve, and where. `addresses` best first."""

    specs: Sequence[DatasetSpec]
    addresses: Sequence[str]
    store_root: Path
    manner: Manner


def serve(order: Order, display: Display) -> int:
    """Serve until `dataserve stop`, SIGTERM, SIGINT or SIGHUP; returns the exit status.

    A data set that fails leaves the others served; where all have failed the daemon ends by itself, with 4 if it was for bad
    samples, else 1. Raises what stands in the way of a start: `daemon_running`, `unsafe_folder`, ...
    """
    root = make_root(order.store_root)
    with _stop_signals() as stop_fd:
        claimed = claim(order.addresses)
        try:
            return _run(order, claimed, root, stop_fd, display)
        finally:
            claimed.release()


def _run(order: Order, claimed: Claim, root: Path, stop_fd: int, display: Display) -> int:
    about = About(
        installed("dataserve") or "unknown",
        os.getpid(),
        claimed.address,
        str(root),
        os.uname().nodename,
        os.stat("/proc/self/ns/pid").st_ino,
    )

    def settled() -> None:
        display.close()
        ready = [spec.name for spec in order.specs if spec.name in builders.ready]
        for text in _serving(ready, claimed.address):
            display.line(text)
        if not ready:
            signal.alarm(FAREWELL_S)

    builders = Builders(order.specs, root, order.manner, display.line, display.progress, settled)
    hub = Hub(claimed.address)
    claimed.bound()
    try:
        display.line(f"dataserve {about.version}, pid {about.pid}, at {about.address}, store {about.store}")
        engine = Engine([spec.name for spec in order.specs], about, time.monotonic())
        boot = secrets.token_bytes(limits.BOOT_BYTES)
        Service(engine, hub, builders, is_running, time.monotonic, boot, stop_fd, display.line).run()
    finally:
        display.close()
        hub.close()
    display.line("The daemon has ended.")
    return 0 if builders.ready else builders.exit_status


def _serving(ready: Sequence[str], where: str) -> Iterator[str]:
    """What the operator reads once all data sets are sealed or have failed."""
    if not ready:
        yield f"There is nothing to serve: the daemon ends in {FAREWELL_S} s."
        return
    yield f"Serving {', '.join(ready)} at {where}. In Python:"
    yield "    from dataserve.client import ServedDataset"
    yield f"    data = ServedDataset({ready[0]!r}, batch_size=256)"


def is_running(pid: int, start_time: int) -> bool:
    """Whether the process of that pid and start time (/proc/PID/stat, field 22, clock ticks since boot) is there.

    A zombie is not: it holds nothing any more.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except OSError:
        return False
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == start_time


@contextmanager
def _stop_signals() -> Iterator[int]:
    """A descriptor that becomes readable when one of STOP_SIGNALS comes."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handlers = {number: signal.signal(number, _wake) for number in STOP_SIGNALS}
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        yield readable
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Nothing: that Python has a handler makes it write to the wakeup descriptor."""
