"""`DataLoader` around a served data set, with a real daemon: whatever the number and the kind of workers, epochs are exact and go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from dataserve.client import ServedDataset

from .daemons import arrays, daemon

ROWS, BATCH, BREAK_AT = 1000, 16, 10

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def serving(isolated: Path) -> Iterator[None]:
    with daemon(arrays(isolated / "data", rows=ROWS), "--name", "digits"):
        yield


CASES = [
    pytest.param(kind, count, id=f"{kind}-{count}", marks=[pytest.mark.slow] if kind != "fork" else [])
    for kind, counts in (("fork", (0, 1, 2, 3, 5, 8)), ("spawn", (1, 8)), ("forkserver", (3,)))
    for count in counts
]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("kind", "count"), CASES)
def test_every_row_comes_once_in_order_and_a_broken_off_epoch_is_over(
    serving: None, kind: str, count: int, persistent: bool
) -> None:
    train = ServedDataset("digits", batch_size=BATCH, info=True, last="short")
    context, kept = (kind, persistent) if count else (None, False)
    loader = DataLoader(
        train, batch_size=None, num_workers=count, multiprocessing_context=context, persistent_workers=kept
    )
    for epoch in range(3):
        rows = []
        for number, (_, info) in enumerate(loader):
            assert info.epoch == epoch
            rows.append(info.rows.numpy())
            if epoch == 1 and number == BREAK_AT:
                break
        found = np.concatenate(rows)
        assert np.array_equal(found, train.plan.rows(epoch, 0, len(found)))
        assert epoch == 1 or len(found) == ROWS
