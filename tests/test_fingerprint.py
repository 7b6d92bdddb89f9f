"""server/fingerprint.py: equal sources have equal fingerprints, others do not, and a miss says what changed."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataserve.protocol.errors import DataserveError
from dataserve.server import census, fingerprint, sources, store
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
    assert verdict.line.startswith("HIT: source files, code, options and library versions are those of tiny-")
    assert "size and time" in verdict.line, "and it says what it does not look at"
    assert verdict.path == store.find(root, "tiny").path
    assert verdict.fingerprint == store.find(root, "tiny").manifest.fingerprint


def test_what_was_never_prepared_is_a_miss(root: Path, isolated: Path) -> None:
    verdict = fingerprint.recall(root, write(isolated / "b.npz", x=np.arange(3)))
    assert not verdict.hit
    assert verdict.line.startswith("MISS: never prepared here")


def test_what_is_sealed_under_another_name_only_is_a_miss_that_names_it(root: Path, spec: DatasetSpec) -> None:
    other = replace(spec, name="other")
    verdict = fingerprint.recall(root, other)
    assert not verdict.hit
    seen = fingerprint.survey(sources.located(other), sources.open_source(sources.located(other)).identity())
    assert "only under the name 'tiny'" in fingerprint.miss(root, other, verdict, seen).line


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
    monkeypatch.setattr("dataserve.server.images.BACKGROUND", (0, 0, 0))
    assert "images: alpha changed on (255, 255, 255) -> on (0, 0, 0)" in fingerprint.recall(root, spec).line


def test_a_store_that_is_gone_or_damaged_is_a_miss_that_says_so(root: Path, spec: DatasetSpec) -> None:
    sealed = store.find(root, "tiny")
    (Path(sealed.path) / "x.npy").unlink()
    assert "x.npy is missing" in fingerprint.recall(root, spec).line
    shutil.rmtree(sealed.path)
    assert "There is no store at" in fingerprint.recall(root, spec).line
    assert prepare(root, spec) == sealed, "and it is made again, the same"


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 2, "files": 3}', b"\xff", b'{"format": 1}'])
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


STEPS = """
from . import helpers
SCALE = 2
def double(sample):
    return {"y": sample["x"] * SCALE + helpers.BIAS}
"""


@pytest.fixture
def package(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a transform in the current directory; a later import of it reads its files anew."""
    name = f"package_{os.getpid()}_{next(_count)}"
    monkeypatch.chdir(isolated)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = isolated / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helpers.py").write_text("BIAS = 1\n")
    (folder / "steps.py").write_text(STEPS)
    yield folder
    forget(folder)


_count = itertools.count()


def forget(package: Path) -> None:
    """As a new process would be: nothing of the package is imported."""
    for module in [module for module in sys.modules if module.partition(".")[0] == package.name]:
        del sys.modules[module]
    importlib.invalidate_caches()


def transformed(isolated: Path, package: Path, **fields: Any) -> DatasetSpec:
    np.savez(isolated / "t.npz", x=np.arange(10))
    return DatasetSpec("tiny", f"arrays:{isolated}/t.npz", {}, f"{package.name}.steps:double", **fields)


def verdict_of(root: Path, spec: DatasetSpec) -> tuple[fingerprint.Verdict, list[str]]:
    """What the record says without an import, and what a preparation then says."""
    recalled = fingerprint.recall(root, spec)
    ours, theirs = os.pipe()
    reporter = Reporter(theirs)
    try:
        Build(spec, root, 1, reporter).run(recalled)
    finally:
        reporter.close()
    with open(ours) as lines:
        events = [json.loads(line) for line in lines]
    (verdict,) = [event for event in events if event["event"] == "verdict"]
    return recalled, [f"{'HIT' if verdict['hit'] else 'MISS'}", *verdict["reasons"]]


