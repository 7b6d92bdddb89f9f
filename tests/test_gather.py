"""client/gather: batches against the plain way to make them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dataserve.client import fixed
from dataserve.client.gather import Gatherer, select
from dataserve.client.mapping import Store
from dataserve.client.outputs import outputs
from dataserve.protocol.errors import DataError, UserError
from dataserve.protocol.manifest import leaves

from .stores import write_store

N = 50
RNG = np.random.default_rng(5)
IMAGE = RNG.integers(0, 256, (N, 3, 4, 5), dtype=np.uint8)
VECTOR = RNG.standard_normal((N, 7)).astype(np.float32)
DOUBLE = RNG.standard_normal(N)
LABEL = RNG.integers(-5, 5, N)
HALVES = torch.randn(N, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
COLUMNS = {
    "image": IMAGE,
    "vector": VECTOR,
    "double": DOUBLE,
    "label": LABEL,
    "flag": LABEL > 0,
    "halves": HALVES.view(torch.int16).numpy().view(np.uint16),
}
ROWS = np.array([3, 0, 49, 3, 17], np.uint32)
MEAN, STD = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder, made = write_store(tmp_path_factory.mktemp("g"), COLUMNS, bfloat16=("halves",), images=("image",))
    mapped = Store(str(folder), made.id)
    for name in COLUMNS:
        mapped.column(name)
    return mapped


def gatherer(
    store: Store, columns: Any = None, *, structure: Any = None, batch_size: int = 8, **options: Any
) -> Gatherer:
    chosen = select(structure or store.manifest.structure, columns, store.manifest)
    used = [store.manifest.column(name) for name in leaves(chosen)]
    leave = outputs(used, options.get("dtype"), options.get("normalize"), options.get("ragged"))
    return Gatherer(store, chosen, leave, batch_size)


def test_rows_come_as_stored_in_their_order(store: Store) -> None:
    image, vector, double, label, flag, halves = gatherer(store).gather(ROWS)
    for tensor, values in ((image, IMAGE), (vector, VECTOR), (double, DOUBLE), (label, LABEL), (flag, LABEL > 0)):
        assert torch.equal(tensor, torch.from_numpy(values[ROWS]))
    assert torch.equal(halves, HALVES[torch.from_numpy(ROWS.astype(np.int64))])


def test_a_slice_of_the_store_is_copied(store: Store) -> None:
    make = gatherer(store, "label")
    batch = make.gather(slice(10, 18))
    assert torch.equal(batch, torch.from_numpy(LABEL[10:18]))
    batch.zero_()
    assert torch.equal(make.gather(slice(10, 18)), torch.from_numpy(LABEL[10:18]))


@pytest.mark.parametrize("rows", [np.array([50]), np.array([-1]), slice(49, 51), np.array([0, 2**32 - 1], np.uint32)])
def test_rows_that_are_not_there_are_refused(store: Store, rows: Any) -> None:
    with pytest.raises(DataError, match="the store has 50"):
        gatherer(store).gather(rows)


def test_images_are_normalized_as_torchvision_does(store: Store) -> None:
    batch = gatherer(store, "image", normalize=(MEAN, STD)).gather(ROWS)
    mean, std = torch.tensor(MEAN).reshape(3, 1, 1), torch.tensor(STD).reshape(3, 1, 1)
    expected = (torch.from_numpy(IMAGE[ROWS]).float() / 255 - mean) / std
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch, expected, rtol=1e-5, atol=1e-6)


def test_normalization_goes_over_all_rows_whatever_the_block(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gatherer(store, "image", batch_size=N, normalize=(MEAN, STD)).gather(slice(0, N)).clone()
    monkeypatch.setattr(fixed, "BLOCK_BYTES", 3 * 4 * 60)
    assert torch.equal(gatherer(store, "image", batch_size=N, normalize=(MEAN, STD)).gather(slice(0, N)), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_normalized_images_come_in_the_dtype_asked_for(store: Store, dtype: torch.dtype) -> None:
    exact = gatherer(store, "image", normalize=(MEAN, STD)).gather(ROWS)
    batch = gatherer(store, "image", normalize=(MEAN, STD), dtype=dtype).gather(ROWS)
    assert batch.dtype == dtype
    assert torch.equal(batch, exact.to(dtype))


def test_named_float_columns_are_normalized_on_their_own_scale(store: Store) -> None:
    options = {"normalize": {"vector": (0.5, 2.0), "double": ([1.0], [4.0])}}
    vector, double = gatherer(store, ["vector", "double"], **options).gather(ROWS)
    torch.testing.assert_close(vector, torch.from_numpy((VECTOR[ROWS] - 0.5) / 2))
    torch.testing.assert_close(double, torch.from_numpy((DOUBLE[ROWS] - 1) / 4))
    assert double.dtype == torch.float64


def test_dtype_leaves_labels_and_flags_alone_and_keeps_values(store: Store) -> None:
    image, vector, double, label, flag, halves = gatherer(store, dtype=torch.float16).gather(ROWS)
    assert [t.dtype for t in (image, vector, double, halves)] == [torch.float16] * 4
    assert (label.dtype, flag.dtype) == (torch.int64, torch.bool)
    assert torch.equal(image, torch.from_numpy(IMAGE[ROWS]).half())
    assert torch.equal(double, torch.from_numpy(DOUBLE[ROWS]).half())


STRUCTURE = {
    "dict": [
        ["inputs", {"list": [{"column": "image"}, {"tuple": [{"column": "vector"}]}]}],
        [
            "point",
            {"namedtuple": {"name": "Point", "fields": [["x", {"column": "double"}], ["y", {"column": "label"}]]}},
        ],
    ]
}


def test_the_structure_is_rebuilt(store: Store) -> None:
    batch = gatherer(store, structure=STRUCTURE).gather(ROWS)
    assert list(batch) == ["inputs", "point"]
    image, (vector,) = batch["inputs"]
    assert isinstance(batch["inputs"], list)
    assert (image.shape, vector.shape) == ((5, 3, 4, 5), (5, 7))
    assert batch["point"]._fields == ("x", "y")
    assert type(batch["point"]).__name__ == "Point"
    assert torch.equal(batch["point"].y, torch.from_numpy(LABEL[ROWS]))


def test_named_tuples_are_one_type_and_cross_processes(store: Store) -> None:
    make = gatherer(store, structure=STRUCTURE)
    first, second = make.gather(ROWS)["point"], make.gather(ROWS)["point"]
    assert type(first) is type(second)
    again = pickle.loads(pickle.dumps(first))
    assert type(again) is type(first)
    assert torch.equal(again.x, first.x)
    assert isinstance(first, tuple)


def test_chosen_columns_keep_their_places_and_one_name_comes_bare(store: Store) -> None:
    assert isinstance(gatherer(store, "label").gather(ROWS), torch.Tensor)
    vector, label = gatherer(store, ["label", "vector"]).gather(ROWS)
    assert (vector.shape, label.shape) == ((5, 7), (5,))
    batch = gatherer(store, ["label"], structure=STRUCTURE).gather(ROWS)
    assert list(batch) == ["point"]
    assert batch["point"]._fields == ("y",)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"columns": ["image", "lable"]}, "unknown_column", "There are: image, vector"),
        ({"columns": []}, "bad_option", "at least one"),
        ({"columns": ["label", "label"]}, "bad_option", "each once"),
        ({"dtype": torch.int8}, "bad_option", "Give one of torch.float16"),
        ({"normalize": ((0.1, 0.2), STD)}, "bad_option", "has 2 numbers; its rows .* have 3 channels"),
        ({"normalize": (MEAN, (1.0, 0.0, 1.0))}, "bad_option", "is 0"),
        ({"normalize": (MEAN, (1.0, float("nan"), 1.0))}, "bad_option", "not finite"),
        ({"normalize": (MEAN,)}, "bad_option", "no pair"),
        ({"normalize": 0.5}, "bad_option", "no pair"),
        ({"normalize": (("a",), STD)}, "bad_option", "no numbers"),
        ({"normalize": {"label": (0.0, 1.0)}}, "bad_option", "int64, neither uint8 nor floating"),
        ({"normalize": {"nothing": (0.0, 1.0)}}, "unknown_column", "There are"),
        ({"normalize": (0.1, 0.2), "columns": ["label"]}, "bad_option", "0 columns of images"),
    ],
)
def test_wrong_options_are_refused_with_what_would_be_right(
    store: Store, options: dict[str, Any], code: str, text: str
) -> None:
    with pytest.raises(UserError, match=text) as caught:
        gatherer(store, options.pop("columns", None), **options)
    assert caught.value.code == code


def test_kept_batches_stay_while_thousands_more_are_drawn(store: Store) -> None:
    make = gatherer(store, normalize=(MEAN, STD))
    generator = np.random.default_rng(9)
    kept = []
    for number in range(2000):
        rows = generator.integers(0, N, generator.integers(1, 9))
        batch = make.gather(rows)
        if number % 40 == 0:
            part = batch[number % 6]
            kept.append(
                (
                    number % 6,
                    rows,
                    [part, part[:1], part.numpy(), part.untyped_storage()][number // 40 % 4],
                    part.clone(),
                )
            )
            if number % 80 == 0:
                del batch, part
        else:
            for part in batch:
                part.zero_()
    for _, _, held, before in kept:
        if isinstance(held, torch.UntypedStorage):
            assert held.tolist()[: before.nbytes] == before.clone().untyped_storage().tolist()
        else:
            assert torch.equal(torch.as_tensor(held), before[: len(held)])


def test_memory_stays_bounded_when_nothing_is_kept(store: Store) -> None:
    make = gatherer(store, "image")
    seen = {make.gather(ROWS).data_ptr() for _ in range(500)}
    assert len(seen) <= 4
