"""The wheel holds what the tree holds: a nested package would be left out of a `package-dir` wheel without a word."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
SIDES = ("server", "client", "protocol")
SHIPPED = ("*.py", "*.md", "py.typed")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of a copy of the tree, built without a network."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, tmp_path)
    for side in SIDES:
        shutil.copytree(CHECKOUT / side, tmp_path / side, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", "dist", "."]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (tmp_path / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    packed = {name for name in names if ".dist-info/" not in name}
    tree = {
        f"dataserve/{path.relative_to(CHECKOUT)}"
        for side in SIDES
        for pattern in SHIPPED
        for path in (CHECKOUT / side).rglob(pattern)
    }
    assert packed == tree
    assert {f"dataserve/{side}/{file}" for side in SIDES for file in ("__init__.py", "py.typed")} <= packed
    assert "dataserve = dataserve.server.cli:main" in entry_points


@pytest.mark.parametrize("side", SIDES)
def test_a_side_has_no_nested_package(side: str) -> None:
    nested = {path.parent.name for path in (CHECKOUT / side).rglob("*.py")} - {side}
    assert nested == set(), "setuptools lists packages one by one here: keep each side flat"
