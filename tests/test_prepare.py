"""server/prepare.py, build.py and pool.py: the real child over real pipes, killed, raced, starved and lied to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.server import store

from .preparing import LIMIT_S, Child, archive, content, group, named, spec, start, until, wait_for_work

__all__ = ["start"]  # the fixture


#: A transform slow enough to be caught at work, wide enough (4 MiB a row) to make every row a chunk.
SLOW = """
import os, sys, time
import numpy as np
def slow(sample):
    print("user code prints")
    time.sleep(0.01)
    return np.full((1024, 1024), int(sample["label"]), np.float32)
def crawls(sample):
    time.sleep(0.09)
    return slow(sample)
def dies(sample):
    if sample["label"] == 17:
        os.kill(os.getpid(), 9)
    return slow(sample)
def hangs(sample):
    if sample["label"] == 17:
        time.sleep(3600)
    return slow(sample)
def fails(sample):
    if sample["label"] == 17:
        raise ValueError("seventeen is odd")
    return slow(sample)
def grows(sample):
    return np.zeros((1, 1, 1, 2 if sample["label"] == 17 else 1))
def reads(sample):
    return np.array([len(sys.stdin.read())])
"""


@pytest.fixture
def slow(isolated: Path) -> dict[str, Any]:
    """A spec of 40 samples that take 10 ms each."""
    (isolated / "steps.py").write_text(SLOW)
    return spec(archive(isolated, 40), "steps:slow")


def idx(path: Path) -> Any:
    """An IDX file read by hand: yann.lecun.com/exdb/mnist."""
    data = path.read_bytes()
    assert data[:3] == b"\0\0\x08"
    shape = [int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(data[3])]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def test_mnist_is_prepared_and_read_back_by_numpy_and_json_alone(start: Callable[..., Child], mnist_root: Path) -> None:
    request = {"spec": spec("torchvision:MNIST", name="mnist", root=str(mnist_root), train=True)}
    began = time.monotonic()
    status, events, _ = start(**request).end()
    assert status == 0
    assert time.monotonic() - began < 100, "ten times what it should take"
    (verdict,), (space,), (sealed,) = (named(events, name) for name in ("verdict", "space", "sealed"))
    assert (verdict["hit"], sealed["hit"], sealed["rows"]) == (False, False, 60_000)
    assert verdict["reasons"][0].startswith("never prepared here")
    assert space["free_bytes"] > space["need_bytes"] == sealed["size_bytes"] > 60_000 * 28 * 28
    counts = [event["done"] for event in named(events, "progress") if event["stage"] == "prepare"]
    assert counts == sorted(counts)
    assert counts[-1] == 60_000

    manifest = json.loads(Path(sealed["path"], "manifest.json").read_bytes())
    assert manifest["structure"] == {"tuple": [{"column": "image"}, {"column": "label"}]}
    assert manifest["classes"][7] == "7 - seven"
    images, labels = (np.load(Path(sealed["path"], f"{name}.npy"), mmap_mode="r") for name in ("image", "label"))
    raw = mnist_root / "MNIST" / "raw"
    np.testing.assert_array_equal(images[:, 0], idx(raw / "train-images-idx3-ubyte"))
    np.testing.assert_array_equal(labels, idx(raw / "train-labels-idx1-ubyte"))
    assert (images.shape, labels.dtype) == ((60_000, 1, 28, 28), np.int64)
    del images, labels

    began = time.monotonic()
    status, events, _ = start(**request, build=False).end()
    assert status == 0
    assert time.monotonic() - began < 3.0, "ten times what it should take"
    assert [event["event"] for event in events] == ["verdict", "sealed"]
    assert (events[0]["hit"], events[1]["id"], events[1]["hit"]) == (True, sealed["id"], True)
    store.open_sealed(sealed["path"], thorough=True)


def test_recalling_imports_neither_torch_nor_multiprocessing(isolated: Path) -> None:
    code = (
        "import sys; from dataserve.server import fingerprint, prepare; from dataserve.server.spec import DatasetSpec\n"
        f"from pathlib import Path; v = fingerprint.recall(Path({str(isolated)!r}), "
        "DatasetSpec('x', 'torchvision:MNIST', {'root': '/x'}, 'a.b:c'))\n"
        "print(v.hit, [name for name in ('torch', 'torchvision', 'multiprocessing', 'PIL') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert ended.stdout == "False []\n"


def test_a_miss_without_building_is_no_failure(start: Callable[..., Child], isolated: Path) -> None:
    status, events, _ = start(spec=spec(archive(isolated)), build=False).end()
    assert (status, [event["event"] for event in events]) == (0, ["verdict"])


def test_a_pool_makes_the_same_bytes_as_one_process(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any]
) -> None:
    paths = []
    for workers in (1, 2, 3):
        status, events, words = start(spec=slow, workers=workers, store=str(isolated / f"store{workers}")).end()
        assert status == 0, words
        paths.append(named(events, "sealed")[0]["path"])
        assert os.listdir(Path(paths[-1]).parent / store.BUILDING) == []
    assert content(paths[0]) == content(paths[1]) == content(paths[2])
    column = np.load(Path(paths[0], "value.npy"))
    assert (column == np.arange(40, dtype=np.float32)[:, None, None]).all()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize(("transform", "pooled"), [("steps:crawls", True), ("steps:slow", False)])
def test_a_pool_is_started_where_it_pays_and_nowhere_else(
    start: Callable[..., Child], slow: dict[str, Any], transform: str, pooled: bool
) -> None:
    child = start(spec={**slow, "transform": transform})  # 4 s alone: a second core saves 2; 0.4 s: nothing to save
    wait_for_work(child)
    assert (len(group(child.process.pid)) > 1) is pooled


def test_what_user_code_prints_goes_to_stderr_and_it_reads_nothing(
    start: Callable[..., Child], slow: dict[str, Any]
) -> None:
    status, events, words = start(spec=slow, workers=2).end()
    assert status == 0
    assert words.count("user code prints") >= 40
    status, events, words = start(spec={**slow, "transform": "steps:reads"}, workers=2).end()
    assert status == 0, words
    assert np.load(Path(named(events, "sealed")[0]["path"], "value.npy")).max() == 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("transform", "status", "code", "text"),
    [
        ("steps:fails", 4, "bad_sample", "Sample 17 failed at the stage transform: ValueError: seventeen is odd."),
        (
            "steps:grows",
            4,
            "bad_schema",
            "Sample 17 does not fit the first one: value is float64 1 x 1 x 1 x 2, not float64 1 x 1 x 1 x 1.",
        ),
        ("steps:missing", 1, "bad_transform", "has no attribute 'missing'"),
    ],
)
def test_a_bad_sample_or_transform_ends_with_its_status_and_leaves_nothing(
    start: Callable[..., Child],
    isolated: Path,
    slow: dict[str, Any],
    workers: int,
    transform: str,
    status: int,
    code: str,
    text: str,
) -> None:
    found, events, words = start(spec={**slow, "transform": transform}, workers=workers).end()
    assert (found, events[-1]["event"], events[-1]["code"]) == (status, "failed", code)
    assert text in events[-1]["text"]
    assert "Traceback" not in words
    assert os.listdir(isolated / "store" / store.BUILDING) == [] if code != "bad_transform" else True
    assert store.list_sealed(isolated / "store") == []


def test_a_worker_that_dies_is_named_with_its_sample_and_signal(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any]
) -> None:
    status, events, _ = start(spec={**slow, "transform": "steps:dies"}, workers=2).end()
    assert (status, events[-1]["code"]) == (1, "worker_died")
    assert "was killed by SIGKILL at sample 17." in events[-1]["text"]
    assert "memory" in events[-1]["remedy"]


@pytest.mark.parametrize(("workers", "text"), [(1, "Sample 17 has taken"), (2, "has been at sample 17 for")])
def test_a_sample_that_takes_for_ever_is_named(
    start: Callable[..., Child], slow: dict[str, Any], workers: int, text: str
) -> None:
    child = start(spec={**slow, "transform": "steps:hangs"}, workers=workers, sample_timeout_s=1.0)
    status, events, _ = child.end()
    assert (status, events[-1]["code"]) == (1, "stuck")
    assert text in events[-1]["text"]


@pytest.mark.parametrize("how", ["the parent closes the pipe", "SIGKILL", "SIGTERM"])
def test_a_child_that_ends_takes_its_workers_along_and_the_next_one_builds_at_once(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any], how: str
) -> None:
    child = start(spec=slow, workers=2)
    wait_for_work(child)
    assert len(group(child.process.pid)) >= 4, "the child, its forkserver and two workers"
    if how.startswith("SIG"):
        child.process.send_signal(signal.Signals[how])
    else:
        assert child.process.stdin is not None
        child.process.stdin.close()
    child.process.wait(LIMIT_S)
    until(lambda: not group(child.process.pid), "workers outlive their parent")
    assert store.list_sealed(isolated / "store") == []
    status, _, _ = start(spec=slow, workers=2).end()
    assert status == 0
    assert os.listdir(isolated / "store" / store.BUILDING) == []


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_kills_at_random_moments_leave_nothing_visible_and_the_same_bytes_in_the_end(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    status, events, _ = start(spec=slow, workers=1, store=str(isolated / "whole")).end()
    whole = content(named(events, "sealed")[0]["path"])
    for _ in range(4):
        child = start(spec=slow, workers=2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(chance.uniform(0.05, 1.2))
        victims = sorted(group(child.process.pid)) or [child.process.pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice([child.process.pid, *victims]), signal.SIGKILL)
        if chance.random() < 0.5:
            child.kill()  # the whole group, workers too
        for sealed in store.list_sealed(isolated / "store"):
            assert content(sealed.path) == whole
        assert store.list_damaged(isolated / "store") == []
    status, events, words = start(spec=slow, workers=2).end()
    assert status == 0, (events, words)
    assert content(named(events, "sealed")[0]["path"]) == whole


def test_eight_at_once_build_once_and_read_the_same(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any]
) -> None:
    children = [start(spec={**slow, "transform": "steps:crawls"}, workers=1) for _ in range(8)]
    ended = [child.end() for child in children]
    assert [status for status, _, _ in ended] == [0] * 8
    sealed = [named(events, "sealed")[0] for _, events, _ in ended]
    assert len({(each["path"], each["id"]) for each in sealed}) == 1
    assert [each["hit"] for each in sealed].count(False) == 1
    builder = next(child.process.pid for child, each in zip(children, sealed, strict=True) if not each["hit"])
    waited = [events for _, events, _ in ended if named(events, "waiting")]
    assert all(event["pid"] == builder for events in waited for event in named(events, "waiting"))
    assert any(0 < event["done"] < 40 for events in waited for event in named(events, "progress")), "its progress shows"
    assert os.listdir(isolated / "store" / store.BUILDING) == []


def test_a_full_disk_is_an_error_with_the_numbers_and_no_leftovers(
    start: Callable[..., Child], isolated: Path, slow: dict[str, Any]
) -> None:
    place = isolated / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        status, events, words = start(spec=slow, store=str(place)).end()
        (space,) = named(events, "space")
        assert (status, events[-1]["code"]) == (1, "no_space")
        assert str(space["need_bytes"]) in events[-1]["text"]
        assert space["need_bytes"] > space["free_bytes"]
        assert "Traceback" not in words
        assert os.listdir(place / store.BUILDING) == []
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"spec": spec("torchvision:MNIST")}, "bad_source"),
        ({"spec": spec("imagefolder:/x")}, "bad_source"),
        ({"spec": spec("store:nothing")}, "unknown_dataset"),
        ({"spec": spec("arrays:/x.npz", name="Bad Name")}, "bad_name"),
        ({"spec": spec("arrays:/x.npz"), "workers": 0}, "bad_option"),
        ({"spec": spec("arrays:/x.npz"), "build": "yes"}, "bad_option"),
        ({"spec": spec("arrays:/x.npz"), "store": "/dev/null/x"}, "no_access"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_no_traceback(
    start: Callable[..., Child], request_: dict[str, Any], code: str
) -> None:
    status, events, words = start(**request_).end()
    assert (status, events[-1]["event"], events[-1]["code"]) == (1, "failed", code)
    assert words == ""


def test_a_request_that_is_none_is_refused(isolated: Path) -> None:
    child = Child(isolated)
    assert child.process.stdin is not None
    child.process.stdin.write(b"garbage\n")
    child.process.stdin.flush()
    status, events, _ = child.end()
    child.kill()
    assert (status, events[0]["code"]) == (1, "bad_option")
