"""One file of a sealed store as the kernel's page cache has it: what of it is in memory, and how it comes and stays there.

The only ctypes: numpy and Python have neither mincore nor mlock. Every call here lets go of the interpreter while it is in the
kernel, so that a thread that waits for a disk delays nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import resource
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits

from .readahead import PAGE

READ_BYTES = 4 * 1024 * 1024  #: read at once while a file is warmed
CAP_IPC_LOCK = 14  #: the right to lock without a limit

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Pages:
    """A file, opened and mapped (addresses, no memory) until `close`. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(self.descriptor)
            self.size_bytes = found.st_size
            # To everybody else the kernel says that all is in memory (Linux 5.2: it would tell on the owner's doings).
            self.may_look = found.st_uid == os.geteuid() or os.geteuid() == 0 or os.access(path, os.W_OK)
            self._map = mmap.mmap(self.descriptor, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data

    @property
    def pages(self) -> int:
        """Pages of the file."""
        return -(-self.size_bytes // PAGE)

    def resident(self, places: Sequence[int]) -> int:
        """How many of these pages, by number, are in memory."""
        found = ctypes.c_ubyte()
        count = 0
        for place in places:
            self._call(_libc.mincore, place * PAGE, PAGE, ctypes.byref(found))
            count += found.value & 1
        return count

    def residency(self) -> npt.NDArray[np.bool_]:
        """Of every page whether it is in memory."""
        found = np.zeros(self.pages, np.uint8)
        self._call(_libc.mincore, 0, self.size_bytes, found.ctypes.data)
        return (found & 1).astype(np.bool_)

    def advise(self, offset: int, length: int) -> None:
        """Have the kernel begin to read these bytes; it may take the time that the disk's queue is full."""
        os.posix_fadvise(self.descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, buffer: bytearray) -> int:
        """Read them, and so have them in memory; how many there were."""
        return os.preadv(self.descriptor, [buffer], offset)

    def lock(self, offset: int, length: int) -> None:
        """Keep these bytes, from a page's start on, in memory until `close` or the end of the process."""
        self._call(_libc.mlock, offset, length)

    def numbers(self, dtype: str) -> npt.NDArray[np.int64]:
        """Its data, behind the header, as numbers; to be dropped before `close`."""
        return np.frombuffer(self._map, dtype, offset=limits.HEADER_BYTES)

    def close(self) -> None:
        """Let go of it, and of what is locked."""
        self._map.close()
        os.close(self.descriptor)

    def _call(self, function: ctypes._NamedFuncPointer, offset: int, length: int, *more: object) -> None:
        if function(self._address + offset, length, *more):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), self.path)


def sample(pages: int, count: int, turn: int) -> list[int]:
    """So many page numbers spread evenly over the file, others with each turn; all of them where there are no more."""
    if pages <= count:
        return list(range(pages))
    shift = turn * 0.6180339887498949 % 1.0  # the golden ratio: no turn comes near an earlier one's places
    return [int((at + shift) * pages / count) for at in range(count)]


def read_text(path: str) -> str:
    """The text of a file of /proc or /sys."""
    with open(path) as file:
        return file.read()


def lockable_bytes() -> int | None:
    """What this process may lock in all, its soft limit raised to the hard one; None where it may lock anything."""
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)", read_text("/proc/self/status"), re.MULTILINE)
    if capabilities is not None and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
