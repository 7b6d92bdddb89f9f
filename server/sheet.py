"""A contact sheet: cells with a picture, a waveform or a text, each with its caption, drawn by Pillow."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

PAPER, CARD, INK, PALE, WAVE = "#f4f4f1", "#ffffff", "#1c1c1a", "#85857d", "#2f6f9f"
MARGIN, GAP, PAD = 28, 14, 8  # pixels
SMALL_PIXELS = 64  #: pictures up to this side are magnified, pixel by pixel
SIDE_SMALL, SIDE_LARGE, SIDE_PANEL = 112, 176, 224
TITLE, CAPTION, NOTE = 22, 14, 11  # sizes of type
CHECK_PIXELS = 8  # the squares behind what is transparent
ASPECT = 1.5  # a sheet is wider than high

Pixels = npt.NDArray[np.uint8]


class Cell(NamedTuple):
    """What one place of the sheet shows. `content` is a picture uint8 `H x W x C` (C 1, 3 or 4), a waveform float `(n,)`
    within [-1, 1], or text."""

    content: npt.NDArray[Any] | str
    caption: str
    note: str


def draw(title: str, subtitle: str, cells: Sequence[Cell]) -> bytes:
    """The sheet as a PNG."""
    from PIL import Image as pil
    from PIL import ImageDraw as drawing

    side = _side(cells)
    columns = min(len(cells), max(1, round(math.sqrt(len(cells) * ASPECT))))
    lines = -(-len(cells) // columns)
    high = side + CAPTION + NOTE + 3 * PAD
    head = MARGIN + TITLE + CAPTION + 3 * PAD
    least = round(max(_font(TITLE).getlength(title), _font(CAPTION).getlength(subtitle)))
    width = max(columns * (side + GAP) - GAP, least) + 2 * MARGIN
    sheet = pil.new("RGB", (width, head + lines * (high + GAP) - GAP + MARGIN), PAPER)
    pen = drawing.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, INK, _font(TITLE), anchor="lt")
    pen.text((MARGIN, MARGIN + TITLE + PAD), subtitle, PALE, _font(CAPTION), anchor="lt")
    for number, cell in enumerate(cells):
        line, column = divmod(number, columns)
        _draw_cell(sheet, pen, cell, MARGIN + column * (side + GAP), head + line * (high + GAP), side, high)
    out = io.BytesIO()
    sheet.save(out, "PNG", optimize=True)
    return out.getvalue()


def _side(cells: Sequence[Cell]) -> int:
    """How large the place of a content is: the same for all."""
    pictures = [cell.content.shape for cell in cells if isinstance(cell.content, np.ndarray) and cell.content.ndim == 3]
    if len(pictures) < len(cells):
        return SIDE_PANEL
    return SIDE_SMALL if max(max(shape[:2]) for shape in pictures) <= SMALL_PIXELS else SIDE_LARGE


def _draw_cell(sheet: Image, pen: ImageDraw, cell: Cell, left: int, top: int, side: int, high: int) -> None:
    pen.rectangle((left, top, left + side - 1, top + high - 1), CARD)
    if isinstance(cell.content, str):
        _draw_text(pen, cell.content, left, top, side)
    elif cell.content.ndim == 1:
        _draw_wave(pen, cell.content, left, top, side)
    else:
        picture = _fitted(cell.content, side)
        sheet.paste(picture, (left + (side - picture.width) // 2, top + (side - picture.height) // 2))
    room = side - 2 * PAD
    base = top + side + PAD + CAPTION  # both lines stand on their base, whatever letters they have
    pen.text((left + PAD, base), _cut(cell.caption, CAPTION, room), INK, _font(CAPTION), anchor="ls")
    pen.text((left + PAD, base + PAD + NOTE), _cut(cell.note, NOTE, room), PALE, _font(NOTE), anchor="ls")


def _fitted(pixels: Pixels, side: int) -> Image:
    """The picture within `side` x `side`: magnified by a whole number, or reduced smoothly."""
    from PIL import Image as pil
    from PIL.Image import Resampling

    high, wide, channels = pixels.shape
    picture = pil.fromarray(np.ascontiguousarray(pixels[:, :, 0] if channels == 1 else pixels))
    if max(high, wide) > side:
        scale = side / max(high, wide)
        picture = picture.resize((max(1, round(wide * scale)), max(1, round(high * scale))), Resampling.LANCZOS)
    elif (times := side // max(high, wide)) > 1:
        picture = picture.resize((wide * times, high * times), Resampling.NEAREST)
    if channels != 4:
        return picture.convert("RGB")
    rows, columns = np.indices((picture.height, picture.width)) // CHECK_PIXELS
    squares = np.where((rows + columns) % 2, 255, 208).astype(np.uint8)
    return pil.alpha_composite(pil.fromarray(squares).convert("RGBA"), picture).convert("RGB")


def _draw_wave(pen: ImageDraw, wave: npt.NDArray[Any], left: int, top: int, side: int) -> None:
    """From the least to the greatest of the values that fall on each pixel and the first behind it."""
    middle, half = top + side / 2, side / 2 - PAD
    pen.line((left + PAD, middle, left + side - PAD - 1, middle), PAPER)
    width = side - 2 * PAD
    for at in range(width):
        start = at * len(wave) // width
        values = wave[start : max(start, (at + 1) * len(wave) // width) + 1]
        ends = middle - float(values.max()) * half, middle - float(values.min()) * half
        pen.line((left + PAD + at, ends[0], left + PAD + at, ends[1]), WAVE)


def _draw_text(pen: ImageDraw, text: str, left: int, top: int, side: int) -> None:
    font, room = _font(CAPTION), side - 2 * PAD
    letters = max(8, int(room / (font.getlength("abcdefghijklmnopqrstuvwxyz ") / 27)))
    lines = [part for line in text.splitlines() for part in (textwrap.wrap(line, letters) or [""])]
    most = room // (CAPTION + 4)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1] + " ..."]
    for number, line in enumerate(lines):
        base = top + PAD + CAPTION + number * (CAPTION + 4)
        pen.text((left + PAD, base), _cut(line, CAPTION, room), INK, font, anchor="ls")


def _cut(text: str, size: int, room: int) -> str:
    """As much of a text as fits, its end replaced by dots."""
    font = _font(size)
    text = " ".join(text.split())
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "...") > room:
        text = text[:-1]
    return text.rstrip() + "..."


@functools.cache
def _font(size: int) -> FreeTypeFont:
    """A font that has the letters of most of the world where it is installed, else Pillow's own."""
    from PIL import ImageFont as fonts

    try:
        return fonts.truetype("DejaVuSans.ttf", size)
    except OSError:
        own = fonts.load_default(size)
        assert isinstance(own, fonts.FreeTypeFont), "Pillow's wheels have FreeType"
        return own
