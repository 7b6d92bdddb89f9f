"""server/codeprint.py: every edit of code that changes rows changes its print and is told; others do not."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataserve.server import codeprint, sources
from dataserve.server.codeprint import CodePrint

PACKAGE = "printed_package"
FILES = {
    "__init__.py": "",
    "helpers.py": """
BIAS = 1.5
TABLE = {"a": [1, 2], "b": {3, 4}}
def shift(x):
    return inner(x) + BIAS
def inner(x):
    return [y for y in (x, len(TABLE))][0]
def late(x):
    return x + 1
""",
    "steps.py": """
import functools
import os
import re
from dataclasses import dataclass
from . import helpers
from .helpers import shift
SCALE = 2
WORD = re.compile("a+")
def simple(sample, gain=3, *, offset=4):
    '''A sentence.'''
    return shift(sample) * SCALE * gain + offset  # a comment
def make(factor):
    def closed(sample):
        return sample * factor
    return closed
closed = make(7)
class Base:
    DEPTH = 1
    def base(self, sample):
        return sample
class Callable(Base):
    SIZE = 5
    LIMITS = (1, 2)
    def __init__(self, amount):
        self.amount = amount
    @property
    def half(self):
        return self.amount / 2
    @staticmethod
    def twice(x):
        return x * 2
    def __call__(self, sample):
        return self.base(sample) * self.SIZE + self.twice(self.half)
called = Callable(3)
bound = called.base
partial = functools.partial(simple, gain=9)
first = lambda sample: sample + 1
def by_attribute(sample):
    return helpers.late(sample) if WORD.match("a") else helpers.BIAS
def imports_late(sample):
    from .helpers import late
    return late(sample)
def loops(sample):
    return loops(sample - 1) if sample else mutual(sample)
def mutual(sample):
    return loops(sample)
def reads(sample):
    return open(os.environ["X"]).read()
@dataclass
class Options:
    width: int = 3
options = Options()
def optional(sample):
    return options.width
import logging, threading
LOG = logging.getLogger(__name__)
LOCK = threading.Lock()
@functools.cache
def weight(sample):
    return 3
def wrapped(function):
    @functools.wraps(function)
    def inner(sample):
        return function(sample)
    return inner
@wrapped
def decorated(sample):
    LOG.info("one")
    with LOCK:
        return weight(sample) + 4
""",
}

Printer = Callable[..., CodePrint]


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Printer]:
    """The print of one callable of the package, after replacing text in one of its files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    count = iter(range(1000))

    def printing(name: str, file: str = "steps.py", old: str = "", new: str = "") -> CodePrint:
        forget()
        folder = tmp_path / str(next(count))
        (folder / PACKAGE).mkdir(parents=True)
        for path, text in FILES.items():
            assert path != file or old in text
            (folder / PACKAGE / path).write_text(text.replace(old, new) if path == file and old else text)
        monkeypatch.chdir(folder)
        sys.path[:0] = [str(folder)]
        reference = f"{PACKAGE}.steps:{name}"
        return codeprint.read(reference, sources.load_transform(reference))

    yield printing
    forget()


