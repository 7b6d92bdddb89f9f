"""server/badsamples.py: bad samples are found, listed with path, index, stage and cause, and left out or refused."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.protocol import limits
from dataserve.protocol.errors import DataError, UserError
from dataserve.server import badsamples, store
from dataserve.server.badsamples import Bad, BadSamples, Limit
from dataserve.server.spec import DatasetSpec

from .preparing import Child, Events, archive, content, group, named, start, until

__all__ = ["start"]  # the fixture

STEPS = """
import os, time
import numpy as np
BAD = {bad}
def picky(sample):
    index = int(sample["label"])
    if index in BAD:
        raise ValueError(f"number {{index}} will not do")
    return np.full((64, 64, 64), index, np.int32), str(index)
def kills(sample):
    if sample["label"] in BAD:
        os.kill(os.getpid(), 11)
    return np.full((64, 64, 64), sample["label"], np.int32)
def hangs(sample):
    if sample["label"] in BAD:
        time.sleep(3600)
    return np.full((64, 64, 64), sample["label"], np.int32)
"""
ROWS = 40  # of 1 MiB: four a chunk


@pytest.fixture
def picky(isolated: Path) -> Callable[..., dict[str, Any]]:
    """A spec of 40 samples, of which the named ones are bad."""

    def making(bad: set[int], on_error: str = "skip", transform: str = "picky", **more: Any) -> dict[str, Any]:
        (isolated / "steps.py").write_text(STEPS.format(bad=bad))
        source = archive(isolated, ROWS)
        return DatasetSpec("data", source, {}, f"steps:{transform}", on_error=on_error, **more).to_map()

    return making


def origins(path: str) -> list[tuple[int, bytes]]:
    """By numpy alone, as FORMAT.md states it."""
    values = np.load(Path(path, "origins.values.npy")).tobytes()
    ends = np.load(Path(path, "origins.offsets.npy")).tolist()
    found = [values[start:stop] for start, stop in itertools.pairwise(ends)]
    return [(int.from_bytes(item[:8], "little"), item[8:]) for item in found]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.mark.parametrize("bad", [{0}, {39}, {0, 1, 2, 3}, set(range(4, 20)) | {0, 22, 39}, {36, 37, 38, 39}], ids=str)
def test_skipped_samples_leave_dense_rows_with_their_origins_and_the_same_bytes_whoever_works(
    start: Callable[..., Child], isolated: Path, picky: Callable[..., dict[str, Any]], bad: set[int]
) -> None:
    paths, spec = [], picky(bad)
    for workers in (1, 2):
        child = start(spec=spec, workers=workers, store=str(isolated / f"store{workers}"))
        status, events, words = child.end()
        assert status == 0, (events, words)
        paths.append(named(events, "sealed")[0]["path"])
    assert content(paths[0]) == content(paths[1])
    kept = [index for index in range(ROWS) if index not in bad]
    assert np.load(Path(paths[0], "field_0.npy"))[:, 0, 0, 0].tolist() == kept
    assert origins(paths[0]) == [(index, b"") for index in kept]
    manifest = json.loads(Path(paths[0], "manifest.json").read_bytes())
    assert (manifest["rows"], manifest["skipped"]) == (
        len(kept),
        [
            {"index": i, "path": None, "stage": "transform", "cause": f"ValueError: number {i} will not do."}
            for i in sorted(bad)
        ],
    )
    store.open_sealed(paths[0], thorough=True)
    assert [(event["index"], event["stage"]) for event in sorted(named(events, "bad"), key=lambda e: e["index"])] == [
        (index, "transform") for index in sorted(bad)
    ]
    (total,) = named(events, "bad_samples")
    assert (total["count"], [int(row["index"]) for row in table(Path(total["table"]))]) == (len(bad), sorted(bad))


def test_fail_finishes_the_scan_and_lists_all_with_status_4(
    start: Callable[..., Child], isolated: Path, picky: Callable[..., dict[str, Any]]
) -> None:
    bad = {3, 5, 8, 13, 21, 34, 39}
    status, events, words = start(spec=picky(bad, "fail"), workers=2).end()
    assert (status, events[-1]["code"]) == (4, "bad_sample")
    assert (
        "7 of 40 samples are bad. Sample 3 failed at the stage transform: ValueError: number 3 will not do."
        in (events[-1]["text"])
    )
    assert "6 more are in" in events[-1]["text"]
    assert "--on-error skip" in events[-1]["remedy"]
    assert {event["index"] for event in named(events, "bad")} == bad
    (total,) = named(events, "bad_samples")
    assert total["table"] in events[-1]["text"]
    assert [row["cause"] for row in table(Path(total["table"]))][-1] == "ValueError: number 39 will not do."
    assert "Traceback" not in words
    assert os.listdir(isolated / "store" / store.BUILDING) == []
    assert store.list_sealed(isolated / "store") == []


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_data_set_of_bad_samples_alone_is_an_error(
    start: Callable[..., Child], picky: Callable[..., dict[str, Any]], on_error: str
) -> None:
    status, events, _ = start(spec=picky(set(range(ROWS)), on_error), workers=1).end()
    assert (status, events[-1]["code"]) == (4, "bad_sample")
    assert events[-1]["text"].startswith("All 40 samples are bad.")


@pytest.mark.parametrize(("max_bad", "status"), [("2", 0), ("1", 4), ("5%", 0), ("4.9%", 4)])
def test_more_bad_samples_than_allowed_end_it(
    start: Callable[..., Child], picky: Callable[..., dict[str, Any]], max_bad: str, status: int
) -> None:
    found, events, _ = start(spec=picky({7, 30}, max_bad=max_bad), workers=1).end()
    assert found == status
    assert status == 0 or f"--max-bad {max_bad}" in events[-1]["text"]


def test_a_sample_that_kills_its_worker_twice_is_left_out_and_the_work_goes_on(
    start: Callable[..., Child], picky: Callable[..., dict[str, Any]]
) -> None:
    status, events, words = start(spec=picky({0, 18}, transform="kills"), workers=2).end()
    assert status == 0, (events[-3:], words)
    path = named(events, "sealed")[0]["path"]
    assert np.load(Path(path, "image.npy"))[:, 0, 0, 0].tolist() == [i for i in range(ROWS) if i not in (0, 18)]
    skipped = json.loads(Path(path, "manifest.json").read_bytes())["skipped"]
    assert [(item["index"], item["stage"], item["cause"]) for item in skipped] == [
        (index, "worker", "The worker was killed by SIGSEGV.") for index in (0, 18)
    ]


def test_a_sample_that_hangs_twice_is_left_out(
    start: Callable[..., Child], picky: Callable[..., dict[str, Any]]
) -> None:
    status, events, words = start(spec=picky({18}, transform="hangs"), workers=2, sample_timeout_s=1.0).end()
    assert status == 0, (events[-3:], words)
    skipped = json.loads(Path(named(events, "sealed")[0]["path"], "manifest.json").read_bytes())["skipped"]
    assert [(item["index"], item["stage"]) for item in skipped] == [(18, "worker")]
    assert skipped[0]["cause"] == "It took more than 1 s."


def test_a_sample_that_killed_a_lone_build_is_named_by_the_next(
    start: Callable[..., Child], picky: Callable[..., dict[str, Any]]
) -> None:
    request = {"spec": picky({18}, "fail", "kills"), "workers": 1}
    child = start(**request)
    status, events, _ = child.end()
    assert (status, named(events, "failed")) == (-11, [])
    until(lambda: not group(child.process.pid), "it left processes behind")
    status, events, _ = start(**request).end()
    assert (status, events[-1]["code"]) == (1, "worker_died")
    assert "was killed by SIGSEGV at sample 18." in events[-1]["text"]


def test_broken_pictures_are_reported_with_path_stage_and_cause(
    start: Callable[..., Child], isolated: Path, shared_data: Path
) -> None:
    tree = isolated / "tree" / "one"
    tree.mkdir(parents=True)
    good = sorted((shared_data / "photos" / "images" / "dog").iterdir())[:5]
    for item in good:
        shutil.copy(item, tree)
    (tree / "a_empty.jpg").touch()
    (tree / os.fsdecode(b"b_\xff\n.jpg")).write_text("<html>no picture</html>")
    (tree / "n02_cut.JPEG").write_bytes(good[0].read_bytes()[: good[0].stat().st_size // 2])
    spec = DatasetSpec("data", f"imagefolder:{tree.parent}", resize="32x32")
    status, events, words = start(spec=spec.to_map()).end()
    assert status == 4, (events, words)
    found = {event["path"]: (event["stage"], event["cause"].partition(":")[0]) for event in named(events, "bad")}
    assert set(found) == {"one/a_empty.jpg", r"one/b_\xff\n.jpg", "one/n02_cut.JPEG"}
    assert found["one/n02_cut.JPEG"] == ("decode", "OSError")
    assert found["one/a_empty.jpg"][0] == "open"
    assert found[r"one/b_\xff\n.jpg"][0] == "open"
    skipping = DatasetSpec("data", f"imagefolder:{tree.parent}", resize="32x32", on_error="skip")
    status, events, words = start(spec=skipping.to_map()).end()
    assert status == 0, (events, words)
    path = named(events, "sealed")[0]["path"]
    names = [f"one/{item.name}".encode() for item in good]
    everything = sorted(os.fsencode(f"one/{name}") for name in os.listdir(tree))
    assert origins(path) == [(everything.index(name), name) for name in names]
    skipped = json.loads(Path(path, "manifest.json").read_bytes())["skipped"]
    assert {os.fsencode(item["path"]) for item in skipped} == set(everything) - set(names)
    assert np.load(Path(path, "image.npy")).shape == (5, 3, 32, 32)


class Heard:
    """What a reporter was told."""

    def __init__(self) -> None:
        self.events: Events = []

    def bad(self, index: int, path: str | None, stage: str, cause: str) -> None:
        self.events.append({"index": index})

    def bad_samples(self, count: int, table: str | None, remedy: str | None) -> None:
        self.events.append({"count": count, "table": table, "remedy": remedy})


class Nameless:
    def path(self, index: int) -> None:
        return None


def gathered(isolated: Path, limit: str | None = None) -> tuple[BadSamples, Heard]:
    heard: Any = Heard()
    source: Any = Nameless()
    return BadSamples(source, Limit(limit, None), heard, isolated / "x.bad.tsv"), heard


def test_the_first_hundred_are_told_one_by_one_and_the_manifest_lists_a_capped_number(isolated: Path) -> None:
    found, heard = gathered(isolated)
    count = limits.SKIPPED + 7
    found.add([Bad(index, "open", "OSError: gone.") for index in reversed(range(count))])
    found.settle(count + 1, "skip")
    assert len(heard.events) == badsamples.LISTED_EVENTS + 1
    assert heard.events[-1] == {"count": count, "table": str(isolated / "x.bad.tsv"), "remedy": None}
    skipped = found.skipped()
    assert len(skipped) == limits.SKIPPED + 1
    assert (skipped[0]["index"], skipped[-1]) == (0, {"more": 7})
    assert len(table(isolated / "x.bad.tsv")) == count


def test_a_share_of_a_source_of_unknown_length_is_judged_at_its_end(isolated: Path) -> None:
    found, _ = gathered(isolated, "50%")
    found.add([Bad(index, "open", "OSError: gone.") for index in range(5)])
    found.settle(10, "skip")
    with pytest.raises(DataError, match=r"5 of 9 samples are bad, more than --max-bad 50%"):
        found.settle(9, "skip")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "%", "5 %", "many"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="neither N nor P%"):
        Limit(text, 100)


def test_a_cause_of_several_lines_takes_one_line_of_the_table(isolated: Path) -> None:
    found, _ = gathered(isolated)
    found.add([Bad(3, "decode", "OSError: a\tb\nc")])
    found.settle(9, "skip")
    assert table(isolated / "x.bad.tsv")[0]["cause"] == r"OSError: a\tb\nc"


def test_a_table_of_a_build_that_found_none_is_gone(isolated: Path) -> None:
    (isolated / "x.bad.tsv").write_text("old")
    gathered(isolated)[0].settle(9, "fail")
    assert not (isolated / "x.bad.tsv").exists()
