"""Ragged columns and sources of unknown length, from the source to a store read by numpy and json alone."""

from __future__ import annotations

import itertools
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataserve.protocol import limits
from dataserve.server import store
from dataserve.server.journal import Chunk
from dataserve.server.layout import Field, Layout
from dataserve.server.writer import ChunkWriter, StoreWriter

from .preparing import Child, content, factory, named, start

__all__ = ["start"]  # the fixture

FACTORIES = '''
import os, pathlib, wave
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

class Paragraphs(Dataset):
    """Real text: its paragraphs, whose lengths differ, empty ones among them."""
    def __init__(self, path):
        self.items = pathlib.Path(path).read_text().split("\\n\\n")
    def __len__(self):
        return len(self.items)
    def __getitem__(self, index):
        text = self.items[index]
        tokens = torch.tensor(list(text.encode()), dtype=torch.int16)
        boxes = np.full((index % 3, 4), index, np.float32)
        return {"text": text, "raw": text.encode()[:index % 5], "tokens": tokens, "boxes": boxes, "index": index}

class Speech(Dataset):
    def __init__(self, root):
        self.paths = sorted(pathlib.Path(root).rglob("*.wav"))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        with wave.open(str(self.paths[index])) as file:
            return np.frombuffer(file.readframes(file.getnframes()), "<i2"), int(self.paths[index].parent.name)

class Stream(IterableDataset):
    def __init__(self, count, fail_at=-1):
        self.count, self.fail_at = count, fail_at
    def __iter__(self):
        for index in range(self.count):
            if index == self.fail_at:
                raise OSError("the stream broke")
            yield np.full(2048, index, np.int32), "x" * (index % 4)

class Hollow(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return "", np.zeros((0, 4), np.float32)

class LateLonger(Dataset):
    """Rows of one length, but for one that the first look does not see."""
    def __len__(self):
        return 6401
    def __getitem__(self, index):
        return np.zeros(4 if index == 6350 else 3, np.float32)
'''


@pytest.fixture
def sources(isolated: Path) -> Path:
    (isolated / "sets.py").write_text(FACTORIES)
    return isolated


def rows(path: str, name: str) -> list[Any]:
    """The rows of a ragged column, by numpy alone."""
    values = np.load(Path(path, f"{name}.values.npy"))
    offsets = np.load(Path(path, f"{name}.offsets.npy"))
    assert (offsets[0], offsets[-1]) == (0, len(values))
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]


def sealed(child: Child) -> str:
    status, events, words = child.end()
    assert status == 0, (events[-3:], words)
    path: str = named(events, "sealed")[0]["path"]
    store.open_sealed(path, thorough=True)
    return path


def test_text_tokens_and_boxes_come_back_as_they_were_with_any_number_of_workers(
    start: Callable[..., Child], sources: Path, shared_data: Path
) -> None:
    book = shared_data / "text" / "tinyshakespeare.txt"
    spec = factory("sets:Paragraphs", path=str(book))
    paths = [sealed(start(spec=spec, workers=n, store=str(sources / f"store{n}"))) for n in (1, 2)]
    assert content(paths[0]) == content(paths[1])
    paragraphs = book.read_text().split("\n\n")
    assert [bytes(row).decode() for row in rows(paths[0], "text")] == paragraphs
    assert [bytes(row) for row in rows(paths[0], "raw")] == [t.encode()[: i % 5] for i, t in enumerate(paragraphs)]
    for index, (tokens, boxes) in enumerate(zip(rows(paths[0], "tokens"), rows(paths[0], "boxes"), strict=True)):
        assert (tokens.dtype, bytes(tokens.astype(np.uint8)).decode()) == (np.int16, paragraphs[index])
        assert (boxes.shape, (boxes == index).all()) == ((index % 3, 4), True)
    np.testing.assert_array_equal(np.load(Path(paths[0], "index.npy")), np.arange(len(paragraphs)))
    columns = {c["name"]: c for c in json.loads(Path(paths[0], "manifest.json").read_bytes())["columns"]}
    assert {name: (c["kind"], c["dtype"], c["shape"], c["logical"]) for name, c in columns.items()} == {
        "text": ("ragged", "uint8", [], "utf8"),
        "raw": ("ragged", "uint8", [], "bytes"),
        "tokens": ("ragged", "int16", [], None),
        "boxes": ("ragged", "float32", [4], None),
        "index": ("fixed", "int64", [], None),
    }


