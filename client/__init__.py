"""The client of dataserve: a data set as a training process sees it.

What is here is imported when it is touched, because torch takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import Info as Info
    from .dataset import ServedDataset as ServedDataset
    from .ragged import Flat as Flat
    from .ragged import Padded as Padded

__all__ = ["Flat", "Info", "Padded", "ServedDataset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import dataset, ragged

    return getattr(ragged if name in ("Flat", "Padded") else dataset, name)


def __dir__() -> list[str]:
    return __all__
