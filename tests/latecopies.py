"""A stand-in for a GPU: its copies end as late as they may, and it looks whether what they read was left alone until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch


class LateEvent:
    """Done once somebody has asked `patience` times, or the device was drained."""

    def __init__(self, device: LateCopies, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._device = device
        self._copies = copies
        self._asked = 0
        self.done = False

    def query(self) -> bool:
        self._asked += 1
        if not self.done and self._asked > self._device.patience:
            self.finish()
        return self.done

    def finish(self) -> None:
        """The copies end: what they read must be what it was when they were queued."""
        for host, result in self._copies:
            self._device.compared += 1
            if not torch.equal(host.view(torch.uint8), result.view(torch.uint8)):
                self._device.overwritten += 1
        self._copies.clear()
        self.done = True


class LateCopies:
    """A backend of `dataserve.client.device` in ordinary memory."""

    def __init__(self, patience: int = 3) -> None:
        self.device = torch.device("cpu")
        self.patience = patience
        self.pinned: list[int] = []
        self.compared = 0
        self.overwritten = 0
        self.adopted = 0
        self.inside = False
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pin(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        self.pinned.append(size_bytes)
        return np.empty(max(1, size_bytes), np.uint8)

    @contextlib.contextmanager
    def side(self) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        assert self.inside, "a copy beside the side stream"
        result = host.clone()
        self._queued.append((host, host.clone()))
        return result

    def mark(self) -> LateEvent:
        assert self.inside
        queued, self._queued = self._queued, []
        return LateEvent(self, queued)

    def adopt(self, event: object, tensors: list[torch.Tensor]) -> None:
        assert isinstance(event, LateEvent)
        self.adopted += len(tensors)
