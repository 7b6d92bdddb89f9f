"""Copies to a device: what they read stays as it is until they have ended, and nothing waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataserve.client import device
from dataserve.client.buffers import Pool
from dataserve.protocol.errors import DataserveError, MachineError

from .latecopies import LateCopies

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def _send_numbers(sender: device.Sender, pool: Pool, count: int) -> list[torch.Tensor]:
    """Batches 0, 1, 2, ... through recycled blocks of the pool."""
    received = []
    for number in range(count):
        host = torch.from_numpy(pool.lease((64,), np.uint8))
        host.fill_(number % 256)
        sent = sender.send(lambda copy, host=host: (copy(host), "text"))
        del host
        received.append(sender.receive(sent)[0])
    return received


@pytest.mark.parametrize("patience", [0, 1, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_block_is_not_lent_again_before_its_copy_has_ended(patience: int, depth: int) -> None:
    backend = LateCopies(patience)
    sender = device.Sender(backend, depth, timeout_s=60)
    pool = Pool(64, kept=depth + 1)
    received = _send_numbers(sender, pool, 40)
    assert [int(tensor[0]) for tensor in received] == list(range(40))
    assert backend.compared >= 40 - depth
    assert backend.overwritten == 0
    assert backend.adopted == 40


def test_the_stand_in_notices_a_block_that_is_lent_too_early() -> None:
    backend = LateCopies(patience=5)
    sender = device.Sender(backend, 4, timeout_s=60)
    block = torch.zeros(64, dtype=torch.uint8)
    for number in range(10):
        block.fill_(number)
        sender.send(lambda copy: copy(block))
    assert backend.overwritten > 0


def test_no_more_blocks_are_made_than_copies_are_under_way() -> None:
    backend = LateCopies(patience=2)
    sender = device.Sender(backend, 3, timeout_s=60)
    pool = Pool(64, kept=4, make=backend.pin)
    _send_numbers(sender, pool, 100)
    assert len(backend.pinned) <= 5


def test_a_copy_that_never_ends_is_an_error_with_a_name() -> None:
    backend = LateCopies(patience=10**9)
    sender = device.Sender(backend, 1, timeout_s=0.05)
    pool = Pool(64)
    with pytest.raises(MachineError, match=r"has not ended in 0\.05 s; 1 are under way") as caught:
        _send_numbers(sender, pool, 2)
    assert caught.value.code == "stuck"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("nothing", "bad_option", "is no device"),
        (3.5, "bad_option", "is no device"),
        ("mps", "not_built", "to the CPU or to CUDA"),
        ("cuda:99", "no_device", "finds"),
    ],
)
def test_a_device_that_cannot_be_is_refused_with_a_sentence(name: object, code: str, text: str) -> None:
    with pytest.raises(DataserveError, match=text) as caught:
        device.check(name)
    assert caught.value.code == code


def test_the_cpu_by_any_name_needs_no_cuda() -> None:
    assert device.check("cpu") == device.check(torch.device("cpu")) == torch.device("cpu")
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_where_there_is_none_is_said_with_the_number_that_was_found() -> None:
    with pytest.raises(MachineError, match="finds 0 CUDA devices") as caught:
        device.check("cuda")
    assert caught.value.code == "no_device"


@needs_gpu
def test_gpu_values_arrive_whole_through_few_pinned_blocks() -> None:
    backend = device.Cuda(torch.device("cuda"))
    sender = device.Sender(backend, 2, timeout_s=60)
    pool = Pool(1 << 22, kept=3, make=backend.pin)
    sums = []
    for number in range(200):
        host = torch.from_numpy(pool.lease((1 << 22,), np.uint8))
        assert host.is_pinned()
        host.fill_(number)
        tensor = sender.receive(sender.send(lambda copy, host=host: copy(host)))
        del host
        sums.append(tensor.to(torch.int64).sum())
    assert [int(total) for total in sums] == [number << 22 for number in range(200)]
