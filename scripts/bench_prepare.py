"""How near preparation comes to what decoding alone costs, and to what its neighbours take.

Question: images/s of `dataserve prepare` beside a bare loop in as many processes (torchvision's ImageFolder, the same resize and
crop, nothing stored), beside LitData's `optimize` and MosaicML's `MDSWriter` where they can be imported (their own environments:
`--litdata PYTHON`, `--mosaic PYTHON`). Sets: the photographs (links to them, `--times` over, resized to 256 and cropped to 224) and CIFAR-10's
test images as JPEG (32 x 32, as they are).

Command: scripts/bench_prepare [--workers 1 2] [--times 8] [--rounds 3]

What is measured: `images/s` over the time in which samples are read: from the moment at which all imports are done and all
processes stand ready to the last sample, the store's writing and checksums included, sealing not. `CPU ms` is user and system time an
image of all processes over the same work (imports are taken off by a run on a handful of images). `whole s` is the command from start to end.
`peak MB` is the largest resident set of a process. The best of the rounds counts: others use the machine too.

Machine and table: see TABLE at the end of this text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("DATASERVE_DATA") or ROOT.parent / "shared" / "data")
LIMIT_S = 600.0

#: The bare loop, and the same loop into a neighbour's writer. Arguments: kind, folder, resize (0: as it is), workers, output.
LOOP = r"""
import multiprocessing, os, resource, sys, time
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
    print("TOOK", took, len(dataset), max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


class Run(NamedTuple):
    """One measurement: images a second while working, CPU seconds and wall seconds of the whole, peak memory in MB."""

    rate: float
    cpu_s: float
    whole_s: float
    peak_mb: float
    images: int


def measured(command: list[str], stdin: bytes | None = None) -> tuple[list[tuple[float, str]], float, float, float]:
    """Runs it: its lines with the time of each, and CPU seconds, wall seconds and peak MB of it and all below it."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    if stdin is not None:
        process.stdin.write(stdin.decode())
        process.stdin.flush()
    lines = [(time.perf_counter(), line) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdin.close()
    process.stdout.close()
    if process.returncode:
        raise RuntimeError(f"status {process.returncode}: {lines[-1][1] if lines else 'not a word'}")
    return lines, usage.ru_utime + usage.ru_stime, time.perf_counter() - began, usage.ru_maxrss / 1024


def dataserve(folder: Path, resize: int, workers: int) -> Run:
    """`dataserve prepare imagefolder:` by its child, the program that does the work."""
    from dataserve.server.spec import DatasetSpec

    sizes = {"resize": "256", "crop": "224"} if resize else {}
    spec = DatasetSpec("bench", f"imagefolder:{folder}", **sizes)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as store:
        request = {"spec": spec.to_map(), "store": store, "workers": workers, "build": True}
        lines, cpu_s, whole_s, peak_mb = measured(
            [sys.executable, "-m", "dataserve.server.prepare"], json.dumps(request).encode() + b"\n"
        )
    events = [(at, json.loads(line)) for at, line in lines]
    work = [(at, event) for at, event in events if event["event"] == "progress" and event["stage"] == "prepare"]
    # the last word before the first sample was done, and the first behind the last one
    start = [(at, event["done"]) for at, event in work if event["done"] == 0][-1:] or [(work[0][0], work[0][1]["done"])]
    end = next(at for at, event in work if event["done"] == event["total"])
    images = work[-1][1]["total"]
    return Run((images - start[0][1]) / (end - start[0][0]), cpu_s, whole_s, peak_mb, images)


def loop(kind: str, python: str, folder: Path, resize: int, workers: int) -> Run:
    """The bare loop, or a neighbour."""
    with tempfile.TemporaryDirectory() as output:
        command = [python, "-c", LOOP, kind, str(folder), str(resize), str(workers), output]
        lines, cpu_s, whole_s, _ = measured(command)
    took, images, peak_kb = next(line for _, line in lines if line.startswith("TOOK")).split()[1:]
    return Run(int(images) / float(took), cpu_s, whole_s, float(peak_kb) / 1024, int(images))


def photographs(place: Path, times: int) -> Path:
    """Links to the photographs, so many times over: the page cache holds them once."""
    for item in sorted((DATA / "photos" / "images").glob("*/*")):
        for number in range(times):
            target = place / item.parent.name / f"{item.stem}_{number}{item.suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(item)
    return place


def cifar(place: Path) -> Path:
    """CIFAR-10's test images."""
    with tarfile.open(DATA / "cifar10" / "cifar10_jpg.tar.gz") as archive:
        members = (member for member in archive if "/test/" in member.name)
        archive.extractall(place, members, filter="data")
    return place / "cifar10" / "test"


def best(runs: list[Run]) -> Run:
    """The fastest run, with the least CPU time of all."""
    fastest = max(runs, key=lambda run: run.rate)
    return fastest._replace(cpu_s=min(run.cpu_s for run in runs), whole_s=min(run.whole_s for run in runs))


def row(name: str, run: Run, few: Run, bare: Run | None) -> None:
    """One line of the table; `few` is the same on a handful of images."""
    cpu_ms = 1000 * (run.cpu_s - few.cpu_s) / (run.images - few.images)
    share = f"{run.rate / bare.rate:6.2f}" if bare is not None else "  1.00"
    print(
        f"| {name:32} | {run.rate:8.0f} | {share} | {cpu_ms:6.2f} | {run.whole_s:7.1f} | {run.peak_mb:7.0f} |",
        flush=True,
    )


def compare(what: str, folder: Path, few: Path, resize: int, options: argparse.Namespace) -> None:
    """The rows of one set."""
    neighbours = {"litdata": options.litdata, "mosaic": options.mosaic}
    for workers in options.workers:
        rounds: dict[str, list[Run]] = {}
        for _ in range(options.rounds):  # in turn, so that a busy moment of the machine hits all
            rounds.setdefault("bare", []).append(loop("bare", sys.executable, folder, resize, workers))
            rounds.setdefault("dataserve", []).append(dataserve(folder, resize, workers))
        bare = best(rounds["bare"])
        row(f"{what}, {workers} workers: bare loop", bare, loop("bare", sys.executable, few, resize, workers), None)
        row(f"{what}, {workers} workers: dataserve", best(rounds["dataserve"]), dataserve(few, resize, workers), bare)
        for kind, python in neighbours.items():
            try:
                if python is None:
                    raise RuntimeError("no interpreter was named")
                run = best([loop(kind, python, folder, resize, workers) for _ in range(options.rounds)])
                row(f"{what}, {workers} workers: {kind}", run, loop(kind, python, few, resize, workers), bare)
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
    print("| what | images/s | ratio | CPU ms | whole s | peak MB |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as place:
        few = photographs(Path(place, "few"), 1)
        compare("photos", photographs(Path(place, "photos"), options.times), few, 256, options)
        images = cifar(Path(place))
        fewer = Path(place, "fewer")
        for group in images.iterdir():
            (fewer / group.name).mkdir(parents=True)
            for item in sorted(group.iterdir())[:10]:
                (fewer / group.name / item.name).symlink_to(item)
        compare("cifar10", images, fewer, 0, options)


if __name__ == "__main__":
    main()
