"""server/store.py and server/writer.py: what a sealed store must be, and how one comes to be and goes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, MachineError, UserError
from dataserve.server import store, writer
from dataserve.server.journal import Chunk
from dataserve.server.layout import Field, Layout
from dataserve.server.writer import ChunkWriter, StoreWriter

FIELDS = (Field("image", "uint8", (1, 4, 4), "image"), Field("score", "complex128", ()))
ROWS = 10


def digits(character: str) -> str:
    return character * 64


def build(
    root: Path, name: str = "tiny", fingerprint: str = digits("a"), rows: int = ROWS, fill: int = 3
) -> store.Sealed:
    layout = Layout(rows, FIELDS)
    build = StoreWriter(root, fingerprint)
    build.create(layout, {}).close()
    columns = build.assemble(layout, fill_in(build, layout, range(layout.chunks or 0), fill), None)
    structure = {"tuple": [{"column": "image"}, {"column": "score"}]}
    return build.seal(manifest.Manifest(name, fingerprint, {"n": 1}, rows, layout.chunk_rows, structure, columns))


def fill_in(build: StoreWriter, layout: Layout, order: Iterable[int], fill: int) -> list[Chunk]:
    """Writes the chunks in that order; they come back in their own."""
    writer = ChunkWriter(build.folder, layout)
    chunks = []
    for chunk in order:
        start, stop = layout.span(chunk)
        images, scores = writer.columns
        images[: stop - start] = fill
        scores[: stop - start] = np.arange(start, stop)
        chunks.append(Chunk(chunk, stop - start, *writer.finish(chunk, stop - start)))
    writer.close()
    return sorted(chunks)


@pytest.fixture
def root(isolated: Path) -> Path:
    return store.make_root(isolated / "store")


def test_a_sealed_store_is_read_back_by_numpy_and_json_alone(root: Path) -> None:
    sealed = build(root)
    found = json.loads(Path(sealed.path, "manifest.json").read_bytes())
    images = np.load(Path(sealed.path, "image.npy"), mmap_mode="r", allow_pickle=False)
    scores = np.load(Path(sealed.path, "score.npy"), allow_pickle=False)
    assert found["rows"] == len(images) == ROWS
    assert images.offset == limits.HEADER_BYTES
    assert (images == 3).all()
    assert scores.tolist() == [complex(row) for row in range(ROWS)]
    del images


def test_files_of_a_sealed_store_are_read_only_and_private_folders_hold_them(root: Path) -> None:
    sealed = build(root)
    assert {os.stat(Path(sealed.path, name)).st_mode & 0o777 for name in os.listdir(sealed.path)} == {0o444}
    assert os.stat(sealed.path).st_mode & 0o777 == 0o700
    assert os.stat(root).st_mode & 0o777 == 0o700
    assert os.listdir(root / store.BUILDING) == []


def test_a_thorough_look_at_a_whole_store_finds_nothing(root: Path) -> None:
    sealed = build(root)
    assert store.open_sealed(sealed.path, thorough=True) == sealed


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.unlink()
    path.write_bytes(bytes(data))


def flip(offset: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[offset] ^= 1

    return change


def cut(data: bytearray) -> None:
    del data[-1:]


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut": ("image.npy", lambda path: edit(path, cut), "bytes, not"),
    "longer": ("image.npy", lambda path: edit(path, lambda data: data.extend(b"x")), "bytes, not"),
    "another header": ("image.npy", lambda path: edit(path, flip(60)), "header"),
    "a link": ("image.npy", link, "symbolic link"),
    "a pipe": ("image.npy", pipe, "no regular file"),
    "missing": ("score.npy", lambda path: path.unlink(), "missing"),
    "no manifest": ("manifest.json", lambda path: path.unlink(), "missing"),
    "an edited manifest": ("manifest.json", lambda path: edit(path, lambda data: data.extend(b"\n")), "canonical"),
    "a manifest that is a pipe": ("manifest.json", pipe, "no regular file"),
    "no JSON": ("manifest.json", lambda path: edit(path, lambda data: data.clear()), "manifest"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_refused_with_the_file_and_the_reason(root: Path, damage: str) -> None:
    sealed = build(root)
    name, spoil, reason = DAMAGES[damage]
    spoil(Path(sealed.path, name))
    with pytest.raises(DataError, match=reason) as caught:
        store.open_sealed(sealed.path)
    assert caught.value.code == "bad_store"
    assert sealed.path in caught.value.text
    assert caught.value.remedy
    assert store.list_sealed(root) == []
    assert [path for path, _ in store.list_damaged(root)] == [sealed.path]


def test_one_flipped_bit_of_data_is_found_by_the_thorough_look_alone(root: Path) -> None:
    sealed = build(root)
    edit(Path(sealed.path, "image.npy"), flip(limits.HEADER_BYTES + 7))
    store.open_sealed(sealed.path)
    with pytest.raises(DataError, match=r"Chunk 0 of image\.npy has CRC"):
        store.open_sealed(sealed.path, thorough=True)


def test_a_folder_that_is_not_there_is_no_store(root: Path) -> None:
    with pytest.raises(DataError, match="There is no store at"):
        store.open_sealed(root / "nothing")


def test_listing_sees_sealed_stores_only_and_no_root_is_an_empty_one(root: Path) -> None:
    one, other = build(root, "a"), build(root, "b", digits("b"))
    (root / store.BUILDING / "left").mkdir()
    (root / "stray").mkdir()
    assert store.list_sealed(root) == [one, other]
    assert store.list_sealed(root / "nowhere") == []


def test_a_name_with_a_prefix_finds_the_one_store(root: Path) -> None:
    one, other = build(root, fingerprint=digits("a")), build(root, fingerprint=digits("b"))
    assert store.find(root, "tiny@bb") == other
    assert store.find(root, f"tiny@{digits('a')}") == one
    with pytest.raises(UserError, match=r"tiny@aaaaaaaa, tiny@bbbbbbbb") as caught:
        store.find(root, "tiny")
    assert caught.value.code == "ambiguous_dataset"


def test_an_unknown_name_is_refused_with_the_names_there_are(root: Path) -> None:
    build(root, "cats")
    build(root, "dogs", digits("b"))
    with pytest.raises(UserError, match="cats, dogs") as caught:
        store.find(root, "cat")
    assert caught.value.code == "unknown_dataset"
    with pytest.raises(UserError, match="none at all"):
        store.find(root / "nowhere", "cat")


def test_a_damaged_store_that_is_asked_for_says_so_instead_of_being_unknown(root: Path) -> None:
    sealed = build(root)
    Path(sealed.path, "score.npy").unlink()
    with pytest.raises(DataError, match="missing"):
        store.find(root, "tiny")


def test_a_reader_keeps_its_bytes_when_the_store_is_removed(root: Path) -> None:
    sealed = build(root)
    images = np.load(Path(sealed.path, "image.npy"), mmap_mode="r")
    store.remove(root, sealed)
    assert store.list_sealed(root) == []
    assert sorted(os.listdir(root)) == [store.BUILDING]
    assert (images == 3).all()
    del images


def test_sealing_onto_a_whole_store_uses_that_one_and_leaves_nothing(root: Path) -> None:
    first = build(root)
    inode = os.stat(Path(first.path, "image.npy")).st_ino
    assert build(root) == first
    assert os.stat(Path(first.path, "image.npy")).st_ino == inode
    assert os.listdir(root / store.BUILDING) == []


def test_sealing_onto_a_damaged_store_replaces_it_and_its_reader_keeps_the_old_bytes(root: Path) -> None:
    first = build(root, fill=3)
    images = np.load(Path(first.path, "image.npy"), mmap_mode="r")
    Path(first.path, "score.npy").unlink()
    second = build(root, fill=5)
    assert second.path == first.path
    assert (np.load(Path(second.path, "image.npy")) == 5).all()
    assert (images == 3).all()
    del images


def test_two_fingerprints_with_the_same_first_digits_are_not_confused(root: Path) -> None:
    build(root, fingerprint=digits("a"))
    with pytest.raises(DataError, match="--name"):
        build(root, fingerprint="a" * 63 + "b")


def test_bytes_do_not_depend_on_the_order_of_the_chunks(root: Path) -> None:
    layout = Layout(200_000, FIELDS)  # several chunks of 65,536 rows
    assert layout.chunks == 4
    scores = []
    for number, order in enumerate(([0, 1, 2, 3], [3, 1, 0, 2])):
        files = StoreWriter(root, digits(str(number)))
        files.create(layout, {}).close()
        columns = files.assemble(layout, fill_in(files, layout, order, 3), None)
        scores.append((columns, (files.folder / "sealed" / "score.npy").read_bytes()))
        files.wipe()
    assert scores[0] == scores[1]


@given(rows=st.integers(1, 10**6), shape=st.lists(st.integers(1, 300), max_size=3))
def test_chunks_cut_the_rows_without_gap_or_overlap(rows: int, shape: list[int]) -> None:
    layout = Layout(rows, (Field("x", "float32", tuple(shape)),))
    place = 0
    for chunk in range(layout.chunks or 0):
        start, stop = layout.span(chunk)
        assert start == place < stop
        place = stop
    assert place == rows


def test_a_layout_survives_the_way_to_a_worker() -> None:
    layout = Layout(ROWS, FIELDS)
    assert Layout.from_map(json.loads(json.dumps(layout.to_map()))) == layout


def test_a_root_comes_from_the_environment_in_the_stated_order() -> None:
    home = {"HOME": "/home/u"}
    assert store.default_root(home) == Path("/home/u/.cache/dataserve")
    assert store.default_root(home | {"XDG_CACHE_HOME": "/c"}) == Path("/c/dataserve")
    assert store.default_root(home | {"XDG_CACHE_HOME": "relative"}) == Path("/home/u/.cache/dataserve")
    assert store.default_root(home | {"XDG_CACHE_HOME": "/c", "DATASERVE_STORE": "/s"}) == Path("/s")


def test_a_root_in_which_anybody_may_write_is_refused(isolated: Path) -> None:
    (isolated / "open").mkdir()
    (isolated / "open").chmod(0o777)
    with pytest.raises(MachineError, match="mode 0777") as caught:
        store.make_root(isolated / "open")
    assert caught.value.code == "unsafe_folder"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_root_that_is_a_file_is_called_one_and_no_store_has_a_remedy(isolated: Path) -> None:
    (isolated / "file").write_text("")
    for place in (isolated / "file", isolated / "file" / "below"):
        with pytest.raises(MachineError, match="/file' is no folder but a file") as caught:
            store.make_root(place)
        assert "--store" in caught.value.remedy
        with pytest.raises(MachineError, match="is no folder but a file"):
            store.list_sealed(place)
    with pytest.raises(DataError, match="There is no store at") as absent:
        store.open_sealed(isolated / "nope")
    assert "dataserve list" in absent.value.remedy


def test_a_root_of_another_user_is_refused(isolated: Path) -> None:
    (isolated / "other").mkdir()
    os.chown(isolated / "other", 12345, 12345)
    with pytest.raises(MachineError, match="belongs to user 12345"):
        store.make_root(isolated / "other")


@pytest.fixture
def small_disk(isolated: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = isolated / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_store_that_does_not_fit_is_refused_before_a_file_is_made(small_disk: Path) -> None:
    with pytest.raises(MachineError, match=r"needs \d+ bytes; \d+ are free") as caught:
        build(small_disk, rows=100_000)
    assert caught.value.code == "no_space"
    assert os.listdir(small_disk) == []


def test_a_disk_that_fills_behind_our_back_is_an_error_with_need_and_free_and_no_leftovers(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = store.free_bytes
    answers = iter([2**40])  # the first look finds room
    monkeypatch.setattr(store, "free_bytes", lambda path: next(answers, None) or free(path))
    with pytest.raises(MachineError, match=r"No space left.*\d+ bytes are needed, \d+ are free") as caught:
        build(small_disk, rows=100_000)
    assert caught.value.code == "no_space"
    assert os.listdir(small_disk / store.BUILDING) == []


def test_a_read_only_disk_is_an_error_with_the_path_and_a_remedy(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(MachineError, match="Read-only") as caught:
        build(small_disk)
    assert caught.value.code == "no_access"
    assert str(small_disk) in caught.value.text
    assert "--store" in caught.value.remedy


def test_usable_tells_absent_from_damaged_from_whole(root: Path) -> None:
    sealed = build(root)
    path = Path(sealed.path)
    assert writer.usable(path, digits("a")) == sealed
    assert writer.usable(root / "nothing", digits("a")) is None
    (path / "score.npy").unlink()
    assert writer.usable(path, digits("a")) is None


def test_every_refusal_of_the_operating_system_names_the_path(isolated: Path) -> None:
    for number in (13, 28, 24, 30, 122):
        error = store.machine_error(OSError(number, os.strerror(number)), isolated, "It fails", 5)
        assert isinstance(error, DataserveError)
        assert str(isolated) in error.text
        assert error.code == ("no_space" if number in (28, 122) else "no_access")
        assert error.remedy
