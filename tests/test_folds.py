"""protocol/folds: against the dumb version, and how even folds are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import limits
from dataserve.protocol.folds import fold_of_rows

from .simulation import dumb

seeds = st.integers(0, limits.SEED - 1)
labels = st.lists(st.integers(-3, 5), min_size=1, max_size=150)


@given(labels, st.integers(1, 12), seeds)
def test_folds_equal_the_dumb_ones_and_are_even_in_every_class(classes: list[int], of: int, seed: int) -> None:
    found = fold_of_rows(len(classes), of, seed, np.array(classes, np.int64))
    assert found.tolist() == dumb.folds(len(classes), of, seed, classes)
    for some in [np.ones(len(classes), bool), *(np.array(classes) == value for value in set(classes))]:
        sizes = np.bincount(found[some], minlength=of)
        assert sizes.max() - sizes.min() <= 1


@given(st.integers(1, 150), st.integers(1, 12), seeds)
def test_without_classes_they_equal_the_dumb_ones(n: int, of: int, seed: int) -> None:
    assert fold_of_rows(n, of, seed).tolist() == dumb.folds(n, of, seed, None)


def test_bools_and_narrow_integers_are_classes_too() -> None:
    values = np.arange(40) % 2
    expected = fold_of_rows(40, 4, 1, values).tolist()
    for dtype in (bool, np.uint8, np.int16, np.uint64):
        assert fold_of_rows(40, 4, 1, values.astype(dtype)).tolist() == expected


def test_seeds_and_classes_give_unrelated_folds() -> None:
    base = fold_of_rows(10_000, 2, 0)
    for other in (fold_of_rows(10_000, 2, 1), fold_of_rows(10_000, 2, 0, np.arange(10_000) % 7)):
        assert abs((base == other).mean() - 0.5) < 0.03
