"""How near preparation comes to what decoding alone costs, and to what its neighbours take.

Question: images/s of `dataserve prepare` beside a bare loop in as many processes (torchvision's ImageFolder, the same resize
and crop, nothing stored), beside LitData's `optimize` and MosaicML's `MDSWriter` where they can be imported (from environments
of their own: `--litdata PYTHON`, `--mosaic PYTHON`). Sets: the photographs (links to them, `--times` over, resized to 256 and
cropped to 224) and CIFAR-10's training images as JPEG (32 x 32, as they are).

Command: scripts/bench_prepare [--workers 1 2] [--times 8] [--rounds 3]

What is measured: `images/s` while samples are read, decoded and (but for the bare loop) stored: of the bare loop and MDSWriter from
the moment at which all processes stand ready to the last sample; of dataserve between its first word of progress and its
last, checksums and writing included, start and seal not; of LitData the call of `optimize`, its start included, which it offers
no way to take off. `whole s` is the command from start to end, imports included. `peak MB` is the largest resident set of any
one process, `sum MB` the sum of all processes' own largest. The best of the rounds counts: others use the machine too.

Machine and table: 2 virtual cores, load average about 1 before the run; Python 3.11.7, Pillow 13.0.0, litdata 0.2.76,
mosaicml-streaming 0.13.0; 2026-12-01, `--rounds 2 --times 4`. The 90 % that preparation aims at are reached but for CIFAR-10 with one
worker: a picture of 0.9 KB is decoded in some 65 microseconds, and the checks of path, header, mode, schema and checksum take some ten
more, of which two workers hide a part.

| what | images/s | ratio | whole s | peak MB | sum MB |
| --- | --- | --- | --- | --- | --- |
| photos, 1 workers: bare loop   |    432 |  1.00 |   6.3 |   684 |   1098 |
| photos, 1 workers: dataserve   |    412 |  0.95 |   3.9 |    74 |     74 |
| photos, 1 workers: litdata     |    211 |  0.49 |  10.4 |   767 |   1336 |
| photos, 1 workers: mosaic      |    306 |  0.71 |   9.7 |   834 |   1487 |
| photos, 2 workers: bare loop   |    799 |  1.00 |   4.8 |   685 |   1510 |
| photos, 2 workers: dataserve   |    769 |  0.96 |   2.4 |    57 |    201 |
| photos, 2 workers: litdata     |    211 |  0.26 |  10.4 |   754 |   1964 |
| photos, 2 workers: mosaic      |    562 |  0.70 |   7.3 |   895 |   2199 |
| cifar10, 1 workers: bare loop  |  13226 |  1.00 |   6.6 |   687 |   1077 |
| cifar10, 1 workers: dataserve  |  11383 |  0.86 |   5.4 |    69 |     69 |
| cifar10, 1 workers: litdata    |   7110 |  0.54 |  10.2 |   744 |   1336 |
| cifar10, 1 workers: mosaic     |   8244 |  0.62 |  10.7 |   790 |   1452 |
| cifar10, 2 workers: bare loop  |  24005 |  1.00 |   5.0 |   687 |   1467 |
| cifar10, 2 workers: dataserve  |  22579 |  0.94 |   3.6 |    64 |    192 |
| cifar10, 2 workers: litdata    |   7100 |  0.30 |  10.4 |   758 |   1989 |
| cifar10, 2 workers: mosaic     |  14381 |  0.60 |   8.6 |   789 |   2113 |

2026-12-07, 2 cores, Linux, the machine shared with other work all the while, the neighbours not run; the photographs with `--times 2
--rounds 2`, CIFAR-10 with one round. The bare loop is far below its figure above, so that a ratio says little and none above 1
says that storing costs nothing; an earlier round of CIFAR-10 on that day, two rounds with tests running beside it, gave 1.14 with
one worker (8151 of 7180 images/s) and 0.79 with two (7800 of 9826).

| what | images/s | ratio | whole s | peak MB | sum MB |
| --- | --- | --- | --- | --- | --- |
| photos, 1 workers: bare loop   |    290 |  1.00 |   6.8 |   759 |   1173 |
| photos, 1 workers: dataserve   |    309 |  1.06 |   2.8 |    74 |     74 |
| photos, 2 workers: bare loop   |    552 |  1.00 |   5.3 |   710 |   1545 |
| photos, 2 workers: dataserve   |    574 |  1.04 |   1.8 |    62 |    202 |
| cifar10, 1 workers: bare loop  |   7526 |  1.00 |  10.1 |   689 |   1079 |
| cifar10, 1 workers: dataserve  |   9797 |  1.30 |   6.6 |    70 |     70 |
| cifar10, 2 workers: bare loop  |  13097 |  1.00 |   8.0 |   796 |   1576 |
| cifar10, 2 workers: dataserve  |  17750 |  1.36 |   4.8 |    64 |    194 |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("DATASERVE_DATA") or ROOT.parent / "shared" / "data")
LIMIT_S = 600.0

#: The bare loop, and the same loop into a neighbour's writer. Arguments: kind, folder, resize (0: as it is), workers, output.
LOOP = r"""
import multiprocessing, os, sys, time
kind, folder, resize, workers, output = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
os.environ["OMP_NUM_THREADS"] = "1"
from torchvision import transforms
from torchvision.datasets import ImageFolder
import torch
torch.set_num_threads(1)
steps = [transforms.Resize(256), transforms.CenterCrop(224)] if resize else []
dataset = ImageFolder(folder, transforms.Compose([*steps, transforms.PILToTensor()]))
if kind == "mosaic":
    from streaming import MDSWriter
