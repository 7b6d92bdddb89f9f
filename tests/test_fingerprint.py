"""server/fingerprint.py: equal sources have equal fingerprints, others do not, and a miss says what changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol.errors import DataserveError
from dataserve.server import fingerprint, sources, store
from dataserve.server.build import Build
from dataserve.server.report import Reporter
from dataserve.server.spec import DatasetSpec


def write(path: Path, **arrays: Any) -> DatasetSpec:
    np.savez(path, **arrays)
    return DatasetSpec("tiny", f"arrays:{path}")


def prepare(root: Path, spec: DatasetSpec) -> store.Sealed:
    """A real preparation in this process, told to nobody."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    reporter = Reporter(nowhere)
    try:
        Build(spec, root, 1, reporter).run(fingerprint.recall(root, spec))
    finally:
        reporter.close()
    verdict = fingerprint.recall(root, spec)
    assert verdict.hit, verdict.reasons
    assert verdict.path is not None
    return store.open_sealed(verdict.path)


@pytest.fixture
def root(isolated: Path) -> Path:
    return store.make_root(isolated / "store")


@pytest.fixture
def spec(isolated: Path, root: Path) -> DatasetSpec:
    """A spec that is prepared."""
    made = write(isolated / "a.npz", x=np.arange(10), y=np.eye(10))
    prepare(root, made)
    return made


def test_what_was_prepared_is_a_hit_with_its_path_and_reason(root: Path, spec: DatasetSpec) -> None:
    verdict = fingerprint.recall(root, spec)
    assert verdict.hit
    assert verdict.line.startswith("HIT: source files, options and library versions are those of tiny-")
    assert verdict.path == store.find(root, "tiny").path
    assert verdict.fingerprint == store.find(root, "tiny").manifest.fingerprint


def test_what_was_never_prepared_is_a_miss(root: Path, isolated: Path) -> None:
    verdict = fingerprint.recall(root, write(isolated / "b.npz", x=np.arange(3)))
    assert not verdict.hit
    assert verdict.line.startswith("MISS: never prepared here")


def rewrite(path: Path) -> str:
    np.savez(path, x=np.arange(11), y=np.eye(11))
    return r"files: a\.npz changed size \d+ -> \d+"


def touch(path: Path) -> str:
    os.utime(path, ns=(1, 1))
    return r"files: a\.npz changed its time of modification"


def take_away(path: Path) -> str:
    path.unlink()
    return r"files: a\.npz is gone"


@pytest.mark.parametrize("change", [rewrite, touch, take_away])
def test_a_changed_source_is_a_miss_that_names_file_and_change(
    root: Path, spec: DatasetSpec, isolated: Path, change: Callable[[Path], str]
) -> None:
    reason = change(isolated / "a.npz")
    verdict = fingerprint.recall(root, spec)
    assert not verdict.hit
    assert len(verdict.reasons) == 1
    assert re.search(reason, verdict.line)


def test_another_library_version_is_a_miss_that_names_both(
    root: Path, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "installed", lambda name: "99.1.2")
    verdict = fingerprint.recall(root, spec)
    assert not verdict.hit
    assert verdict.line.startswith("MISS: versions: numpy changed 2.")
    assert verdict.line.endswith("-> 99.1")


