"""server/preview.py and sheet.py: each kind of column is shown, and the pixels on the sheet are the store's."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dataserve.protocol.errors import UserError
from dataserve.server import preview, sheet, store
from dataserve.server.sheet import Cell

from .daemons import run
from .stores import write_store

COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (90, 90, 0)]


def seen(data: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        return np.array(image.convert("RGB"))


def count_of(pixels: npt.NDArray[np.uint8], colour: tuple[int, ...]) -> int:
    return int((pixels == np.array(colour, np.uint8)).all(axis=2).sum())


def made(folder: Path, images: tuple[str, ...] = (), **columns: Any) -> store.Sealed:
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    path, _ = write_store(folder, arrays, images=images, classes=("red", "green", "blue", "olive"))
    return store.open_sealed(path)


@pytest.fixture
def colours(isolated: Path) -> store.Sealed:
    image = np.array(COLOURS, np.uint8).reshape(4, 3, 1, 1).repeat(16, 2).repeat(16, 3)
    return made(isolated / "colours", ("image",), image=image, label=np.arange(4))


def test_each_row_is_there_in_its_colour_magnified_by_a_whole_number(colours: store.Sealed) -> None:
    pixels = seen(preview.preview(colours, 40, 0, None))
    times = sheet.SIDE_SMALL // 16
    assert [count_of(pixels, colour) for colour in COLOURS] == [(16 * times) ** 2] * 4


def test_rows_are_a_function_of_the_seed_without_repetition(colours: store.Sealed) -> None:
    drawn = [preview.preview(colours, 2, seed, None) for seed in range(8)]
    assert drawn[3] == preview.preview(colours, 2, 3, None)
    assert len(set(drawn)) > 1
    for data in drawn:
        assert sum(count_of(seen(data), colour) > 0 for colour in COLOURS) == 2


def test_captions_have_the_class_and_the_row(colours: store.Sealed, monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[Cell] = []
    monkeypatch.setattr(sheet, "draw", lambda title, subtitle, given: cells.extend(given) or b"")
    preview.preview(colours, 40, 0, None)
    assert [(cell.caption, cell.note) for cell in cells] == (
        [("red", "row 0"), ("green", "row 1"), ("blue", "row 2"), ("olive", "row 3")]
    )
    cells.clear()
    preview.preview(colours, 40, 0, "label")
    assert [cell.content for cell in cells] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (np.linspace(-2, 3, 4 * 3 * 8 * 8, dtype=np.float32).reshape(4, 3, 8, 8), (8, 8, 3)),
        (np.linspace(0, 1, 4 * 8 * 6).reshape(4, 8, 6), (8, 6, 1)),
        (np.arange(4 * 4 * 5 * 6, dtype=np.uint8).reshape(4, 4, 5, 6), (5, 6, 4)),
        (np.arange(4 * 100).reshape(4, 100), (100,)),
    ],
)
def test_numbers_are_scaled_over_all_rows(
    isolated: Path, values: npt.NDArray[Any], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells: list[Cell] = []
    real = sheet.draw
    monkeypatch.setattr(
        sheet, "draw", lambda title, subtitle, given: cells.extend(given) or real(title, subtitle, given)
    )
    seen(preview.preview(made(isolated / "numbers", x=values), 40, 0, None))
    contents = [cell.content for cell in cells]
    assert all(isinstance(content, np.ndarray) and content.shape == shape for content in contents)
    low, high = min(float(np.min(each)) for each in contents), max(float(np.max(each)) for each in contents)  # type: ignore[type-var]
    if len(shape) == 1:
        assert (low, high) == (0, 1)
    elif values.dtype != np.uint8:
        assert (low, high) == (0, 255)
    else:
        assert np.array_equal(np.moveaxis(contents[1], -1, 0), values[1])  # type: ignore[arg-type]


def test_values_that_are_no_numbers_and_a_constant_picture_are_drawn_all_the_same(isolated: Path) -> None:
    wild = np.zeros((4, 3, 8, 8), np.float32)
    seen(preview.preview(made(isolated / "constant", x=wild), 4, 0, None))
    wild[0, 0, 0, :3] = np.nan, 1, -1
    seen(preview.preview(made(isolated / "wild", x=wild), 4, 0, None))


def test_a_large_picture_is_reduced_and_a_long_text_is_cut_to_its_cell(isolated: Path) -> None:
    large = made(isolated / "large", ("x",), x=np.full((2, 1, 700, 30), 90, np.uint8))
    pixels = seen(preview.preview(large, 2, 0, None))
    assert pixels.shape[0] < 400
    assert count_of(pixels, (90, 90, 90)) == 2 * sheet.SIDE_LARGE * round(30 * sheet.SIDE_LARGE / 700)
    words = seen(sheet.draw("t", "s", [Cell("word " * 1000 + "\n" + "x" * 500, "c" * 500, "n" * 500)]))
    assert words.shape[1] == sheet.SIDE_PANEL + 2 * sheet.MARGIN
    edge = words[:, -sheet.MARGIN - sheet.PAD // 2 :]
    assert {tuple(colour) for colour in edge.reshape(-1, 3)} <= {(0xF4, 0xF4, 0xF1), (0xFF, 0xFF, 0xFF)}


def test_an_unknown_column_is_refused_with_the_nearest(colours: store.Sealed) -> None:
    with pytest.raises(UserError, match="Did you mean 'image'"):
        preview.preview(colours, 2, 0, "imag")


def test_the_command_draws_mnist_without_torch(isolated: Path, mnist_root: Path) -> None:
    words = ("torchvision:MNIST", "--arg", f"root={mnist_root}", "--arg", "train=false", "--name", "mnist")
    assert run("prepare", *words).returncode == 0
    code = (
        "import sys; from dataserve.server import cli; status = cli.main(sys.argv[1:]); "
        "assert not {'torch', 'multiprocessing'} & sys.modules.keys(); sys.exit(status)"
    )
    out = isolated / "mnist.png"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code, "preview", "mnist", "-o", str(out), "--rows", "9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "9 rows of mnist@" in ended.stdout
    pixels = seen(out.read_bytes())
    assert (pixels.max(), len(np.unique(pixels)) > 100) == (255, True)
    assert run("preview", "mnist", "-o", "/dev/null/x.png").returncode == 1
    assert "ends in .png" in run("preview", "mnist", "-o", "x.jpg").stderr
