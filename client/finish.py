"""What happens at the loop's own door: the transform of a batch, and the measuring of a loop around a `DataLoader`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dataserve.protocol import plan as plans

from .epochs import Epochs
from .iterator import Drawn
from .options import Options


class Finish:
    """Makes of a drawn batch what the loop gets: the transform, under its own seed, and the info. Runs in `next()`."""

    def __init__(self, chosen: Options, takes: tuple[bool, bool], epoch: int) -> None:
        self._transform = chosen.transform
        self._seed = chosen.seed
        self._with_info = chosen.info
        self._takes_info, self._takes_generator = takes
        self._epoch = epoch

    def __call__(self, drawn: Drawn) -> Any:
        """The batch, or (batch, info)."""
        batch = drawn.batch if self._transform is None else self._transformed(self._transform, drawn)
        return (batch, drawn.info) if self._with_info else batch

    def _transformed(self, transform: Callable[..., Any], drawn: Drawn) -> Any:
        seed = plans.batch_seed(self._seed, self._epoch, drawn.place.start)
        arguments = (drawn.batch, drawn.info) if self._takes_info else (drawn.batch,)
        try:
            if self._takes_generator:
                return transform(*arguments, generator=torch.Generator().manual_seed(seed))
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for CUDA
                return transform(*arguments)
        except StopIteration as error:
            raise RuntimeError("the transform raised StopIteration") from error  # else the epoch would end here
        except Exception as error:
            error.add_note(f"in the transform of epoch {self._epoch}, batch at position {drawn.place.start}")
            raise


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
