"""command_info.py, command_remove.py, command_list.py and users.py: what is known of a store, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataserve.server.command_info import made_from, sample_text

from .daemons import LIMIT_S, arrays, daemon, run, until

#: A job as it trains: it reads one batch, says so, and waits for the end of its stdin.
JOB = """
import sys
from dataserve.client import ServedDataset
data = iter(ServedDataset("digits", batch_size=10, job="lr-0.1"))
next(data)
print("reading", flush=True)
sys.stdin.read()
"""


def succeeded(*words: str, **options: Any) -> str:
    ended = run(*words, **options)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextmanager
def job() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        try:
            yield process
        finally:
            process.kill()
            process.wait(LIMIT_S)


@pytest.fixture
def folder(isolated: Path) -> str:
    """A folder of pictures, one of them broken and skipped, as a store; its `info`."""
    for name in ("cat/0.png", "cat/1.png", "dog/a.png"):
        path = isolated / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(path)
    (isolated / "tree" / "cat" / "0.png").write_bytes(b"broken")
    succeeded("prepare", f"imagefolder:{isolated}/tree", "--name", "pets", "--on-error", "skip", "--resize", "6")
    return succeeded("info", "pets")


def test_info_tells_what_it_holds_and_what_it_was_made_from(folder: str, isolated: Path) -> None:
    (path,) = (isolated / "store").glob("pets-*[0-9a-f]")
    for words in (
        f"pets@{path.name[5:13]}: 2 rows",
        str(path),
        "(image, label)",
        "2: cat, dog",
        "1 samples",
        "sample 0 (cat/0.png) at the stage",
        "3 x 6 x 6",
        "where rows come from",
        "imagefolder",
        "told apart by size and time",
        "resize 6 bilinear antialias",
        "on_error skip",
        "numpy 2.",
    ):
        assert words in folder, words
    facts = json.loads(succeeded("info", "pets", "--json"))
    assert facts["path"] == str(path)
    assert facts["skipped"][0]["path"] == "cat/0.png"
    assert facts["columns"][0]["parts"][0]["chunks"] == 1


def test_info_of_a_row_tells_its_origin_behind_a_skipped_sample(folder: str) -> None:
    shown = succeeded("info", "pets", "--row", "0")
    assert "sample 1 of the source, cat/1.png" in shown
    assert "0 (cat)" in shown
    assert "uint8 3 x 6 x 6, 7 to 7, mean 7" in shown
    told = json.loads(succeeded("info", "pets", "--row", "1", "--json"))
    assert (told["sample"], told["path"], told["classes"]) == (2, "dog/a.png", {"label": "dog"})
    beyond = run("info", "pets", "--row", "2")
    assert (beyond.returncode, "its rows are [0, 2)" in beyond.stderr) == (2, True)


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        ({"column": "x"}, "x"),
        ({"tuple": [{"column": "x"}]}, "(x,)"),
        ({"list": [{"column": "x"}, {"tuple": [{"column": "y"}, {"column": "z"}]}]}, "[x, (y, z)]"),
        ({"dict": [["a", {"column": "x"}]]}, "{'a': x}"),
        ({"namedtuple": {"name": "P", "fields": [["a", {"column": "x"}]]}}, "P(a=x)"),
    ],
)
def test_a_structure_is_told_as_python_writes_it(structure: dict[str, Any], text: str) -> None:
    assert sample_text(structure) == text


def test_parts_of_a_later_version_or_none_are_told_as_far_as_they_go() -> None:
    assert dict(made_from({}))["source"] == "?"
    parts = {
        "source": {"kind": "factory", "reference": "m:f", "args": {"n": 3}, "code": {"m.f": [], "m.g": []}},
        "transform": {"reference": "m:t", "code": {"m.t": []}},
        "not_seen": ["a", "b"],
    }
    told = dict(made_from(parts))
    assert told["source"] == "factory m:f (n=3), the code of m.f, m.g"
    assert told["transform"] == "m:t, the code of m.t"
    assert told["not seen"] == "a; b"


def test_remove_frees_the_store_with_its_table_and_says_how_much(folder: str, isolated: Path) -> None:
    store = isolated / "store"
    assert list(store.glob("pets-*.bad.tsv"))
    assert "are free again." in succeeded("remove", "pets")
    assert [name for name in os.listdir(store) if not name.startswith((".index", ".building"))] == []
    again = run("remove", "pets")
    assert (again.returncode, "There is none at all" in again.stderr) == (1, True)


def test_remove_takes_a_damaged_store_and_never_the_other_of_two(isolated: Path) -> None:
    succeeded("prepare", arrays(isolated / "a", "digits"))
    succeeded("prepare", arrays(isolated / "b", "digits", rows=50))
    small, large = sorted((isolated / "store").glob("digits-*"), key=lambda path: (path / "label.npy").stat().st_size)
    (small / "label.npy").chmod(0o644)
    os.truncate(small / "label.npy", 10)
    both = run("remove", "digits")
    assert both.returncode == 1
    assert f"digits@{small.name[7:15]}" in both.stderr
    succeeded("remove", f"digits@{small.name[7:15]}")
    assert (small.exists(), large.exists()) == (False, True)
    succeeded("remove", large.name)  # a folder's name is as good
    assert not large.exists()


def test_remove_is_refused_while_a_job_reads_and_while_a_daemon_serves(isolated: Path) -> None:
    with daemon(arrays(isolated / "data"), "--no-confirm") as serving:
        (path,) = (isolated / "store").glob("digits-*")
        idle = run("remove", "digits")
        assert idle.returncode == 1
        assert f"the daemon, pid {serving.pid}, serves it" in idle.stderr
        with job() as reading:
            until(lambda: (serving.status() or {})["jobs"], "a job")
            busy = run("remove", "digits")
            assert f"job 'lr-0.1', pid {reading.pid}, reads it" in busy.stderr
            (row,) = json.loads(succeeded("list", "--json"))["stores"]
            assert (row["jobs"], row["used_s"] < LIMIT_S) == (["lr-0.1"], True)
            assert "lr-0.1" in succeeded("list")
            serving.kill()
            alone = run("remove", "digits")
            assert alone.returncode == 1
            assert f"process {reading.pid} (python" in alone.stderr
            assert path.exists()
            forced = succeeded("remove", "digits", "--force")
            assert "once those end who read it" in forced
            assert not path.exists()
            assert reading.poll() is None
    assert not (isolated / "store" / ".trash").exists()


def test_remove_is_refused_where_a_daemon_does_not_answer(isolated: Path) -> None:
    succeeded("prepare", arrays(isolated / "data"))
    with daemon(arrays(isolated / "other", "other"), "--no-confirm") as serving:
        os.kill(serving.pid, signal.SIGSTOP)
        try:
            silent = run("remove", "digits")
        finally:
            os.kill(serving.pid, signal.SIGCONT)
        assert f"the daemon, pid {serving.pid}, does not answer" in silent.stderr
        assert "Removed" in succeeded("remove", "digits")


def test_list_does_not_wait_for_a_socket_that_nobody_reads(isolated: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(isolated / "run" / "d.sock"))
    succeeded("prepare", arrays(isolated / "data"))
    (row,) = json.loads(succeeded("list", "--json"))["stores"]
    assert row["jobs"] is None


@pytest.mark.parametrize("verb", [["info"], ["verify"], ["remove"], ["preview", "-o", "x.png"]])
def test_a_name_that_is_not_there_is_told_with_the_nearest(isolated: Path, verb: list[str]) -> None:
    succeeded("prepare", arrays(isolated / "data"))
    ended = run(*verb, "digit")
    assert ended.returncode == 1
    assert "Did you mean 'digits'? There are: digits." in ended.stderr
