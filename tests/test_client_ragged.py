"""client/ragged: rows that differ in length, in each form, against the plain way to make them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dataserve.client import Flat, Padded, ServedDataset, ragged
from dataserve.client.gather import Gatherer, select
from dataserve.client.mapping import Store
from dataserve.client.outputs import outputs
from dataserve.client.ragged import copy_rows
from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError, UserError

from .fakes import FakeDaemon, fake_daemon
from .preparing import Child, factory, named, start
from .stores import write_store

__all__ = ["start"]  # the fixture

N = 40
RNG = np.random.default_rng(8)
LENGTHS = [0, 1, 700, *RNG.integers(0, 30, N - 3).tolist()]
TEXT = [("née " * length)[:length] for length in LENGTHS]
RAW = [bytes(RNG.integers(0, 256, length, dtype=np.uint8)) for length in LENGTHS]
BOXES = [RNG.standard_normal((length % 5, 4)).astype(np.float32) for length in LENGTHS]
WAVES = [RNG.integers(-99, 99, 300 + length, dtype=np.int16) for length in LENGTHS]
HALVES = [torch.randn(length, 3, generator=torch.Generator().manual_seed(length)).bfloat16() for length in LENGTHS]
EMPTY = [np.zeros((0, 2), np.int64)] * N
RAGGED: dict[str, Any] = {
    "text": TEXT,
    "raw": RAW,
    "boxes": BOXES,
    "waves": WAVES,
    "halves": [item.view(torch.int16).numpy().view(np.uint16) for item in HALVES],
    "empty": EMPTY,
}
#: Each column's rows as tensors.
ROWS_OF: dict[str, list[torch.Tensor]] = {
    "text": [torch.tensor(list(item.encode()), dtype=torch.uint8) for item in TEXT],
    "raw": [torch.tensor(list(item), dtype=torch.uint8) for item in RAW],
    "boxes": [torch.from_numpy(item) for item in BOXES],
    "waves": [torch.from_numpy(item) for item in WAVES],
    "halves": HALVES,
    "empty": [torch.from_numpy(item) for item in EMPTY],
}
DRAWN = [np.array([3, 0, 39, 3, 2, 17], np.uint32), np.array([0]), np.array([2, 2]), slice(0, 1), slice(5, N)]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, manifest.Manifest]:
    label = {"label": np.arange(N)}
    return write_store(tmp_path_factory.mktemp("r"), label, ragged=RAGGED, bfloat16=("halves",))


@pytest.fixture(scope="module")
def store(sealed: tuple[Path, manifest.Manifest]) -> Store:
    mapped = Store(str(sealed[0]), sealed[1].id)
    for name in RAGGED:
        mapped.ragged(name)
    mapped.column("label")
    return mapped


def gatherer(store: Store, columns: Any = None, **options: Any) -> Gatherer:
    chosen = select(store.manifest.structure, columns, store.manifest)
    used = [store.manifest.column(name) for name in manifest.leaves(chosen)]
    leaving = outputs(used, options.get("dtype"), options.get("normalize"), options.get("ragged"))
    return Gatherer(store, chosen, leaving, N)


def indices(rows: Any) -> list[int]:
    return list(range(N))[rows] if isinstance(rows, slice) else [int(row) for row in rows]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and torch.equal(found, expected)


def check_padded(found: Padded, expected: list[torch.Tensor]) -> None:
    lengths = [len(row) for row in expected]
    assert found.lengths.tolist() == found.mask.sum(1).tolist() == lengths
    assert found.mask.shape == found.values.shape[:2] == (len(expected), max(lengths))
    for row, mask, values in zip(expected, found.mask, found.values, strict=True):
        assert mask.tolist() == [True] * len(row) + [False] * (max(lengths) - len(row))
        assert same(values[: len(row)], row)
        assert not values[len(row) :].any()


@pytest.mark.parametrize("rows", DRAWN, ids=str)
@pytest.mark.parametrize("name", RAGGED)
def test_each_form_holds_the_rows_in_their_order(store: Store, name: str, rows: Any) -> None:
    expected = [ROWS_OF[name][row] for row in indices(rows)]
    listed = gatherer(store, name).gather(rows)
    if name in ("text", "raw"):
        assert listed == [RAGGED[name][row] for row in indices(rows)]
    else:
        assert isinstance(listed, list)
        assert [same(*pair) for pair in zip(listed, expected, strict=True)] == [True] * len(expected)
    flat = gatherer(store, name, ragged="flat").gather(rows)
    assert isinstance(flat, Flat)
    assert flat.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert same(flat.values, torch.cat(expected))
    check_padded(gatherer(store, name, ragged={name: "padded"}).gather(rows), expected)


@pytest.mark.parametrize("dtype", manifest.DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_every_type_comes_back_in_each_form(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    lengths = [3, 0, 1, 300]
    bits = RNG.integers(0, 256, (304 * 16 * 4,), dtype=np.uint8)
    if dtype == "bool":
        bits &= 1
    values = bits.view(manifest.DTYPES[dtype])[: 304 * int(np.prod(shape))].reshape(304, *shape)
    items = np.split(values, np.cumsum(lengths)[:-1])
    folder, made = write_store(tmp_path, {}, ragged={"x": items}, bfloat16=("x",) if dtype == "bfloat16" else ())
    rows = np.array([3, 1, 0, 0])
    for form in ("list", "flat", "padded"):
        (batch,) = gatherer(Store(str(folder), made.id), ragged=form).gather(rows)
        drawn = batch if form == "list" else [batch.values]
        assert {item.dtype for item in drawn} == {getattr(torch, dtype)}
        stored = [item.contiguous().flatten().view(torch.uint8).numpy().tobytes() for item in drawn]
        if form == "padded":
            wide = np.zeros((4, 300, *shape), values.dtype)
            for place, row in enumerate(rows):
                wide[place, : lengths[row]] = items[row]
            assert stored == [wide.tobytes()]
        else:
            assert b"".join(stored) == b"".join(items[row].tobytes() for row in rows)


@given(
    lengths=st.lists(st.integers(0, 9) | st.integers(0, 2000), min_size=1, max_size=30),
    seed=st.integers(0, 99),
    block=st.sampled_from([1, 7, ragged.BLOCK_ELEMENTS]),
    run=st.sampled_from([1, 20, ragged.RUN_ELEMENTS, 10**9]),
)
def test_rows_are_copied_as_a_loop_would(lengths: list[int], seed: int, block: int, run: int) -> None:
    generator = np.random.default_rng(seed)
    ends = np.cumsum([0, *lengths])
    values = generator.integers(0, 2**31, (ends[-1], 2))
    rows = generator.integers(0, len(lengths), generator.integers(1, 40))
    expected = np.concatenate([values[ends[row] : ends[row + 1]] for row in rows])
    offsets = np.cumsum([0, *(lengths[row] for row in rows)])
    out = np.full((offsets[-1], 2), -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "BLOCK_ELEMENTS", block)
        patch.setattr(ragged, "RUN_ELEMENTS", run)
        copy_rows(values, ends[rows], offsets, out)
    assert np.array_equal(out, expected)


def test_a_sample_keeps_its_structure_beside_fixed_columns(store: Store) -> None:
    label, text, raw, boxes, *_ = gatherer(store, ragged={"boxes": "padded", "raw": "flat"}).gather(DRAWN[0])
    assert label.tolist() == indices(DRAWN[0])
    assert text == [TEXT[row] for row in indices(DRAWN[0])]
    assert (type(raw), type(boxes)) == (Flat, Padded)


def test_floats_take_the_dtype_and_are_normalized_by_element_and_padding_stays_zero(store: Store) -> None:
    mean, std = (1.0, 2.0, 3.0, 4.0), (0.5, 1.0, 2.0, 4.0)
    rows = DRAWN[0]
    options: dict[str, Any] = {"normalize": {"boxes": (mean, std), "halves": (0.5, 2.0)}, "dtype": torch.float16}
    boxes, halves = gatherer(store, ["boxes", "halves"], ragged="padded", **options).gather(rows)
    exact = [(ROWS_OF["boxes"][row] - torch.tensor(mean)) / torch.tensor(std) for row in indices(rows)]
    check_padded(boxes, [item.half() for item in exact])
    check_padded(halves, [((HALVES[row].float() - 0.5) / 2).half() for row in indices(rows)])
    listed = gatherer(store, "boxes", **{**options, "normalize": None}).gather(rows)
    assert all(same(item, ROWS_OF["boxes"][row].half()) for item, row in zip(listed, indices(rows), strict=True))
    for name in ("text", "waves"):  # neither text nor integers are converted
        flat = gatherer(store, name, ragged="flat", dtype=torch.float16).gather(rows)
        assert same(flat.values, torch.cat([ROWS_OF[name][row] for row in indices(rows)]))


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"ragged": "wide"}, "bad_option", "Known: list, flat, padded"),
        ({"ragged": {"boxes": 3}}, "bad_option", "ragged=3"),
        ({"ragged": {"bocks": "flat"}}, "unknown_column", "There are: label, text"),
        ({"ragged": {"label": "flat"}}, "bad_option", "they are stacked"),
        ({"normalize": {"text": (0.0, 1.0)}}, "bad_option", "'text' is utf8, no numbers"),
        ({"normalize": {"boxes": ((0.0, 1.0), 1.0)}}, "bad_option", "its elements .4,. have 4 channels"),
        ({"normalize": (0.0, 1.0)}, "bad_option", "0 columns of images"),
    ],
)
def test_wrong_options_are_refused_with_what_would_be_right(
    store: Store, options: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(UserError, match=text) as caught:
        gatherer(store, **options)
    assert caught.value.code == code


def test_ragged_images_are_not_normalized() -> None:
    part = manifest.Part("x.values.npy", 0, 4096, ())
    column = manifest.Column("x", "ragged", "uint8", (4, 4), (part,), "image", (part,))
    with pytest.raises(UserError, match="differ in size"):
        outputs([column], None, {"x": (0.0, 1.0)})


def test_text_that_is_no_utf8_is_a_damaged_store(tmp_path: Path) -> None:
    folder, made = write_store(tmp_path, {}, ragged={"text": ["good", "bad!"]})
    file = folder / "text.values.npy"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    read = gatherer(Store(str(folder), made.id), "text")
    assert read.gather(slice(0, 1)) == ["good"]
    with pytest.raises(DataError, match="'text' holds text that is no UTF-8"):
        read.gather(slice(0, 2))


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "flat", "padded"])
def test_kept_batches_stay_while_more_are_drawn_and_written(store: Store, form: str) -> None:
    make = gatherer(store, "boxes", ragged=form)
    generator = np.random.default_rng(9)
    kept = []
    for number in range(1000):
        batch = make.gather(generator.integers(0, N, generator.integers(1, 9)))
        values = batch if form == "list" else [batch.values]
        if number % 20 == 0:
            last = values[-1]
            holds = [last, last[:1], last.numpy(), last.untyped_storage()]
            kept.append((holds[number // 20 % 4], content(holds[number // 20 % 4])))
        else:
            for item in values:
                item.fill_(7)
    assert [number for number, (held, before) in enumerate(kept) if content(held) != before] == []
    for row in range(N):
        batch = make.gather(slice(row, row + 1))
        assert torch.equal(batch[0] if form == "list" else batch.values.reshape(-1, 4), ROWS_OF["boxes"][row])


def content(held: Any) -> list[Any]:
    found: list[Any] = held.tolist()
    return found


@pytest.mark.parametrize("form", ["list", "flat", "padded"])
def test_memory_stays_bounded_when_nothing_is_kept(store: Store, form: str) -> None:
    make = gatherer(store, "waves", ragged=form)
    generator = np.random.default_rng(3)
    seen = set()
    for _ in range(500):
        batch = make.gather(generator.integers(0, N, 8))
        seen.add((batch[0] if form == "list" else batch.values).data_ptr())
    assert len(seen) <= 12  # the rare batch with the long row takes a larger block


# --- a whole data set -------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(sealed: Any, isolated: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(*sealed) as serving:
        yield serving


def with_lengths(batch: Any, info: Any) -> Any:
    assert isinstance(batch[3], list | Flat | Padded)
    return batch, [len(text) for text in batch[1]] if isinstance(batch[1], list) else info.rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["list", "flat", "padded"])
def test_an_epoch_comes_whole_through_loader_workers_prefetch_and_transform(
    daemon: FakeDaemon, workers: int, form: str
) -> None:
    train = ServedDataset(
        "digits", batch_size=7, ragged=form, prefetch=2, transform=with_lengths, info=True, columns=list_of_columns()
    )
    loader = DataLoader(train, batch_size=None, num_workers=workers)
    seen = []
    for ((label, text, raw, boxes), _), info in loader:
        assert torch.equal(label, info.rows)
        seen += label.tolist()
        for name, found in (("text", text), ("raw", raw), ("boxes", boxes)):
            expected = [ROWS_OF[name][row] for row in label.tolist()]
            if form == "padded":
                check_padded(found, expected)
            elif form == "flat":
                assert same(found.values, torch.cat(expected))
                assert found.offsets.diff().tolist() == [len(item) for item in expected]
            elif name == "boxes":
                assert all(same(*pair) for pair in zip(found, expected, strict=True))
            else:
                assert found == [RAGGED[name][row] for row in label.tolist()]
    assert sorted(seen) == list(range(N))


def list_of_columns() -> list[str]:
    return ["label", "text", "raw", "boxes"]


def test_it_shows_and_pickles_what_it_is(daemon: FakeDaemon) -> None:
    train = ServedDataset("digits", batch_size=7, ragged={"boxes": "flat"}, columns="boxes", shuffle=False)
    assert train.columns == ("boxes",)
    again = pickle.loads(pickle.dumps(train))
    assert same(next(iter(again)).values, torch.cat(ROWS_OF["boxes"][:7]))


MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from torch.utils.data import DataLoader
from dataserve.client import ServedDataset
train = ServedDataset("digits", batch_size=2000, columns="x")
for batch in DataLoader(train, batch_size=None, num_workers=1):
    print(len(batch), sum(len(row) for row in batch))
"""