if kind == "litdata":
    import litdata

def sample(index):
    image, label = dataset[index]
    return {"image": image.numpy(), "label": label}

def share(worker, barrier):
    barrier.wait(120)
    rows = range(worker, len(dataset), workers)
    if kind == "bare":
        for index in rows:
            dataset[index]
        return
    columns = {"image": "ndarray", "label": "int"}
    with MDSWriter(out=f"{output}/{worker}", columns=columns) as out:
        for index in rows:
            out.write(sample(index))

if __name__ == "__main__":
    if kind == "litdata":
        began = time.perf_counter()
        litdata.optimize(fn=sample, inputs=list(range(len(dataset))), output_dir=output, num_workers=workers, chunk_bytes="64MB")
    else:
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(workers + 1)
        processes = [context.Process(target=share, args=(worker, barrier)) for worker in range(workers)]
        [process.start() for process in processes]
        barrier.wait(120)
        began = time.perf_counter()
        [process.join() for process in processes]
        assert all(process.exitcode == 0 for process in processes)
    took = time.perf_counter() - began
    print("TOOK", took, len(dataset))
"""


class Run(NamedTuple):
    """One measurement: images a second while working, wall seconds of the whole, largest memory of one process and the sum
    of all, in MB."""

    rate: float
    whole_s: float
    peak_mb: float
    sum_mb: float


class Watch(threading.Thread):
    """The largest resident set of each process of a session, looked at twenty times a second."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self._session = session
        self._end = threading.Event()
        self.peak_kb: dict[str, int] = {}

    def run(self) -> None:
        """Looks until `stop`."""
        while not self._end.wait(0.05):
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError):
                    if (entry / "stat").read_text().rpartition(")")[2].split()[3] == str(self._session):
                        status = (entry / "status").read_text()
                        self.peak_kb[entry.name] = int(status.partition("VmHWM:")[2].split()[0])

    def stop(self) -> tuple[float, float]:
        """(peak, sum) in MB."""
        self._end.set()
        self.join()
        return max(self.peak_kb.values()) / 1024, sum(self.peak_kb.values()) / 1024


def measured(command: list[str], stdin: bytes | None = None) -> tuple[list[tuple[float, str]], float, float, float]:
    """Runs it: its lines with the time of each, wall seconds, peak MB and sum MB of it and all that it starts."""
    began = time.perf_counter()
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    watch = Watch(process.pid)
    watch.start()
    assert process.stdin is not None
    assert process.stdout is not None
    if stdin is not None:
        process.stdin.write(stdin.decode())
        process.stdin.flush()
    lines = [(time.perf_counter(), line) for line in process.stdout]
    status = process.wait(LIMIT_S)
    took = time.perf_counter() - began
    process.stdin.close()
    process.stdout.close()
    memory = watch.stop()
    if status:
        raise RuntimeError(f"status {status}: {lines[-1][1] if lines else 'not a word'}")
    return lines, took, *memory


