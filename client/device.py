"""Batches on their way to a GPU: pinned blocks, a side stream, and the events that say when a block may be used again.

`Sender` knows the order of things and nothing of CUDA; `Cuda` is the few calls that do. So the rule that matters, that no pinned block
is written again while a copy still reads it, is tested without a GPU too, on a stand-in that copies as late as it may.
CUDA is touched by nobody here before the first batch, and never where the device is the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from dataserve.protocol.errors import MachineError, UserError

POLL_S = 0.0002  #: how often a full pipeline looks whether a copy has ended
log = logging.getLogger("dataserve")


class Event(Protocol):
    """A mark in a stream of work."""

    def query(self) -> bool:
        """Whether all that came before it is done."""


class Backend(Protocol):
    """What a device must be able to do; `Cuda` is the one that there is."""

    device: torch.device

    def pin(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A block that the device can read by itself."""

    def side(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, work is queued on the side stream, on this thread."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """The same values on the device, once the side stream is there; `host` must stay as it is until then."""

    def mark(self) -> Event:
        """The point that the side stream's queue has reached."""

    def adopt(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """The caller's own stream waits for the event; the tensors' memory is not given away while it still works on them."""


class Sent(NamedTuple):
    """A batch whose copy is queued: its tensors on the device must be adopted by the thread that uses them."""

    batch: Any
    tensors: list[torch.Tensor]
    event: Event


class Sender:
    """Queues copies on the side stream and keeps what they read until they are done. One thread at a time."""

    def __init__(self, backend: Backend, depth: int, timeout_s: float) -> None:
        """`depth`: copies that may be under way at once; a further one waits for the oldest."""
        self._backend = backend
        self._depth = max(1, depth)
        self._timeout_s = timeout_s
        self._flying: deque[tuple[Event, list[torch.Tensor]]] = deque()

    def send(self, work: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> Sent:
        """Have `work(copy)` queue a batch: `copy(host)` gives the same values on the device, once the side stream is there.

        The host's tensors are kept until the device has read them: a lease that ends then gives its block back.
        """
        self._make_room()
        host: list[torch.Tensor] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            host.append(tensor)
            return self._backend.upload(tensor)

        with self._backend.side():
            batch = work(copy)
            event = self._backend.mark()
        self._flying.append((event, host))
        return Sent(batch, _tensors(batch, self._backend.device), event)

    def receive(self, sent: Sent) -> Any:
        """The batch, safe on the calling thread's own stream."""
        self._backend.adopt(sent.event, sent.tensors)
        return sent.batch

    def _make_room(self) -> None:
        while self._flying and self._flying[0][0].query():
            self._flying.popleft()
        if len(self._flying) < self._depth:
            return
        deadline = time.monotonic() + self._timeout_s
        while not self._flying[0][0].query():
            if time.monotonic() > deadline:
                raise MachineError(
                    "stuck",
                    f"A copy to {self._backend.device} has not ended in {self._timeout_s:g} s; {len(self._flying)} are under way.",
                    "Look at what else the GPU is doing; or give a longer timeout_s.",
                )
            time.sleep(POLL_S)
        self._flying.popleft()


def _tensors(batch: Any, device: torch.device) -> list[torch.Tensor]:
    """The tensors of a batch that lie on that kind of device, nested in tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.device.type == device.type else []
    if isinstance(batch, dict):
        batch = list(batch.values())
    elif not isinstance(batch, tuple | list):
        return []
    return [tensor for item in batch for tensor in _tensors(item, device)]


# --- CUDA ---------------------------------------------------------------------------------------------------------------


def check(device: object) -> torch.device:
    """The device that an option names: the CPU, or one of CUDA's that is there. Raises `bad_option`, `no_device`.

    Only a CUDA device is looked for, and by NVML where torch can, so that a later fork is not spoilt.
    """
    try:
        found: torch.device = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise UserError("bad_option", f"device={device!r} is no device.", "Give 'cpu', 'cuda' or 'cuda:1'.") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise UserError(
            "not_built",
            f"device={device!r} is not built: batches go to the CPU or to CUDA.",
            "Leave it out and move each batch: images.to(device, non_blocking=True).",
        )
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise MachineError(
            "no_device",
            f"device={device!r}: torch {torch.__version__} finds {count} CUDA devices here.",
            "Leave device out for batches on the CPU; `nvidia-smi` and CUDA_VISIBLE_DEVICES say what there is.",
        )
    return found


class Cuda:
    """One CUDA device, seen from this process. Made at the first batch, not before; not across a fork."""

    def __init__(self, device: torch.device) -> None:
        """Raises `UserError` in a process that CUDA cannot be used in."""
        if torch.cuda._is_in_bad_fork():
            raise UserError(
                "bad_state",
                f"device={str(device)!r} in a process that was forked after CUDA had begun: CUDA does not cross a fork.",
                "Use num_workers=0, which is the fastest here; or the start method 'spawn'.",
            )
        known: int | None = device.index  # torch declares it an integer
        self.device = torch.device("cuda", torch.cuda.current_device() if known is None else known)
        self._stream = torch.cuda.Stream(self.device)
        self._pins = True

    def pin(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A block of whole pages, registered as it is: torch's own allocator rounds up to a power of two.

        Where the driver registers no more, an ordinary block, and one warning: copies then wait for the CPU.
        """
        block = np.frombuffer(mmap.mmap(-1, max(1, size_bytes)), np.uint8)
        if self._pins:
            with torch.cuda.device(self.device):
                error = int(torch.cuda.cudart().cudaHostRegister(block.ctypes.data, block.nbytes, 0))
            if error:
                self._pins = False
                text = "dataserve: %d bytes could not be pinned (CUDA error %d): copies to %s are slower."
                log.warning(text, block.nbytes, error, self.device)
            else:
                weakref.finalize(block, _unpin, os.getpid(), block.ctypes.data).atexit = False
        return block

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        """The side stream; the device is set in the thread first."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Without waiting, if the memory is pinned."""
        return host.to(self.device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """An event on the side stream."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def adopt(self, event: Event, tensors: list[torch.Tensor]) -> None:
        """`wait_event` and `record_stream`, on the current stream of the calling thread."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)  # type: ignore[arg-type]
        for tensor in tensors:
            tensor.record_stream(current)


def _unpin(pid: int, address: int) -> None:
    """Give a block's pages back to the kernel, in the process that has pinned them: before they are unmapped."""
    if os.getpid() == pid:
        torch.cuda.cudart().cudaHostUnregister(address)
