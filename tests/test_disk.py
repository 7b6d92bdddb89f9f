"""What the machine refuses while a build is under way: room, descriptors, writing. An error with the path and the remedy, and
nothing left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataserve.server import store
from dataserve.server.spec import DatasetSpec

from .preparing import Child, archive, named, start

__all__ = ["start"]  # the fixture

STEPS = """
import os
import numpy as np
def text(sample):
    return os.path.basename(__file__) * 2000 + str(int(sample["label"])) * 1000  # some 18 kB
def swells(sample):
    return np.zeros(1 if sample["label"] % 3 == 0 else 200 if sample["label"] < 190 else 2**20, np.uint8)
def opens(sample):
    global held
    if sample["label"] >= 150:
        held = [open(__file__) for _ in range(200)]
    return sample["label"]
"""


@pytest.fixture
def steps(isolated: Path) -> Path:
    (isolated / "steps.py").write_text(STEPS)
    return isolated


def spec(folder: Path, transform: str) -> dict[str, Any]:
    return DatasetSpec("data", archive(folder, 200), {}, f"steps:{transform}", on_error="skip").to_map()


@pytest.fixture
def small_disk(isolated: Path) -> Iterator[Path]:
    """A file system of 5 MiB."""
    place = isolated / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m,mode=0700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_ragged_columns_that_do_not_fit_twice_are_refused_by_their_estimate_before_the_work(
    start: Callable[..., Child], steps: Path, small_disk: Path
) -> None:
    status, events, words = start(spec=spec(steps, "text"), workers=1, store=str(small_disk)).end()
    (space,) = named(events, "space")
    assert (status, events[-1]["code"]) == (1, "no_space"), words
    assert space["need_bytes"] > space["free_bytes"] > 4 << 20
    assert str(space["need_bytes"]) in events[-1]["text"]
    assert os.listdir(small_disk / store.BUILDING) == []


def test_ragged_columns_that_swell_until_the_disk_is_full_leave_nothing(
    start: Callable[..., Child], steps: Path, small_disk: Path
) -> None:
    status, events, words = start(spec=spec(steps, "swells"), workers=1, store=str(small_disk)).end()
    (space,) = named(events, "space")
    assert space["need_bytes"] < space["free_bytes"], "the estimate did not see it"
    assert (status, events[-1]["code"]) == (1, "no_space"), words
    assert str(small_disk) in events[-1]["text"]
    assert "are free" in events[-1]["text"]
    assert events[-1]["remedy"].startswith("Make room")
    assert os.listdir(small_disk / store.BUILDING) == []
    assert store.list_sealed(small_disk) == []


def test_a_disk_that_is_read_only_is_an_error_with_the_path(
    start: Callable[..., Child], steps: Path, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    status, events, words = start(spec=spec(steps, "text"), store=str(small_disk)).end()
    assert (status, events[-1]["code"]) == (1, "no_access"), words
    assert str(small_disk) in events[-1]["text"]


@pytest.mark.parametrize("workers", [1, 2])
def test_too_many_open_files_are_the_machines_fault_and_no_bad_sample(
    start: Callable[..., Child], steps: Path, workers: int
) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))"
    status, events, words = start(limit, spec=spec(steps, "opens"), workers=workers).end()
    assert (status, events[-1]["code"]) == (1, "no_access"), (events, words)
    assert "ulimit -n" in events[-1]["remedy"]
    assert named(events, "bad") == []
    assert os.listdir(steps / "store" / store.BUILDING) == []
