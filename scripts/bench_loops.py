"""One measured process of bench_client: a system's loop over batches, driven by lines on stdin, told in JSON on stdout.

    python bench_loops.py SYSTEM SETTING

It runs in the environment of the system it measures, so that it needs torch and numpy alone; what else a system needs is imported by
its own function. SETTING is a `Setting` as JSON. Words: `open` (make the loader, take its first batch), `warm S`, `go T S` (from the
moment T of the monotonic clock on, for S seconds), `memory`, `end`; `write` makes what a neighbour reads.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Epoch = Callable[[], Iterable[Any]]  #: each call is one more epoch of (images, labels) of exactly the batch's size


class Setting(NamedTuple):
    """What all systems are told: where the rows lie, how they must leave, and who this is among the jobs."""

    dataset: str
    store: str
    source: str
    scratch: str
    batch: int
    normalize: tuple[float, float] | None
    job: int
    port: int

    def columns(self) -> tuple[Any, Any]:
        """(images, labels) of the store, mapped."""
        return np.load(f"{self.store}/image.npy", mmap_mode="r"), np.load(f"{self.store}/label.npy", mmap_mode="r")

    def converted(self, images: torch.Tensor) -> torch.Tensor:
        """A fresh batch of bytes as it must leave, for systems that have no conversion of their own."""
        if self.normalize is None:
            return images
        mean, std = self.normalize
        return images.to(torch.float32).sub_(255 * mean).mul_(1 / (255 * std))


# --- systems --------------------------------------------------------------------------------------------------------------


def limit(setting: Setting) -> Epoch:
    """The bare loop: numpy's gather from the warm map into one buffer, and the conversion into another."""
    images, labels = setting.columns()
    images, labels = np.asarray(images), np.asarray(labels)  # np.memmap's own methods are slow
    taken, kept = np.empty((setting.batch, *images.shape[1:]), np.uint8), np.empty(setting.batch, np.int64)
    stored, label = torch.from_numpy(taken), torch.from_numpy(kept)
    result = torch.empty(stored.shape) if setting.normalize else stored
    mean, std = setting.normalize or (0.0, 1.0)
    scale, bias = 1 / (255 * std), torch.tensor(-mean / std)
    generator, last = np.random.default_rng(setting.job), len(images) - setting.batch

    def epoch() -> Iterator[Any]:
        order = generator.permutation(len(images))
        for start in range(0, last + 1, setting.batch):
            rows = order[start : start + setting.batch]
            images.take(rows, 0, taken, "clip")
            labels.take(rows, 0, kept, "clip")
            if result is not stored:
                torch.add(bias, result.copy_(stored), alpha=scale, out=result)
            yield result, label

    return epoch


def dataserve(setting: Setting) -> Epoch:
    """Ours."""
    from dataserve.client import ServedDataset

    train = ServedDataset(
        setting.dataset,
        batch_size=setting.batch,
        seed=setting.job,
        normalize=setting.normalize,
        drop_last=True,
        job=f"bench-{setting.job}-{os.getpid()}",
    )
    return lambda: train


def index_select(setting: Setting) -> Epoch:
    """By hand, over a private copy in memory."""
    images, labels = (torch.from_numpy(np.array(column)) for column in setting.columns())
    generator = torch.Generator().manual_seed(setting.job)

    def epoch() -> Iterator[Any]:
        for rows in torch.randperm(len(images), generator=generator).split(setting.batch):
            if len(rows) == setting.batch:
                yield setting.converted(torch.index_select(images, 0, rows)), torch.index_select(labels, 0, rows)

    return epoch


def dataloader(setting: Setting, workers: int) -> Epoch:
    """torch's DataLoader over the source, as most do it."""
    from torchvision import transforms as t
    from torchvision.datasets import MNIST, ImageFolder

    if setting.dataset == "mnist":
        mean, std = setting.normalize or (0.0, 1.0)
        source: Any = MNIST(setting.source, transform=t.Compose([t.ToTensor(), t.Normalize(mean, std)]))
    else:
        sized = [t.Resize(256), t.CenterCrop(224)] if setting.dataset == "photos" else []
        source = ImageFolder(setting.source, t.Compose([*sized, t.PILToTensor()]))
    loader = torch.utils.data.DataLoader(
        source,
        setting.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(setting.job),
    )
    return lambda: loader


def tensordataset(setting: Setting) -> Epoch:
    """torch's DataLoader over a TensorDataset of the mapped columns."""
    images, labels = (torch.from_numpy(column) for column in setting.columns())
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), setting.batch, shuffle=True, drop_last=True
    )
    return lambda: ((setting.converted(image), label) for image, label in loader)


