"""The daemon's composition root: claims the address, puts the parts together, runs them, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dataserve.protocol import address, limits
from dataserve.protocol.errors import DataserveError

from .builders import Builders, Manner, Progress
from .claim import Claim, claim, clear_orders
from .display import Display
from .engine import About, Engine
from .fingerprint import installed
from .residence import Residence
from .service import Service
from .spec import DatasetSpec
from .store import make_root
from .transport import Hub
from .warm import Hold, Warming

OPEN_FILES = 1 << 20  #: enough for all; some libraries walk through as many as they may have
FAREWELL_S = 3  #: a daemon with nothing to serve tells those that wait why, for so long
NOTHING = "There is nothing to serve"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)


class Order(NamedTuple):
    """What to serve, and where. `addresses` best first; `hold`: what of the data is read into memory, and kept there."""

    specs: Sequence[DatasetSpec]
    addresses: Sequence[str]
    store_root: Path
    manner: Manner
    hold: Hold | None = None


def serve(order: Order, display: Display) -> int:
    """Serve until `dataserve stop`, SIGTERM, SIGINT or SIGHUP; returns the exit status.

    A data set that fails leaves the others served; where all have failed the daemon ends by itself, with 4 if it was for bad
    samples, else 1. Raises what stands in the way of a start: `daemon_running`, `unsafe_folder`, ...
    """
    raise_open_files()
    root = make_root(order.store_root)
    with _stop_signals() as stop_fd:
        claimed = claim(order.addresses)
        try:
            clear_orders(claimed.address)
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

    def warming(how_far: Warming) -> None:
        told = Progress("warm", how_far.done, how_far.total, None, None)
        display.progress(how_far.name, told, str(how_far))

    residence = Residence(address.orders_path(claimed.address), order.hold, display.line, warming)
    builders = Builders(order.specs, root, order.manner, display.line, display.progress, settled, residence.admit)
    hub = Hub(claimed.address)
    claimed.bound()
    try:
        display.line(f"dataserve {about.version}, pid {about.pid}, at {about.address}, store {about.store}")
        engine = Engine([spec.name for spec in order.specs], about, time.monotonic())
        boot = secrets.token_bytes(limits.BOOT_BYTES)
        keeper = Keeper(claimed, hub, display.line)
        Service(
            engine, hub, builders, is_running, time.monotonic, boot, stop_fd, display.line, keeper.look, residence
        ).run()
    finally:
        display.close()
        hub.close()
    display.line("The daemon has ended.")
    return 0 if builders.ready else builders.exit_status


class Keeper:
    """Sees to it that the daemon can be reached: what was removed of its folder, lock and socket is made again."""

    def __init__(self, claimed: Claim, hub: Hub, log: Callable[[str], None]) -> None:
        self._claimed = claimed
        self._hub = hub
        self._log = log
        self._said = ""

    def look(self) -> None:
        """Once a tick. What stands in the way is told once, and tried again."""
        try:
            if self._claimed.renew():
                self._hub.bind_again()
                self._claimed.bound()
                self._log(f"The socket {address.socket_path(self._claimed.address)} was removed; it is made again.")
            self._said = ""
        except (DataserveError, OSError) as error:
            text = f"The socket was removed and cannot be made again: {error}"
            if text != self._said:
                self._said = text
                self._log(text)


def raise_open_files() -> None:
    """The soft limit on open files to the hard one. Each connection is a file, and libzmq ends the process that has none
    left for the next; a shell's usual soft limit, 1024, is fewer than the processes of some jobs. What comes above the hard
    limit nobody here can stop: only this user can connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _serving(ready: Sequence[str], where: str) -> Iterator[str]:
    """What the operator reads once all data sets are sealed or have failed."""
    if not ready:
        yield f"{NOTHING}: the daemon ends in {FAREWELL_S} s."
        return
    yield f"Serving {', '.join(ready)} at {where}. In Python:"
    yield "    from dataserve.client import ServedDataset"
    yield f"    data = ServedDataset({ready[0]!r}, batch_size=256)"


def is_running(pid: int, start_time: int) -> bool:
    """Whether the process of that pid and start time (/proc/PID/stat, field 22, clock ticks since boot) is there.

    A zombie is not: it holds nothing any more. One that cannot be looked at, for want of a file or of memory, counts as
    there: what it holds must not go to another.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
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
