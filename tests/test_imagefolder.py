"""server/imagefolder.py: torchvision's conventions on every machine alike, and what is left out, refused or reported."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from dataserve.protocol.errors import DataError, DataserveError
from dataserve.server import cli, fingerprint, imagefolder, sources
from dataserve.server.imagefolder import Tree
from dataserve.server.sources import BadSample, Source
from dataserve.server.spec import DatasetSpec


def picture(path: Path | bytes, value: int = 0, size: tuple[int, int] = (3, 2)) -> None:
    """A PNG of one grey, whatever the name says."""
    place = os.fsencode(path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    with open(place, "wb") as file:
        Image.new("L", size, value).save(file, "PNG")


def spec(root: Path, **fields: Any) -> DatasetSpec:
    return DatasetSpec("photos", f"imagefolder:{root}", **fields)


@contextlib.contextmanager
def opened(root: Path, **fields: Any) -> Iterator[Source]:
    with contextlib.closing(sources.open_source(spec(root, **fields))) as source:
        yield source


def refusal(root: Path, **fields: Any) -> DataserveError:
    with pytest.raises(DataserveError) as caught:
        sources.open_source(spec(root, **fields))
    return caught.value


def listed(root: Path) -> list[tuple[bytes, int]]:
    tree = Tree(str(root))
    return [(tree.path(index), tree.label(index)) for index in range(len(tree))]


def test_a_sample_is_the_picture_in_rgb_and_the_place_of_its_class(tmp_path: Path) -> None:
    picture(tmp_path / "dog" / "1.png", 7)
    picture(tmp_path / "cat" / "1.png", 9)
    with opened(tmp_path) as source:
        assert (source.length, source.classes) == (2, ("cat", "dog"))
        pixels, label = sources.read_sample(source, None, 1)
        assert (pixels.shape, pixels.dtype, label) == ((3, 2, 3), np.uint8, 1)
        assert (pixels == 7).all()
        assert source.path(1) == b"dog/1.png"


def test_the_photographs_are_those_that_torchvision_finds_in_the_same_classes(shared_data: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    root = shared_data / "photos" / "images"
    theirs = datasets.ImageFolder(str(root))
    with opened(root) as source:
        assert list(source.classes or ()) == theirs.classes
        ours = [
            (os.fsdecode(source.path(index) or b""), source.sample(index)[1]) for index in range(source.length or 0)
        ]
        assert sorted(ours) == sorted((os.path.relpath(path, root), label) for path, label in theirs.samples)
        pixels, _ = sources.read_sample(source, None, 5)
        with Image.open(root / ours[5][0]) as image:
            upright = np.asarray(ImageOps.exif_transpose(image.convert("RGB")))
        np.testing.assert_array_equal(pixels.transpose(1, 2, 0), upright)


def test_classes_and_pictures_are_sorted_by_bytes_whatever_the_locale(tmp_path: Path) -> None:
    names = [b"1", b"10", b"2", b"A", b"B", b"a", b"e\xcc\x81", b"\xc3\xa9", b"\xff", b"a-b", b"a b"]
    for name in names:
        for file in (b"2.png", b"10.png", b"sub/1.png", b"\xe5.png"):
            picture(os.fsencode(tmp_path) + b"/" + name + b"/" + file)
    found = listed(tmp_path)
    classes = sorted(names)
    assert found == [
        (name + b"/" + file, label)
        for label, name in enumerate(classes)
        for file in sorted((b"2.png", b"10.png", b"sub/1.png", b"\xe5.png"))
    ]
    code = (
        "import sys; from dataserve.server.imagefolder import Tree\n"
        f"tree = Tree({str(tmp_path)!r}); sys.stdout.write(repr([tree.path(i) for i in range(len(tree))]))"
    )
    for locale in ("C", "C.UTF-8", "POSIX"):
        environ = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, timeout=60, check=True)
        assert told.stdout.decode() == repr([path for path, _ in found]), locale


def test_hidden_and_junk_entries_are_left_out_and_listed(tmp_path: Path) -> None:
    for path in (
        "cat/1.png cat/.hidden.png cat/._1.png .ipynb_checkpoints/a.jpg __MACOSX/cat/1.png cat/.ipynb_checkpoints/b.png"
    ).split():
        picture(tmp_path / path)
    for path in ("cat/Thumbs.db", "cat/desktop.ini", ".DS_Store", "cat/.DS_Store", "cat/notes.txt", "labels.csv"):
        (tmp_path / path).write_text("x")
    assert listed(tmp_path) == [(b"cat/1.png", 0)]
    with opened(tmp_path) as source:
        assert source.classes == ("cat",)
        found = source.scanned()
    assert found is not None
    assert json.loads(json.dumps(found)) == found
    assert {path for path, _ in found["listed"]} == {
        "cat/.hidden.png",
        "cat/._1.png",
        ".ipynb_checkpoints",
        "__MACOSX",
        "cat/.ipynb_checkpoints",
        "cat/Thumbs.db",
        "cat/desktop.ini",
        ".DS_Store",
        "cat/.DS_Store",
        "labels.csv",
    }
    assert found["left_out"] == {"hidden or junk": 9, "a file beside the classes": 1}
    assert found["extensions"] == {".png": 1, ".txt": 1, ".csv": 1}
    assert found["unlike"] == {".txt": 1}


def test_links_are_followed_and_loops_are_left_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    picture(root / "cat" / "1.png")
    picture(tmp_path / "elsewhere" / "2.png")
    (root / "dog").symlink_to(tmp_path / "elsewhere")
    (root / "cat" / "3.png").symlink_to(tmp_path / "elsewhere" / "2.png")
    (root / "loop").symlink_to(root)
    (root / "cat" / "up").symlink_to("..")
    (root / "cat" / "here").symlink_to(".")
    (root / "cat" / "self").symlink_to("self")
    assert listed(root) == [(b"cat/1.png", 0), (b"cat/3.png", 0), (b"dog/2.png", 1)]
    with opened(root) as source:
        assert source.classes == ("cat", "dog")
        assert (source.scanned() or {})["left_out"] == {"a link to a folder above it": 3}


def test_a_link_to_nothing_is_a_bad_sample_with_its_path_and_a_pipe_is_left_out(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png")
    (tmp_path / "cat" / "2.png").symlink_to("nothing")
    os.mkfifo(tmp_path / "cat" / "3.png")
    with opened(tmp_path) as source:
        assert source.length == 2
        assert (source.scanned() or {})["left_out"] == {"no file": 1}
        with pytest.raises(
            BadSample, match=r"Sample 1 \(cat/2\.png\) failed at the stage open: FileNotFoundError"
        ) as caught:
            sources.read_sample(source, None, 1)
        assert (caught.value.index, caught.value.path, caught.value.stage) == (1, b"cat/2.png", "open")
        assert len(fingerprint.survey(spec(tmp_path), source.identity()).fingerprint) == 64
        (tmp_path / "cat" / "1.png").unlink()
        os.mkfifo(tmp_path / "cat" / "1.png")  # since the scan: it is not waited for
        with pytest.raises(BadSample, match="It is no file"):
            sources.read_sample(source, None, 0)


def test_the_cause_of_a_bad_sample_does_not_tell_where_the_source_lies(tmp_path: Path) -> None:
    causes = []
    for place in ("here", "there \n'é'"):  # OSError writes such a path as escapes
        root = tmp_path / place
        picture(root / "cat" / "1.png")
        (root / "cat" / "2.png").symlink_to("nothing")
        with opened(root) as source, pytest.raises(BadSample) as caught:
            sources.read_sample(source, None, 1)
        causes.append(caught.value.cause)
    assert causes[0] == causes[1] == "FileNotFoundError: [Errno 2] No such file or directory: b'cat/2.png'."


def test_an_empty_class_is_refused_or_kept_by_option_and_changes_the_fingerprint(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png")
    picture(tmp_path / "zebra" / "1.png")
    with opened(tmp_path) as source:
        before = fingerprint.survey(spec(tmp_path), source.identity()).parts["files"]
    (tmp_path / "dog").mkdir()
    error = refusal(tmp_path)
    assert error.code == "bad_source"
    assert "1 of the 3 classes have no pictures: 'dog'" in error.text
    assert "allow_empty=true" in error.remedy
    with opened(tmp_path, args={"allow_empty": True}) as source:
        assert source.classes == ("cat", "dog", "zebra")
        assert source.sample(1)[1] == 2
        now = fingerprint.survey(spec(tmp_path, args={"allow_empty": True}), source.identity())
    assert now.parts["files"] != before
    assert now.files[str(tmp_path)][-1].path == "dog/"


@pytest.mark.parametrize(
    ("paths", "code", "text"),
    [
        ([], "bad_source", "has no class folders, and holds no files"),
        (["1.png", "2.png"], "bad_source", "has no class folders, and holds 2 of .png"),
        (["cat/1.txt", "cat/2.gif"], "empty_source", "no pictures in its 1 classes, but 1 of .txt, 1 of .gif"),
    ],
)
def test_a_folder_of_another_form_is_refused_with_what_it_holds(
    tmp_path: Path, paths: list[str], code: str, text: str
) -> None:
    for path in paths:
        picture(tmp_path / path)
    error = refusal(tmp_path)
    assert error.code == code
    assert text in error.text


def test_a_folder_that_is_not_there_or_is_none_or_cannot_be_read_is_told_by_path(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent").text
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in refusal(tmp_path / "file").text
    assert refusal(tmp_path, args={"alow_empty": True}).remedy == "It takes: allow_empty, max_entries."
    assert refusal(tmp_path, args={"max_entries": "many"}).code == "bad_source"


def test_an_absurd_scan_ends_with_counts_and_can_be_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagefolder, "OTHERS", 20)
    for number in range(30):
        (tmp_path / "cat").mkdir(exist_ok=True)
        (tmp_path / "cat" / f"{number}.py").write_text("")
    picture(tmp_path / "cat" / "1.png")
    error = refusal(tmp_path)
    assert "more than 20 entries that are no pictures" in error.text
    assert " of .py" in error.text
    assert "max_entries" in error.remedy
    with opened(tmp_path, args={"max_entries": 100}) as source:
        assert source.length == 1
    assert "more than 5 entries," in refusal(tmp_path, args={"max_entries": 5}).text


ODD_NAMES = [
    b"\xff.png",
    b"new\nline.png",
    "é.png".encode(),
    "e\u0301.png".encode(),
    b"a" * 251 + b".png",
    b" .PNG",
    b"'\".jpeg",
]


def test_names_of_any_bytes_are_prepared_in_the_c_locale_by_the_real_child(isolated: Path) -> None:
    root = isolated / "tree"
    for value, name in enumerate(ODD_NAMES):
        picture(os.fsencode(root) + b"/" + b"cl\xff\nss" + b"/" + name, value)
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    request = {"spec": spec(root).to_map(), "store": str(isolated / "store"), "workers": 1, "build": True}
    child = subprocess.Popen(
        [sys.executable, "-m", "dataserve.server.prepare"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        events = [json.loads(line) for line in child.stdout]
        assert child.wait(60) == 0, events
    finally:
        child.kill()
        child.communicate()
    (sealed,) = [event for event in events if event["event"] == "sealed"]
    (scanned,) = [event for event in events if event["event"] == "scanned"]
    assert scanned["pictures"] == len(ODD_NAMES)
    manifest = json.loads(Path(sealed["path"], "manifest.json").read_bytes())
    assert [os.fsencode(name) for name in manifest["classes"]] == [b"cl\xff\nss"]
    images = np.load(Path(sealed["path"], "image.npy"))
    order = sorted(range(len(ODD_NAMES)), key=lambda value: ODD_NAMES[value])
    assert images[:, 0, 0, 0].tolist() == order


def test_every_awkward_picture_is_reported_with_its_path_and_stage(shared_data: Path, tmp_path: Path) -> None:
    for name in ("odd", "broken", "bomb", "notimage"):
        shutil.copytree(shared_data / "awkward" / name, tmp_path / name)
        (tmp_path / name).chmod(0o755)
    bad, told = {}, []
    with opened(tmp_path, resize="8x8") as source:
        assert source.length is not None
        for index in range(source.length):
            try:
                pixels, _ = sources.read_sample(source, None, index)
                assert pixels.shape == (3, 8, 8)
            except BadSample as error:
                bad[error.path] = error.stage
                told.append(error.text)
    assert all(os.fsdecode(path or b"") in text for path, text in zip(bad, told, strict=True))
    folders = {os.path.dirname(path or b"") for path in bad}
    assert folders == {b"broken", b"bomb", b"notimage"}
    listed_broken = [path for path in os.listdir(tmp_path / "broken") if path != "bad_huffman.jpg"]
    assert sum(path.startswith(b"broken") for path in bad if path) == len(listed_broken)
    assert bad[b"broken/truncated.jpg"] == "decode"
    assert bad[b"notimage/zero_bytes.jpg"] == "open"
    assert bad[b"bomb/65536-uint32-limit.png"] == "open"


TREES = st.dictionaries(
    st.tuples(st.sampled_from(["a", "B", "10", "2", "a/b"]), st.sampled_from(["1.png", "x.JPG", "y/z.bmp"])),
    st.integers(0, 255),
    min_size=1,
)


@given(TREES, st.integers(0, 2**32))
@settings(max_examples=15)
def test_by_content_the_same_tree_elsewhere_made_in_another_order_at_another_time_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[tuple[str, str], int], seed: int
) -> None:
    found = []
    for number in range(2):
        root = tmp_path_factory.mktemp("tree")
        items = list(tree.items())
        random.Random(seed * number).shuffle(items)
        for (folder, name), value in items:
            picture(root / folder / name, value)
            os.utime(root / folder / name, ns=(number, number))
        chosen = spec(root, identity="content")
        with opened(root) as source:
            found.append(fingerprint.survey(chosen, source.identity()).fingerprint)
    assert found[0] == found[1]


def test_a_sample_that_has_too_many_pixels_is_bad_at_the_stage_open(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png", size=(20, 10))
    with opened(tmp_path, max_pixels=199) as source:
        with pytest.raises(DataError, match="stage open: The picture has 20 x 10 pixels, more than 199") as caught:
            sources.read_sample(source, None, 0)
        assert "--max-pixels" in caught.value.remedy


def test_a_store_in_the_folder_of_its_source_is_refused(isolated: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (isolated / "tree" / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(isolated / "tree" / "a" / "0.png")
    for place in (isolated / "tree", isolated / "tree" / "a" / "deep"):
        assert cli.main(["prepare", f"imagefolder:{isolated}/tree", "--store", str(place)]) == 1
        told = capfd.readouterr().err
        assert f"The store root '{place}' lies in the source's folder '{isolated}/tree'." in told
        assert "[bad_option]" in told


def test_a_device_under_a_pictures_name_is_a_bad_sample_of_its_own_words(isolated: Path) -> None:
    (isolated / "tree" / "a").mkdir(parents=True)
    (isolated / "tree" / "a" / "0.png").symlink_to("/dev/zero")
    source = sources.open_source(DatasetSpec("x", f"imagefolder:{isolated}/tree"))
    with pytest.raises(DataError, match="It is no file, but a device"):
        source.sample(0)
