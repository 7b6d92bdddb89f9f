"""client/buffers: a block is lent again only when nobody can see it any more."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataserve.client.buffers import BIG_BYTES, PAGE_BYTES, SLACK, Pool, VaryingPool, _rounded

#: Ways in which a user holds on to a batch; each alone must keep its memory.
HOLDS: dict[str, Callable[[npt.NDArray[Any]], Any]] = {
    "array": lambda array: array,
    "view": lambda array: array[1:],
    "view of a view": lambda array: array[1:][:, 1:][:1],
    "reshaped": lambda array: array.reshape(-1)[3:],
    "other type": lambda array: array.view(np.uint8),
    "transposed": lambda array: array.T,
    "memoryview": memoryview,
    "tensor": torch.from_numpy,
    "tensor's view": lambda array: torch.from_numpy(array)[1:, 1:],
    "tensor's numpy": lambda array: torch.from_numpy(array).numpy(),
    "numpy of a slice": lambda array: torch.from_numpy(array)[2:].numpy()[1:],
    "storage": lambda array: torch.from_numpy(array).untyped_storage(),
    "detached": lambda array: torch.from_numpy(array).float().sum() and torch.from_numpy(array).detach(),
    "asarray": lambda array: np.asarray(torch.from_numpy(array)),
}


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_whatever_still_sees_the_memory_keeps_it(hold: Callable[[npt.NDArray[Any]], Any]) -> None:
    pool = Pool(4 * 8 * 4)
    array = pool.lease((4, 8), np.int32)
    where = address(array)
    held = hold(array)
    del array
    gc.collect()
    others = [pool.lease((4, 8), np.int32) for _ in range(5)]
    assert where not in {address(other) for other in others}
    del held
    gc.collect()
    assert where == address(pool.lease((4, 8), np.int32))


def test_a_lease_is_writable_contiguous_and_of_its_type() -> None:
    array = Pool(1000).lease((3, 5), "<i8")
    assert (array.shape, array.dtype, array.flags.writeable, array.flags.c_contiguous) == ((3, 5), np.int64, True, True)


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_no_python_runs_when_a_lease_ends_so_that_no_ctrl_c_is_lost_in_it(
    hold: Callable[[npt.NDArray[Any]], Any],
) -> None:
    pool = Pool(4 * 8 * 4)
    held = hold(pool.lease((4, 8), np.int32))
    gc.collect()
    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        del held
    finally:
        sys.setprofile(None)
    assert (entered, len(pool._free)) == ([], 1)


def test_the_free_list_is_capped() -> None:
    pool = Pool(64, kept=2)
    leases = [pool.lease((64,), np.uint8) for _ in range(10)]
    leases.clear()
    assert len(pool._free) == 2


def test_a_big_block_begins_on_a_page() -> None:
    assert address(Pool(BIG_BYTES).lease((BIG_BYTES,), np.uint8)) % PAGE_BYTES == 0


def test_a_lease_larger_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes does not fit a block of 8"):
        Pool(8).lease((2,), np.int64)


def test_a_varying_block_serves_whatever_fits_and_no_outlier_stays() -> None:
    pool = VaryingPool()
    outlier = 100 * BIG_BYTES
    where = address(pool.lease(outlier))
    assert where == address(pool.lease(outlier // SLACK + outlier // 8))
    assert where == address(pool.lease(outlier + outlier // 100))
    pool.lease(BIG_BYTES)
    assert [len(back.block) for back in pool._free] == [BIG_BYTES]
    assert len(pool.lease(0)) == 0
    assert len(pool.lease(BIG_BYTES + 1)) == BIG_BYTES + 1


def test_a_varying_lease_is_kept_by_whoever_sees_it() -> None:
    pool = VaryingPool()
    kept = pool.lease(64).view(np.int32).reshape(4, 4)[1:]
    kept[:] = 5
    for size in range(100):
        pool.lease(size).fill(1)
    assert (kept == 5).all()
    leases = [pool.lease(8) for _ in range(10)]
    leases.clear()
    assert len(pool._free) == 4


@given(st.integers(0, 2**50))
def test_sizes_are_rounded_up_by_an_eighth_at_most(size_bytes: int) -> None:
    assert size_bytes <= _rounded(size_bytes) <= size_bytes + size_bytes // 8
    assert _rounded(_rounded(size_bytes)) == _rounded(size_bytes)


@given(st.lists(st.tuples(st.sampled_from(sorted(HOLDS)), st.booleans()), max_size=40))
def test_kept_leases_never_change_while_others_are_written(story: list[tuple[str, bool]]) -> None:
    pool = Pool(4 * 8 * 4, kept=3)
    kept: list[tuple[Any, bytes]] = []
    for number, (name, keep) in enumerate(story):
        array = pool.lease((4, 8), np.int32)
        array[:] = number
        if keep:
            held = HOLDS[name](array)
            kept.append((held, content(held)))
        del array
    for held, before in kept:
        assert content(held) == before


def content(held: Any) -> bytes:
    if isinstance(held, torch.UntypedStorage):
        return bytes(held.tolist())
    if isinstance(held, torch.Tensor):
        return held.contiguous().numpy().tobytes()
    return bytes(held.tobytes())
