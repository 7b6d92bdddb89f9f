"""How near the client comes to the bare gather from memory, and how far its neighbours stay behind.

Question: samples/s, CPU-seconds per 1,000 samples, time to the first batch and memory of `ServedDataset` beside the
limit (numpy's gather from the warm map in a bare loop, into recycled buffers, with the same conversion where the row
converts), beside a loop written by hand over a private copy in memory (`index_select`), torch's DataLoader over the
source (0 and 2 workers) and over a TensorDataset of the mapped columns, and beside other libraries, each in an
environment of its own. For MNIST (float32, normalised, batches of 64 and 256), CIFAR-10 (uint8, 512) and photographs
(uint8, 3x224x224, 64), with 1, 2 and 4 jobs at once.

Command: scripts/bench_client --all --peer ffcv=PYTHON --peer litdata=PYTHON ... Without `--all` it takes the sets,
jobs and systems that are named. PYTHON has the library, torch, torchvision and numpy.

What is measured: every process is a fresh interpreter with one torch thread; all shuffle anew in each epoch and drop
the rest. The processes of a set stand ready together, and in each round the systems take turns of `--seconds`, N
processes from the same moment on; medians of the rounds. `ratio` is samples/s over the limit's in the same round,
`cpu` the limit's CPU-seconds a sample over the system's: it hardly moves when others use the machine too. `first` is
from the libraries being imported to the first batch. `grown` is anonymous memory since then, `private` USS, `shared`
what others map too, all of the process and those it has started, of one job, at the end. TensorSocket's producer has
a TensorDataset in memory, batches of half the consumers' size, and its cost is in `cpu`.

2026-12-07, 2 cores, Linux, other work on the machine meanwhile (load 3.6, so that `cpu` tells more than `ratio`); Python 3.11,
litdata 0.2.76, datasets 5.2.0, tensorsocket 0.0.5: --sets mnist-256 photos-64 --systems limit dataserve index_select litdata hf
tensorsocket --jobs 1 2 --rounds 2 --seconds 0.3. The other rows were not run that day. The row of
`hf` is unfair to it: its torch format gave int64, which costs it the conversion, and fails its row on the photographs.

    | what | jobs | samples/s | ratio | cpu | CPU s / 1000 | first ms | grown MB | private MB | shared MB |
    | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
    | mnist-256: limit | 1 | 2907168 | 1.000 | 1.000 | 0.00025 | 19.0 | 2 | 283 | 279 |
    | mnist-256: dataserve | 1 | 1874770 | 0.642 | 0.729 | 0.00034 | 20.5 | 6 | 290 | 282 |
    | mnist-256: index_select | 1 | 1432984 | 0.494 | 0.718 | 0.00035 | 178.9 | 48 | 329 | 233 |
    | mnist-256: litdata | 1 | 3905 | 0.001 | 0.002 | 0.15038 | 123.3 | 17 | 350 | 245 |
    | mnist-256: hf | 1 | 7231 | 0.002 | 0.003 | 0.08508 | 46.7 | 22 | 416 | 278 |
    | mnist-256: tensorsocket | 1 | 78332 | 0.027 | 0.020 | 0.01259 | 1662.1 | 17 | 300 | 233 |
    | mnist-256: limit | 2 | 4134940 | 1.000 | 1.000 | 0.00027 | 14.1 | 2 | 282 | 279 |
    | mnist-256: dataserve | 2 | 3312546 | 0.907 | 0.713 | 0.00037 | 22.4 | 6 | 290 | 282 |
    | mnist-256: index_select | 2 | 3363902 | 0.804 | 0.722 | 0.00037 | 103.7 | 48 | 329 | 233 |
    | mnist-256: litdata | 2 | 5344 | 0.001 | 0.001 | 0.18430 | 91.8 | 17 | 328 | 278 |
    | mnist-256: hf | 2 | 7859 | 0.002 | 0.003 | 0.08977 | 48.0 | 22 | 362 | 332 |
    | mnist-256: tensorsocket | 2 | 70098 | 0.019 | 0.018 | 0.01497 | 1333.2 | 28 | 311 | 233 |
    | photos-64: limit | 1 | 22374 | 1.000 | 1.000 | 0.01435 | 54.4 | 10 | 291 | 443 |
    | photos-64: dataserve | 1 | 42276 | 1.957 | 1.224 | 0.01172 | 9.9 | 37 | 321 | 445 |
    | photos-64: index_select | 1 | 14834 | 0.641 | 0.843 | 0.01954 | 1019.0 | 240 | 521 | 231 |
    | photos-64: litdata | 1 | 1942 | 0.087 | 0.117 | 0.12206 | 52.5 | 62 | 364 | 1069 |
    | photos-64: hf | 1 | not run: RuntimeError: a batch is (64, 3, 224, 224) torch.int64 with 64 labels |
    | photos-64: tensorsocket | 1 | 1933 | 0.094 | 0.019 | 0.77328 | 2089.5 | 138 | 421 | 231 |
    | photos-64: limit | 2 | 43274 | 1.000 | 1.000 | 0.01437 | 56.8 | 10 | 290 | 443 |
    | photos-64: dataserve | 2 | 35323 | 0.820 | 0.911 | 0.01577 | 51.3 | 37 | 322 | 445 |
    | photos-64: index_select | 2 | 33617 | 0.781 | 0.933 | 0.01543 | 1082.6 | 249 | 529 | 231 |
    | photos-64: litdata | 2 | 4545 | 0.105 | 0.110 | 0.13126 | 105.0 | 63 | 364 | 1517 |
    | photos-64: hf | 2 | not run: RuntimeError: a batch is (64, 3, 224, 224) torch.int64 with 64 labels |
    | photos-64: tensorsocket | 2 | 3075 | 0.071 | 0.026 | 0.58078 | 1918.5 | 258 | 541 | 231 |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_sets import BENCHES, ROOT, Bench, Served, serving

OWN = ("limit", "dataserve", "index_select", "dataloader-0", "dataloader-2", "tensordataset")
PEERS = ("ffcv", "litdata", "hf", "tensorsocket", "mosaic", "webdataset", "grain")
JOBS = (1, 2, 4)
WARM_S = 1.0
READY_S = 0.05  #: from the word to the start that all share
HEAD = "| what | jobs | samples/s | ratio | cpu | CPU s / 1000 | first ms | grown MB | private MB | shared MB |"


class NotRunError(Exception):
    """A system that cannot be measured here; its text is the reason."""


class Child:
    """One process of bench_loops."""

    def __init__(self, python: str, system: str, setting: dict[str, Any], environ: dict[str, str]) -> None:
        command = [python, str(ROOT / "scripts" / "bench_loops.py"), system, json.dumps(setting)]
        self._log = Path(setting["scratch"], f"{system}-{setting['job']}.log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, text=True
            )

    def say(self, *words: object) -> None:
        """One word, to be answered."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, float]:
        """The answer. Raises `NotRunError`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended: {self._log.read_text()[-160:]}"}
        if "error" in answer:
            raise NotRunError(answer["error"])
        return answer

    def cpu_s(self) -> float:
        """Seconds of the cores that it has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Gone, with what it has started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def ask(children: list[Child], *words: object) -> list[dict[str, float]]:
    """The same word to all of them at once; their answers."""
    for child in children:
        child.say(*words)
    return [child.hear() for child in children]