OWN: dict[str, Callable[[Setting], Epoch]] = {
    "limit": limit,
    "dataserve": dataserve,
    "index_select": index_select,
    "dataloader-0": lambda setting: dataloader(setting, 0),
    "dataloader-2": lambda setting: dataloader(setting, 2),
    "tensordataset": tensordataset,
}

#: What a user has imported before a loader is made; a peer's module has its name.
IMPORTS: dict[str, tuple[str, ...]] = {
    "limit": (),
    "dataserve": ("dataserve.client.dataset",),
    "index_select": (),
    "dataloader-0": ("torchvision",),
    "dataloader-2": ("torchvision",),
    "tensordataset": (),
    "hf": ("datasets",),
    "ffcv": ("ffcv.loader", "ffcv.fields", "ffcv.transforms"),
    "mosaic": ("streaming",),
    "tensorsocket-producer": ("tensorsocket",),
}


# --- what is measured -------------------------------------------------------------------------------------------------------


class Loop:
    """A system's endless sequence of batches."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._batches: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        while (batch := next(self._batches, None)) is None:
            self._batches = iter(self._epoch())
        return batch

    def stretch(self, start: float, seconds: float) -> dict[str, float]:
        """Batches from that moment on for so long: how many, in what time of the clock and of the cores."""
        while (left := start - time.monotonic()) > 0:
            time.sleep(left)
        cpu, count, end = cpu_s(), 0, start + seconds
        while time.monotonic() < end:
            next(self)
            count += 1
        return {"batches": count, "wall_s": time.monotonic() - start, "cpu_s": cpu_s() - cpu}


def check(batch: Any, setting: Setting) -> None:
    """Raises where a batch is not what was asked for: a loop that does less work is no peer."""
    images, labels = (torch.as_tensor(part) for part in batch)
    shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "photos": (3, 224, 224)}[setting.dataset]
    dtype = torch.float32 if setting.normalize else torch.uint8
    wanted = (setting.batch, *shape), dtype, setting.batch
    if (tuple(images.shape), images.dtype, labels.numel()) != wanted:
        raise RuntimeError(f"a batch is {tuple(images.shape)} {images.dtype} with {labels.numel()} labels")
    if setting.normalize and not -0.6 < float(images.mean()) < 0.6:
        raise RuntimeError(f"a batch has the mean {float(images.mean()):.2f}: it is not normalised")


def family() -> list[int]:
    """This process and all it has started."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def cpu_s() -> float:
    """Seconds of the cores that this process and those it has started have used."""
    ticks = 0
    for pid in family()[1:]:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def memory() -> dict[str, float]:
    """MB of this process and those it has started: private (USS), anonymous, shared with others."""
    sums = dict.fromkeys(("Private_Clean", "Private_Dirty", "Anonymous", "Shared_Clean", "Shared_Dirty"), 0)
    for pid in family():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, _, rest = line.partition(":")
                if name in sums:
                    sums[name] += int(rest.split()[0])
    clean, dirty, anonymous, *shared = (value / 1024 for value in sums.values())
    return {"private_mb": clean + dirty, "anonymous_mb": anonymous, "shared_mb": sum(shared)}


def serve(system: str, setting: Setting, say: Callable[[dict[str, Any]], None]) -> None:
    """Does what stdin says, until it ends."""
    make = OWN.get(system) or importlib.import_module("bench_peers").PEERS[system]
    loop = Loop(list)
    before = {"anonymous_mb": 0.0}
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "import":
            for name in IMPORTS.get(system, (system,)):
                importlib.import_module(name)
            before = memory()
            say({})
        elif word == "write":
            importlib.import_module("bench_peers").WRITERS[system](setting)
            say({})
        elif word == "open":
            began = time.perf_counter()
            loop = Loop(make(setting))
            batch = next(loop)
            say({"first_s": time.perf_counter() - began})
            check(batch, setting)
        elif word == "warm":
            say(loop.stretch(time.monotonic(), float(numbers[0])))
        elif word == "go":
            say(loop.stretch(float(numbers[0]), float(numbers[1])))
        elif word == "memory":
            now = memory()
            say(now | {"grown_mb": now["anonymous_mb"] - before["anonymous_mb"]})
        elif word == "end":
            return


def main() -> None:
    """Serves the parent; what libraries print goes to stderr."""
    torch.set_num_threads(1)  # jobs share the cores; one thread each, as most recipes have it
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")

    fields = json.loads(sys.argv[2])
    try:
        serve(sys.argv[1], Setting(**fields), say)
    except Exception as error:  # noqa: BLE001 - whatever a neighbour raises becomes its row
        say({"error": " ".join(f"{type(error).__name__}: {error}".split())[:160]})
        traceback.print_exc()
    finally:
        answers.flush()
        sys.stderr.flush()
        os._exit(0)  # some neighbours' threads never end


if __name__ == "__main__":
    main()
