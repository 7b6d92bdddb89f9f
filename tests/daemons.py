"""Real daemons and commands for tests: started in the test's own environment, waited for, killed, and gone at the end.

The `isolated` fixture names the address and the store in the environment; all that is started here inherits it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dataserve.protocol.address import lock_path, socket_path
from dataserve.protocol.errors import ServerError
from dataserve.server.command_status import ask_status

LIMIT_S = 60.0  #: ten times what anything here takes on a busy machine
POLL_S = 0.01
DATASERVE = (sys.executable, "-P", "-m", "dataserve.server.cli")

#: A transform that leaves a file called `held`, and holds each sample until one called `gate` is in the current directory.
GATED = "gated:hold"
_GATED = """
import os, time
def hold(sample):
    open("held", "w").close()
    deadline = time.monotonic() + 60
    while not os.path.exists("gate"):
        assert time.monotonic() < deadline, "nobody opened the gate"
        time.sleep(0.01)
    return sample
"""


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One command to its end."""
    options = {"timeout": LIMIT_S, "capture_output": True, "text": True, **options}
    return subprocess.run((*DATASERVE, *arguments), check=False, **options)


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """What the condition gives once it is true."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} not after {limit_s} s"
        time.sleep(POLL_S)
    return found


def arrays(folder: Path, name: str = "digits", rows: int = 100) -> str:
    """The source of a small archive: images and labels that tell their row."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.npz"
    images = np.repeat(np.arange(rows, dtype=np.uint8), 64).reshape(rows, 1, 8, 8)
    np.savez(path, image=images, label=np.arange(rows))
    return f"arrays:{path}"


def gated(folder: Path) -> Path:
    """Lays the module of `GATED` into that folder, which becomes the daemon's current one; returns the gate's path."""
    (folder / "gated.py").write_text(_GATED)
    return folder / "gate"


class Daemon:
    """One `dataserve start ...` in the foreground, its output in files."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        self.address = os.environ["DATASERVE_ADDRESS"]
        run_folder = Path(socket_path(self.address)).parent
        self._out = run_folder.parent / f"out-{time.monotonic_ns()}"
        with open(self._out, "wb") as out:
            self.process = subprocess.Popen((*DATASERVE, "start", *arguments), stdout=out, stderr=out, **options)
        self.pid = self.process.pid

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self._out.read_text()

    def status(self) -> dict[str, Any] | None:
        """Its status; None while it does not answer."""
        try:
            found = ask_status([self.address], 1.0)
        except ServerError:
            return None
        return found if found["pid"] == self.pid else None

    def await_answer(self) -> dict[str, Any]:
        """Until it answers."""
        found: dict[str, Any] = until(lambda: self._alive() and self.status(), "an answer")
        return found

    def await_settled(self) -> dict[str, Any]:
        """Until each data set is ready or failed."""

        def settled() -> dict[str, Any] | None:
            status = self._alive() and self.status()
            waiting = not status or any(row["state"] == "preparing" for row in status["datasets"])
            return None if waiting else status

        found: dict[str, Any] = until(settled, "all data sets")
        return found

    def _alive(self) -> bool:
        assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}: {self.said}"
        return True

    def kill(self) -> None:
        """kill -9: nothing is tidied up."""
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextmanager
def daemon(*arguments: str, ready: bool = True, **options: Any) -> Iterator[Daemon]:
    """A daemon that answers, with all data sets settled unless told; gone at the end."""
    started = Daemon(*arguments, **options)
    try:
        if ready:
            started.await_settled()
        else:
            started.await_answer()
        yield started
    finally:
        if started.process.poll() is None:
            started.stop()


@contextmanager
def detached_ends() -> Iterator[None]:
    """Whatever daemon listens at the test's address is gone at the end."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(Path(lock_path(os.environ["DATASERVE_ADDRESS"])).read_text()), signal.SIGKILL)
