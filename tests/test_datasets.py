"""server/datasets.py: data sets of others' code, map-style and iterable, opened anew wherever they are read."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataserve.protocol.errors import DataserveError
from dataserve.server import fingerprint, sources
from dataserve.server.sources import BadSample, Source
from dataserve.server.spec import DatasetSpec

MODULE = """
class Squares:
    classes = ["even", "odd"]
    def __init__(self, count=5, power=2, label="x", on=False):
        self.count, self.power, self.got = count, power, (label, on)
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(f"no {index}")
        return index ** self.power, index % 2
def generator(count=3):
    for number in range(count):
        yield number
class Again:
    def __iter__(self):
        return iter("abc")
def iterable():
    import torch.utils.data
    class Stream(torch.utils.data.IterableDataset):
        def __len__(self):
            return 2
        def __iter__(self):
            return iter([7, 8])
    return Stream()
def fails(path):
    raise FileNotFoundError(2, "No such file or directory", path)
def nothing():
    return None
def empty():
    return []
class Strange:
    def __len__(self):
        raise RuntimeError("who knows")
    def __getitem__(self, index):
        return index
plain = 3
"""

_count = itertools.count()


@pytest.fixture
def module(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"factories_{os.getpid()}_{next(_count)}"
    (isolated / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(isolated)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def opening(module: str) -> Iterator[Callable[..., Source]]:
    with contextlib.ExitStack() as stack:

        def opened(name: str, **args: Any) -> Source:
            return stack.enter_context(contextlib.closing(sources.open_source(spec(f"{module}:{name}", **args))))

        yield opened


def spec(source: str, **args: Any) -> DatasetSpec:
    return DatasetSpec("data", source, args)


def test_a_map_style_factory_gets_its_arguments(opening: Callable[..., Source]) -> None:
    source = opening("Squares", count=7, power=3, label="1a", on=True)
    assert source.length == 7
    assert source.classes == ("even", "odd")
    assert sources.read_sample(source, None, 3) == (27, 1)
    assert source._dataset.got == ("1a", True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "samples"), [("generator", [0, 1, 2]), ("Again", ["a", "b", "c"]), ("iterable", [7, 8])]
)
def test_an_iterable_has_no_length_and_gives_all_its_samples_each_time(
    opening: Callable[..., Source], name: str, samples: list[Any]
) -> None:
    if name == "iterable":
        pytest.importorskip("torch")
    source = opening(name)
    assert source.length is None
    assert [list(source.samples()) for _ in range(3)] == [samples] * 3


def test_a_sequence_of_known_length_iterates_too(opening: Callable[..., Source]) -> None:
    assert list(opening("Squares", count=3).samples()) == [(0, 0), (1, 1), (4, 0)]


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("fails", {"path": "/absent"}, "(path='/absent') failed: FileNotFoundError: [Errno 2] No such file"),
        ("fails", {}, "missing 1 required positional argument: 'path'"),
        ("nothing", {}, "gave a NoneType, which is neither map-style nor iterable"),
        ("empty", {}, "has no samples"),
        ("Strange", {}, "who knows"),
        ("plain", {}, "is a int, not callable"),
        ("absent", {}, "has no attribute 'absent'"),
    ],
)
def test_what_a_factory_does_wrong_is_a_sentence(module: str, name: str, args: dict[str, Any], text: str) -> None:
    with pytest.raises(DataserveError) as caught:
        sources.open_source(spec(f"{module}:{name}", **args))
    assert caught.value.code == ("empty_source" if name == "empty" else "bad_source")
    assert text in caught.value.text


def test_a_sample_that_fails_is_named(opening: Callable[..., Source]) -> None:
    with pytest.raises(BadSample, match="Sample 9 failed at the stage open: IndexError: no 9"):
        sources.read_sample(opening("Squares"), None, 9)


def test_the_data_of_a_factory_are_not_seen_unless_depends_or_a_version_covers_them(
    module: str, isolated: Path
) -> None:
    (isolated / "data").mkdir()
    (isolated / "data" / "a").write_text("x")

    def seen(**fields: Any) -> fingerprint.Survey:
        wanted = sources.located(DatasetSpec("data", f"{module}:Squares", **fields))
        with contextlib.closing(sources.open_source(wanted)) as source:
            return fingerprint.survey(wanted, source.identity())

    bare = seen()
    assert bare.parts["not_seen"] == [f"the data that {module}:Squares reads"]
    (note,) = fingerprint.notes(bare.parts)
    assert "Give --version NAME" in note
    assert fingerprint.notes(seen(version="1").parts) == []
    covered = seen(depends=("data",))
    assert fingerprint.notes(covered.parts) == []
    assert list(covered.files) == [str(isolated / "data")]
    (isolated / "data" / "a").write_text("xy")
    assert seen(depends=("data",)).fingerprint != covered.fingerprint
    assert seen(args={"count": 6}).fingerprint != bare.fingerprint


def test_the_code_of_a_factory_is_part_of_the_fingerprint(module: str, isolated: Path) -> None:
    def seen() -> fingerprint.Survey:
        sys.modules.pop(module, None)
        wanted = DatasetSpec("data", f"{module}:Squares")
        return fingerprint.survey(wanted, sources.Identity((), ()))

    before = seen()
    (isolated / f"{module}.py").write_text(MODULE.replace("power=2", "power=4"))
    after = seen()
    (reason,) = fingerprint.changes(before.parts, after.parts)
    assert reason == f"source: default power of Squares.__init__ of {module} changed 2 -> 4"


def test_torchvisions_image_folder_tells_paths(shared_data: Path) -> None:
    pytest.importorskip("torchvision")
    root = shared_data / "photos" / "images"
    with contextlib.closing(sources.open_source(spec("torchvision:ImageFolder", root=str(root)))) as source:
        path = source.path(3)
        assert path is not None
        assert (root / os.fsdecode(path)).is_file()