class System:
    """A system's processes on one set, as many as there are jobs; once it has failed it does nothing more."""

    def __init__(self, name: str, python: str, setting: dict[str, Any], environ: dict[str, str]) -> None:
        self.name = name
        self.failed: str | None = None
        self.children: list[Child] = []
        self.first_s: list[float] = []
        self.rounds: list[tuple[float, float]] = []  #: samples a second, CPU-seconds a sample
        self.memory: dict[str, float] = {}
        self._python, self._setting, self._environ = python, setting, environ

    def do(self, step: Callable[..., None], *arguments: Any) -> None:
        """One step; a failure of the system's is kept."""
        if self.failed is None:
            try:
                step(self, *arguments)
            except NotRunError as error:
                self.failed = str(error)
                self.end()

    def start(self, jobs: int) -> None:
        """So many processes, libraries imported."""
        new = [self._child(self.name, job) for job in range(len(self.children), jobs)]
        self.children += new
        ask(new, "import")

    def write(self) -> None:
        """The files that it reads, if they are its own."""
        self.start(1)
        if self.name in PEERS:
            ask(self.children[:1], "write")

    def open(self, jobs: int) -> None:
        """The loaders of so many jobs, warm; those that are open already stay."""
        new = self.children[len(self.first_s) : jobs]
        self.first_s += [answer["first_s"] for answer in ask(new, "open")]
        ask(self.children[:jobs], "warm", WARM_S)
        self.rounds.clear()

    def turn(self, jobs: int, seconds: float) -> None:
        """A timed stretch of so many jobs at once."""
        answers = ask(self.children[:jobs], "go", time.monotonic() + READY_S, seconds)
        samples = self._setting["batch"] * sum(answer["batches"] for answer in answers)
        rate = sum(self._setting["batch"] * answer["batches"] / answer["wall_s"] for answer in answers)
        self.rounds.append((rate, (sum(answer["cpu_s"] for answer in answers) + self._aside_s()) / max(1, samples)))

    def look(self) -> None:
        """What one job has of memory."""
        self.memory = ask(self.children[:1], "memory")[0]

    def end(self) -> None:
        """All processes gone."""
        for child in self.children:
            child.end()
        self.children = []

    def _child(self, system: str, job: int) -> Child:
        return Child(self._python, system, self._setting | {"job": job}, self._environ)

    def _aside_s(self) -> float:
        """CPU-seconds since the last turn of a process that serves all jobs."""
        return 0.0


