"""Recycled memory for batches, under leases that end with the last tensor, view or storage that can see it.

A fresh 38 MB batch costs 7 times a recycled one, nearly all of it page faults. A lease is an array whose base is an array of
another class. That matters: numpy gives a view of a view the innermost owner as its base, and would so pass over the lease, but it
looks through arrays of one class only. tests/test_buffers.py goes through the ways in which memory is held. This costs a quarter of
a microsecond; an exporter by `__array_interface__` four.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
BIG_BYTES = 64 * 1024  #: from here on a block begins on a page
SLACK = 4  #: a big block is not lent for less than this part of it


class _Block(np.ndarray[Any, Any]):
    """Memory of a pool, as bytes or in a batch's shape and type. The base of a lease holds how it comes back."""

    __slots__ = ("back",)
    back: _Return


class _Return(weakref.ref[npt.NDArray[Any]]):
    """A block, and how it comes back: laid into the free list when its lease ends.

    Its callback is `deque.append` itself, not a finaliser in Python: in one, a Ctrl-C would be raised where nobody can catch
    it, and be lost. It is atomic too, since it comes in any thread, at any time. The lease itself cannot hold this: it would let go
    before its callbacks are called, and its base only afterwards.
    """

    __slots__ = ("block", "view")
    block: _Block  #: bytes
    view: _Block  #: as it was lent last


def _lend(block: _Block, view: _Block, free: deque[_Return]) -> npt.NDArray[Any]:
    """The view, until the last who sees it lets go; then the block goes back to where it came from."""
    base = view.view()
    lease = base.view(np.ndarray)
    base.back = back = _Return(lease, free.append)
    back.block, back.view = block, view
    return lease


class Pool:
    """Blocks of one size. `kept` of them wait for their next use; what is beyond that is given back to the system."""

    def __init__(
        self, size_bytes: int, kept: int = 4, make: Callable[[int], npt.NDArray[np.uint8]] | None = None
    ) -> None:
        """`make(size_bytes)`: where blocks come from, if not from the heap."""
        self.size_bytes = size_bytes
        self._make = make or _block
        self._free: deque[_Return] = deque(maxlen=kept)

    def lease(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A writable, C-contiguous array of undefined content, at most `size_bytes` large."""
        try:
            back = self._free.pop()
            block, view = back.block, back.view
        except IndexError:
            block = view = self._make(self.size_bytes).view(_Block)
        if view.shape != shape or view.dtype != dtype:
            kind = np.dtype(dtype)
            needed = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            if needed > self.size_bytes:
                raise ValueError(f"a lease of {needed} bytes does not fit a block of {self.size_bytes}")
            view = cast(_Block, block[:needed].view(kind).reshape(shape))
        return _lend(block, view, self._free)


class VaryingPool:
    """Blocks for batches that differ in size: each is an eighth too large at most, so that the next batch fits it too.

    A block is lent again where it is large enough, and no more than `SLACK` times as large as that if it is big: one
    outlier's block does not stay for ever. What does not fit is given back to the system.
    """

    def __init__(self, kept: int = 4, make: Callable[[int], npt.NDArray[np.uint8]] | None = None) -> None:
        """`make(size_bytes)`: where blocks come from, if not from the heap."""
        self._make = make or _block
        self._free: deque[_Return] = deque(maxlen=kept)

    def lease(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Writable bytes of undefined content, `(size_bytes,)`."""
        try:
            block = self._free.pop().block
        except IndexError:
            block = self._make(_rounded(size_bytes)).view(_Block)
        if not size_bytes <= len(block) <= max(BIG_BYTES, SLACK * size_bytes):
            block = self._make(_rounded(size_bytes)).view(_Block)
        return _lend(block, cast(_Block, block[:size_bytes]), self._free)


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
