"""What happens at the loop's own door: the transform of a batch, and the measuring of a loop around a `DataLoader`."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.random import MT19937, mtrand

from dataserve.protocol import draws

from .epochs import Epochs
from .iterator import Drawn
from .moved import Courier
from .options import Options


class Finish:
    """Makes of a drawn batch what the loop gets: the transform, under its own seed, and the info. Runs in `next()`."""

    def __init__(self, chosen: Options, takes: tuple[bool, bool], epoch: int, courier: Courier | None = None) -> None:
        """`courier`: the way that the batch came, if not from the CPU's memory."""
        self._courier = courier
        self._transform = chosen.transform
        self._seed = chosen.seed
        self._with_info = chosen.info
        self._takes_info, self._takes_generator = takes
        self._epoch = epoch
        self._bits = MT19937(0)  # numpy's global generator draws from it during a transform

    def __call__(self, drawn: Drawn) -> Any:
        """The batch, or (batch, info)."""
        if self._courier is not None:
            drawn = drawn._replace(batch=self._courier.receive(drawn.batch))
        batch = drawn.batch if self._transform is None else self._transformed(self._transform, drawn)
        return (batch, drawn.info) if self._with_info else batch

    def _transformed(self, transform: Callable[..., Any], drawn: Drawn) -> Any:
        seed = draws.batch_seed(self._seed, self._epoch, drawn.place.start)
        arguments = (drawn.batch, drawn.info) if self._takes_info else (drawn.batch,)
        device = None if self._courier is None else self._courier.device
        try:
            if self._takes_generator:
                return transform(*arguments, generator=torch.Generator(device or "cpu").manual_seed(seed))
            with _seeded(seed, self._bits, device):
                return transform(*arguments)
        except StopIteration as error:
            raise RuntimeError("the transform raised StopIteration") from error  # else the epoch would end here
        except Exception as error:
            error.add_note(f"in the transform of epoch {self._epoch}, batch at position {drawn.place.start}")
            raise


@contextlib.contextmanager
def _seeded(seed: int, bits: MT19937, device: torch.device | None = None) -> Iterator[None]:
    """The global generators of torch (the device's too), numpy and `random`, seeded inside and as they were afterwards; some 25 µs.

    numpy's is given other bits to draw from: a copy of its state alone takes 50 µs. Of what it had before, only the second
    half of a pair of normal numbers is lost, which its `randn` may have kept.
    """
    theirs, kept = mtrand.get_bit_generator(), random.getstate()
    moved = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if moved else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for CUDA
        if device is not None and moved:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        try:
            mtrand.set_bit_generator(bits)
            mtrand.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            mtrand.set_bit_generator(theirs)
            random.setstate(kept)


class Timed:
    """A loader, its waits measured and told to the daemon by the loader workers."""

    def __init__(self, epochs: Epochs, loader: Any) -> None:
        self._epochs = epochs
        self._loader = loader
        epochs.note_times(0.0, 0.0)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        left = time.perf_counter()
        source = iter(self._loader)
        while True:
            try:
                batch = next(source)
            except StopIteration:
                return
            came = time.perf_counter()
            yield batch
            asked, waited_s = time.perf_counter(), came - left
            self._epochs.note_times(waited_s, asked - came)
            left = asked