def dataserve(folder: Path, resize: int, workers: int) -> Run:
    """`dataserve prepare imagefolder:` by its child, the program that does the work."""
    from dataserve.server.spec import DatasetSpec

    sizes = {"resize": "256", "crop": "224"} if resize else {}
    spec = DatasetSpec("bench", f"imagefolder:{folder}", **sizes)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as store:
        request = {"spec": spec.to_map(), "store": store, "workers": workers, "build": True}
        lines, *rest = measured(
            [sys.executable, "-m", "dataserve.server.prepare"], json.dumps(request).encode() + b"\n"
        )
    events = [(at, json.loads(line)) for at, line in lines]
    work = [(at, event) for at, event in events if event["event"] == "progress" and event["stage"] == "prepare"]
    start, first = next((at, event["done"]) for at, event in work if event["done"] > 0)
    end, last = next((at, event["done"]) for at, event in work if event["done"] == event["total"])
    return Run((last - first) / (end - start), *rest)


def loop(kind: str, python: str, folder: Path, resize: int, workers: int) -> Run:
    """The bare loop, or a neighbour."""
    with tempfile.TemporaryDirectory() as output:
        lines, *rest = measured([python, "-c", LOOP, kind, str(folder), str(resize), str(workers), output])
    took, images = next(line for _, line in lines if line.startswith("TOOK")).split()[1:]
    return Run(int(images) / float(took), *rest)


def photographs(place: Path, times: int) -> Path:
    """Links to the photographs, so many times over: the page cache holds them once."""
    for item in sorted((DATA / "photos" / "images").glob("*/*")):
        for number in range(times):
            target = place / item.parent.name / f"{item.stem}_{number}{item.suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(item)
    return place


def cifar(place: Path) -> Path:
    """CIFAR-10's training images."""
    with tarfile.open(DATA / "cifar10" / "cifar10_jpg.tar.gz") as archive:
        members = (member for member in archive if "/train/" in member.name)
        archive.extractall(place, members, filter="data")
    return place / "cifar10" / "train"


def best(runs: list[Run]) -> Run:
    """The fastest run, in the shortest time of all."""
    return max(runs, key=lambda run: run.rate)._replace(whole_s=min(run.whole_s for run in runs))


def row(name: str, run: Run, bare: Run) -> None:
    """One line of the table."""
    print(
        f"| {name:30} | {run.rate:6.0f} | {run.rate / bare.rate:5.2f} | {run.whole_s:5.1f} | {run.peak_mb:5.0f} | {run.sum_mb:6.0f} |",
        flush=True,
    )


def compare(what: str, folder: Path, resize: int, options: argparse.Namespace) -> None:
    """The rows of one set."""
    neighbours = {"litdata": options.litdata, "mosaic": options.mosaic}
    for workers in options.workers:
        rounds: dict[str, list[Run]] = {}
        for _ in range(options.rounds):  # in turn, so that a busy moment of the machine hits all
            rounds.setdefault("bare", []).append(loop("bare", sys.executable, folder, resize, workers))
            rounds.setdefault("dataserve", []).append(dataserve(folder, resize, workers))
        bare = best(rounds["bare"])
        row(f"{what}, {workers} workers: bare loop", bare, bare)
        row(f"{what}, {workers} workers: dataserve", best(rounds["dataserve"]), bare)
        for kind, python in neighbours.items():
            try:
                if python is None:
                    raise RuntimeError("no interpreter was named")
                run = best([loop(kind, python, folder, resize, workers) for _ in range(options.rounds)])
                row(f"{what}, {workers} workers: {kind}", run, bare)
            except RuntimeError as error:
                print(f"| {what}, {workers} workers: {kind} | not run: {error} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--times", type=int, default=8, help="the photographs, so many times over")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litdata", help="a Python that has litdata and torchvision")
    parser.add_argument("--mosaic", help="a Python that has mosaicml-streaming and torchvision")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}")
    print("| what | images/s | ratio | whole s | peak MB | sum MB |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as place:
        compare("photos", photographs(Path(place, "photos"), options.times), 256, options)
        compare("cifar10", cifar(Path(place)), 0, options)


if __name__ == "__main__":
    main()