HELPERS, STEPS = f"of {PACKAGE}.helpers", f"of {PACKAGE}.steps"


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "reason"),
    [
        ("simple", "steps.py", "SCALE = 2", "SCALE = 3", f"constant SCALE {STEPS} changed 2 -> 3"),
        ("simple", "steps.py", "gain=3", "gain=5", f"default gain of simple {STEPS} changed 3 -> 5"),
        ("simple", "steps.py", "offset=4", "offset=0", f"default offset of simple {STEPS} changed 4 -> 0"),
        ("simple", "steps.py", "* gain", "/ gain", f"function simple {STEPS} changed"),
        ("simple", "helpers.py", "+ BIAS", "- BIAS", f"function shift {HELPERS} changed"),
        ("simple", "helpers.py", "BIAS = 1.5", "BIAS = 2.5", f"constant BIAS {HELPERS} changed 1.5 -> 2.5"),
        ("simple", "helpers.py", "{3, 4}", "{3, 5}", f"constant TABLE {HELPERS} changed"),
        ("simple", "helpers.py", "(x, len", "(x + 0, len", f"function inner {HELPERS} changed"),
        ("closed", "steps.py", "make(7)", "make(8)", f"closure factor of make.<locals>.closed {STEPS} changed 7 -> 8"),
        ("called", "steps.py", "SIZE = 5", "SIZE = 6", f"attribute SIZE of Callable {STEPS} changed 5 -> 6"),
        ("called", "steps.py", "DEPTH = 1", "DEPTH = 2", f"attribute DEPTH of Base {STEPS} changed 1 -> 2"),
        ("called", "steps.py", "Callable(3)", "Callable(4)", "attribute amount of transform changed 3 -> 4"),
        ("called", "steps.py", "x * 2", "x * 3", f"function Callable.twice {STEPS} changed"),
        ("called", "steps.py", "/ 2", "/ 3", f"function Callable.half {STEPS} changed"),
        ("called", "steps.py", "return sample\nclass", "return -sample\nclass", f"function Base.base {STEPS} changed"),
        ("bound", "steps.py", "Callable(3)", "Callable(4)", "attribute amount of object of transform changed 3 -> 4"),
        ("partial", "steps.py", "gain=9", "gain=8", "arguments of transform, named changed"),
        ("partial", "steps.py", "SCALE = 2", "SCALE = 3", f"constant SCALE {STEPS} changed 2 -> 3"),
        ("first", "steps.py", "sample + 1", "sample + 2", f"function <lambda> {STEPS} changed"),
        ("by_attribute", "helpers.py", "return x + 1", "return x + 2", f"function late {HELPERS} changed"),
        ("by_attribute", "helpers.py", "BIAS = 1.5", "BIAS = 2.5", f"constant BIAS {HELPERS} changed 1.5 -> 2.5"),
        ("by_attribute", "steps.py", '"a+"', '"b+"', f"constant WORD {STEPS} changed re 'a+' 32 -> re 'b+' 32"),
        ("imports_late", "helpers.py", "return x + 1", "return x + 2", f"function late {HELPERS} changed"),
        ("loops", "steps.py", "sample - 1", "sample - 2", f"function loops {STEPS} changed"),
        (
            "optional",
            "steps.py",
            "width: int = 3",
            "width: int = 4",
            f"attribute width of constant options {STEPS} changed",
        ),
    ],
)
def test_each_edit_that_changes_rows_is_seen_and_told(
    printed: Printer, name: str, file: str, old: str, new: str, reason: str
) -> None:
    found = codeprint.changes(printed(name).items, printed(name, file, old, new).items)
    assert any(text.startswith(reason) for text in found), found


@pytest.mark.parametrize("name", ["simple", "closed", "called", "partial", "by_attribute", "loops", "optional"])
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("steps.py", "", ""),
        ("steps.py", "  # a comment", ""),
        ("steps.py", "SCALE = 2\n", "# more\n\n\nSCALE = 2\n"),
        ("steps.py", "A sentence.", "Another one."),
        ("steps.py", "    return sample * factor", "    return (sample\n            * factor)"),
        ("helpers.py", "{3, 4}", "{4, 3}"),
    ],
)
def test_comments_space_docstrings_and_the_place_change_nothing(
    printed: Printer, name: str, file: str, old: str, new: str
) -> None:
    assert printed(name).items == printed(name, file, old, new).items


def test_what_it_reads_is_not_seen_and_said(printed: Printer) -> None:
    found = printed("reads").not_seen
    assert any("open()" in text for text in found)
    assert any("os.environ" in text for text in found)
    assert printed("simple").not_seen == set()


def test_loggers_and_locks_are_the_processs_own_and_not_followed(printed: Printer) -> None:
    found = printed("decorated")
    assert found.not_seen == set()
    assert len(found.items) < 15