def test_a_list_of_more_rows_than_descriptors_comes_through_a_worker(tmp_path: Path) -> None:
    folder, made = write_store(tmp_path, {}, ragged={"x": [np.arange(row % 7) for row in range(2000)]})
    with fake_daemon(folder, made):
        command = [sys.executable, "-c", MANY]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == (f"2000 {sum(row % 7 for row in range(2000))}\n", 0), ended.stderr


def test_real_text_comes_back_as_it_was(tmp_path: Path, shared_data: Path, isolated: Path) -> None:
    paragraphs = (shared_data / "text" / "tinyshakespeare.txt").read_text().split("\n\n")
    folder, made = write_store(tmp_path, {"index": np.arange(len(paragraphs))}, ragged={"text": paragraphs})
    with fake_daemon(folder, made):
        seen = []
        for index, text in ServedDataset("digits", batch_size=256, prefetch=1):
            assert text == [paragraphs[row] for row in index.tolist()]
            seen += index.tolist()
        for index, text in ServedDataset("digits", batch_size=256, ragged="padded"):
            decoded = [bytes(row[mask].tolist()).decode() for row, mask in zip(text.values, text.mask, strict=True)]
            assert decoded == [paragraphs[row] for row in index.tolist()]
    assert sorted(seen) == list(range(len(paragraphs)))


