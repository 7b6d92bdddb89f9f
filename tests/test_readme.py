"""README.md: its Python examples run as they stand, against a real daemon."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from dataserve.client import ServedDataset

from .daemons import daemon

README = Path(__file__).resolve().parent.parent / "README.md"


def example(heading: str) -> str:
    """The first Python example below that heading."""
    section = README.read_text().split(f"### {heading}\n")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def labels(train: ServedDataset) -> np.ndarray[Any, Any]:
    return np.concatenate([batch["label"].numpy() for batch in train])


def test_parts_weights_and_blocks(isolated: Path) -> None:
    label = np.arange(1000) % 10
    image = np.random.default_rng(0).integers(0, 256, (1000, 1, 4, 4), dtype=np.uint8)
    np.savez(isolated / "made.npz", image=image, label=label)
    with daemon(f"arrays:{isolated}/made.npz", "--name", "mnist"):
        found: dict[str, Any] = {}
        exec(compile(example("Parts, weights, blocks"), str(README), "exec"), found)  # noqa: S102 - our own words
        train, held_out = (
            np.concatenate([batch["image"].numpy() for batch in found[name]]) for name in ("train", "held_out")
        )
        assert len(train) + len(held_out) == 1000
        assert np.array_equal(
            np.sort(np.concatenate([train, held_out]).reshape(1000, -1), axis=0),
            np.sort(image.reshape(1000, -1), axis=0),
        )
        assert np.bincount(labels(found["held_out"])).tolist() == [20] * 10
        assert set(labels(found["small"]).tolist()) == set(range(5))
        assert len(labels(found["even"])) == 10_000
        assert sorted(labels(found["large"]).tolist()) == sorted(label.tolist())
