"""Real preparing children over real pipes, for the tests of preparation; each lives in the test's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.server.spec import DatasetSpec

LIMIT_S = 60.0
Events = list[dict[str, Any]]


class Child:
    """One `python -m dataserve.server.prepare`, spoken to as the daemon does."""

    def __init__(self, cwd: Path, setup: str = "") -> None:
        # `setup` changes bounds in the child; without one it is started as the daemon starts it.
        code = f"import os, sys; from dataserve.server import pool, prepare; {setup}; os._exit(prepare.main())"
        program = ["-c", code] if setup else ["-m", "dataserve.server.prepare"]
        self.process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            start_new_session=True,
        )

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"workers": None, "build": True, **request}).encode() + b"\n")
        self.process.stdin.flush()

    def events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def end(self) -> tuple[int, Events, str]:
        """Status, the remaining events, and stderr."""
        found = list(self.events())
        assert self.process.stderr is not None
        words = self.process.stderr.read().decode()
        return self.process.wait(LIMIT_S), found, words

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start(isolated: Path) -> Iterator[Callable[..., Child]]:
    """Starts a child with a request; all are killed with their groups in the end."""
    children: list[Child] = []

    def starting(setup: str = "", **request: Any) -> Child:
        child = Child(isolated, setup)
        children.append(child)
        child.ask(**{"store": str(isolated / "store"), **request})
        return child

    yield starting
    for child in children:
        child.kill()


def spec(source: str, transform: str | None = None, name: str = "data", **args: Any) -> dict[str, Any]:
    return {**DatasetSpec("data", source, args, transform).to_map(), "name": name}


def named(events: Events, name: str) -> Events:
    return [event for event in events if event["event"] == name]


def content(path: str) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in Path(path).iterdir()}


def archive(folder: Path, rows: int = 200) -> str:
    generator = np.random.default_rng(0)
    np.savez(
        folder / "a.npz",
        image=generator.integers(0, 256, (rows, 3, 32, 32), np.uint8),
        label=np.arange(rows, dtype="<i8"),
    )
    return f"arrays:{folder}/a.npz"


def factory(reference: str, on_error: str = "fail", name: str = "data", **args: Any) -> dict[str, Any]:
    """A spec of a factory whose data are covered by a version."""
    return DatasetSpec(name, reference, args, on_error=on_error, version="1").to_map()


def wait_for_work(child: Child) -> None:
    """Returns when the child has finished some rows."""
    for event in child.events():
        if event["event"] == "progress" and event["stage"] == "prepare" and event["done"] > 0:
            return
    pytest.fail("it ended before it worked")


def group(pid: int) -> set[int]:
    """Living processes of that session, whose leader was `pid`."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[3] == str(pid) and fields[0] != "Z":
                    found.add(int(entry.name))
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