def test_a_patch_release_is_no_miss(root: Path, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = ".".join(str(fingerprint.installed("numpy")).split(".")[:2])
    monkeypatch.setattr(fingerprint, "installed", lambda name: f"{numpy}.999")
    assert fingerprint.recall(root, spec).hit


def test_other_image_rules_are_a_miss(root: Path, spec: DatasetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserve.server.images.RULES", {**fingerprint.images.RULES, "max_pixels": 5})
    assert "images: max_pixels changed" in fingerprint.recall(root, spec).line


def test_a_store_that_is_gone_or_damaged_is_a_miss_that_says_so(root: Path, spec: DatasetSpec) -> None:
    sealed = store.find(root, "tiny")
    (Path(sealed.path) / "x.npy").unlink()
    assert "x.npy is missing" in fingerprint.recall(root, spec).line
    shutil.rmtree(sealed.path)
    assert "There is no store at" in fingerprint.recall(root, spec).line
    assert prepare(root, spec) == sealed, "and it is made again, the same"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 1, "files": 3}', b"\xff", b'{"format": 2}'])
def test_a_damaged_record_is_a_miss_and_no_error(root: Path, spec: DatasetSpec, content: bytes) -> None:
    (record,) = (root / store.INDEX).iterdir()
    record.write_bytes(content)
    assert not fingerprint.recall(root, spec).hit


@pytest.mark.parametrize("folder", ["../elsewhere", "/etc", ".building", ""])
def test_a_record_cannot_lead_out_of_the_root(root: Path, spec: DatasetSpec, folder: str) -> None:
    (record,) = (root / store.INDEX).iterdir()
    record.write_text(json.dumps({**json.loads(record.read_text()), "folder": folder}))
    assert not fingerprint.recall(root, spec).hit


def test_the_same_files_at_another_place_have_the_same_fingerprint(
    isolated: Path, root: Path, spec: DatasetSpec
) -> None:
    (isolated / "other").mkdir()
    shutil.copy2(isolated / "a.npz", isolated / "other" / "a.npz")
    moved = DatasetSpec("tiny", f"arrays:{isolated}/other/a.npz")
    assert not fingerprint.recall(root, moved).hit, "there is no record of that place"
    assert prepare(root, moved) == store.find(root, "tiny"), "but one store serves both"


def test_the_transforms_code_is_part_of_it_and_seen_without_an_import(
    isolated: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(isolated)
    package = isolated / f"package_{os.getpid()}"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "steps.py").write_text("def double(sample): return sample\n")
    spec = DatasetSpec("tiny", "arrays:a.npz", {}, f"{package.name}.steps:double")
    identity = sources.Identity((), ("numpy",))
    before = fingerprint.survey(spec, identity)
    again = fingerprint.survey(spec, identity)
    (package / "steps.py").write_text("def double(sample): return 2 * sample\n")
    after = fingerprint.survey(spec, identity)
    assert before.fingerprint == again.fingerprint != after.fingerprint
    (reason,) = fingerprint.changes(before.parts, after.parts)
    assert reason.startswith("transform: code changed")


@pytest.mark.parametrize(
    ("args", "other", "same"),
    [
        ({"train": True}, {"train": False}, False),
        ({"train": True}, {}, False),
        ({"root": "/a"}, {"root": "/b"}, True),
        ({"download": True}, {}, True),
        ({"scale": 0.1}, {"scale": 0.1}, True),
        ({"scale": 0.1}, {"scale": 0.1 + 2**-56}, False),
        ({"n": 1}, {"n": 1.0}, False),
        ({"n": 1}, {"n": True}, False),
    ],
)
def test_arguments_count_and_the_place_and_the_download_do_not(args: Any, other: Any, same: bool) -> None:
    identity = sources.Identity((), ("numpy",))
    one, two = (
        fingerprint.survey(DatasetSpec("x", "torchvision:MNIST", each), identity).fingerprint for each in (args, other)
    )
    assert (one == two) is same


@given(st.sets(st.sampled_from(["a", "b/c", "b/d", "Z", "é", "b.e", "10", "2"]), min_size=1), st.randoms())
def test_a_census_does_not_depend_on_the_order_of_creation(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], chance: Any
) -> None:
    found = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("tree")
        order = sorted(names)
        chance.shuffle(order)
        for name in order:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(name.encode())
            os.utime(folder / name, ns=(5, 5))
        found.append(fingerprint.census(str(folder)))
    assert found[0] == found[1]
    assert [entry.path for entry in found[0]] == sorted(names, key=os.fsencode)


def test_a_census_survives_loops_dangling_links_and_names_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    (entry,) = fingerprint.census(str(tmp_path))
    assert os.fsencode(entry.path) == b"\xff"
    identity = sources.Identity((str(tmp_path),), ())
    assert len(fingerprint.survey(DatasetSpec("x", "torchvision:MNIST"), identity).fingerprint) == 64


def test_many_changes_are_counted_instead_of_listed() -> None:
    old = {"/r": [fingerprint.Entry(f"{number}", 1, 1) for number in range(100)]}
    found = fingerprint.changes({"files": 1}, {"files": 2}, old, {"/r": []})
    assert len(found) == fingerprint.SHOWN_CHANGES + 1
    assert found[-1] == "files: 95 more changed"


def test_a_store_source_is_a_hit_by_name_and_by_path_and_an_error_when_it_is_unknown(
    root: Path, spec: DatasetSpec
) -> None:
    sealed = store.find(root, "tiny")
    for target in ("tiny", f"tiny@{sealed.manifest.fingerprint[:6]}", sealed.path):
        verdict = fingerprint.recall(root, DatasetSpec("other", f"store:{target}"))
        assert (verdict.hit, verdict.path) == (True, sealed.path)
    with pytest.raises(DataserveError, match="There are: tiny"):
        fingerprint.recall(root, DatasetSpec("other", "store:huge"))


def test_a_source_that_changes_while_it_is_prepared_is_an_error_and_leaves_nothing(
    isolated: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write(isolated / "b.npz", x=np.arange(10))
    fill = Build._fill

    def meddle(self: Build, *args: Any) -> Any:
        found = fill(self, *args)
        os.utime(isolated / "b.npz", ns=(7, 7))
        return found

    monkeypatch.setattr(Build, "_fill", meddle)
    with pytest.raises(DataserveError, match=r"changed while it was prepared: files: b\.npz") as caught:
        prepare(root, spec)
    assert caught.value.code == "source_changed"
    assert store.list_sealed(root) == []
    assert os.listdir(root / store.BUILDING) == []


def test_an_argument_that_is_no_utf8_has_a_fingerprint() -> None:
    spec = DatasetSpec("x", "torchvision:MNIST", {"split": os.fsdecode(b"\xff")})
    assert len(fingerprint.survey(spec, sources.Identity((), ())).fingerprint) == 64
