"""Folds: which rows belong to fold k of K, spread evenly over the classes. PROTOCOL.md section 5 has the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import draws


def fold_of_rows(n: int, of: int, seed: int, classes: npt.NDArray[Any] | None = None) -> npt.NDArray[np.uint32]:
    """The fold of each row, in `[0, of)`, uint32 `(n,)`. `classes`: integers or bools `(n,)`, each spread evenly.

    Folds differ by one row at most, and so do a class's rows in them.
    """
    order = draws.shuffled(n, draws.epoch_base(seed, 0, draws.SALT_FOLD))
    if classes is not None:
        order = order[np.argsort(classes[order], kind="stable")]
    folds = np.empty(n, np.uint32)
    folds[order] = np.arange(n, dtype=np.uint64) % np.uint64(of)
    return folds
