"""server/rows.py: single rows as values, their origins and classes, and how a value is told on one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError
from dataserve.server import store
from dataserve.server.rows import Rows, class_column, class_name, described

from .preparing import Child, named, start
from .stores import write_store

__all__ = ["start"]

STEPS = """
import torch
def samples():
    return [{"text": "né " * n, "raw": bytes([n] * n), "half": torch.full((3,), n + 0.5, dtype=torch.bfloat16), "y": n} for n in range(9)]
"""


@pytest.fixture
def mixed(start: type[Child], isolated: Path) -> store.Sealed:
    (isolated / "steps.py").write_text(STEPS)
    spec = {"name": "mixed", "source": "steps:samples", "version": "1"}
    from dataserve.server.spec import DatasetSpec

    _, events, words = start(spec=DatasetSpec(**spec).to_map()).end()  # type: ignore[call-arg]
    (sealed,) = named(events, "sealed")
    assert words == ""
    return store.open_sealed(sealed["path"])


def test_a_row_has_the_values_that_the_sample_had(mixed: store.Sealed) -> None:
    rows = Rows(mixed)
    for row in (0, 1, 8):
        assert (rows.value("text", row), rows.value("raw", row)) == ("né " * row, bytes([row] * row))
        assert rows.value("y", row) == row
        half = rows.value("half", row)
        assert isinstance(half, np.ndarray)
        assert (half.dtype, half.tolist()) == (np.float32, [row + 0.5] * 3)


def test_without_origins_a_row_is_the_sample_of_its_number(mixed: store.Sealed) -> None:
    assert manifest.ORIGINS not in [column.name for column in mixed.manifest.columns]
    assert Rows(mixed).origin(7) == (7, None)


def test_offsets_that_lead_astray_are_an_error(mixed: store.Sealed) -> None:
    file = Path(mixed.path, "text.offsets.npy")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[4096 + 8 * 4 : 4096 + 8 * 5] = (2**40).to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(DataError, match="row 3 lies at"):
        Rows(mixed).row("text", 3)


@pytest.mark.parametrize(
    ("columns", "column"),
    [
        ({"label": (), "other": ()}, "label"),
        ({"x": (3,), "y": ()}, "y"),
        ({"a": (), "b": ()}, None),
        ({"x": (3,)}, None),
    ],
)
def test_classes_name_the_numbers_of_one_column(
    isolated: Path, columns: dict[str, tuple[int, ...]], column: str | None
) -> None:
    arrays = {name: np.zeros((4, *shape), np.int64) for name, shape in columns.items()}
    _, found = write_store(isolated, arrays, classes=("cat", "dog"))
    assert class_column(found) == column
    if column is not None:
        assert [class_name(found, column, value) for value in (1, 2, -1)] == ["dog", "no class", "no class"]
        assert class_name(found, "elsewhere", 1) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (True, "True"),
        (0.1 + 0.2, "0.3"),
        ("né", "'né'"),
        ("x" * 70, "'" + "x" * 60 + "'... (70 characters)"),
        (b"\x00" * 61, repr(b"\x00" * 60) + "... (61 bytes)"),
        (np.array([1, 2], np.int16), "int16 [1, 2]"),
        (np.arange(12, dtype=np.uint8).reshape(3, 4), "uint8 3 x 4, 0 to 11, mean 5.5"),
        (np.zeros(9, np.complex64), "complex64 9"),
        (np.zeros((0,), np.float32), "float32 []"),
    ],
)
def test_a_value_on_one_line(value: object, text: str) -> None:
    assert described(value) == text  # type: ignore[arg-type]
