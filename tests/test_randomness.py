"""server/randomness.py: what would freeze a draw is refused with the row and the remedy, or seeded by the row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.server import randomness
from dataserve.server.spec import DatasetSpec

from .preparing import Child, archive, content, named, spec, start

__all__ = ["start"]

STEPS = """
import os, random
import numpy as np
private = np.random.default_rng()
def python(sample):
    return {"y": sample["label"] + random.random()}
def legacy(sample):
    return {"y": sample["label"] + np.random.rand()}
def torch_draws(sample):
    import torch
    return {"y": float(sample["label"]) + torch.rand(())}
def torch_module(sample):
    import torch
    from torchvision import transforms
    return {"y": transforms.RandomHorizontalFlip()(torch.from_numpy(sample["image"].copy()))}
def moves_without_a_trace(sample):
    random.random()
    return {"y": sample["label"]}
def generator_of_its_own(sample):
    return {"y": sample["label"] + private.random()}
def by_process(sample):
    return {"y": np.int64(hash(str(sample["label"])))}
def rarely(sample):
    return {"y": sample["label"] + (random.random() if sample["label"] == 61 else 0.0)}
def seeded_by_itself(sample):
    return {"y": sample["label"] + np.random.default_rng(int(sample["label"])).random()}
models = []
def draws_once(sample):
    if not models:  # as a model does that is made when it is first needed
        models.append(random.random())
    return {"y": sample["label"]}
class Drawing:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"y": index + np.random.rand()}
def drawing():
    return Drawing()
def stream():
    for number in range(30):
        yield {"y": number * random.random()}
def large(sample):
    return {"y": np.full(1 << 15, np.random.rand())}
"""


@pytest.fixture
def steps(isolated: Path) -> Callable[..., dict[str, Any]]:
    """A spec with one of the transforms above, over 200 samples."""
    (isolated / "steps.py").write_text(STEPS)

    def using(name: str, **fields: Any) -> dict[str, Any]:
        return {**spec(archive(isolated), f"steps:{name}"), **fields}

    return using


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("python", "moved the global generator of Python's random"),
        ("legacy", "moved the global generator of numpy.random"),
        ("torch_draws", "moved the global generator of torch"),  # though the first row itself loads it
        ("torch_module", "moved the global generator of torch"),
        ("moves_without_a_trace", "moved the global generator of Python's random"),
        ("generator_of_its_own", "comes out differently under another seed"),
        ("by_process", "comes out differently in another process"),
    ],
)
def test_a_random_transform_is_refused_with_the_row_and_the_remedy(
    start: Callable[..., Child], steps: Callable[..., dict[str, Any]], isolated: Path, name: str, sign: str
) -> None:
    status, events, _ = start(spec=steps(name), workers=1).end()
    (failed,) = named(events, "failed")
    assert status == 1
    assert failed["code"] == "bad_transform"
    assert f"The transform 'steps:{name}' is random: sample " in failed["text"]
    assert (
        "moved" in failed["text"] if sign.startswith("comes") and "torch" in failed["text"] else sign in failed["text"]
    )
    assert "transform=" in failed["remedy"]
    assert "--allow-random" in failed["remedy"]
    assert [path.name for path in (isolated / "store").iterdir() if not path.name.startswith(".")] == []


def test_a_draw_in_one_row_of_many_is_found_while_it_is_built_and_the_row_is_named(
    start: Callable[..., Child], steps: Callable[..., dict[str, Any]]
) -> None:
    for workers in (1, 2):
        status, events, _ = start(spec=steps("rarely"), workers=workers).end()
        (failed,) = named(events, "failed")
        assert status == 1
        assert "sample 61 moved the global generator of Python's random" in failed["text"]


@pytest.mark.parametrize(("source", "moved"), [("steps:drawing", "numpy.random"), ("steps:stream", "Python's random")])
def test_a_random_source_is_refused_too(
    start: Callable[..., Child], steps: Callable[..., dict[str, Any]], source: str, moved: str
) -> None:
    steps("python")
    status, events, _ = start(spec=spec(source)).end()
    (failed,) = named(events, "failed")
    assert (status, failed["code"]) == (1, "bad_source")
    assert f"The source {source!r} is random: sample 0 moved the global generator of {moved}" in failed["text"]


@pytest.mark.parametrize("name", ["seeded_by_itself", "draws_once"])
def test_a_transform_whose_rows_are_the_same_each_time_is_none(
    start: Callable[..., Child], steps: Callable[..., dict[str, Any]], name: str
) -> None:
    for workers in (1, 2):
        status, events, _ = start(spec=steps(name), workers=workers).end()
        assert status == 0, events


@pytest.mark.parametrize("name", [pytest.param("large", marks=pytest.mark.slow), "torch_draws"])
def test_allowed_draws_are_the_same_in_any_order_of_work_and_differ_by_row(
    start: Callable[..., Child], steps: Callable[..., dict[str, Any]], isolated: Path, name: str
) -> None:
    made = []
    wanted = steps(name, allow_random=True)
    for number, workers in enumerate((1, 2)):
        request = {"spec": wanted, "store": str(isolated / f"store-{number}")}
        status, events, _ = start(workers=workers, **request).end()
        assert status == 0, events
        (sealed,) = named(events, "sealed")
        made.append(content(sealed["path"]))
        status, events, _ = start(confirm=True, **request).end()
        assert (status, named(events, "confirmed")[0]["rows"]) == (0, 16)
    assert made[0] == made[1]
    draws = np.load(Path(sealed["path"], "y.npy"), mmap_mode="r").reshape(200, -1)[:, 0] - (
        0 if name == "large" else np.arange(200)
    )
    assert len(set(draws.tolist())) > 190
    del draws


def test_an_allowed_draw_from_a_generator_of_its_own_is_out_of_reach_and_refused(
    start: Callable[..., Child], steps: Callable[..., dict[str, Any]]
) -> None:
    status, events, _ = start(spec=steps("generator_of_its_own", allow_random=True)).end()
    assert status == 1
    assert "draw from these alone" in named(events, "failed")[0]["remedy"]


@given(st.text(max_size=10), st.integers(0, 2**32))
def test_a_row_is_seeded_by_key_and_index_alone(key: str, index: int) -> None:
    def draws(*seed: Any) -> tuple[float, float]:
        randomness.seed_row(*seed)
        return random.random(), float(np.random.rand())

    before = random.getstate(), np.random.get_state()
    try:
        assert draws(key, index) == draws(key, index)
        assert draws(key, index) != draws(key, index + 1)
        assert draws(key, index) != draws(f"{key}.", index)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@given(st.one_of(st.none(), st.integers(1, 10**9)), st.integers(2, 64))
def test_probes_are_spread_within_the_source_and_hold_its_ends(length: int | None, count: int) -> None:
    found = randomness.probes(length, count)
    assert found == sorted(set(found))
    assert len(found) == (count if length is None else min(count, length))
    assert found[0] == 0
    assert length is None or found[-1] == length - 1


def test_where_nothing_of_the_operators_touches_a_row_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading:
        spec = replace(DatasetSpec("x", "torchvision:MNIST"))

    monkeypatch.setattr(randomness, "_start_second", lambda *_: pytest.fail("a process was started"))
    randomness.check(None, Reading())  # type: ignore[arg-type]
