"""What N jobs on one machine cost together: ours beside N DataLoaders, jobs of mixed speed, and one that stops.

Question: CPU-seconds and wall time from nothing (preparation included, and told apart) to the end of some epochs, for N jobs that
read pictures from a folder and compute `--pause-ms` a batch, against as many DataLoaders; whether a job that is stopped for
`--stop-s` disturbs the others; what the daemon costs meanwhile; how often an idle client wakes. Figures to reach: CPU of N jobs at
most 1/N + 5 % of the DataLoaders', the daemon below 2 % of a core with 4 jobs, an idle client below 20 wakes a second.

Command: scripts/bench_jobs [--jobs 1 2 4 8] [--epochs 2] [--data DIR]. DIR has cifar10/cifar10_jpg.tar.gz (else $DATASERVE_DATA).

What is measured: each job is a fresh interpreter with one torch thread, batches of 256 of uint8, the rest dropped. Clock and CPU
begin when all have imported their libraries; DataLoaders have `--workers` processes each, whose CPU counts. Ours counts the
daemon whole, the command that starts it, and all that it has started, looked at ten times a second. `prepared` is the first batch of
the first job, and the
CPU of the daemon's side until then. A pause is a sleep: the GPU works, the CPU does not. A job stops by SIGSTOP. Wakes are
voluntary context switches of all threads of a client that holds a batch and asks for no other.

No table yet: it has never been run to its end. The parts with four jobs, a stopped job, the daemon's share and idle wakes have not
been seen working.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench_sets import DATA, client_environ, dataserve

BATCH = 256
LIMIT_S = 600.0
SAMPLE_S = 0.1  #: the daemon's CPU is looked at so often, from outside
IDLE_S = 5.0
LEAD_S = 5.0  #: before a job is stopped, and after it goes on
PAUSES_MS = (5.0, 10.0, 20.0, 40.0)  #: of the jobs of mixed speed; the second is stopped
TICKS = os.sysconf("SC_CLK_TCK")


# --- a job ----------------------------------------------------------------------------------------------------------------


def used_s() -> float:
    """CPU-seconds of this process and of those it has waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def job(setting: dict[str, Any]) -> None:
    """A job, told to begin by a line on stdin; its account is a line of JSON on stdout."""
    import torch
    import torchvision.transforms as t
    from torchvision.datasets import ImageFolder

    from dataserve.client import ServedDataset

    torch.set_num_threads(1)
    print("{}", flush=True)
    sys.stdin.readline()
    before, moments, count = used_s(), [], 0
    loader: Any
    if setting["system"] == "dataserve":
        loader = ServedDataset("cifar10", batch_size=BATCH, seed=setting["seed"], drop_last=True)
    else:
        loader = torch.utils.data.DataLoader(
            ImageFolder(setting["folder"], t.PILToTensor()),
            BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=setting["workers"],
            persistent_workers=setting["workers"] > 0,
        )
    end = time.monotonic() + setting["seconds"]
    for _ in range(setting["epochs"]):
        for images, _labels in loader:
            count += len(images)
            moments.append(time.monotonic())
            if setting["idle"]:
                print("{}", flush=True)
                sys.stdin.readline()
            time.sleep(setting["pause_s"])
            if time.monotonic() > end:
                break
        if time.monotonic() > end:
            break
    done = time.monotonic()
    del loader  # its workers end, so that their CPU is counted
    print(json.dumps({"cpu_s": used_s() - before, "samples": count, "moments": moments, "end": done}), flush=True)


