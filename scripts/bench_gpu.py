"""How fast batches reach the GPU, and how long it waits for them.

Question: bytes a second that `ServedDataset(device="cuda")` brings to the device, beside the limit (one pinned block of a batch's size,
copied again and again), beside the usual loop (`index_select` from a private copy in memory, `pin_memory`, `to(non_blocking=True)`),
and with `resident=True`; and the share of the time that the GPU idles when each batch is followed by a fixed load.

Command: scripts/bench_gpu [--seconds 5] [--load-ms 5]

What is measured: everything in one process, a CUDA synchronisation at both ends of each turn; bytes are those of the pictures as stored.
`idle` is 1 - (batches x the load alone) / wall time. MNIST and photographs come from $DATASERVE_DATA, as in bench_client.

Machine and table: not run yet: no machine with a GPU was there. Without one the script says so and ends with 0.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from bench_sets import BENCHES, Bench, Served, serving
from dataserve.client import ServedDataset

SETS = ("mnist-256", "photos-64")


def synchronised_s() -> float:
    """The time when the device has done all that was asked of it."""
    torch.cuda.synchronize()
    return time.perf_counter()


def bare_copy(size_bytes: int) -> Iterator[torch.Tensor]:
    """The limit: the same pinned block to the device for ever."""
    host = torch.empty(size_bytes, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device="cuda")
    while True:
        there.copy_(host, non_blocking=True)
        yield there


def usual_loop(bench: Bench, store: str) -> Iterator[torch.Tensor]:
    """By hand, from a private copy in memory."""
    images = torch.from_numpy(np.load(os.path.join(store, "image.npy")).copy())
    while True:
        for rows in torch.randperm(len(images)).split(bench.batch):  # type: ignore[no-untyped-call, unused-ignore]
            yield torch.index_select(images, 0, rows).pin_memory().to("cuda", non_blocking=True)


def ours(bench: Bench, *, resident: bool) -> Iterator[torch.Tensor]:
    """Epoch after epoch."""
    train = ServedDataset(bench.dataset, batch_size=bench.batch, device="cuda", resident=resident)
    return itertools.chain.from_iterable((batch[0] for batch in train) for _ in itertools.count())


def measure(
    batches: Iterable[torch.Tensor], seconds: float, work: Callable[[], object] | None = None
) -> tuple[float, float, int]:
    """(bytes/s, s, batches) of a turn."""
    source = iter(batches)
    for _ in range(10):
        next(source)
    began, total, count = synchronised_s(), 0, 0
    while time.perf_counter() - began < seconds:
        total += next(source).nbytes
        count += 1
        if work is not None:
            work()
            torch.cuda.synchronize()
    took = synchronised_s() - began
    return total / took, took, count


def load_of(milliseconds: float) -> tuple[Callable[[], object], float]:
    """Matrix products that take about so long, and how long they take in fact, in seconds."""
    matrix = torch.randn(2048, 2048, device="cuda")
    times = 1

    def work() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    work()
    while True:
        began = synchronised_s()
        work()
        took = synchronised_s() - began
        if took * 1000 >= milliseconds:
            break
        times *= 2
    began = synchronised_s()
    for _ in range(50):
        work()
        torch.cuda.synchronize()
    return work, (synchronised_s() - began) / 50


def rows(bench: Bench, served: Served, seconds: float, load_ms: float) -> Iterator[tuple[str, float, float]]:
    """(system, bytes/s, idle share) of one set."""
    work, load_s = load_of(load_ms)
    images = np.load(os.path.join(served.store, "image.npy"), mmap_mode="r")
    size_bytes = bench.batch * images[:1].nbytes
    systems: dict[str, Callable[[], Any]] = {
        "the limit": lambda: bare_copy(size_bytes),
        "dataserve": lambda: ours(bench, resident=False),
        "dataserve, resident": lambda: ours(bench, resident=True),
        "by hand": lambda: usual_loop(bench, served.store),
    }
    for name, make in systems.items():
        speed, _, _ = measure(make(), seconds)
        _, took, count = measure(make(), seconds, work)
        yield name, speed, max(0.0, 1 - count * load_s / took)


def main() -> None:
    """Prints a table, or why there is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--load-ms", type=float, default=5.0, help="the fixed load after each batch")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: no CUDA device is here")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print("| set | system | GB/s | ratio | idle |\n| --- | --- | --- | --- | --- |")
    wanted = [bench for bench in BENCHES if bench.name in SETS]
    with serving({bench.dataset for bench in wanted}) as (served, environ, _):
        os.environ.update(environ)
        for bench in wanted:
            limit = 0.0
            for name, speed, idle in rows(bench, served[bench.dataset], chosen.seconds, chosen.load_ms):
                limit = limit or speed
                print(f"| {bench.name} | {name} | {speed / 1e9:.2f} | {speed / limit:.2f} | {idle:.1%} |", flush=True)


if __name__ == "__main__":
    main()