def test_spoken_digits_are_a_ragged_column(start: Callable[..., Child], sources: Path, shared_data: Path) -> None:
    root = shared_data / "audio" / "fsdd"
    path = sealed(start(spec=factory("sets:Speech", root=str(root)), workers=1))
    files = sorted(root.rglob("*.wav"))
    labels = np.load(Path(path, "field_1.npy"))
    for file, samples, label in zip(files, rows(path, "field_0"), labels, strict=True):
        with wave.open(str(file)) as sound:
            assert samples.tobytes() == sound.readframes(sound.getnframes())
        assert int(file.parent.name) == label


def test_a_column_without_any_element_is_a_store_too(start: Callable[..., Child], sources: Path) -> None:
    path = sealed(start(spec=factory("sets:Hollow"), workers=1))
    assert [row.shape for row in rows(path, "field_0")] == [(0,)] * 3
    assert [row.shape for row in rows(path, "field_1")] == [(0, 4)] * 3


@pytest.mark.parametrize(
    "count", [511, 512, pytest.param(1, marks=pytest.mark.slow), pytest.param(1300, marks=pytest.mark.slow)]
)  # 8 KiB and some bytes a row: 511 rows a chunk
def test_an_iterable_is_prepared_to_its_end(start: Callable[..., Child], sources: Path, count: int) -> None:
    status, events, words = start(spec=factory("sets:Stream", count=count), workers=2).end()
    assert status == 0, words
    assert named(events, "iterated"), "it is said that one process does it"
    path = named(events, "sealed")[0]["path"]
    store.open_sealed(path, thorough=True)
    values = np.load(Path(path, "field_0.npy"))
    np.testing.assert_array_equal(values, np.repeat(np.arange(count, dtype=np.int32), 2048).reshape(count, 2048))
    assert [len(row) for row in rows(path, "field_1")] == [index % 4 for index in range(count)]


def test_an_iterable_without_samples_is_an_error(start: Callable[..., Child], sources: Path) -> None:
    status, events, _ = start(spec=factory("sets:Stream", count=0)).end()
    assert (status, events[-1]["code"]) == (1, "empty_source")


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_an_iterable_that_breaks_is_never_taken_for_one_that_ends(
    start: Callable[..., Child], sources: Path, on_error: str
) -> None:
    status, events, _ = start(spec=factory("sets:Stream", on_error, count=900, fail_at=700)).end()
    assert (status, events[-1]["code"]) == (4, "bad_sample")
    assert "Sample 700: the source itself failed and cannot go on: OSError: the stream broke." in events[-1]["text"]
    assert store.list_sealed(sources / "store") == []


def test_a_row_longer_than_all_that_the_first_look_saw_is_refused_with_both_lengths(
    start: Callable[..., Child], sources: Path
) -> None:
    status, events, _ = start(spec=factory("sets:LateLonger"), workers=1).end()
    assert (status, events[-1]["code"]) == (4, "bad_schema")
    assert "Sample 6350 does not fit the first one: value is float32 4, not float32 3." in events[-1]["text"]
    assert '--ragged value (in a file: ragged = ["value"])' in events[-1]["remedy"]


def test_a_column_that_is_declared_ragged_takes_rows_of_any_length(start: Callable[..., Child], sources: Path) -> None:
    spec = factory("sets:LateLonger")
    path = sealed(start(spec={**spec, "ragged": ["value"]}, workers=1))
    assert [len(row) for row in rows(path, "value")] == [4 if index == 6350 else 3 for index in range(6401)]
    parts = json.loads(Path(path, "manifest.json").read_bytes())["fingerprint_parts"]
    assert parts["options"]["ragged"] == ["value"]


