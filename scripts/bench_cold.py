"""How fast data come that are not in memory, and that do not fit there.

Question: samples/s of one job in its first epoch, and bytes read from the disk for each byte that it was given, when
no page of the store is in memory: with room for all of it, and in a control group with room for less than half;
shuffled, shuffled in blocks and in order; with read-ahead and without it, and with other advice on the client's maps
than ours.

Command: scripts/bench_cold [--seconds 6] [--photos 16000] [--small 1500000] [--folder DIR]

No table yet: it has not been run to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dataserve.protocol import limits
from dataserve.protocol.errors import DataserveError
from dataserve.server.command_status import ask_status
from dataserve.server.pages import Pages, read_text

LIMIT_S = 120.0
BASE_BYTES = 500_000_000  #: what the client, torch and the daemon take of a control group before any data
SOURCE = """
import numpy as np
class Rows:
    def __init__(self, rows, size): self.rows, self.size, self.noise = rows, size, np.random.default_rng(0).bytes(2 * size)
    def __len__(self): return self.rows
    def __getitem__(self, row):
        start = row * 31 % self.size
        return np.frombuffer(self.noise, np.uint8, self.size, start), row
def rows(rows, size): return Rows(rows, size)
"""

#: The daemon, with its read-ahead taken out where the first word says so. The control group is joined before anything is read.
DAEMON = """
import os, sys
if sys.argv[1]: open(sys.argv[1], "w").write(str(os.getpid()))
from dataserve.server import cli, pages
if sys.argv[2] == "off": pages.Pages.advise = lambda *_: None
sys.exit(cli.main(sys.argv[3:]))
"""

#: One job: samples and seconds, one line. Arguments: control group, name, batch size, order, advice, seconds.
CLIENT = """
import mmap, os, sys, time
if sys.argv[1]: open(sys.argv[1], "w").write(str(os.getpid()))
name, batch, order, advice, seconds = sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5], float(sys.argv[6])
from dataserve.client import ServedDataset, mapping
if advice != "ours":
    mapping.advise_scattered = lambda mapped, *_: mapped.base.madvise(getattr(mmap, "MADV_" + advice.upper()))
if order == "blocks":
    from dataserve.client import Blocks
how = {"shuffled": True, "blocks": order == "blocks" and Blocks(64), "sequential": False}[order]
data = ServedDataset(name, batch_size=batch, seed=1, job="cold", shuffle=how, prefetch=2)
began, samples = time.perf_counter(), 0
for image, _ in data:
    samples += len(image)
    if time.perf_counter() - began > seconds: break
