"""The orders of the epochs that are read ahead: made as a client makes them, or mapped where clients share a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits, manifest
from dataserve.protocol.blocks import BlockOrder
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.kinds import plan_of

from .readahead import Places

ORDERS_BYTES = 256 * 1024 * 1024  #: of orders that this process makes: those above it are not read ahead

Order = npt.NDArray[np.uint32]
_Key = tuple[str, int]  # a plan's digest and the epoch


class Orders:
    """Orders by plan and epoch, as long as `keep` names them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._made: dict[_Key, Order | BlockOrder | None] = {}
        self._hopeless: set[str] = set()

    def keep(self, keys: set[_Key]) -> None:
        """Forget all others."""
        self._made = {key: order for key, order in self._made.items() if key in keys}
        self._hopeless &= {digest for digest, _ in keys}

    def rows(self, fields: Mapping[str, Any], digest: str, epoch: int, positions: Places) -> Places | None:
        """The rows at those positions; None where they are not known here: of a plan whose data the daemon does not have,
        of one whose shared file is not there (yet), and of more than `ORDERS_BYTES`."""
        key = (digest, epoch)
        if key not in self._made and (digest in self._hopeless or not self._make(key, fields)):
            return None
        order = self._made[key]
        if order is None:
            return positions
        if isinstance(order, BlockOrder):
            first = int(positions.min())
            return order.rows(first, int(positions.max()) + 1)[positions - first].astype(np.int64)
        return np.take(order, positions, mode="clip").astype(np.int64)

    def is_local(self, digest: str, epoch: int) -> bool:
        """Whether neighbouring positions of that order lie in few places of the store, so that what is between is due too."""
        return isinstance(self._made.get((digest, epoch)), BlockOrder)

    def _make(self, key: _Key, fields: Mapping[str, Any]) -> bool:
        try:
            plan = plan_of(fields)
            windows = plan.windows(key[1])
            if windows is not None or plan.is_fixed:
                self._made[key] = windows if windows is not None else plan.order(key[1])
            elif plan.n > limits.ORDER_SHARED_ROWS:
                if (shared := self._shared(key, plan.n)) is None:
                    return False
                self._made[key] = shared
            else:
                held = sum(order.nbytes for order in self._made.values() if isinstance(order, np.ndarray))
                if held + 4 * plan.n > ORDERS_BYTES:
                    return False
                self._made[key] = plan.order(key[1])
        except DataserveError:
            self._hopeless.add(key[0])
            return False
        return True

    def _shared(self, key: _Key, n: int) -> Order | None:
        """The file that a client has laid there, if it is one of ours and whole."""
        digest, epoch = key
        header = manifest.npy_header("uint32", (n,))
        try:
            path = os.path.join(self._folder, f"{digest[:16]}-{epoch}.npy")
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
            if not ours or found.st_size != len(header) + 4 * n or file.read(len(header)) != header:
                return None
            return np.memmap(file, np.dtype("<u4"), "r", len(header), (n,))