def test_rows_left_out_for_their_length_alone_are_told_with_what_would_keep_them(
    start: Callable[..., Child], sources: Path
) -> None:
    status, events, _ = start(spec=factory("sets:LateLonger", "skip"), workers=1).end()
    assert status == 0
    (told,) = named(events, "bad_samples")
    assert told["remedy"].startswith("1 of them do not fit the first sample. If rows of value differ in length")
    assert "--ragged value" in told["remedy"]


@pytest.mark.parametrize(
    ("column", "text", "remedy"),
    [("valeu", "'valeu', which is no column", "'value'"), ("value", "which is int64 one in sample 0", "first dim")],
)
def test_a_column_that_cannot_be_ragged_is_a_usage_error(
    start: Callable[..., Child], sources: Path, column: str, text: str, remedy: str
) -> None:
    (sources / "plain.py").write_text("def numbers(): return [1, 2, 3]")
    status, events, words = start(spec={**factory("plain:numbers"), "ragged": [column]}, workers=1).end()
    assert (status, events[-1]["code"], words) == (1, "bad_option", "")
    assert text in events[-1]["text"]
    assert remedy in events[-1]["remedy"]


FIELDS = (
    Field("text", "uint8", (), "utf8", "ragged"),
    Field("boxes", "float32", (4,), None, "ragged"),
    Field("label", "int64", ()),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(lengths=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_parts_written_in_any_order_join_to_what_a_loop_concatenates(
    isolated: Path, lengths: list[list[int]], seed: int
) -> None:
    root = store.make_root(isolated / "store")
    rows_ = [(f"{length}" * length, np.full((length, 4), length, "f4"), length) for each in lengths for length in each]
    layout = Layout(None, FIELDS, ragged_bytes=limits.CHUNK_BYTES)  # chunks of one row, were they full
    files = StoreWriter(root, "a" * 64)
    files.create(layout, {}).close()
    writer = ChunkWriter(files.folder, layout)
    chunks = []
    for number in np.random.default_rng(seed).permutation(len(rows_)).tolist():
        text, boxes, label = rows_[number]
        writer.begin(number)
        for column, value in zip(writer.columns, (np.frombuffer(text.encode(), "u1"), boxes, label), strict=True):
            column[0] = np.zeros(column.shape[1:]) if isinstance(column, np.ndarray) else np.ones((3, 4))[:, 0]
            column[0] = value  # put twice: the first failed in a later column
        chunks.append(Chunk(number, 1, *writer.finish(number, 1)))
    writer.close()
    columns = files.assemble(layout, sorted(chunks), None)
    values = np.load(files.folder / "sealed" / "text.values.npy")
    assert bytes(values).decode() == "".join(text for text, _, _ in rows_)
    offsets = np.load(files.folder / "sealed" / "boxes.offsets.npy")
    assert offsets.tolist() == [0, *np.cumsum([label for _, _, label in rows_]).tolist()]
    assert columns[1].parts[0].rows == sum(label for _, _, label in rows_)
    files.wipe()


def test_a_chunk_of_a_ragged_column_stays_small_in_memory_and_whole_in_its_file(isolated: Path) -> None:
    from dataserve.server.parts import FOLDER, PartReader, PartWriter

    (isolated / FOLDER).mkdir()
    field = Field("x", "uint8", (), "bytes", "ragged")
    part = PartWriter(isolated, field)
    part.begin(0)
    row = np.arange(limits.CHUNK_BYTES // 2, dtype=np.uint8)
    held = []
    for index in range(20):
        part[index] = row
        held.append(part._bytes)
    assert max(held) <= limits.CHUNK_BYTES + len(row)
    crc, elements = part.finish(20)
    read = PartReader(isolated, field, 0, 20, elements)
    assert (elements, read.crc()) == (20 * len(row), crc)
    assert b"".join(read.values()) == row.tobytes() * 20
    assert read.lengths().tolist() == [len(row)] * 20
    read.close()