took = time.perf_counter() - began
io = open("/proc/self/io").read()
print("TOOK", samples, took, io.partition("read_bytes: ")[2].split()[0])
"""


class Case(NamedTuple):
    """One row of the table. `room`: whether all of it fits into the memory there is."""

    data: str
    room: bool
    order: str
    ahead: bool
    advice: str = "ours"


CASES = [
    Case(data, room, order, ahead, advice)
    for data in ("photos", "small")
    for room in (True, False)
    for order, ahead, advice in (
        ("shuffled", False, "normal"),
        ("shuffled", False, "ours"),
        ("shuffled", True, "ours"),
        ("blocks", False, "ours"),
        ("blocks", True, "ours"),
        ("sequential", False, "ours"),
        ("sequential", True, "ours"),
    )
]
ROW_BYTES = {"photos": 150_528, "small": 784}
BATCH = {"photos": 64, "small": 256}


@contextmanager
def control_group(limit_bytes: int) -> Iterator[str]:
    """A control group below our own with that limit; its file for processes. Raises OSError where there can be none."""
    lines = read_text("/proc/self/cgroup").splitlines()
    line = next((line for line in lines if ":memory:" in line), lines[-1])
    version_1 = ":memory:" in line
    mount = "/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup"
    folder = Path(mount + line.split(":", 2)[2]) / f"dataserve-bench-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit_bytes))
        yield str(folder / "cgroup.procs")
    finally:
        deadline = time.monotonic() + 10  # the kernel takes its time to part with the last process
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.05)


def files(store: Path, name: str) -> list[Path]:
    """The column files of that data set."""
    return sorted(store.glob(f"{name}-*/*.npy"))


def drop(paths: list[Path]) -> float:
    """Have the kernel let go of all pages; the share that is still in memory."""
    left = total = 0
    for path in paths:
        pages = Pages(str(path))
        os.posix_fadvise(pages.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left, total = left + int(pages.residency().sum()), total + pages.pages
        pages.close()
    return left / total


def resident_bytes(paths: list[Path]) -> int:
    """Bytes of them that are in memory."""
    found = 0
    for path in paths:
        pages = Pages(str(path))
        found += int(pages.residency().sum()) * 4096
        pages.close()
    return found


def prepare(folder: Path, name: str, rows: int) -> None:
    """The store, through `dataserve prepare`."""
    words = [sys.executable, "-m", "dataserve.server.cli", "prepare", "bench_cold_rows:rows", "--name", name]
    words += ["--arg", f"rows={rows}", "--arg", f"size={ROW_BYTES[name]}", "--version", "1", "--store", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stdout + ended.stderr)


@contextmanager
def serving(store: Path, case: Case, group: str) -> Iterator[int]:
    """A daemon that serves the store, whose pages were dropped since it began; its pid."""
    address = f"ipc://{store}/run/d.sock"
    (store / "run").mkdir(mode=0o700, exist_ok=True)
    sealed = files(store, case.data)[0].parent
    words = ["start", f"store:{sealed}", "--name", case.data, "--address", address]
    ahead = "on" if case.ahead else "off"
    with open(store / "daemon.log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-c", DAEMON, group, ahead, *words], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(DataserveError):
                found = ask_status([address], 1.0)["datasets"][0]
                if found["state"] == "ready" and found["resident"] is not None:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((store / "daemon.log").read_text())
            time.sleep(0.05)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def read_bytes(pid: int) -> int:
    """What that process has had read from disks."""
    return int(read_text(f"/proc/{pid}/io").partition("read_bytes: ")[2].split()[0])


def measure(store: Path, case: Case, seconds: float) -> str:
    """One row."""
    paths = files(store, case.data)
    size_bytes = sum(path.stat().st_size for path in paths)
    with contextlib.ExitStack() as stack:
        group = ""
        if not case.room:
            try:
                group = stack.enter_context(control_group(BASE_BYTES + size_bytes * 2 // 5))
            except OSError as error:
                return f"not run: no control group can be made here ({error.strerror})"
        daemon = stack.enter_context(serving(store, case, group))
        left = drop(paths)
        time.sleep(limits.RESIDENT_EACH_S + 0.5)  # until the daemon has seen it
        before = read_bytes(daemon)
        words = [group, case.data, str(BATCH[case.data]), case.order, case.advice, str(seconds)]
        environment = {**os.environ, "DATASERVE_ADDRESS": f"ipc://{store}/run/d.sock", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [sys.executable, "-c", CLIENT, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if ended.returncode:
            return f"failed: {ended.stderr.strip().splitlines()[-1]}"
        _, samples, took, read = ended.stdout.split()
        by_daemon = read_bytes(daemon) - before
    given = int(samples) * ROW_BYTES[case.data]
    disk = int(read) + by_daemon
    values = [
        f"{left:5.0%}",
        f"{int(samples) / float(took):9,.0f}",
        f"{given / 1e6:8,.0f}",
        f"{disk / 1e6:8,.0f}",
        f"{disk / given:6.2f}",
        f"{by_daemon / max(disk, 1):5.0%}",
    ]
    return " | ".join(values)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run, which ends with its epoch")
    parser.add_argument("--photos", type=int, default=16_000, help="rows of 150,528 bytes")
    parser.add_argument("--small", type=int, default=1_500_000, help="rows of 784 bytes")
    parser.add_argument("--folder", help="where the stores are made, on the disk that is asked about")
    chosen = parser.parse_args()
    store = Path(tempfile.mkdtemp(prefix="ds-cold-", dir=chosen.folder))
    need = chosen.photos * ROW_BYTES["photos"] + chosen.small * ROW_BYTES["small"]
    try:
        free = shutil.disk_usage(store).free
        if free < 2 * need:
            raise SystemExit(f"{store} has {free:,} bytes free; {2 * need:,} are wanted: give --folder, or fewer rows.")
        (store / "bench_cold_rows.py").write_text(SOURCE)
        for name, rows in (("photos", chosen.photos), ("small", chosen.small)):
            began = time.monotonic()
            prepare(store, name, rows)
            os.sync()
            size_bytes = sum(path.stat().st_size for path in files(store, name))
            print(f"{name}: {size_bytes / 1e6:,.0f} MB prepared in {time.monotonic() - began:.0f} s", flush=True)
        print(
            "| data | memory | order | read-ahead | advice | left | samples/s | given MB | read MB | ratio | daemon |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for case in CASES:
            words = case.data, "all fits" if case.room else "2/5 fits", case.order, "yes" if case.ahead else "no"
            row = measure(store, case, chosen.seconds)
            print(f"| {' | '.join(words)} | {case.advice} | {row} |", flush=True)
    finally:
        shutil.rmtree(store, ignore_errors=True)


if __name__ == "__main__":
    main()
