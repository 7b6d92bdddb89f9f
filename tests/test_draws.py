"""protocol/draws against the dumb versions: seeds and keys, one Python integer at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import draws, limits

from .simulation import dumb

seeds = st.integers(0, limits.SEED - 1)
epochs = st.integers(0, limits.EPOCH - 1)


@given(st.integers(0, 2**70))
def test_mix_equals_the_dumb_one(x: int) -> None:
    assert draws.mix(x) == dumb.mix(x)


@given(seeds, epochs, st.integers(0, limits.ROWS - 1))
def test_row_seeds_equal_the_dumb_ones(seed: int, epoch: int, row: int) -> None:
    expected = dumb.mix(dumb.mix(dumb.base(seed, epoch) ^ 0x726F77) + (row + 1) * dumb.G) >> 1
    assert draws.row_seeds(seed, epoch, np.array([row], np.uint32)).tolist() == [expected]


@given(seeds, epochs, st.integers(0, limits.ROWS - 1))
def test_place_seeds_equal_the_dumb_ones(seed: int, epoch: int, place: int) -> None:
    start = dumb.mix(dumb.base(seed, epoch) ^ 0x706C616365)
    expected = [dumb.mix(start + (place + i + 1) * dumb.G) >> 1 for i in range(2)]
    assert draws.place_seeds(seed, epoch, place, place + 2).tolist() == expected


def test_seeds_differ_between_rows_places_epochs_and_batches() -> None:
    rows = np.arange(1000)
    drawn = [value for epoch in range(5) for value in draws.row_seeds(1, epoch, rows).tolist()]
    drawn += [value for epoch in range(5) for value in draws.place_seeds(1, epoch, 0, 1000).tolist()]
    drawn += [draws.batch_seed(1, epoch, start) for epoch in range(5) for start in range(0, 1000, 10)]
    assert len(set(drawn)) == len(drawn)


@given(st.sets(st.integers(0, 999), min_size=1), seeds)
def test_any_rows_come_in_the_order_in_which_all_come(some: set[int], seed: int) -> None:
    rows = np.array(sorted(some), np.uint64)
    base = draws.epoch_base(seed, 0)
    order = draws.in_key_order(len(rows), lambda start, stop: rows[start:stop], draws.row_bits(1000), base)
    assert order.tolist() == [row for row in draws.shuffled(1000, base).tolist() if row in some]


@pytest.mark.parametrize("slice_rows", [1, 7, 64])
def test_an_order_does_not_depend_on_the_size_of_its_slices(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draws.shuffled(200, 5)
    monkeypatch.setattr(draws, "SLICE", slice_rows)
    assert draws.shuffled(200, 5).tolist() == whole.tolist()