def test_an_edit_of_the_transform_is_a_miss_without_an_import_and_told_with_one(
    isolated: Path, root: Path, package: Path
) -> None:
    spec = transformed(isolated, package)
    prepare(root, spec)
    forget(package)
    assert fingerprint.recall(root, spec).hit
    assert not any(module.startswith(package.name) for module in sys.modules), "recalling imports nothing of the user's"
    (package / "steps.py").write_text(STEPS.replace("SCALE = 2", "SCALE = 3"))
    recalled, said = verdict_of(root, spec)
    assert recalled.line == f"MISS: code: {package}/steps.py has changed"
    assert said[:2] == ["MISS", f"transform: constant SCALE of {package.name}.steps changed 2 -> 3"]
    forget(package)
    (package / "helpers.py").write_text("BIAS = 2\n")
    recalled, said = verdict_of(root, spec)
    assert recalled.line == f"MISS: code: {package}/helpers.py has changed"
    assert said[:2] == ["MISS", f"transform: constant BIAS of {package.name}.helpers changed 1 -> 2"]


def test_a_comment_costs_an_import_and_is_a_hit(isolated: Path, root: Path, package: Path) -> None:
    spec = transformed(isolated, package)
    sealed = prepare(root, spec)
    forget(package)
    (package / "steps.py").write_text("# more words\n" + STEPS)
    recalled, said = verdict_of(root, spec)
    assert not recalled.hit
    assert said[0] == "HIT"
    assert store.list_sealed(root) == [sealed]
    assert fingerprint.recall(root, spec).hit, "and is remembered"
    os.utime(package / "steps.py", ns=(1, 1))
    assert fingerprint.recall(root, spec).hit, "its bytes count, not its time"