SPOKEN = """
import pathlib, wave
import numpy as np
from torch.utils.data import Dataset

class Spoken(Dataset):
    def __init__(self, root):
        self.paths = sorted(pathlib.Path(root).rglob("*.wav"))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        with wave.open(str(self.paths[index])) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return {"sound": (samples, file.getframerate()), "speaker": self.paths[index].stem, "index": index}
"""


def test_what_the_preparation_sealed_comes_back_in_the_samples_structure(
    start: Callable[..., Child], shared_data: Path, isolated: Path
) -> None:
    root = shared_data / "audio" / "fsdd"
    (isolated / "spoken.py").write_text(SPOKEN)
    status, events, words = start(spec=factory("spoken:Spoken", root=str(root)), workers=2).end()
    assert status == 0, (events[-3:], words)
    folder = Path(named(events, "sealed")[0]["path"])
    paths = sorted(root.rglob("*.wav"))
    seen = []
    with fake_daemon(folder, manifest.parse((folder / manifest.FILE).read_bytes())):
        for batch in ServedDataset("data", batch_size=32, ragged={"sound_0": "padded"}):
            (sound, rate), speakers, rows = batch["sound"], batch["speaker"], batch["index"].tolist()
            assert speakers == [paths[row].stem for row in rows]
            assert (rate.dtype, sound.values.dtype) == (torch.int64, torch.int16)
            for row, values, length in zip(rows, sound.values, sound.lengths.tolist(), strict=True):
                with wave.open(str(paths[row])) as file:
                    assert values[:length].numpy().tobytes() == file.readframes(file.getnframes())
            seen += rows
    assert sorted(seen) == list(range(len(paths)))
