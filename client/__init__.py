"""The client of dataserve: a data set as a training process sees it.

`ServedDataset` and `Info` are imported when they are touched, because torch takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import Info as Info
    from .dataset import ServedDataset as ServedDataset

__all__ = ["Info", "ServedDataset"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import dataset

    return getattr(dataset, name)


def __dir__() -> list[str]:
    return __all__
