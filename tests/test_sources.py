"""server/sources.py and server/arrays.py: what can be opened, and what each mistake is told."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dataserve.protocol.errors import DataError, DataserveError, UserError
from dataserve.server import sources
from dataserve.server.sources import Source
from dataserve.server.spec import DatasetSpec

Opening = Callable[[DatasetSpec], Source]


def spec(source: str, transform: str | None = None, **args: Any) -> DatasetSpec:
    return DatasetSpec("data", source, args, transform)


def archive(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return f"arrays:{path}"


@pytest.fixture
def opening() -> Iterator[Opening]:
    """`open_source`, with everything closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(wanted: DatasetSpec) -> Source:
            return stack.enter_context(contextlib.closing(sources.open_source(wanted)))

        yield opened


def refusal(wanted: DatasetSpec) -> DataserveError:
    with pytest.raises(DataserveError) as caught:
        sources.open_source(wanted)
    return caught.value


def test_arrays_give_a_dict_sample_with_the_files_names_in_the_files_order(opening: Opening, tmp_path: Path) -> None:
    source = opening(spec(archive(tmp_path / "a.npz", zeta=np.arange(3), alpha=np.eye(3))))
    assert source.length == 3
    assert list(source.sample(0)) == ["zeta", "alpha"]
    assert source.sample(2)["zeta"] == 2
    np.testing.assert_array_equal(source.sample(1)["alpha"], [0, 1, 0])
    assert source.identity().roots == (str(tmp_path / "a.npz"),)


@given(
    data=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=7)),
    spans=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6),
    order=st.sampled_from("CF"),
    squeezed=st.booleans(),
)
def test_blocks_in_any_order_equal_slices_of_the_array(
    tmp_path_factory: pytest.TempPathFactory, data: Any, spans: list[tuple[int, int]], order: str, squeezed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.npz"
    (np.savez_compressed if squeezed else np.savez)(path, x=np.asarray(data, order=order))  # type: ignore[call-overload]
    with contextlib.closing(sources.open_source(spec(f"arrays:{path}"))) as source:
        for one, other in spans:
            start, stop = sorted((min(one, len(data)), min(other, len(data))))
            block = source.block(start, stop)
            assert block is not None
            np.testing.assert_array_equal(block["x"], data[start:stop])


def test_arrays_of_the_other_byte_order_keep_their_values(opening: Opening, tmp_path: Path) -> None:
    source = opening(spec(archive(tmp_path / "a.npz", x=np.array([1, 258], ">i4"))))
    assert [int(source.sample(row)["x"]) for row in (0, 1)] == [1, 258]


def test_arrays_of_unequal_length_are_refused_with_both(tmp_path: Path) -> None:
    error = refusal(spec(archive(tmp_path / "a.npz", image=np.zeros(3), label=np.zeros(4))))
    assert error.code == "bad_source"
    assert "'image' has 3 rows, 'label' has 4" in error.text


@pytest.mark.parametrize("values", [np.array(["a", None], object), np.array(["a", "b"]), np.zeros(2, "M8[s]")])
def test_arrays_of_a_type_that_a_store_cannot_hold_are_refused_with_the_ones_it_can(
    tmp_path: Path, values: Any
) -> None:
    error = refusal(spec(archive(tmp_path / "a.npz", x=values)))
    assert error.code == "bad_source"
    assert "'x'" in error.text
    assert "float32" in error.remedy
    assert "pickle" not in str(error)


def test_arrays_without_rows_are_empty(tmp_path: Path) -> None:
    assert refusal(spec(archive(tmp_path / "a.npz", x=np.zeros((0, 3))))).code == "empty_source"
    assert refusal(spec(archive(tmp_path / "b.npz"))).code == "empty_source"
    assert "single number" in refusal(spec(archive(tmp_path / "c.npz", x=np.float32(1)))).text


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no zip", b"\x93NUMPY"])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    assert "no .npz" in refusal(spec(f"arrays:{tmp_path}/a.npz")).text


def test_a_file_that_is_not_there_is_refused_with_its_path(tmp_path: Path) -> None:
    error = refusal(spec(f"arrays:{tmp_path}/a.npz"))
    assert f"'{tmp_path}/a.npz' cannot be opened: No such file or directory." == error.text


def test_a_damaged_member_is_found_by_its_checksum(opening: Opening, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    archive(path, x=np.arange(1000))
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    source = opening(spec(f"arrays:{path}"))
    with pytest.raises(UserError, match=r"'x'.*damaged"):
        source.block(0, 1000)


def test_a_member_that_ends_early_is_found(opening: Opening, tmp_path: Path) -> None:
    whole = io.BytesIO()
    np.save(whole, np.arange(10))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("x.npy", whole.getvalue()[:-8])
    source = opening(spec(f"arrays:{tmp_path}/a.npz"))
    with pytest.raises(UserError, match="8 bytes too early"):
        source.block(0, 10)


def test_mnist_is_opened_with_its_arguments_and_classes(opening: Opening, mnist_root: Path) -> None:
    train = opening(spec("torchvision:MNIST", root=str(mnist_root)))
    test = opening(spec("torchvision:MNIST", root=str(mnist_root), train=False))
    assert (train.length, test.length) == (60_000, 10_000)
    assert train.classes is not None
    assert train.classes[7] == "7 - seven"
    image, label = test.sample(0)
    assert (image.size, label) == ((28, 28), 7)
    assert train.identity().roots == (str(mnist_root / "MNIST" / "raw"),)
    assert "torchvision" in train.identity().libraries


def test_a_near_name_is_offered_for_an_unknown_one() -> None:
    error = refusal(spec("torchvision:FashonMNIST"))
    assert error.code == "bad_source"
    assert "FashionMNIST" in error.remedy
    assert refusal(spec("torchvision:os")).code == "bad_source"


def test_missing_data_is_a_sentence_with_the_download_as_remedy(tmp_path: Path) -> None:
    error = refusal(spec("torchvision:MNIST", root=str(tmp_path)))
    assert error.code == "bad_source"
    assert "not found" in error.text
    assert "--arg download=true" in error.remedy


def test_a_wrong_argument_is_named_with_the_ones_there_are() -> None:
    error = refusal(spec("torchvision:MNIST", root="/x", trian=True))
    assert "'trian'" in error.text
    assert "train" in error.remedy


def test_a_missing_argument_is_asked_for() -> None:
    error = refusal(spec("torchvision:MNIST"))
    assert "needs root" in error.text
    assert "--arg root=" in error.remedy


def test_an_argument_of_a_base_class_is_known(tmp_path: Path) -> None:
    error = refusal(spec("torchvision:EMNIST", root=str(tmp_path), split="letters", train=False))
    assert "not found" in error.text, "train is EMNIST's by **kwargs"


def test_a_data_set_without_files_needs_no_root(opening: Opening) -> None:
    source = opening(spec("torchvision:FakeData", size=5))
    assert source.length == 5
    assert source.identity().roots == ()


def test_no_samples_is_an_error() -> None:
    assert refusal(spec("torchvision:FakeData", size=0)).code == "empty_source"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("MNIST", "bad_source"),
        ("/some/path", "bad_source"),
        ("s3://bucket/x", "bad_source"),
        ("imagefolder", "bad_source"),
    ],
)
def test_other_kinds_are_refused_with_the_kinds_there_are(source: str, code: str) -> None:
    error = refusal(spec(source))
    assert error.code == code
    assert source in error.text
    assert "torchvision:NAME" in error.remedy


