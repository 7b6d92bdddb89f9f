"""server/uniform.py: rows that are nearly one value are counted, told and kept in the manifest, and never an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataserve.protocol import manifest
from dataserve.server import cli, uniform
from dataserve.server.layout import Field
from dataserve.server.spec import DatasetSpec
from dataserve.server.uniform import Uniform

from .preparing import Child, content, named, start

__all__ = ["start"]  # the fixture

PICTURE = Field("image", "uint8", (3, 40, 50), "image")


def dumb(row: np.ndarray) -> bool:
    """By the most common value of each channel."""
    return all(np.unique(channel, return_counts=True)[1].max() > 0.99 * channel.size for channel in row)


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2000)), min_size=3, max_size=12), st.integers(0, 2**32))
def test_it_finds_what_counting_every_value_finds(channels: list[tuple[int, int]], seed: int) -> None:
    chance = np.random.default_rng(seed)
    flat = np.repeat(np.array([value for value, _ in channels[: len(channels) // 3 * 3]], np.uint8), 2000)
    flat = flat.reshape(-1, 2000)
    for channel, (_, noise) in zip(flat, channels, strict=False):
        # Near the bound or all: a share between is what probes may take for less than it is.
        count = noise % 21 if noise < 1000 else 2000
        channel[chance.choice(2000, count, replace=False)] = chance.integers(0, 256, count)
    rows = flat.reshape(-1, 3, 40, 50)
    expected = [row for row, each in enumerate(rows) if dumb(each)]
    found = uniform.find((PICTURE,), [rows], len(rows))
    assert found == ((Uniform(0, len(expected), tuple(expected[: uniform.LISTED])),) if expected else ())


@pytest.mark.parametrize(
    ("value", "noise", "is_one"), [(0, 0, True), (255, 19, True), (255, 21, False), (7, 2000, False)]
)
def test_more_than_99_of_100_is_nearly_one_value(value: int, noise: int, is_one: bool) -> None:
    rows = np.full((2, 3, 2000), value, np.uint8)
    rows[1, 1, :noise] = np.arange(noise) % 250 + 1
    rows[0] = np.arange(2000) % 251
    found = uniform.find((PICTURE,), [rows.reshape(2, 3, 40, 50)], 2)
    assert found == ((Uniform(0, 1, (1,)),) if is_one else ())


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64", "bfloat16"])
def test_arrays_like_pictures_count_too(dtype: str) -> None:
    field = Field("x", dtype, (1, 8, 8))
    assert uniform.find((field,), [field.buffer(2) * 0], 2) == (Uniform(0, 2, (0, 1)),)


def test_nan_equals_nothing_and_rows_beyond_the_kept_ones_are_not_looked_at() -> None:
    field = Field("x", "float32", (1, 8, 8))
    rows = np.full((2, 1, 8, 8), np.nan, np.float32)
    assert uniform.find((field,), [rows], 2) == ()
    rows[1] = 0
    assert uniform.find((field,), [rows], 1) == ()
    assert uniform.find((field,), [rows], 0) == ()


@pytest.mark.parametrize("shape", [(), (9,), (20, 20), (3, 7, 9), (1000, 1, 1)])
def test_labels_vectors_and_small_pictures_say_nothing(shape: tuple[int, ...]) -> None:
    assert uniform.find((Field("x", "uint8", shape),), [np.zeros((4, *shape), np.uint8)], 4) == ()


def test_chunks_are_merged_to_rows_of_the_store() -> None:
    chunks = [
        (4, (Uniform(1, 2, (0, 3)),)),
        (0, ()),
        (6, (Uniform(0, 1, (5,)), Uniform(1, 6, (0, 1, 2, 3, 4)))),
    ]
    fields = (PICTURE, PICTURE._replace(name="mask"), PICTURE._replace(name="depth"))
    assert list(uniform.merged(fields, chunks)) == [
        {"column": "image", "count": 1, "rows": [9]},
        {"column": "mask", "count": 8, "rows": [0, 3, 4, 5, 6]},
    ]


def test_white_pictures_are_a_warning_at_the_end_and_in_info_and_the_same_whoever_works(
    start: Callable[..., Child], isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = np.random.default_rng(0)
    for label in ("a", "b"):
        (isolated / "tree" / label).mkdir(parents=True)
        for number in range(6):
            noise = chance.integers(0, 256, (32, 32, 3), np.uint8)
            noise = np.full_like(noise, 255) if label == "b" and number in (1, 4) else noise
            Image.fromarray(noise).save(isolated / "tree" / label / f"{number}.png")
    (isolated / "tree" / "a" / "0.png").write_bytes(b"")  # skipped: numbers are rows, not samples
    spec = DatasetSpec("white", f"imagefolder:{isolated}/tree", on_error="skip").to_map()
    paths = []
    for workers in (1, 2):
        status, events, words = start(spec=spec, workers=workers, store=str(isolated / f"s{workers}")).end()
        assert status == 0, words
        (told,) = named(events, "uniform")
        assert told == {"event": "uniform", "column": "image", "count": 2, "rows": [6, 9], "of": 11}
        paths.append(named(events, "sealed")[0]["path"])
    assert content(paths[0]) == content(paths[1])
    found = manifest.parse(Path(paths[0], "manifest.json").read_bytes())
    assert found.uniform == ({"column": "image", "count": 2, "rows": [6, 9]},)
    assert cli.main(["info", "white", "--store", str(isolated / "s1")]) == 0
    assert "2 rows of image, the first 6, 9" in capsys.readouterr().out
    assert cli.main(["info", "white", "--json", "--store", str(isolated / "s1")]) == 0
    assert json.loads(capsys.readouterr().out)["uniform"][0]["count"] == 2
