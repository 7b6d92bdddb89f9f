"""client/moved: batches for a device, on a stand-in that copies late, against the same batches on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dataserve.client import ServedDataset, device, moved
from dataserve.client.gather import Gatherer, Target, select
from dataserve.client.mapping import Store
from dataserve.client.moved import Courier
from dataserve.client.outputs import outputs
from dataserve.protocol.errors import DataserveError, MachineError, UserError
from dataserve.protocol.manifest import leaves

from .fakes import FakeDaemon, fake_daemon
from .latecopies import LateCopies
from .stores import write_store

N = 60
RNG = np.random.default_rng(8)
HALVES = torch.randn(N, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
FIXED = {
    "image": RNG.integers(0, 256, (N, 3, 5, 4), dtype=np.uint8),
    "vector": RNG.standard_normal((N, 7)).astype(np.float32),
    "label": RNG.integers(-5, 5, N),
    "wide": RNG.integers(0, 2**16, N).astype(np.uint16),
    "halves": HALVES.view(torch.int16).numpy().view(np.uint16),
}
BOXES = [RNG.standard_normal((RNG.integers(0, 5), 4)).astype(np.float32) for _ in range(N)]
TEXT = [np.frombuffer(f"line {i}".encode(), np.uint8) for i in range(N)]
ROWS = [np.array([3, 0, 59, 3, 17]), slice(4, 12), np.array([1])]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16},
    {"normalize": ((0.1, 0.2, 0.3), (0.5, 0.25, 2.0))},
    {"normalize": {"image": (0.5, 0.5), "vector": (1.0, 2.0)}, "dtype": torch.bfloat16},
    {"normalize": {"boxes": (0.5, 4.0)}, "ragged": {"boxes": "flat"}},
    {"normalize": {"boxes": (0.5, 4.0)}, "ragged": {"boxes": "padded"}},
]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    ragged = {"boxes": BOXES, "text": TEXT}
    return write_store(tmp_path_factory.mktemp("m"), FIXED, ragged=ragged, bfloat16=("halves",), images=("image",))


@pytest.fixture(scope="module")
def store(sealed: tuple[Path, Any]) -> Store:
    mapped = Store(str(sealed[0]), sealed[1].id)
    for name in FIXED:
        mapped.column(name)
    for name in ("boxes", "text"):
        mapped.ragged(name)
    return mapped


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """Stands where the GPU stands, from the option on."""
    there = LateCopies(patience=4)
    monkeypatch.setattr(device, "Cuda", lambda wanted: there)
    monkeypatch.setattr(device, "check", torch.device)
    return there


@pytest.fixture
def daemon(sealed: tuple[Path, Any], isolated: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(*sealed) as running:
        yield running


def gatherer(store: Store, options: dict[str, Any], target: Target | None = None) -> Gatherer:
    chosen = select(store.manifest.structure, None, store.manifest)
    used = [store.manifest.column(name) for name in leaves(chosen)]
    leaving = outputs(used, options.get("dtype"), options.get("normalize"), options.get("ragged"))
    return Gatherer(store, chosen, leaving, 8, target)


def parts(batch: Any) -> list[Any]:
    """What a batch holds, one behind the other."""
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    return [leaf for item in batch for leaf in parts(item)] if isinstance(batch, tuple | list) else [batch]


def require_same(found: Any, expected: Any) -> None:
    pairs = list(zip(parts(found), parts(expected), strict=True))
    assert pairs
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(
                one,
                other,
                rtol=1e-5 if other.dtype == torch.float32 else None,
                atol=1e-6 if other.dtype == torch.float32 else None,
            )
        else:
            assert one == other


def first_refusal(loader: DataLoader[Any]) -> str:
    """What the first batch's error says; nothing here keeps its traceback, which keeps the workers."""
    try:
        next(iter(loader))
    except DataserveError as error:
        return str(error.with_traceback(None))
    return ""


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_are_those_of_the_cpu(store: Store, gpu: LateCopies, options: dict[str, Any], resident: bool) -> None:
    courier = Courier(torch.device("cuda"), 60)
    there = gatherer(store, options, Target(courier, resident=resident))
    here = gatherer(store, options)
    for rows in ROWS * 5:
        require_same(courier.receive(there.gather(rows)), here.gather(rows))
    assert gpu.overwritten == 0
    assert gpu.compared > 0


def test_unchanged_values_are_exact(store: Store, gpu: LateCopies) -> None:
    courier = Courier(torch.device("cuda"), 60)
    for resident in (False, True):
        found = parts(courier.receive(gatherer(store, {}, Target(courier, resident=resident)).gather(ROWS[0])))
        for one, other in zip(found, parts(gatherer(store, {}).gather(ROWS[0])), strict=True):
            assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


