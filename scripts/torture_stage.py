"""What scripts/torture_jobs acts with: a daemon, jobs as processes, their records, and the rows that they must hold."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataserve.protocol.address import socket_path
from dataserve.protocol.errors import ServerError
from dataserve.protocol.partition import Cursor, Partition, Range
from dataserve.protocol.plan import Plan
from dataserve.server.command_status import ask_status
from torture_job import HEADER, NAME, Wanted

LIMIT_S = 120.0
DATASERVE = (sys.executable, "-P", "-m", "dataserve.server.cli")
JOB = Path(__file__).with_name("torture_job.py")


class BrokenError(Exception):
    """A promise that does not hold."""


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """What the condition gives once it is true. Raises `BrokenError` where that takes too long."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise BrokenError(f"{what}: not after {limit_s:g} s")
        time.sleep(0.002)
    return found


class Record(NamedTuple):
    """A batch that a job was given."""

    asked_s: float
    given_s: float
    epoch: int
    start: int
    after: Cursor
    rows: bytes


class Job:
    """One process, and what it has written."""

    def __init__(self, wanted: Wanted, environ: dict[str, str]) -> None:
        self.wanted = wanted
        with open(wanted.out + ".err", "ab") as err:
            command = (sys.executable, "-P", str(JOB), json.dumps(asdict(wanted)))
            self.process = subprocess.Popen(command, stderr=err, env=environ, start_new_session=True)

    @property
    def said(self) -> str:
        """Its error output."""
        return Path(self.wanted.out + ".err").read_text()

    def is_ready(self) -> bool:
        """Whether it has had a batch. Raises `BrokenError` where it has ended without."""
        if os.path.exists(self.wanted.out + ".ready"):
            return True
        if self.process.poll() is not None:
            raise BrokenError(f"{self.wanted.job} ended with {self.process.returncode}: {self.said[-2000:]}")
        return False

    def workers(self) -> list[int]:
        """The processes of its loader workers, once it is ready."""
        out = Path(self.wanted.out)
        return sorted(int(path.read_text()) for path in out.parent.glob(f"{out.name}.worker-*"))

    def signal(self, number: int) -> None:
        """To the process and its loader workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, status: int = 0, limit_s: float = LIMIT_S) -> None:
        """Wait for its end. Raises `BrokenError` for another exit status."""
        try:
            found = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            raise BrokenError(f"{self.wanted.job} has not ended in {limit_s:g} s: {self.said[-2000:]}") from None
        if found != status:
            raise BrokenError(f"{self.wanted.job} ended with {found}, not {status}: {self.said[-2000:]}")

    def state(self) -> dict[str, Any]:
        """What it saved after its last batch."""
        found: dict[str, Any] = json.loads(Path(self.wanted.out + ".state").read_text())
        return found

    def records(self) -> list[Record]:
        """All that it has written so far."""
        data, records, place = Path(self.wanted.out).read_bytes(), [], 0
        while place + HEADER.size <= len(data):
            asked_s, given_s, epoch, start, after_epoch, position, count = HEADER.unpack_from(data, place)
            place += HEADER.size
            records.append(
                Record(asked_s, given_s, epoch, start, Cursor(after_epoch, position), data[place : place + 4 * count])
            )
            place += 4 * count
        return records

    def longest_gap_s(self, start: float, stop: float) -> float:
        """The longest time between two batches of which any part lies within `[start, stop)`."""
        times = [record.given_s for record in self.records()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > start and earlier < stop]
        return max(gaps, default=0.0)

    def longest_wait_s(self) -> float:
        """The longest `next()` within an epoch; the first of an iteration registers, and is not one."""
        records = self.records()
        waits = [now.given_s - now.asked_s for before, now in itertools.pairwise(records) if now.epoch == before.epoch]
        return max(waits, default=0.0)


@dataclass
class Stage:
    """A folder, a store of `rows` rows, an address; the seed decides all moments."""

    rows: int
    chance: random.Random
    base: Path
    store: Path
    environ: dict[str, str]
    daemon: subprocess.Popen[bytes] | None = None
    number: int = 0

    # --- jobs -------------------------------------------------------------------------------------------------------

    def job(self, name: str, batch_size: int, **more: Any) -> Job:
        """Start one."""
        self.number += 1
        out = str(self.base / f"{self.number:03d}-{name}")
        return Job(Wanted(out=out, job=name, batch_size=batch_size, **more), self.environ)

    def again(self, job: Job, **more: Any) -> Job:
        """Start another process that goes on from the state that this one saved."""
        self.number += 1
        out = str(self.base / f"{self.number:03d}-{job.wanted.job}")
        return Job(replace(job.wanted, out=out, state=job.state(), **more), self.environ)

    def end_jobs(self) -> None:
        """Kill all that are left of a scene that broke off, and the daemon."""
        end_all(self.base)
        if self.daemon is not None:
            self.kill()

    def expected(self, wanted: Wanted) -> Iterator[tuple[int, Range, Cursor]]:
        """What that job must be given: epoch, range, and the cursor behind it."""
        at = Cursor(0, 0) if wanted.state is None else Cursor(wanted.state["epoch"], wanted.state["position"])
        for epoch in range(at.epoch, at.epoch + wanted.epochs):
            origin = at.position if epoch == at.epoch else 0
            cut = Partition(self.rows, wanted.batch_size, wanted.world_size, wanted.last, origin)
            for index in range(cut.count(wanted.rank)):
                yield epoch, cut.batch(wanted.rank, index), cut.cursor(epoch, wanted.rank, index + 1)

    def check(self, job: Job, *, whole: bool = True) -> int:
        """Compare its records with plan and partition, one by one; the rows that counted. `whole`: to the end of its last epoch.

        Raises `BrokenError` at the first difference.
        """
        plan, orders, counted = Plan("shuffled", self.rows, job.wanted.seed), {}, 0
        records = job.records()
        for index, (epoch, place, after) in enumerate(self.expected(job.wanted)):
            if index == len(records):
                if whole:
                    raise BrokenError(f"{job.wanted.job}: {index} batches, then none; epoch {epoch} has more")
                break
            found = records[index]
            if epoch not in orders:
                orders = {epoch: plan.order(epoch)}
            order = orders[epoch]
            assert order is not None
            if found[2:] != (epoch, place.start, after, order[place.start : place.stop].astype("<u4").tobytes()):
                rows = np.frombuffer(found.rows, "<u4")[:3].tolist()
                raise BrokenError(
                    f"{job.wanted.job}: batch {index} is epoch {found.epoch}, start {found.start}, rows {rows}..., then "
                    f"{found.after}; it must be epoch {epoch}, {place}, then {after}"
                )
            counted += place.valid
        else:
            if len(records) > index + 1:
                raise BrokenError(f"{job.wanted.job}: {len(records)} batches, {index + 1} are all")
        return counted

    # --- the daemon -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A daemon, without waiting for it."""
        with open(self.base / "daemon.log", "ab") as log:
            command = (*DATASERVE, "start", f"store:{self.store}", "--name", NAME)
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ, start_new_session=True)

    def answers(self) -> dict[str, Any] | None:
        """Its status; None while it does not serve."""
        try:
            found = ask_status([self.environ["DATASERVE_ADDRESS"]], 1.0)
        except ServerError:
            return None
        return found if any(row["state"] in ("ready", "confirming") for row in found["datasets"]) else None

    def serve(self) -> None:
        """A daemon that serves."""
        if self.daemon is None:
            self.start()
        until(self.answers, "the daemon serves")

    def kill(self) -> None:
        """kill -9 the daemon."""
        assert self.daemon is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.daemon.pid, signal.SIGKILL)
        self.daemon.wait(LIMIT_S)
        self.daemon = None

    def registered(self, jobs: list[Job]) -> bool:
        """Whether the daemon has all of these that still run, and none of them thinks itself alone."""
        status = self.answers()
        jobs = [job for job in jobs if job.process.poll() is None]
        held = {} if status is None else {row["job"]: row["consumers"] for row in status["jobs"]}
        return all(job.wanted.job in held and not any(one["alone"] for one in held[job.wanted.job]) for job in jobs)

    @property
    def socket(self) -> Path:
        """Where the daemon listens."""
        return Path(socket_path(self.environ["DATASERVE_ADDRESS"]))


