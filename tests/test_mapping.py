"""client/mapping: a store is mapped only if it is what it must be, and nothing can be written through the map."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataserve.client import mapping
from dataserve.client.mapping import Store, locate, map_npy
from dataserve.protocol import memory
from dataserve.protocol.errors import DataError, MachineError, UserError
from dataserve.protocol.manifest import Manifest

from .stores import write_store

VALUES = np.arange(60, dtype=np.int32).reshape(20, 3)


@pytest.fixture
def sealed(tmp_path: Path) -> tuple[Path, Manifest]:
    return write_store(tmp_path, {"x": VALUES, "label": np.arange(20)})


def test_columns_are_what_was_written_and_read_only(sealed: tuple[Path, Manifest]) -> None:
    store = Store(str(sealed[0]), sealed[1].id)
    column = store.column("x")
    assert np.array_equal(column, VALUES)
    assert not column.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        column.flags.writeable = True
    assert store.column("x") is column


def test_another_id_than_the_daemons_is_refused(sealed: tuple[Path, Manifest]) -> None:
    with pytest.raises(UserError) as caught:
        Store(str(sealed[0]), "f" * 64)
    assert caught.value.code == "store_mismatch"
    assert sealed[1].id[:16] in str(caught.value)
    assert "f" * 16 in str(caught.value)


def test_a_folder_that_is_not_there_says_how_to_name_it(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="store=PATH") as caught:
        Store(str(tmp_path / "gone"), "f" * 64)
    assert caught.value.code == "no_access"


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def change_header(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"'<i4'", b"'<u4'"))


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [shorten, lengthen, change_header, replace_by_folder])
def test_a_damaged_file_is_refused(sealed: tuple[Path, Manifest], damage: Callable[[Path], None]) -> None:
    file = sealed[0] / "x.npy"
    if file.exists():
        file.chmod(0o644)
    damage(file)
    with pytest.raises(DataError) as caught:
        Store(str(sealed[0]), sealed[1].id).column("x")
    assert caught.value.code == "bad_store"


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Manifest]:
    return write_store(tmp_path, {}, name="texts", ragged={"text": ["a", "", "bcd", "", ""], "none": [b""] * 5})


def test_a_ragged_column_is_what_was_written_and_read_only(texts: tuple[Path, Manifest]) -> None:
    store = Store(str(texts[0]), texts[1].id)
    values, offsets = store.ragged("text")
    assert (bytes(values), offsets.tolist()) == (b"abcd", [0, 1, 1, 4, 4, 4])
    assert not values.flags.writeable
    assert not offsets.flags.writeable
    assert store.ragged("none").values.shape == (0,)
    assert store.ragged("text").values is values


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([1, 1, 1, 4, 4, 4], "leads from 1 to 4, not from 0 to 4"),
        ([0, 1, 1, 4, 4, 3], "leads from 0 to 3"),
        ([0, 1, 1, 4, 4, 5], "leads from 0 to 5"),
        ([0, 1, 0, 4, 4, 4], "falls behind row 1"),
        ([0, 1, 1, 9, 4, 4], "falls behind row 3"),
        ([0, 1, -(2**63), 4, 4, 4], "falls behind row 1"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2, mapping.OFFSETS_SLICE])
def test_hostile_offsets_are_a_damaged_store(
    texts: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch, offsets: list[int], text: str, at_once: int
) -> None:
    monkeypatch.setattr(mapping, "OFFSETS_SLICE", at_once)
    file = texts[0] / "text.offsets.npy"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:4096] + np.array(offsets).tobytes())
    with pytest.raises(DataError, match=text) as caught:
        Store(str(texts[0]), texts[1].id).ragged("text")
    assert caught.value.code == "bad_store"


def test_a_link_is_not_followed(sealed: tuple[Path, Manifest], tmp_path: Path) -> None:
    file = sealed[0] / "x.npy"
    file.rename(tmp_path / "elsewhere.npy")
    file.symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(MachineError) as caught:
        Store(str(sealed[0]), sealed[1].id).column("x")
    assert caught.value.code == "no_access"


def test_removing_a_store_leaves_its_readers_undisturbed(sealed: tuple[Path, Manifest]) -> None:
    column = Store(str(sealed[0]), sealed[1].id).column("x")
    (sealed[0] / "x.npy").unlink()
    assert np.array_equal(column, VALUES)


def test_a_file_that_others_may_write_is_not_trusted_where_an_owner_is_asked_for(sealed: tuple[Path, Manifest]) -> None:
    file = sealed[0] / "x.npy"
    owner = file.stat().st_uid
    assert map_npy(str(file), "int32", (20, 3), owner).shape == (20, 3)
    with pytest.raises(DataError):
        map_npy(str(file), "int32", (20, 3), owner + 1)
    file.chmod(0o666)
    with pytest.raises(DataError):
        map_npy(str(file), "int32", (20, 3), owner)


def test_a_store_seen_elsewhere_is_named_by_its_folder_or_by_the_root(
    sealed: tuple[Path, Manifest], tmp_path: Path
) -> None:
    described = f"/srv/store/{sealed[0].name}"
    assert locate(described, None) == described
    assert locate(described, str(sealed[0])) == str(sealed[0])
    assert locate(described, str(tmp_path)) == str(sealed[0])


def advised(path: Path) -> bool:
    """Whether a map of that file is to be read at random: `rr` among the kernel's flags of it."""
    text = Path("/proc/self/smaps").read_text()
    blocks = [block for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text) if str(path) in block]
    assert blocks, f"{path} is not mapped"
    return any(" rr" in block.partition("VmFlags:")[2] for block in blocks)


@pytest.mark.parametrize(
    ("scattered", "available", "read_ahead", "random"),
    [(True, 100, 1 << 20, True), (False, 100, 1 << 20, False), (True, 1 << 40, 1 << 20, False), (True, 100, 8, False)],
    ids=["scattered", "in order", "all fits", "rows larger than what is read around"],
)
def test_rows_in_no_order_of_a_file_too_large_for_memory_are_read_without_what_lies_around(
    sealed: tuple[Path, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    scattered: bool,
    available: int,
    read_ahead: int,
    random: bool,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda _read: available)
    monkeypatch.setattr(mapping, "read_ahead_bytes", lambda _device: read_ahead)
    store = Store(str(sealed[0]), sealed[1].id, scattered=scattered)
    column = store.column("x")
    assert advised(sealed[0] / "x.npy") == random
    assert np.array_equal(column, VALUES)


def test_what_the_kernel_reads_around_is_known_or_its_default() -> None:
    assert mapping.read_ahead_bytes(os.makedev(4095, 9)) == 128 * 1024
    assert mapping.read_ahead_bytes(os.stat("/").st_dev) >= 0
