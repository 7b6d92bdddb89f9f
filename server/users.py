"""Who uses a sealed store: daemons that serve it, jobs that are attached through them, and processes that have it mapped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from dataserve.protocol.errors import ServerError

from .claim import holder
from .command_status import Status, ask_status


class Attached(NamedTuple):
    """One process of a job that reads a store, and the daemon that knows of it."""

    job: str
    pid: int
    daemon_pid: int


def daemons(addresses: Sequence[str], timeout_s: float) -> tuple[list[Status], list[int]]:
    """The status of each daemon that answers at these addresses, and the pids of those that are there and do not."""
    answers, silent = [], []
    for where in addresses:
        try:
            answers.append(ask_status([where], timeout_s))
        except ServerError:
            if (pid := holder(where)) is not None:
                silent.append(pid)
    return answers, silent


def served_by(statuses: Sequence[Status], path: str) -> list[int]:
    """Pids of the daemons that serve that store."""
    return [status["pid"] for status in statuses if any(_serves(row, path) for row in status["datasets"])]


def attached(statuses: Sequence[Status], path: str) -> list[Attached]:
    """The processes of jobs that read that store, as the daemons know them."""
    found = set()
    for status in statuses:
        names = {row["name"] for row in status["datasets"] if _is(row, path)}
        for job in status["jobs"]:
            if job["dataset"] in names:
                found |= {Attached(job["job"], row["pid"], status["pid"]) for row in job["consumers"]}
    return sorted(found)


def mapped_by(path: str) -> list[int]:
    """Pids of the processes that have files of that folder mapped, as far as this user may look: jobs go on alone when
    their daemon dies, and no daemon tells of them."""
    needle = os.fsencode(f" {os.path.realpath(path)}{os.sep}")
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/maps", "rb") as file:
                if any(needle in line for line in file):
                    found.append(int(name))
    return sorted(found)


def _serves(row: dict[str, Any], path: str) -> bool:
    return _is(row, path) and row["state"] in ("ready", "confirming")


def _is(row: dict[str, Any], path: str) -> bool:
    return row["path"] is not None and os.path.realpath(row["path"]) == os.path.realpath(path)
