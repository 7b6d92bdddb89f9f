"""server/confirm.py: after a hit some rows are prepared again, and what no fingerprint saw is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataserve.server.spec import DatasetSpec

from .preparing import Child, archive, named, spec, start

__all__ = ["start"]

STEPS = """
import json, pathlib
def scaled(sample):
    return {"y": sample["label"] * json.loads(pathlib.Path("scale.json").read_text()), "text": f"n{sample['label']}"}
class Lines:
    def __init__(self):
        self.lines = pathlib.Path("lines.txt").read_text().split()
    def __iter__(self):
        return iter(self.lines)
def lines():
    return Lines()
"""


def outcome(child: Child) -> tuple[int, list[str], dict[str, Any]]:
    """Status, the names of the events, and the last event."""
    status, events, words = child.end()
    assert "Traceback" not in words
    return status, [event["event"] for event in events if event["event"] != "progress"], events[-1]


def test_rows_that_are_as_they_were_are_confirmed(start: Callable[..., Child], isolated: Path) -> None:
    request = {"spec": spec(archive(isolated))}
    start(**request).end()
    status, names, last = outcome(start(**request, build=False, confirm=True))
    assert (status, names) == (0, ["verdict", "sealed", "confirming", "confirmed"])
    assert last["rows"] == 16
    assert outcome(start(**request, build=False))[1] == ["verdict", "sealed"], "only where it is asked for"


def test_a_change_that_no_fingerprint_sees_is_found_with_row_column_and_remedy(
    start: Callable[..., Child], isolated: Path
) -> None:
    (isolated / "steps.py").write_text(STEPS)
    (isolated / "scale.json").write_text("2")
    request = {"spec": spec(archive(isolated), "steps:scaled")}
    assert start(**request).end()[0] == 0
    assert outcome(start(**request, confirm=True))[2] == {"event": "confirmed", "rows": 16}
    (isolated / "scale.json").write_text("3")
    status, names, last = outcome(start(**request, confirm=True))
    assert (status, names) == (1, ["verdict", "sealed", "confirming", "failed"])
    assert last["code"] == "source_changed"
    assert last["text"].startswith("Row 13 (sample 13) differs from the store in 1 of 1 values of y."), last
    assert "--version NAME" in last["remedy"]


def test_a_file_whose_size_and_time_were_kept_is_found(start: Callable[..., Child], isolated: Path) -> None:
    for number in range(5):
        (isolated / "tree" / "cat").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(isolated / "tree" / "cat" / f"{number}.bmp")
    request = {"spec": spec(f"imagefolder:{isolated}/tree")}
    assert start(**request).end()[0] == 0
    changed = isolated / "tree" / "cat" / "3.bmp"
    before = changed.stat()
    changed.write_bytes(changed.read_bytes()[:-3] + b"\xff\xff\xff")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    status, names, last = outcome(start(**request, confirm=True))
    assert (status, names[0], last["code"]) == (1, "verdict", "source_changed")
    assert "Row 3 (sample 3, cat/3.bmp) differs from the store in" in last["text"]
    assert "Files count by size and time." in last["text"]
    assert "--identity content" in last["remedy"]


def test_rows_behind_skipped_samples_are_compared_with_their_own(start: Callable[..., Child], isolated: Path) -> None:
    for number in range(20):
        path = isolated / "tree" / "cat" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
        if number in (0, 7, 8):
            path.write_bytes(b"broken")
    request = {"spec": {**spec(f"imagefolder:{isolated}/tree"), "on_error": "skip"}}
    status, events, _ = start(**request).end()
    assert (status, named(events, "sealed")[0]["rows"]) == (0, 17)
    assert outcome(start(**request, confirm=True))[2] == {"event": "confirmed", "rows": 16}


def test_an_iterable_is_confirmed_by_its_first_rows(start: Callable[..., Child], isolated: Path) -> None:
    (isolated / "steps.py").write_text(STEPS)
    (isolated / "lines.txt").write_text(" ".join(f"word{number}" for number in range(30)))
    request = {"spec": DatasetSpec("data", "steps:lines", version="1").to_map()}
    status, events, _ = start(**request).end()
    assert (status, named(events, "sealed")[0]["rows"]) == (0, 30)
    assert outcome(start(**request, confirm=True))[2] == {"event": "confirmed", "rows": 16}
    (isolated / "lines.txt").write_text("word0 word1")
    assert "Row 2 (sample 2) is beyond the end" in outcome(start(**request, confirm=True))[2]["text"]
    (isolated / "lines.txt").write_text("word0 longer1 word2")
    assert "Row 1 (sample 1) has value of shape (7,) now, (5,)" in outcome(start(**request, confirm=True))[2]["text"]


def test_another_number_of_samples_is_told(start: Callable[..., Child], isolated: Path) -> None:
    (isolated / "steps.py").write_text(
        "import pathlib\ndef numbers():\n    return [{'y': n} for n in range(int(pathlib.Path('n').read_text()))]\n"
    )
    (isolated / "n").write_text("9")
    request = {"spec": DatasetSpec("data", "steps:numbers", version="1").to_map()}
    assert start(**request).end()[0] == 0
    (isolated / "n").write_text("8")
    last = outcome(start(**request, confirm=True))[2]
    assert "The source has 8 samples now, the store was made from 9." in last["text"]


def test_a_store_source_has_nothing_to_be_prepared_from(start: Callable[..., Child], isolated: Path) -> None:
    start(spec=spec(archive(isolated))).end()
    status, _, last = outcome(start(spec=spec("store:data"), confirm=True))
    assert (status, last) == (0, {"event": "confirmed", "rows": 0})


@pytest.mark.parametrize("column", ["image", "label"])
def test_each_column_is_compared(start: Callable[..., Child], isolated: Path, column: str) -> None:
    request = {"spec": spec(archive(isolated, 16))}
    (sealed,) = named(start(**request).end()[1], "sealed")
    path = Path(sealed["path"], f"{column}.npy")
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    last = outcome(start(**request, confirm=True))[2]
    assert last["event"] == "failed"
    assert f"Row 15 (sample 15) differs from the store in 1 of {3072 if column == 'image' else 1}" in last["text"]
