"""The order of an epoch in memory: made once a process, or once a machine where it is large; or a window at a time.

Up to `ORDER_SHARED_ROWS` each process makes its own: a sort of 4 M keys takes a fraction of a second. Above, the first
writes `<digest16>-<epoch>.npy` into the orders folder beside the daemon's socket and all map it; one that cannot write
there makes its own. The file is content-addressed by what defines it, so that nobody needs to agree on anything. An order
of blocks is never whole: a batch is sliced from the window that it lies in, so that it costs a window to begin anywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import threading
import time
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.blocks import BlockOrder
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.manifest import npy_header
from dataserve.protocol.plan import Plan

from .mapping import map_npy

AHEAD_ROWS = 1 << 13  #: some tenths of a millisecond of sorting
UNUSED_S = 3600.0  #: a file that nobody has begun to use for so long goes with the next one that is written
_OURS = re.compile(r"\.?[0-9a-f]{16}-[0-9]+\.npy(\.[0-9a-f]{16})?")
log = logging.getLogger("dataserve")

Order = npt.NDArray[np.uint32]

_orders: WeakValueDictionary[tuple[str, int], Order] = WeakValueDictionary()
_making = threading.Lock()


class Windows:
    """An order of blocks: `[start:stop]` gives the rows at those positions, from the window that was made last or a new one.
    From any thread."""

    def __init__(self, order: BlockOrder) -> None:
        self._order = order
        self._latest: tuple[int, Order] = (0, np.empty(0, np.uint32))

    def __getitem__(self, positions: slice) -> Order:
        start, stop = int(positions.start), int(positions.stop)
        parts = []
        while start < stop:
            first, rows = self._window_of(start)
            parts.append(rows[start - first : stop - first])
            start = first + len(rows)
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint32)])

    def _window_of(self, position: int) -> tuple[int, Order]:
        """The first position of the window that holds this one, and its rows."""
        latest = self._latest
        if not latest[0] <= position < latest[0] + len(latest[1]):
            window = self._order.window_of(position)
            self._latest = latest = self._order.start(window), self._order.window(window)
        return latest


def of(
    plan: Plan, epoch: int, folder: str | None, shared_rows: int = limits.ORDER_SHARED_ROWS
) -> Order | Windows | None:
    """Rows by position, uint32 `(n,)`, read-only, or what gives slices of them; None where position and row are the same.

    Objects of one process share it while any of them holds it. `folder`: where large ones are shared, if anywhere.
    """
    if plan.is_fixed:
        return plan.order(epoch)
    if (windows := plan.windows(epoch)) is not None:
        return Windows(windows)
    key = (plan.digest(), epoch)
    with _making:
        order = _orders.get(key)
        if order is None:
            shared = folder is not None and plan.n > shared_rows
            order = _shared(plan, epoch, folder) if shared and folder is not None else _own(plan, epoch)
            _orders[key] = order
        return order


class Upcoming:
    """The order of the next epoch, made near the end of this one, so that no loop waits between the two.

    By a thread of its own, from `AHEAD_ROWS` rows on: a smaller one is there in the time that a thread takes to start. A process
    that will hardly live to use it (`lasts` false) makes it only where it is a file for all. What is here is held until the
    epoch begins, and from then on by its iteration alone.
    """

    def __init__(
        self, plan: Plan, epoch: int, folder: str, shared_rows: int = limits.ORDER_SHARED_ROWS, *, lasts: bool = True
    ) -> None:
        self._wanted = (
            not (plan.is_fixed or plan.is_windowed)
            and plan.n >= (AHEAD_ROWS if lasts else shared_rows + 1)
            and epoch < limits.EPOCH  # behind the last one there is none
        )
        self._arguments = plan, epoch, folder, shared_rows
        self._order: Order | Windows | None = None

    def start(self) -> None:
        """Have it made; waits for nothing, and does nothing when repeated."""
        if self._wanted:
            self._wanted = False
            threading.Thread(target=self._make, name="dataserve-order", daemon=True).start()

    def _make(self) -> None:
        try:
            self._order = of(*self._arguments)
        except Exception as error:  # noqa: BLE001 - whoever needs the order makes it then, and sees the error
            log.debug("dataserve: the next epoch's order was not made: %s: %s", type(error).__name__, error)


def _renew_lock() -> None:
    global _making  # noqa: PLW0603 - another thread may have held it when the process was forked
    _making = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _own(plan: Plan, epoch: int) -> Order:
    order = plan.order(epoch)
    assert order is not None
    order.flags.writeable = False
    return order


def _shared(plan: Plan, epoch: int, folder: str) -> Order:
    """The mapped file; made if it is not there or not right. Without a usable folder, the order in memory."""
    name = f"{plan.digest()[:16]}-{epoch}.npy"
    path = os.path.join(folder, name)
    with contextlib.suppress(DataserveError):
        mapped = _mapped(path, plan.n)
        _note_use(path)
        return mapped
    order = _own(plan, epoch)
    try:
        _prepare(folder)
        _write(folder, name, order)
        _forget_older(folder, plan.digest()[:16], epoch)
        _forget_unused(folder)
        return _mapped(path, plan.n)
    except (OSError, DataserveError):
        return order


def _mapped(path: str, n: int) -> Order:
    return map_npy(path, "uint32", (n,), os.geteuid())


def _prepare(folder: str) -> None:
    """The folder, ours alone: what another may write into is not used."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not ours alone")


def _write(folder: str, name: str, order: Order) -> None:
    """Whole or not at all, by a rename; two who do it at once write the same."""
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o400)
    try:
        with open(descriptor, "wb") as file:
            file.write(npy_header("uint32", order.shape))
            file.write(_bytes(order))
        os.rename(temporary, os.path.join(folder, name))
    except BaseException:
        os.unlink(temporary)
        raise


def _bytes(order: Order) -> Any:
    return order.astype("<u4", copy=False).data


def _forget_older(folder: str, digest: str, epoch: int) -> None:
    """Unlink earlier epochs of the same plan: who has mapped one keeps it, who needs one again makes it again."""
    for name in os.listdir(folder):
        start, _, rest = name.partition("-")
        number = rest.removesuffix(".npy")
        if start == digest and number.isdecimal() and int(number) < epoch:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))


def _note_use(path: str) -> None:
    """As the time of access, which no mount option keeps from being set so. Best effort: a file lost early is made again."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))


def _forget_unused(folder: str) -> None:
    """Unlink what ended jobs have left, of any plan, and what killed writers have: there may never be a next of theirs."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if _OURS.fullmatch(name) and time.time() - max(found.st_atime, found.st_mtime) > UNUSED_S:
                os.unlink(path)