def test_a_graph_without_end_is_not_seen_to_its_end_and_said(printed: Printer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codeprint, "VALUES", 5)
    assert any("beyond" in text for text in printed("called").not_seen)


def test_the_files_of_the_package_are_known_and_no_librarys(printed: Printer) -> None:
    found = printed("simple")
    assert {os.path.basename(path) for path in found.files} == {"steps.py", "helpers.py"}
    assert all(len(digest) == 64 for digest in found.files.values())


def test_a_print_is_the_same_in_every_process(printed: Printer) -> None:
    found = printed("called")
    assert "called" in FILES["steps.py"]
    code = (
        "import json, sys; from dataserve.server import codeprint, sources\n"
        "r = sys.argv[1]; print(json.dumps(codeprint.read(r, sources.load_transform(r)).items, sort_keys=True))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code, f"{PACKAGE}.steps:{name}"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for name, seed in (("called", "1"), ("called", "2"), ("simple", "1"), ("simple", "2"))
    ]
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert " at 0x" not in "".join(told)
    assert len(found.items) > 10


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], CodePrint]:
    """The print of a transform written with torchvision's."""
    pytest.importorskip("torchvision.transforms")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    name = f"composed_{os.getpid()}"

    def printing(text: str) -> CodePrint:
        head = "import torch\nfrom torchvision import transforms as T\nfrom torchvision.transforms import v2\n"
        (tmp_path / f"{name}.py").write_text(head + text)
        importlib.invalidate_caches()
        try:
            return codeprint.read(f"{name}:t", sources.load_transform(f"{name}:t"))
        finally:
            del sys.modules[name]

    return printing


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (
            "t = T.Compose([T.Resize(256), T.CenterCrop(224)])",
            "t = T.Compose([T.Resize(224), T.CenterCrop(224)])",
            "Resize(size=256, interpolation=bilinear, max_size=None, antialias=True) became Resize(size=224, inter",
        ),
        (
            "t = T.Compose([T.Pad(2), T.CenterCrop(224)])",
            "t = T.Compose([T.CenterCrop(224), T.Pad(2)])",
            "Pad(padding=2, fill=0, padding_mode=constant) became CenterCrop(size=(224, 224))",
        ),
        ("t = T.Normalize([0.5], [0.5])", "t = T.Normalize([0.5], [0.25])", "transform changed"),
        (
            "t = v2.Compose([v2.ToDtype(torch.uint8)])",
            "t = v2.Compose([v2.ToDtype(torch.float32)])",
            "step 1 of transform changed",
        ),
        ("t = torch.nn.Sequential(T.Resize(8))", "t = torch.nn.Sequential(T.Resize(9))", "Resize(size=8"),
        (
            "t = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 1))\nt[1].weight.data.fill_(1); t[1].bias.data.fill_(1)",
            "t = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 1))\nt[1].weight.data.fill_(2); t[1].bias.data.fill_(1)",
            "step 2 of transform changed",
        ),
        ("t = T.Compose([T.ToTensor()])", "t = T.Compose([T.ToTensor(), T.Pad(1)])", "step 2 of transform is new"),
        (
            "t = T.Compose([f := (lambda s: s + 1), lambda s: s * 2])",
            "t = T.Compose([f := (lambda s: s * 2), lambda s: s + 1])",
            "function <lambda>",
        ),
        (
            "def a(s): return s\ndef b(s): return s\nt = T.Compose([a, b])",
            "def a(s): return s\ndef b(s): return s\nt = T.Compose([b, a])",
            "MODULE.a became MODULE.b",
        ),
    ],
)
def test_parameters_and_the_order_of_torchvisions_steps_are_seen(
    composed: Callable[[str], CodePrint], one: str, other: str, reason: str
) -> None:
    found = [text.replace(f"composed_{os.getpid()}", "MODULE") for text in _changes(composed(one), composed(other))]
    assert any(text.startswith(reason) for text in found), found
    assert _changes(composed(one), composed(one)) == []


def _changes(one: CodePrint, other: CodePrint) -> list[str]:
    return codeprint.changes(one.items, other.items)