class TensorSocket(System):
    """Its consumers go in lock-step, so that none may be idle: all begin anew for each number of jobs, with a producer."""

    def start(self, jobs: int) -> None:
        """Only one, which has nothing to write: `open` makes them."""

    def open(self, jobs: int) -> None:
        """A producer, its consumers, all at once."""
        self.end()
        self._setting["port"] += 10
        self.children = [self._child(self.name, job) for job in range(jobs)] + [self._child("tensorsocket-producer", 0)]
        ask(self.children, "import")
        self.children[-1].say("open")  # it serves from now on, and hears nothing
        self.first_s = [answer["first_s"] for answer in ask(self.children[:jobs], "open")]
        ask(self.children[:jobs], "warm", WARM_S)
        self.rounds.clear()
        self._aside_s()

    def write(self) -> None:
        """Nothing."""

    def _aside_s(self) -> float:
        before, self._before = getattr(self, "_before", 0.0), self.children[-1].cpu_s()
        return self._before - before


# --- the table --------------------------------------------------------------------------------------------------------------


def report(bench: Bench, jobs: int, systems: list[System]) -> None:
    """The rows of a set and a number of jobs."""
    bare = systems[0].rounds
    for system in systems:
        what = f"| {bench.name}: {system.name:13} | {jobs} "
        if system.failed is not None:
            print(f"{what}| not run: {system.failed} |", flush=True)
            continue
        rate, cpu = (statistics.median(values) for values in zip(*system.rounds, strict=True))
        ratio = statistics.median(own[0] / limit[0] for own, limit in zip(system.rounds, bare, strict=True))
        share = statistics.median(limit[1] / own[1] for own, limit in zip(system.rounds, bare, strict=True))
        first_ms = 1000 * statistics.median(system.first_s)
        memory = " | ".join(f"{system.memory[name]:5.0f}" for name in ("grown_mb", "private_mb", "shared_mb"))
        print(
            f"{what}| {rate:9.0f} | {ratio:6.3f} | {share:6.3f} | {1000 * cpu:8.5f} | {first_ms:6.1f} | {memory} |",
            flush=True,
        )


def measure(bench: Bench, served: Served, options: argparse.Namespace, environ: dict[str, str], place: Path) -> None:
    """All rows of one set."""
    scratch = place / bench.name
    scratch.mkdir()
    systems = []
    for number, name in enumerate(options.systems):
        setting = dict(
            dataset=bench.dataset,
            store=served.store,
            source=served.source,
            scratch=str(scratch),
            batch=bench.batch,
            normalize=bench.normalize,
            port=20000 + os.getpid() % 20000 + 100 * number,
        )
        made = (TensorSocket if name == "tensorsocket" else System)(name, options.pythons[name], setting, environ)
        made.failed = None if options.pythons[name] else "no --peer names an interpreter that has it"
        systems.append(made)
    try:
        for (
            system
        ) in systems:  # all start importing before any is waited for would take all memory bandwidth: one by one
            system.do(type(system).write)
            system.do(type(system).start, max(options.jobs))
        for jobs in options.jobs:
            for system in systems:
                system.do(type(system).open, jobs)
            for _ in range(options.rounds):
                for system in systems:
                    system.do(type(system).turn, jobs, options.seconds)
            for system in systems:
                system.do(type(system).look)
            report(bench, jobs, systems)
    finally:
        for system in systems:
            system.end()


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line, with the interpreter of each system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--all", action="store_true", help="every set, system and number of jobs")
    parser.add_argument("--sets", nargs="+", choices=names, default=names)
    parser.add_argument("--systems", nargs="+", choices=(*OWN, *PEERS), default=["limit", "dataserve", "index_select"])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="of each turn")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    options = parser.parse_args(words)
    if options.all:
        options.sets, options.systems, options.jobs = names, [*OWN, *PEERS], list(JOBS)
    options.systems = list(dict.fromkeys(["limit", *options.systems]))
    named = dict(peer.split("=", 1) for peer in options.peer)
    options.pythons = {name: sys.executable if name in OWN else named.get(name) for name in options.systems}
    return options


def main() -> None:
    """Prints the table."""
    options = arguments()
    began = time.monotonic()
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    )
    print(f"{HEAD}\n{'| --- ' * HEAD.count(' |')}|")
    benches = [bench for bench in BENCHES if bench.name in options.sets]
    with serving({bench.dataset for bench in benches}) as (served, environ, place):
        for bench in benches:
            measure(bench, served[bench.dataset], options, environ, place)
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
