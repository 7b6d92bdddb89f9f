"""server/images.py: every kind of picture becomes uint8 `C x H x W` by a stated rule, or is refused."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataserve.protocol.errors import DataError
from dataserve.server import images

SCENE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 13  # 2 high, 3 wide, no symmetry


def test_grey_is_one_channel_and_colour_three() -> None:
    grey = images.to_array(Image.fromarray(SCENE[..., 0]))
    colour = images.to_array(Image.fromarray(SCENE))
    np.testing.assert_array_equal(grey, SCENE[np.newaxis, ..., 0])
    np.testing.assert_array_equal(colour, SCENE.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("mode", "channels"),
    [
        ("1", 1),
        ("L", 1),
        ("LA", 1),
        ("RGB", 3),
        ("RGBA", 3),
        ("P", 3),
        ("PA", 3),
        ("CMYK", 3),
        ("YCbCr", 3),
        ("HSV", 3),
    ],
)
def test_each_mode_of_8_bits_becomes_grey_or_rgb(mode: str, channels: int) -> None:
    picture = Image.new("RGB", (3, 2), (200, 100, 50)).convert("L" if mode in ("1", "LA") else "RGB")
    if mode == "PA":
        picture = picture.convert("P")
    pixels = images.to_array(picture.convert(mode))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (channels, 2, 3)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_more_than_8_bits_are_refused_and_never_clipped(mode: str) -> None:
    with pytest.raises(DataError, match=f"mode {mode}") as caught:
        images.to_array(Image.new(mode, (3, 2)))
    assert caught.value.code == "bad_sample"
    assert "--transform" in caught.value.remedy


def test_a_16_bit_png_as_pillow_opens_it_is_refused(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    with Image.open(tmp_path / "ramp.png") as picture, pytest.raises(DataError, match="8 bits"):
        images.to_array(picture)


def test_transparency_is_laid_on_the_background() -> None:
    clear = images.to_array(Image.new("RGBA", (1, 1), (10, 20, 30, 0)))
    half = images.to_array(Image.new("LA", (1, 1), (0, 128)))
    opaque = images.to_array(Image.new("RGBA", (1, 1), (10, 20, 30, 255)))
    assert clear.ravel().tolist() == list(images.BACKGROUND)
    assert half.ravel().tolist() == [127]
    assert opaque.ravel().tolist() == [10, 20, 30]


@pytest.mark.parametrize("mode", ["P", "RGB", "L"])
def test_a_transparent_colour_of_a_png_is_laid_on_the_background(mode: str) -> None:
    picture = Image.new("RGB", (2, 1), (9, 9, 9))
    picture.putpixel((1, 0), (204, 204, 204))
    picture = picture.convert(mode)
    key = picture.getpixel((0, 0))
    data = io.BytesIO()
    picture.save(data, "PNG", transparency=key)
    with Image.open(data) as again:
        pixels = images.to_array(again)
    assert pixels[:, 0, 0].tolist() == [255] * len(pixels)
    assert pixels[:, 0, 1].tolist() == [204] * len(pixels)


#: What a camera stored for each orientation when the scene was upright: EXIF 2.32, tag 0x0112.
STORED = {
    1: lambda scene: scene,
    2: lambda scene: scene[:, ::-1],
    3: lambda scene: scene[::-1, ::-1],
    4: lambda scene: scene[::-1],
    5: lambda scene: scene.transpose(1, 0, 2),
    6: lambda scene: np.rot90(scene, 1),
    7: lambda scene: np.rot90(scene, 2).transpose(1, 0, 2),
    8: lambda scene: np.rot90(scene, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_each_exif_orientation_gives_the_upright_scene(orientation: int) -> None:
    picture = Image.fromarray(np.ascontiguousarray(STORED[orientation](SCENE)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = io.BytesIO()
    picture.save(data, "PNG", exif=exif)
    with Image.open(data) as again:
        np.testing.assert_array_equal(images.to_array(again), SCENE.transpose(2, 0, 1))
    with Image.open(data) as again:  # as torchvision's loader opens it
        np.testing.assert_array_equal(images.to_array(again.convert("RGB")), SCENE.transpose(2, 0, 1))


def test_orientation_survives_transparency() -> None:
    picture = Image.fromarray(np.ascontiguousarray(STORED[6](SCENE))).convert("RGBA")
    exif = Image.Exif()
    exif[0x0112] = 6
    data = io.BytesIO()
    picture.save(data, "PNG", exif=exif)
    with Image.open(data) as again:
        np.testing.assert_array_equal(images.to_array(again), SCENE.transpose(2, 0, 1))


@given(st.binary(max_size=64))
def test_broken_exif_counts_as_none(noise: bytes) -> None:
    picture = Image.fromarray(SCENE)
    picture.info["exif"] = b"Exif\0\0" + noise
    assert images.to_array(picture).shape in {(3, 2, 3), (3, 3, 2)}


def test_too_many_pixels_are_refused_by_the_header_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    Image.fromarray(SCENE).save(data, "PNG")
    monkeypatch.setattr(images, "MAX_PIXELS", 5)
    header = io.BytesIO(data.getvalue()[:60])  # no pixel in it: nothing can be decoded
    with Image.open(header) as picture, pytest.raises(DataError, match="3 x 2 pixels, more than 5"):
        images.to_array(picture)