class Job:
    """One such process, libraries imported when it has been made and `hear` has been called once."""

    def __init__(self, system: str, folder: Path, seed: int, environ: dict[str, str], **more: Any) -> None:
        setting = dict(system=system, folder=str(folder), seed=seed, workers=0, pause_s=0.0, epochs=10**6)
        setting |= dict(seconds=LIMIT_S, idle=False) | more
        command = [sys.executable, str(Path(__file__).resolve()), "--job", json.dumps(setting)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)

    def say(self) -> None:
        """Go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line. Raises `RuntimeError` where it has ended; why is on stderr."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a job ended with {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Gone."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def started(jobs: list[Job]) -> Iterator[list[Job]]:
    """Those jobs with their libraries imported; gone at the end."""
    try:
        for each in jobs:
            each.hear()
        yield jobs
    finally:
        for each in jobs:
            each.end()


# --- the daemon -----------------------------------------------------------------------------------------------------------


class Daemon:
    """A daemon with an empty store, and what it has used of the cores, by the clock."""

    def __init__(self, place: Path, folder: Path) -> None:
        self.environ = client_environ(place)
        self._place, self._folder = place, folder
        self._pid = 0
        self._used: dict[int, float] = {}
        self.command_s = 0.0
        self.samples: list[tuple[float, float]] = []

    def start(self, *, wait: bool) -> None:
        """It prepares; `wait` until it has."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        more = () if wait else ("--no-wait",)
        source = f"imagefolder:{self._folder}"
        dataserve("start", source, "--name", "cifar10", "--detach", *more, environ=self.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.command_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self._pid = int((self._place / "d.sock.lock").read_text())

    def look(self) -> float:
        """CPU-seconds of it and of those that it has started."""
        parents, used = {}, {}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                parents[int(entry)], used[int(entry)] = int(fields[1]), sum(map(int, fields[11:13])) / TICKS
        found = [self._pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        self._used |= {pid: used[pid] for pid in (*found, *self._used) if pid in used}  # those that have ended stay
        total = sum(self._used.values())
        self.samples.append((time.monotonic(), total))
        return total

    def until(self, moment: float) -> float:
        """The same as it was at that moment."""
        return max((used for when, used in self.samples if when <= moment), default=0.0)

    def stop(self) -> None:
        """Gone."""
        dataserve("stop", environ=self.environ)


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[Daemon]:
    """One, not started yet; gone with its store at the end."""
    place = Path(tempfile.mkdtemp(prefix="ds-jobs-", dir="/tmp"))  # a socket's path has 107 bytes at most
    made = Daemon(place, folder)
    try:
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            made.stop()
        shutil.rmtree(place, ignore_errors=True)


# --- what is measured -----------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of N jobs: seconds of the clock and of the cores, and the part of each until the first batch of the first job."""

    wall_s: float
    cpu_s: float
    prepared_s: float
    prepared_cpu_s: float


def loaders(folder: Path, jobs: int, options: argparse.Namespace) -> Cost:
    """N DataLoaders."""
    more = dict(workers=options.workers, pause_s=options.pause_ms / 1000, epochs=options.epochs)
    with started([Job("dataloader", folder, seed, dict(os.environ), **more) for seed in range(jobs)]) as running:
        began = time.monotonic()
        for each in running:
            each.say()
        answers = [each.hear() for each in running]
    return Cost(max(answer["end"] for answer in answers) - began, sum(answer["cpu_s"] for answer in answers), 0.0, 0.0)


def served(folder: Path, jobs: int, options: argparse.Namespace) -> Cost:
    """N of ours, with a daemon that has nothing yet."""
    more = dict(pause_s=options.pause_ms / 1000, epochs=options.epochs)
    with (
        daemon(folder) as made,
        started([Job("dataserve", folder, seed, made.environ, **more) for seed in range(jobs)]) as running,
    ):
        began = time.monotonic()
        made.start(wait=False)
        for each in running:
            each.say()
        while not all(_readable(each) for each in running):
            made.look()
            time.sleep(SAMPLE_S)
        answers = [each.hear() for each in running]
        total = made.look() + made.command_s + sum(answer["cpu_s"] for answer in answers)
        first = min(answer["moments"][0] for answer in answers)
        end = max(answer["end"] for answer in answers)
        return Cost(end - began, total, first - began, made.until(first) + made.command_s)


def _readable(each: Job) -> bool:
    assert each.process.stdout is not None
    return bool(select.select([each.process.stdout], [], [], 0)[0])


def costs(folder: Path, options: argparse.Namespace) -> None:
    """The table of N jobs."""
    print(
        "| jobs | DataLoaders: wall s | CPU s | ours: wall s | CPU s | prepared: wall s | CPU s | CPU ratio | allowed | wall ratio |"
    )
    print("| --- " * 10 + "|")
    for jobs in options.jobs:
        theirs, ours = loaders(folder, jobs, options), served(folder, jobs, options)
        allowed = f"{1 / jobs + 0.05:.3f}" if jobs > 1 else "-"
        print(
            f"| {jobs} | {theirs.wall_s:.1f} | {theirs.cpu_s:.1f} | {ours.wall_s:.1f} | {ours.cpu_s:.1f} | {ours.prepared_s:.1f} "
            f"| {ours.prepared_cpu_s:.1f} | {ours.cpu_s / theirs.cpu_s:.3f} | {allowed} | {ours.wall_s / theirs.wall_s:.3f} |",
            flush=True,
        )


def _rate(moments: list[float], start: float, stop: float) -> float:
    return sum(start <= moment < stop for moment in moments) / (stop - start)


def disturbed(made: Daemon, folder: Path, stop_s: float) -> None:
    """Jobs of mixed speed, one of which stops; what the daemon uses meanwhile."""
    seconds = stop_s + 2 * LEAD_S + 1
    jobs = [
        Job("dataserve", folder, seed, made.environ, pause_s=pause / 1000, seconds=seconds)
        for seed, pause in enumerate(PAUSES_MS)
    ]
    with started(jobs):
        for each in jobs:
            each.say()
        time.sleep(1.0)  # all have begun
        began, used = time.monotonic(), made.look()
        time.sleep(LEAD_S)
        stopped = time.monotonic()
        jobs[1].process.send_signal(signal.SIGSTOP)
        time.sleep(stop_s)
        went_on = time.monotonic()
        jobs[1].process.send_signal(signal.SIGCONT)
        time.sleep(LEAD_S - 1)
        end = time.monotonic()
        share = (made.look() - used) / (end - began)
        answers = [each.hear() for each in jobs]
    print(
        "\n| job, pause ms | batches/s before | during | after | during / before | median gap ms | longest gap ms during |"
    )
    print("| --- " * 7 + "|")
    for number, (pause, answer) in enumerate(zip(PAUSES_MS, answers, strict=True)):
        moments = answer["moments"]
        before, during = _rate(moments, began, stopped), _rate(moments, stopped, went_on)
        after = _rate(moments, went_on, end)
        gaps = [b - a for a, b in itertools.pairwise(moments) if stopped <= b < went_on] or [stop_s]
        name = f"{pause:g}, stopped {stop_s:g} s" if number == 1 else f"{pause:g}"
        print(
            f"| {name} | {before:.1f} | {during:.1f} | {after:.1f} | {during / before:.3f} "
            f"| {1000 * statistics.median(gaps):.1f} | {1000 * max(gaps):.1f} |"
        )
    print(f"\ndaemon, {len(jobs)} jobs: {100 * share:.2f} % of a core (allowed: 2 %)", flush=True)


def idle(made: Daemon, folder: Path) -> None:
    """Wakes of a client that holds a batch and asks for no other."""
    with started([Job("dataserve", folder, 9, made.environ, idle=True)]) as (client,):
        client.say()
        client.hear()
        time.sleep(1.0)
        before, began = _switches(client.process.pid), time.monotonic()
        time.sleep(IDLE_S)
        wakes = (_switches(client.process.pid) - before) / (time.monotonic() - began)
    print(f"idle client: {wakes:.1f} wakes a second (allowed: 20)", flush=True)


def _switches(pid: int) -> int:
    """Voluntary context switches of all its threads so far."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            total += int(status.read_text().rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause-ms", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2, help="of each DataLoader")
    parser.add_argument("--stop-s", type=float, default=20.0)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        job(json.loads(options.job))
        return
    began = time.monotonic()
    load, day = os.getloadavg()[0], time.strftime("%Y-%m-%d")
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load {load:.1f}, {day}, {options.epochs} epochs\n"
    )
    place = Path(tempfile.mkdtemp(prefix="ds-pictures-", dir="/tmp"))
    try:
        with tarfile.open(options.data / "cifar10" / "cifar10_jpg.tar.gz") as archive:
            archive.extractall(place, (member for member in archive if "/train/" in member.name), filter="data")
        folder = place / "cifar10" / "train"
        costs(folder, options)
        with daemon(folder) as made:
            made.start(wait=True)
            disturbed(made, folder, options.stop_s)
            idle(made, folder)
    finally:
        shutil.rmtree(place)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
