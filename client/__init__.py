"""The client of dataserve: a data set as a training process sees it.

What is here is imported when it is touched, because torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import Info as Info
    from .dataset import ServedDataset as ServedDataset
    from .ragged import Flat as Flat
    from .ragged import Padded as Padded
    from .selection import Balanced as Balanced
    from .selection import Blocks as Blocks
    from .selection import Fold as Fold

_MODULES = {
    "Balanced": "selection",
    "Blocks": "selection",
    "Flat": "ragged",
    "Fold": "selection",
    "Info": "dataset",
    "Padded": "ragged",
    "ServedDataset": "dataset",
}
__all__ = ["Balanced", "Blocks", "Flat", "Fold", "Info", "Padded", "ServedDataset"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
