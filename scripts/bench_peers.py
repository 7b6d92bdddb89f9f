"""Other libraries as bench_client measures them: what each writes of a store first, and its loop over that.

Each is used as its own documentation has it, at the settings that were fastest for it here. Imported by bench_loops in the
peer's environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from bench_loops import Epoch, Setting

CHUNK_BYTES = "64MB"  #: of a file of litdata


def _folder(name: str, setting: Setting) -> Path:
    return Path(setting.scratch, f"{name}-{setting.dataset}")


# --- Hugging Face datasets ------------------------------------------------------------------------------------------------


def write_hf(setting: Setting) -> None:
    """Arrow files with the rows of the store."""
    import datasets

    if _folder("hf", setting).exists():
        return
    images, labels = setting.columns()
    shape = tuple(images.shape[1:])
    features = datasets.Features({"image": datasets.Array3D(shape, "uint8"), "label": datasets.Value("int64")})

    def rows() -> Iterator[dict[str, Any]]:
        for image, label in zip(images, labels, strict=True):
            yield {"image": image, "label": int(label)}

    made = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(_folder("hf-cache", setting)))
    made.save_to_disk(str(_folder("hf", setting)))


def hf(setting: Setting) -> Epoch:
    """`with_format("torch")`, a batch of shuffled indices at a time."""
    import datasets

    data = datasets.load_from_disk(str(_folder("hf", setting))).with_format("torch")
    generator = torch.Generator().manual_seed(setting.job)

    def epoch() -> Iterator[Any]:
        for rows in torch.randperm(len(data), generator=generator).split(setting.batch):
            if len(rows) == setting.batch:
                batch = data[rows.tolist()]
                yield setting.converted(batch["image"]), batch["label"]

    return epoch


# --- LitData --------------------------------------------------------------------------------------------------------------


def _row(store: str, row: int) -> tuple[Any, int]:
    images, labels = (np.load(f"{store}/{name}.npy", mmap_mode="r") for name in ("image", "label"))
    return torch.from_numpy(np.array(images[row])), int(labels[row])


def write_litdata(setting: Setting) -> None:
    """Chunks with the rows of the store."""
    import litdata

    if _folder("litdata", setting).exists():
        return
    litdata.optimize(
        fn=functools.partial(_row, setting.store),
        inputs=list(range(len(setting.columns()[0]))),
        output_dir=str(_folder("litdata", setting)),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
    )


def litdata_loop(setting: Setting) -> Epoch:
    """Its StreamingDataset, shuffled, in its StreamingDataLoader without workers."""
    import litdata

    data = litdata.StreamingDataset(
        str(_folder("litdata", setting)), shuffle=True, drop_last=True, seed=setting.job, max_cache_size="50GB"
    )
    loader = litdata.StreamingDataLoader(data, batch_size=setting.batch, num_workers=0, drop_last=True)
    return lambda: ((setting.converted(image), label) for image, label in loader)


# --- TensorSocket ---------------------------------------------------------------------------------------------------------


def _ports(setting: Setting) -> dict[str, Any]:
    first = setting.port
    return {"port": first, "ack_port": first + 1, "heart_ports": (first + 2, first + 3)}


def tensorsocket(setting: Setting) -> Epoch:
    """A consumer."""
    from tensorsocket import TensorConsumer

    consumer = TensorConsumer(batch_size=setting.batch, **_ports(setting))

    def epoch() -> Iterable[Any]:
        for batch in consumer:
            if len(batch[0]) == setting.batch:
                yield batch

    return epoch


def tensorsocket_producer(setting: Setting) -> Epoch:
    """The one producer, over a TensorDataset in memory that is normalised already."""
    from tensorsocket import TensorProducer

    images, labels = (torch.from_numpy(np.array(column)) for column in setting.columns())
    images = setting.converted(images)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images, labels), setting.batch // 2, shuffle=True, drop_last=True
    )
    producer = TensorProducer(loader, producer_batch_size=2, **_ports(setting))

    def serve() -> Iterator[Any]:
        for _ in iter(lambda: sum(1 for _ in producer), None):
            yield from ()  # it serves, and gives nothing itself

    return serve


PEERS: dict[str, Callable[[Setting], Epoch]] = {
    "hf": hf,
    "litdata": litdata_loop,
    "tensorsocket": tensorsocket,
    "tensorsocket-producer": tensorsocket_producer,
}
WRITERS: dict[str, Callable[[Setting], None]] = {"hf": write_hf, "litdata": write_litdata}
