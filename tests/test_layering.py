"""Who may import what: DESIGN section 3 as an `ast` walk over every module of the three packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
SIDES = ("server", "client", "protocol")
MODULES = sorted(path for side in SIDES for path in (CHECKOUT / side).glob("*.py"))

PROTOCOL = "version limits errors checks messages codec manifest address partition draws plan blocks subset weighted folds kinds memory"
PURE = {
    *(f"protocol/{name}" for name in PROTOCOL.split()),
    *(f"server/{name}" for name in ("events", "engine", "service", "catalog", "registry", "metrics", "readahead")),
    *(f"client/{name}" for name in ("events", "pending", "session")),
}
#: All that a pure module may import: nothing here has a clock, a socket, a file or a thread.
PURE_IMPORTS = set(
    "__future__ abc bisect collections dataclasses enum functools hashlib heapq itertools json keyword math operator re "
    "string struct textwrap typing".split()
)
PURE_EXTRAS = {
    "protocol/codec": {"msgpack"},
    **{f"protocol/{name}": {"numpy"} for name in "partition draws plan blocks subset weighted folds".split()},
    "protocol/manifest": {"numpy"},
    "server/readahead": {"numpy"},
}
IMPURE_BUILTINS = {"open", "print", "input"}

#: Pillow decodes in one place and draws in another.
TWO_DOORS = {("server", "PIL"): ["images", "sheet"]}
#: One door a side. numpy, torch and torchvision are what samples and batches are made of, and have none.
NO_DOOR = {"numpy", "torch", "torchvision", "dataserve"}
ONLY_DOOR = {"zmq": ("server/transport", "client/transport"), "msgpack": ("protocol/codec",)}

NEVER_IMPORTED = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", *SIDES}
NEVER_CALLED = {"eval", "exec", "compile", "__import__"}
NEVER_METHODS = {"recv_pyobj", "send_pyobj"}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(level, dotted name) of every import, late ones too; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "dataserve" and not node.level:
                yield from ((0, f"dataserve.{alias.name}") for alias in node.names)
            else:
                yield node.level, node.module or ""


def complaints(name: str, source: str) -> list[str]:
    """What is wrong with the module `side/name` of that source."""
    tree = ast.parse(source)
    found = []
    for level, dotted in imports(tree):
        found += _of_import(name, level, dotted)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += _of_call(name, node)
    return found


def _of_call(name: str, call: ast.Call) -> list[str]:
    found = []
    if isinstance(call.func, ast.Name) and call.func.id in NEVER_CALLED:
        found.append(f"calls {call.func.id}")
    if isinstance(call.func, ast.Name) and name in PURE and call.func.id in IMPURE_BUILTINS:
        found.append(f"is pure and calls {call.func.id}")
    if isinstance(call.func, ast.Attribute) and call.func.attr in NEVER_METHODS:
        found.append(f"calls {call.func.attr}")
    for keyword in call.keywords:
        refused = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg == "allow_pickle" and not refused:
            found.append("allows pickle")
    return found


def _of_import(name: str, level: int, dotted: str) -> list[str]:
    side = name.partition("/")[0]
    if level:
        return [f"climbs out of its package with {'.' * level}{dotted}"] if level > 1 else []
    found = []
    first, _, rest = dotted.partition(".")
    if first in NEVER_IMPORTED:
        found.append(f"imports {first}")
    if first == "dataserve":
        other = rest.partition(".")[0]
        if other == side:
            found.append(f"imports {dotted} of its own package absolutely")
        elif other != "protocol":
            found.append(f"imports {dotted}: the sides meet in protocol only")
    elif name in PURE and first not in PURE_IMPORTS | PURE_EXTRAS.get(name, set()):
        found.append(f"is pure and imports {dotted}")
    if first in ONLY_DOOR and name not in ONLY_DOOR[first]:
        found.append(f"imports {first}, whose door is {' or '.join(ONLY_DOOR[first])}")
    return found


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    assert complaints(name_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("server/cli", "import dataserve.client.dataset", "the sides meet in protocol only"),
        ("client/dataset", "from dataserve import server", "the sides meet in protocol only"),
        ("protocol/plan", "from dataserve.server import spec", "the sides meet in protocol only"),
        ("server/cli", "from dataserve.server import spec", "of its own package absolutely"),
        ("server/cli", "from ..client import dataset", "climbs out"),
        ("server/cli", "import client", "imports client"),
        ("server/engine", "def f():\n    import time", "is pure and imports time"),
        ("client/session", "from threading import Lock", "is pure and imports threading"),
        ("protocol/errors", "import numpy", "is pure and imports numpy"),
        ("protocol/manifest", "def f(path): return open(path)", "is pure and calls open"),
        ("server/daemon", "import zmq.asyncio", "whose door is"),
        ("server/service", "import msgpack", "whose door is"),
        ("server/store", "import pickle", "imports pickle"),
        ("server/sources", "import numpy\nnumpy.load('x', allow_pickle=True)", "allows pickle"),
        ("client/transport", "def f(socket): return socket.recv_pyobj()", "calls recv_pyobj"),
        ("client/dataset", "eval('1')", "calls eval"),
    ],
)
def test_each_rule_is_seen_to_be_broken(name: str, source: str, complaint: str) -> None:
    assert any(complaint in found for found in complaints(name, source))


def test_the_walk_lets_honest_code_pass() -> None:
    source = "from . import engine\nfrom dataserve.protocol import limits\nimport numpy\nnumpy.load('x', allow_pickle=False)\nmodel.eval()"
    assert complaints("server/store", source) == []


def test_each_outside_library_has_one_door_a_side() -> None:
    doors: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in MODULES:
        for level, dotted in imports(ast.parse(path.read_text())):
            library = dotted.partition(".")[0]
            if not level and library not in sys.stdlib_module_names | NO_DOOR:
                doors[path.parent.name, library].add(path.stem)
    assert {key: sorted(modules) for key, modules in doors.items() if len(modules) > 1} == TWO_DOORS


def test_every_pure_module_is_there() -> None:
    assert PURE - {name_of(path) for path in MODULES} == set()


def test_every_module_of_protocol_is_pure() -> None:
    protocol = {name_of(path) for path in MODULES if path.parent.name == "protocol"}
    assert protocol - {"protocol/__init__"} <= PURE


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("dataserve.protocol.messages", ("torch", "zmq", "multiprocessing")),
        ("dataserve.server.cli", ("torch", "multiprocessing")),
        ("dataserve.server.daemon", ("torch", "multiprocessing")),
        ("dataserve.client", ("torch",)),
    ],
)
def test_importing_stays_light(module: str, absent: tuple[str, ...]) -> None:
    side, name = module.removeprefix("dataserve.").partition(".")[::2]
    if not (CHECKOUT / side / f"{name or '__init__'}.py").exists():
        pytest.skip(f"{module} is not there")
    code = f"import sys, {module}; print(*(name for name in {absent} if name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, [], "")
