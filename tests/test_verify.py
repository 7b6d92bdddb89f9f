"""server/verify.py and `dataserve verify`: any byte that is not as it was written is found, with its rows."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataserve.protocol import limits, manifest
from dataserve.protocol.manifest import Manifest
from dataserve.server import store
from dataserve.server.verify import Mismatch, spans, verify

from .daemons import run
from .preparing import named, start
from .stores import write_store

__all__ = ["start"]

ROWS = 3000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> store.Sealed:
    """Several chunks of an image and a label each."""
    values = np.random.default_rng(0).integers(0, 256, (ROWS, 3, 40, 40), np.uint8)
    folder, made = write_store(tmp_path_factory.mktemp("wide"), {"image": values, "label": np.arange(ROWS)})
    assert made.chunk_rows < ROWS // 2
    return store.open_sealed(folder)


def flip(path: str, byte: int) -> None:
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 1]))


def mismatches(sealed: store.Sealed, threads: int = 2) -> list[Mismatch]:
    """Less that of the fingerprint: stores that tests write by hand have none."""
    return [found for found in verify(sealed, threads, lambda done, total: None) if found.file != "manifest.json"]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_one_flipped_bit_is_one_mismatch_with_the_rows_of_its_chunk(wide: store.Sealed, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["image", "label"]))
    column = wide.manifest.column(name)
    byte = data.draw(st.integers(limits.HEADER_BYTES, column.parts[0].size_bytes - 1))
    path = os.path.join(wide.path, f"{name}.npy")
    flip(path, byte)
    try:
        (found,) = mismatches(wide, data.draw(st.integers(1, 3)))
    finally:
        flip(path, byte)
    row = (byte - limits.HEADER_BYTES) // column.item_bytes
    chunk = row // wide.manifest.chunk_rows
    start = chunk * wide.manifest.chunk_rows
    assert found[:3] == (f"{name}.npy", chunk, (start, min(start + wide.manifest.chunk_rows, ROWS)))
    assert "instead of" in found.cause


def test_a_whole_store_has_no_mismatch_and_progress_ends_at_all_bytes(wide: store.Sealed) -> None:
    heard: list[tuple[int, int]] = []
    assert [found.file for found in verify(wide, 3, lambda *told: heard.append(told))] == ["manifest.json"]
    total = ROWS * (3 * 40 * 40 + 8)
    assert heard[-1] == (total, total)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert len(heard) == len(list(spans(wide)))


def test_a_file_that_ends_early_or_went_away_is_told_for_each_of_its_chunks(isolated: Path) -> None:
    folder, made = write_store(isolated, {"a": np.arange(200_000), "b": np.arange(200_000)})
    sealed = store.open_sealed(folder)
    (folder / "a.npy").chmod(0o644)
    os.truncate(folder / "a.npy", limits.HEADER_BYTES + 8 * (made.chunk_rows + 5))
    (folder / "b.npy").unlink()
    found = mismatches(sealed)
    chunks = -(-200_000 // made.chunk_rows)
    assert [item.cause for item in found[: chunks - 1]] == (
        [f"the file ends at byte {limits.HEADER_BYTES + 8 * (made.chunk_rows + 5)}"]
        + [f"the file ends at byte {limits.HEADER_BYTES + 8 * made.chunk_rows * n}" for n in range(2, chunks)]
    )
    assert len(found) == chunks - 1 + chunks
    assert all("No such file" in item.cause for item in found[chunks - 1 :])


def test_the_rows_of_a_ragged_columns_chunks(start: object, isolated: Path) -> None:
    (isolated / "steps.py").write_text("def texts():\n    return ['x' * 100_000 for n in range(100)]\n")
    from dataserve.server.spec import DatasetSpec

    _, events, _ = start(spec=DatasetSpec("texts", "steps:texts", version="1").to_map()).end()  # type: ignore[operator]
    (event,) = named(events, "sealed")
    sealed = store.open_sealed(event["path"])
    assert mismatches(sealed) == verify(sealed, 2, lambda *_: None) == []
    (column,) = (each for each in sealed.manifest.columns if each.logical == "utf8")
    flip(os.path.join(sealed.path, f"{column.name}.values.npy"), limits.HEADER_BYTES + limits.CHUNK_BYTES)
    (found,) = mismatches(sealed)
    assert found[:3] == (f"{column.name}.values.npy", 1, (41, 84))  # 4 MiB are 41.9 rows
    flip(os.path.join(sealed.path, f"{column.name}.values.npy"), limits.HEADER_BYTES + limits.CHUNK_BYTES)
    flip(os.path.join(sealed.path, f"{column.name}.offsets.npy"), limits.HEADER_BYTES + 30)
    (found,) = mismatches(sealed)
    assert found[:3] == (f"{column.name}.offsets.npy", 0, (0, 100))


@pytest.fixture
def texts(isolated: Path) -> tuple[Path, Manifest]:
    """Four texts of 3, 0, 2 and 1 bytes, and where each comes from, samples 1 and 3 left out."""
    rows = [(index, path) for index, path in ((0, b"a"), (2, b""), (4, b"bc"), (5, b""))]
    origins = [np.frombuffer(index.to_bytes(8, "little") + path, np.uint8) for index, path in rows]
    folder, made = write_store(
        isolated, {}, ragged={"text": ["abc", "", "de", "f"], "origins": origins}, structure=TEXT
    )
    return folder, replace(made, skipped=({"index": 1}, {"index": 3}))


TEXT = {"column": "text"}


def forge(folder: Path, made: Manifest, file: str, data: bytes) -> store.Sealed:
    """The store with other data of the same size in one file, and a manifest with the checksum of that."""
    path = folder / file
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: limits.HEADER_BYTES] + data)
    columns = []
    for column in made.columns:
        parts, ends = (
            tuple(each._replace(crcs=(zlib.crc32(data),)) if each.file == file else each for each in those)
            for those in (column.parts, column.offsets)
        )
        columns.append(replace(column, parts=parts, offsets=ends))
    manifest_file = folder / manifest.FILE
    manifest_file.chmod(0o644)
    manifest_file.write_bytes(replace(made, columns=tuple(columns)).to_bytes())
    return store.open_sealed(folder)


@pytest.mark.parametrize(
    ("ends", "row", "cause"),
    [
        ((0, 3, 2, 5, 6), 1, "it lies at [3, 2) of 6 values"),
        ((0, 3, 3, 9, 6), 2, "it lies at [3, 9) of 6 values; 1 more rows are as wrong"),
        ((1, 3, 3, 5, 6), 0, "its offsets start at 1, not at 0"),
        ((0, -3, 3, 5, 6), 0, "it lies at [0, -3) of 6 values; 1 more rows are as wrong"),
        ((0, 3, 3, 5, 5), 3, "the last row ends at 5, and there are 6 values"),
    ],
)
def test_offsets_that_cannot_be_are_told_by_row_though_their_checksum_is_right(
    texts: tuple[Path, Manifest], ends: tuple[int, ...], row: int, cause: str
) -> None:
    assert mismatches(forge(*texts, "text.offsets.npy", np.array((0, 3, 3, 5, 6), "<i8").tobytes())) == []
    (found,) = mismatches(forge(*texts, "text.offsets.npy", np.array(ends, "<i8").tobytes()))
    assert found == ("text.offsets.npy", 0, (row, row + 1), f"row {row} cannot be so: {cause}")


@pytest.mark.parametrize(
    ("indices", "row", "cause"),
    [
        ((0, 2, 2, 5), 2, "it names sample 2, behind sample 2, of 6"),
        ((0, 2, 4, 6), 3, "it names sample 6, behind sample 4, of 6"),
    ],
)
def test_origins_that_do_not_rise_or_name_no_sample_are_told(
    texts: tuple[Path, Manifest], indices: tuple[int, ...], row: int, cause: str
) -> None:
    paths = (b"a", b"", b"bc", b"")
    data = b"".join(index.to_bytes(8, "little") + path for index, path in zip(indices, paths, strict=True))
    (found,) = mismatches(forge(*texts, "origins.values.npy", data))
    assert found == ("origins.offsets.npy", 0, (row, row + 1), f"row {row} cannot be so: {cause}")


def test_an_origin_without_room_for_an_index_is_told(texts: tuple[Path, Manifest]) -> None:
    (found,) = mismatches(forge(*texts, "origins.offsets.npy", np.array((0, 9, 12, 27, 35), "<i8").tobytes()))
    assert found.cause == "row 1 cannot be so: its 3 bytes have no room for a sample's index"


def test_the_command_names_file_chunk_and_rows_and_ends_with_one(isolated: Path) -> None:
    np.savez(isolated / "a.npz", image=np.zeros((9, 3, 8, 8), np.uint8))
    assert run("prepare", f"arrays:{isolated}/a.npz").returncode == 0
    fine = run("verify", "a")
    assert (fine.returncode, "are as they were written" in fine.stdout) == (0, True), fine
    (folder,) = (isolated / "store").glob("a-*")
    flip(str(folder / "image.npy"), 5000)
    damaged = run("verify", "a")
    assert damaged.returncode == 1
    assert "image.npy, chunk 0, rows [0, 9): CRC" in damaged.stdout
    assert "1 of 1 chunks" in damaged.stderr
    assert f"dataserve remove a@{folder.name[2:10]}" in damaged.stderr
    told = json.loads(run("verify", "a", "--json").stdout)
    assert (told["mismatches"][0]["rows"], told["chunks"]) == ([0, 9], 1)