@contextlib.contextmanager
def stage(rows: int, seed: int) -> Iterator[Stage]:
    """Everything in a folder of its own; no process of it is left at the end."""
    base = Path(tempfile.mkdtemp(prefix="dt-", dir="/tmp"))
    (base / "run").mkdir(mode=0o700)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DATASERVE_")}
    environ |= {
        "DATASERVE_ADDRESS": f"ipc://{base}/run/d.sock",
        "DATASERVE_STORE": str(base / "store"),
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield Stage(rows, random.Random(seed), base, prepare(base, rows, environ), environ)
    finally:
        end_all(base)
        shutil.rmtree(base, ignore_errors=True)


def prepare(base: Path, rows: int, environ: dict[str, str]) -> Path:
    """A sealed store whose every row tells its number twice, in its label and in its image's first bytes."""
    images = np.zeros((rows, 1, 28, 28), np.uint8)
    images.reshape(rows, -1)[:, :4] = np.arange(rows, dtype="<u4").view(np.uint8).reshape(rows, 4)
    images.reshape(rows, -1)[:, 4:] = np.random.default_rng(0).integers(0, 256, (rows, 780), np.uint8)
    np.savez(base / "rows.npz", image=images, label=np.arange(rows))
    command = (*DATASERVE, "prepare", f"arrays:{base / 'rows.npz'}", "--name", NAME)
    subprocess.run(
        command, env=environ, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return next((base / "store").glob(f"{NAME}-*"))


def end_all(base: Path) -> None:
    """Kill whatever was started with that folder in its environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and str(base).encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