def test_places_become_absolute_and_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/u")
    assert sources.located(spec("arrays:a.npz")).source == f"arrays:{tmp_path}/a.npz"
    found = sources.located(spec("torchvision:MNIST", root="~/data", split="train"))
    assert found.args == {"root": "/home/u/data", "split": "train"}
    assert sources.located(found) == found


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that lies in the current directory alone."""
    name = f"transforms_{os.getpid()}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "class Steps:\n    @staticmethod\n    def double(sample):\n        return sample * 2\n"
        "def fails(sample):\n    raise KeyError('label')\n"
        "size = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    return name


def test_a_transform_is_found_from_the_current_directory(module: str) -> None:
    assert sources.load_transform(f"{module}:Steps.double")(4) == 8


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [("missing", "has no attribute"), ("size", "is a int, not callable"), ("fails()", "not of the form")],
)
def test_a_transform_that_is_none_is_refused(module: str, attribute: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        sources.load_transform(f"{module}:{attribute}")
    assert caught.value.code == "bad_transform"


def test_a_transform_that_is_not_there_says_where_it_was_looked_for(module: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No module named 'absent_module'") as caught:
        sources.load_transform("absent_module:f")
    assert str(tmp_path) in caught.value.remedy


def test_a_sample_that_fails_is_named_with_its_stage_and_cause(opening: Opening, module: str, tmp_path: Path) -> None:
    source = opening(spec(archive(tmp_path / "a.npz", x=np.zeros(3))))
    with pytest.raises(DataError, match="Sample 1 failed at the stage transform: KeyError: 'label'") as caught:
        sources.read_sample(source, sources.load_transform(f"{module}:fails"), 1)
    assert caught.value.code == "bad_sample"


def test_a_sample_that_cannot_be_read_is_named(opening: Opening) -> None:
    source = opening(spec("torchvision:FakeData", size=3))
    with pytest.raises(DataError, match="Sample 9 failed at the stage open: IndexError: FakeData index out of range"):
        sources.read_sample(source, None, 9)
