"""Recycled memory for batches, under leases that end with the last tensor, view or storage that can see it.

A fresh 38 MB batch costs 7 times a recycled one, nearly all of it page faults. The lease is the object that *exports* the memory by
`__array_interface__`: numpy and torch keep the exporter alive for whatever they make of it. An ndarray that views an
ndarray would not do: numpy collapses `.base` to the innermost owner, and the lease would end early.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
BIG_BYTES = 64 * 1024  #: from here on a block begins on a page
SLACK = 4  #: a big block is not lent for less than this part of it


class _Return(weakref.ref["_Lease"]):
    """A block, and how it comes back: laid into the free list when the lease that holds this ends.

    Its callback is `deque.append` itself, not a finaliser in Python: in one, a Ctrl-C would be raised where nobody can catch
    it, and be lost. It is atomic too, since it comes in any thread, at any time.
    """

    __slots__ = ("block",)
    block: npt.NDArray[np.uint8]


class _Lease:
    """Exports a block until the last who sees it lets go; then the block goes back to where it came from."""

    # Nothing that holds a lease can be part of a cycle that the collector sees, which would skip the callback.
    __slots__ = ("__array_interface__", "__weakref__", "_return")

    def __init__(
        self, block: npt.NDArray[np.uint8], free: deque[_Return], shape: tuple[int, ...], typestr: str
    ) -> None:
        self._return = _Return(self, free.append)
        self._return.block = block
        self.__array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (block.ctypes.data, False),
            "version": 3,
        }


class Pool:
    """Blocks of one size. `kept` of them wait for their next use; what is beyond that is given back to the system."""

    def __init__(self, size_bytes: int, kept: int = 4) -> None:
        self.size_bytes = size_bytes
        self._free: deque[_Return] = deque(maxlen=kept)

    def lease(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A writable, C-contiguous array of undefined content, at most `size_bytes` large."""
        kind = np.dtype(dtype)
        needed = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if needed > self.size_bytes:
            raise ValueError(f"a lease of {needed} bytes does not fit a block of {self.size_bytes}")
        try:
            block = self._free.pop().block
        except IndexError:
            block = _block(self.size_bytes)
        return np.asarray(_Lease(block, self._free, shape, kind.str))


class VaryingPool:
    """Blocks for batches that differ in size: each is an eighth too large at most, so that the next batch fits it too.

    A block is lent again where it is large enough, and no more than `SLACK` times as large as that if it is big: one
    outlier's block does not stay for ever. What does not fit is given back to the system.
    """

    def __init__(self, kept: int = 4) -> None:
        self._free: deque[_Return] = deque(maxlen=kept)

    def lease(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Writable bytes of undefined content, `(size_bytes,)`."""
        try:
            block = self._free.pop().block
        except IndexError:
            block = _block(_rounded(size_bytes))
        if not size_bytes <= len(block) <= max(BIG_BYTES, SLACK * size_bytes):
            block = _block(_rounded(size_bytes))
        return np.asarray(_Lease(block, self._free, (size_bytes,), "|u1"))


def _rounded(size_bytes: int) -> int:
    """The next size of four significant bits: at most an eighth more."""
    step = 1 << max(0, size_bytes.bit_length() - 4)
    return -(-size_bytes // step) * step


def _block(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Fresh memory; a big block begins on a page, as pinning and direct copies like it."""
    if size_bytes < BIG_BYTES:
        return np.empty(max(1, size_bytes), np.uint8)
    raw = np.empty(size_bytes + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + size_bytes]