@pytest.mark.parametrize("options", OPTIONS[:4])
@pytest.mark.parametrize("resident", [False, True])
def test_pictures_take_the_memory_format_and_nothing_else_does(
    store: Store, gpu: LateCopies, options: dict[str, Any], resident: bool
) -> None:
    courier = Courier(torch.device("cuda"), 60)
    there = gatherer(store, options, Target(courier, torch.channels_last, resident))
    found, expected = courier.receive(there.gather(ROWS[0])), gatherer(store, options).gather(ROWS[0])
    require_same(found, expected)
    assert parts(found)[0].is_contiguous(memory_format=torch.channels_last)
    assert all(part.is_contiguous() for part in parts(found)[1:] if isinstance(part, torch.Tensor))


def test_pinned_blocks_are_few_whatever_the_number_of_batches(store: Store, gpu: LateCopies) -> None:
    courier = Courier(torch.device("cuda"), 60)
    there = gatherer(store, {}, Target(courier))
    for _ in range(50):
        courier.receive(there.gather(ROWS[0]))
    assert len(gpu.pinned) <= 7 * (moved.DEPTH + 2)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("resident", [False, True])
def test_an_epoch_on_the_device_is_that_of_the_cpu(
    daemon: FakeDaemon, gpu: LateCopies, prefetch: int, resident: bool
) -> None:
    here = ServedDataset("digits", batch_size=8, normalize={"image": (0.5, 0.5)}, info=True)
    there = ServedDataset(
        "digits",
        batch_size=8,
        normalize={"image": (0.5, 0.5)},
        info=True,
        device="cuda",
        resident=resident,
        prefetch=prefetch,
    )
    assert gpu.pinned == []  # nothing of the device before the first batch
    for _ in range(2):
        for (found, info), (expected, same) in zip(there, here, strict=True):
            require_same(found, expected)
            assert info.rows.tolist() == same.rows.tolist()
    assert gpu.overwritten == 0


def test_a_transform_has_the_batch_on_the_device_and_its_seed(daemon: FakeDaemon, gpu: LateCopies) -> None:
    def transform(batch: Any, generator: torch.Generator) -> Any:
        noise = torch.rand(3, generator=generator, device=generator.device)
        return parts(batch)[0].float().mean(), noise

    def noises(**options: Any) -> list[list[float]]:
        return [noise.tolist() for _, noise in ServedDataset("digits", batch_size=8, transform=transform, **options)]

    assert noises(device="cuda") == noises() != []


def test_a_batch_whose_transform_raised_is_sent_again(daemon: FakeDaemon, gpu: LateCopies) -> None:
    failing = [True]

    def transform(batch: Any) -> Any:
        if failing.pop() if failing else False:
            parts(batch)[0].zero_()
            raise ValueError("once")
        return batch

    train = iter(ServedDataset("digits", batch_size=8, transform=transform, device="cuda"))
    with pytest.raises(ValueError, match="once"):
        next(train)
    expected = list(ServedDataset("digits", batch_size=8))
    found = list(train)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        require_same(one, other)


def test_a_loader_worker_is_told_that_the_device_is_not_for_it(daemon: FakeDaemon, gpu: LateCopies) -> None:
    loader = DataLoader(ServedDataset("digits", batch_size=8, device="cuda"), batch_size=None, num_workers=1)
    assert "in a loader worker" in first_refusal(loader)


def test_a_column_that_does_not_fit_there_is_named(
    store: Store, gpu: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    courier = Courier(torch.device("cuda"), 60)
    there = gatherer(store, {}, Target(courier, resident=True))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MachineError, match="'image' has 3,600 bytes") as caught:
        there.gather(ROWS[0])
    assert caught.value.code == "no_memory"


def test_ragged_tensors_of_a_list_share_one_copy(store: Store, gpu: LateCopies) -> None:
    courier = Courier(torch.device("cuda"), 60)
    found = courier.receive(gatherer(store, {}, Target(courier)).gather(ROWS[1]))
    boxes = found["boxes"] if isinstance(found, dict) else next(item for item in found if isinstance(item, list))
    assert len({box.untyped_storage().data_ptr() for box in boxes}) == 1


def test_a_gpu_that_is_not_there_is_named_before_a_daemon_is_asked() -> None:
    with pytest.raises(MachineError, match=r"finds \d+ CUDA devices here") as caught:
        ServedDataset("digits", batch_size=8, device="cuda:99")
    assert caught.value.code == "no_device"


def test_an_option_of_the_device_is_refused_without_one() -> None:
    with pytest.raises(UserError, match="resident=True is for batches on a GPU"):
        ServedDataset("digits", batch_size=8, resident=True)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [False, True])
def test_an_epoch_on_a_real_gpu_is_that_of_the_cpu(daemon: FakeDaemon, resident: bool) -> None:
    options: dict[str, Any] = {"batch_size": 8, "normalize": {"image": (0.5, 0.5)}}
    there = ServedDataset("digits", device="cuda", memory_format=torch.channels_last, resident=resident, **options)
    for found, expected in zip(there, ServedDataset("digits", **options), strict=True):
        assert all(part.is_cuda for part in parts(found) if isinstance(part, torch.Tensor))
        here = [part.cpu() if isinstance(part, torch.Tensor) else part for part in parts(found)]
        require_same(here, parts(expected))
