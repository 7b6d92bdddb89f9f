"""Columns of a batch for a device: gathered as they are stored into pinned memory, copied, converted there; or kept there whole.

`Courier` is the device as a data set sees it: made at its first batch, in the process that uses it. `MovedColumn`, `MovedRagged` and
`ResidentColumn` stand where `FixedColumn` and `RaggedColumn` stand for batches on the CPU.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dataserve.protocol.errors import MachineError, UserError

from . import device as devices
from . import world
from .buffers import Pool
from .convert import MovedConverter
from .device import Backend, Sender, Sent
from .fixed import FixedColumn
from .mapping import Store
from .outputs import Output
from .ragged import Flat, Padded, RaggedColumn

DEPTH = 3  #: copies under way at once: one being read, one queued, one being gathered
UPLOAD_BYTES = 64 << 20  #: of a resident column at a time

Copy = Callable[[torch.Tensor], torch.Tensor]
Rows = npt.NDArray[np.intp] | slice


class Request(NamedTuple):
    """One batch on its way: its rows, and `copy(host)`, which queues a copy to the device."""

    rows: Rows
    copy: Copy


class Courier:
    """A device and the copies to it, from any thread. CUDA is touched at the first batch, not before."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._wanted = device
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._made: tuple[Backend, Sender] | None = None

    def _ready(self) -> tuple[Backend, Sender]:
        if world.loading() is not None:
            raise UserError(
                "bad_state",
                f"device={str(self._wanted)!r} in a loader worker: what it sends to the training loop goes through the CPU's memory.",
                "Use num_workers=0, which is the fastest here; or leave device out and move each batch.",
            )
        if self._made is None or self._pid != os.getpid():
            backend = devices.Cuda(self._wanted)  # raises in a fork that CUDA does not cross
            self._made, self._pid = (backend, Sender(backend, DEPTH, self._timeout_s)), os.getpid()
        return self._made

    @property
    def device(self) -> torch.device:
        """Where the batches are."""
        return self._ready()[0].device

    def pin(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A block of host memory that the device reads by itself."""
        return self._ready()[0].pin(size_bytes)

    def send(self, work: Callable[[Copy], Any]) -> Sent:
        """Queue a batch; see `Sender.send`. A batch that is drawn again may come from another thread: one at a time."""
        with self._lock:
            return self._ready()[1].send(work)

    def receive(self, sent: Sent) -> Any:
        """The batch, safe on the calling thread's own stream."""
        return self._ready()[1].receive(sent)


class MovedColumn:
    """A fixed column: rows as they are stored through recycled pinned blocks, converted on the device."""

    def __init__(
        self, store: Store, output: Output, batch_size: int, courier: Courier, layout: torch.memory_format | None
    ) -> None:
        self._output = output
        self._host = FixedColumn(store, as_stored(output), batch_size, courier.pin)
        self._convert = MovedConverter(output, layout)

    def size_bytes(self, count: int) -> int:
        """Bytes of so many rows as they leave."""
        return count * self._output.item_bytes

    def gather(self, request: Request) -> torch.Tensor:
        """Those rows on the device, `(count, *shape)`."""
        return self._convert(request.copy(self._host.gather(request.rows)))


class MovedRagged:
    """A ragged column: flat, or as a list of views, converted on the device; padded, it is converted and filled up here."""

    def __init__(self, store: Store, output: Output, courier: Courier) -> None:
        self._text = output.form == "list" and output.column.logical in ("utf8", "bytes")
        self._listed = output.form == "list" and not self._text
        self._whole = output.form == "padded"
        here = output if self._whole or self._text else dataclasses.replace(as_stored(output), form="flat")
        self._host = RaggedColumn(store, here, None if self._text else courier.pin)
        self._convert = MovedConverter(output, None)

    def size_bytes(self, count: int) -> int:
        """Bytes of so many rows of the mean length as they leave, padding left out."""
        return self._host.size_bytes(count)

    def gather(self, request: Request) -> Any:
        """Those rows: tensors on the device; text and bytes as they are."""
        found = self._host.gather(request.rows)
        if self._text:
            return found
        if self._whole:
            return Padded(*(request.copy(part) for part in found))
        values = self._convert(request.copy(found.values))
        if self._listed:
            return list(values.split_with_sizes(found.offsets.diff().tolist()))
        return Flat(values, request.copy(found.offsets))


class ResidentColumn:
    """A fixed column that lies on the device, whole and as it is stored, from the first batch on."""

    def __init__(
        self, store: Store, output: Output, batch_size: int, courier: Courier, layout: torch.memory_format | None
    ) -> None:
        self._rows = store.column(output.column.name)
        self._output = output
        self._courier = courier
        self._indices = Pool(batch_size * np.dtype(np.intp).itemsize, make=courier.pin)
        self._convert = MovedConverter(output, layout)
        self._there: torch.Tensor | None = None

    def size_bytes(self, count: int) -> int:
        """Bytes of so many rows as they leave."""
        return count * self._output.item_bytes

    def gather(self, request: Request) -> torch.Tensor:
        """Those rows, `(count, *shape)`, gathered on the device. Raises `no_memory` where the column does not fit there."""
        if self._there is None:
            self._there = self._upload()
        if isinstance(request.rows, slice):
            return self._convert(self._there[request.rows].clone())
        listed = self._indices.lease(request.rows.shape, np.intp)
        listed[:] = request.rows
        found = _bits(self._there).index_select(0, request.copy(torch.from_numpy(listed)))
        return self._convert(found.view(self._there.dtype))

    def _upload(self) -> torch.Tensor:
        """Through one pinned block; each part has arrived before the block is written again."""
        device, rows = self._courier.device, self._rows
        try:
            there = torch.empty(rows.shape, dtype=getattr(torch, self._output.column.dtype), device=device)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                "no_memory",
                f"resident=True: {self._output.column.name!r} has {rows.nbytes:,} bytes, and they do not fit on {device}: {error}",
                "Leave resident out, or choose fewer columns=.",
            ) from None
        step = max(1, min(len(rows), UPLOAD_BYTES // max(1, rows[:1].nbytes)))
        block = self._courier.pin(step * rows[:1].nbytes).view(rows.dtype).reshape(step, *rows.shape[1:])
        for start in range(0, len(rows), step):
            part = block[: min(step, len(rows) - start)]
            np.copyto(part, rows[start : start + len(part)])
            there[start : start + len(part)].copy_(self._output.tensor(part))
        return there


def as_stored(output: Output) -> Output:
    """The same column without conversion."""
    return Output(output.column, getattr(torch, output.column.dtype), form=output.form)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Unsigned integers of 16 bits and more as signed ones: not every kernel has them."""
    kinds = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return tensor.view(kinds[tensor.dtype]) if tensor.dtype in kinds else tensor