def test_a_module_of_that_name_elsewhere_is_a_miss(
    isolated: Path, root: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = transformed(isolated, package)
    prepare(root, spec)
    forget(package)
    shutil.copytree(package, isolated / "other" / package.name)
    sys.path.remove(str(isolated))
    monkeypatch.chdir(isolated / "other")
    assert f"code: the module {package.name}.steps is now" in fingerprint.recall(root, spec).line
    assert verdict_of(root, spec)[1][0] == "HIT", "but the same code at another place is the same"


def test_what_is_not_seen_is_said_with_the_remedy_until_a_version_covers_it(
    isolated: Path, root: Path, package: Path
) -> None:
    (package / "steps.py").write_text(
        STEPS.replace("SCALE = 2", "import os\ndef SCALED(): return os.environ").replace(
            "* SCALE", "* len(os.environ.get('NEVER', '1'))"
        )
    )
    spec = transformed(isolated, package)
    prepare(root, spec)
    (note,) = fingerprint.recall(root, spec).reasons[1:]
    assert note.startswith("not seen: transform: what")
    assert "os.environ" in note
    assert "--version NAME" in note
    versioned = transformed(isolated, package, version="v1")
    prepare(root, versioned)
    assert len(fingerprint.recall(root, versioned).reasons) == 1
    later = replace(versioned, version="v2")
    assert verdict_of(root, later)[1][:2] == ["MISS", "options: version changed v1 -> v2"]


def test_options_that_shape_rows_are_part_of_it(isolated: Path, root: Path, spec: DatasetSpec) -> None:
    kept = fingerprint.survey(spec, sources.Identity((), ()))
    for change in (
        {"on_error": "skip"},
        {"allow_random": True},
        {"version": "2"},
        {"mode": "L"},
        {"resize": "3"},
        {"crop": "3"},
        {"max_pixels": 7},
        {"truncated": True},
        {"identity": "content"},
    ):
        changed = fingerprint.survey(replace(spec, **change), sources.Identity((str(isolated / "a.npz"),), ()))
        assert changed.fingerprint != kept.fingerprint, change


@pytest.fixture
def tree(isolated: Path) -> Path:
    for place, text in {"a/1.txt": "one", "a/2.txt": "two", "b/1.txt": "three"}.items():
        path = isolated / "tree" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    packed = isolated / "tree" / "b" / "2.gz"
    packed.write_bytes(gzip.compress(b"four", mtime=0))
    return isolated / "tree"


def same_size_same_time(tree: Path) -> None:
    before = (tree / "a" / "1.txt").stat()
    (tree / "a" / "1.txt").write_text("ONE")
    os.utime(tree / "a" / "1.txt", ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_same_size(tree: Path) -> None:
    (tree / "a" / "new").write_text("owt")
    (tree / "a" / "new").rename(tree / "a" / "2.txt")


def add(tree: Path) -> None:
    (tree / "a" / "3.txt").write_text("")


def rename(tree: Path) -> None:
    (tree / "a" / "1.txt").rename(tree / "a" / "0.txt")


def edit_packed(tree: Path) -> None:
    (tree / "b" / "2.gz").write_bytes(gzip.compress(b"five", mtime=0))


def touch_all(tree: Path, time_ns: int = 3) -> None:
    for path in tree.rglob("*.*"):
        os.utime(path, ns=(time_ns, time_ns))


def copy_elsewhere(tree: Path) -> None:
    shutil.copytree(tree, tree.parent / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(tree)
    (tree.parent / "copy").rename(tree)


@pytest.mark.parametrize(
    ("change", "by_content", "by_stat"),
    [
        (same_size_same_time, True, False),  # what the default misses, and says so
        (replace_same_size, True, True),
        (add, True, True),
        (rename, True, True),
        (edit_packed, True, True),
        (touch_all, False, True),
        (copy_elsewhere, False, True),
    ],
)
def test_content_sees_every_change_and_minds_no_time(
    tree: Path, change: Callable[[Path], None], by_content: bool, by_stat: bool
) -> None:
    touch_all(tree, 2)
    identity = sources.Identity((str(tree),), ())
    specs = [DatasetSpec("x", "torchvision:MNIST", identity=look) for look in ("content", "stat")]
    before = [fingerprint.survey(spec, identity) for spec in specs]
    change(tree)
    after = [fingerprint.survey(spec, identity, earlier=seen.files) for spec, seen in zip(specs, before, strict=True)]
    changed = [one.fingerprint != other.fingerprint for one, other in zip(before, after, strict=True)]
    assert changed == [by_content, by_stat]
    assert fingerprint.survey(specs[0], identity).fingerprint == after[0].fingerprint, "as if nothing was known before"


def test_bytes_are_read_again_only_where_size_or_a_time_changed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_SETTLED_NS", -(10**12))  # files made this moment count as old
    read: list[str] = []
    hashing = census._sha256
    monkeypatch.setattr(census, "_sha256", lambda path: (read.append(os.path.relpath(path, tree)), hashing(path))[1])
    known = census.hashed(str(tree), census.files(str(tree)), None)
    assert sorted(read) == ["a/1.txt", "a/2.txt", "b/1.txt", "b/2.gz"]
    read.clear()
    assert census.hashed(str(tree), census.files(str(tree)), known) == known
    assert read == []
    same_size_same_time(tree)
    assert census.hashed(str(tree), census.files(str(tree)), known) != known
    assert read == ["a/1.txt"]


def test_a_file_that_changed_a_moment_ago_is_read_again_whatever_its_times_say(tree: Path) -> None:
    known = census.hashed(str(tree), census.files(str(tree)), None)
    assert {entry.ctime_ns for entry in known} == {0}


def test_a_change_of_bytes_alone_is_told_as_such(isolated: Path, root: Path) -> None:
    spec = replace(write(isolated / "c.npz", x=np.arange(10)), identity="content")
    prepare(root, spec)
    before = os.stat(isolated / "c.npz")
    np.savez(isolated / "c.npz", x=np.arange(1, 11))
    os.utime(isolated / "c.npz", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint.recall(root, spec).line == "MISS: files: c.npz changed its bytes"


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
        found.append([entry[:3] for entry in census.files(str(folder))])  # the status' time is the moment's
    assert found[0] == found[1]
    assert [path for path, _, _ in found[0]] == sorted(names, key=os.fsencode)


def test_a_census_survives_loops_dangling_links_and_names_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / os.fsdecode(b"\xff")).write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    (entry,) = census.files(str(tmp_path))
    assert os.fsencode(entry.path) == b"\xff"
    identity = sources.Identity((str(tmp_path),), ())
    assert len(fingerprint.survey(DatasetSpec("x", "torchvision:MNIST"), identity).fingerprint) == 64


def test_many_changes_are_counted_instead_of_listed() -> None:
    old = {"/r": [census.Entry(f"{number}", 1, 1) for number in range(100)]}
    found = fingerprint.changes({"files": 1}, {"files": 2}, old, {"/r": []})
    assert len(found) == census.SHOWN_CHANGES + 1
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


@pytest.fixture
def photos(isolated: Path) -> Path:
    for place in ("cat/1.png", "cat/2.png", "dog/1.png"):
        path = isolated / "photos" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (len(place), 2, 3)).save(path)
    return isolated / "photos"


def test_a_folder_of_pictures_is_recalled_by_its_pictures_alone(root: Path, photos: Path) -> None:
    spec = DatasetSpec("photos", f"imagefolder:{photos}")
    prepare(root, spec)
    (photos / "cat" / ".DS_Store").write_text("junk")
    (photos / "cat" / "notes.txt").write_text("no picture")
    (photos / ".ipynb_checkpoints").mkdir()
    assert fingerprint.recall(root, spec).hit
    shutil.copy(photos / "cat" / "1.png", photos / "cat" / "3.png")
    assert fingerprint.recall(root, spec).line == "MISS: files: cat/3.png is new"
    (photos / "cat" / "3.png").unlink()
    (photos / "emu").mkdir()
    assert "1 of the 3 classes have no pictures: 'emu'" in fingerprint.recall(root, spec).line
    shutil.rmtree(photos)
    assert fingerprint.recall(root, spec).line.startswith("MISS: source: ")


@pytest.mark.parametrize("kind", ["arrays", "imagefolder"])
def test_what_depends_names_is_looked_at_for_every_kind_of_source(root: Path, photos: Path, kind: str) -> None:
    mean = photos.parent / "mean.txt"
    mean.write_text("1")
    made = write(photos.parent / "a.npz", x=np.arange(3)) if kind == "arrays" else None
    spec = replace(made or DatasetSpec("photos", f"imagefolder:{photos}"), depends=(str(mean),))
    prepare(root, spec)
    mean.write_text("22")
    assert fingerprint.recall(root, spec).line == "MISS: files: mean.txt changed size 1 -> 2"
    mean.unlink()
    assert f"What --depends names is not there: {mean}" in fingerprint.recall(root, spec).line
    identity = sources.Identity((), ())
    with pytest.raises(DataserveError) as caught:
        fingerprint.survey(spec, identity)
    assert caught.value.code == "bad_option"


def test_other_options_for_the_same_name_are_told_against_what_is_there(root: Path, photos: Path) -> None:
    spec = DatasetSpec("photos", f"imagefolder:{photos}", resize="8")
    prepare(root, spec)
    assert verdict_of(root, replace(spec, resize="9x7"))[1] == [
        "MISS",
        "images: resize changed 8 bilinear antialias -> 9x7 bilinear antialias",
    ]
    (photos / "cat" / "2.png").unlink()
    _, said = verdict_of(root, replace(spec, mode="L"))
    assert "images: mode changed RGB -> L" in said
    assert any(text.startswith("files: 3 with") for text in said)


def test_recalling_pictures_and_transforms_imports_neither_them_nor_torch(
    root: Path, photos: Path, package: Path
) -> None:
    (package / "steps.py").write_text("def same(sample):\n    return sample\n")
    spec = DatasetSpec("photos", f"imagefolder:{photos}", {}, f"{package.name}.steps:same", identity="content")
    prepare(root, spec)
    code = (
        "import json, sys; from pathlib import Path; from dataserve.server import fingerprint, prepare\n"
        "from dataserve.server.spec import DatasetSpec\n"
        f"v = fingerprint.recall(Path({str(root)!r}), DatasetSpec.from_map(json.loads(sys.argv[1])))\n"
        f"print(v.hit, [name for name in ('torch', 'PIL', 'multiprocessing', {package.name!r}) if name in sys.modules])"
    )
    program = [sys.executable, "-c", code, json.dumps(spec.to_map())]
    told = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "True []\n", told.stderr
