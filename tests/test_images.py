"""server/images.py: every kind of picture becomes uint8 `C x H x W` by a stated rule, or is refused."""

from __future__ import annotations

import csv
import io
import resource
import shutil
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from dataserve.protocol.errors import DataError
from dataserve.server import images
from dataserve.server.images import Rules
from dataserve.server.spec import MODES

SCENE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 13  # 2 high, 3 wide, no symmetry


def load(data: bytes, **rules: Any) -> images.Pixels:
    """A file's bytes as a source opens them and a store gets them."""
    return images.to_array(images.load(data, Rules(**rules)), Rules(**rules))


def test_grey_is_one_channel_and_colour_three() -> None:
    grey = images.to_array(Image.fromarray(SCENE[..., 0]))
    colour = images.to_array(Image.fromarray(SCENE))
    np.testing.assert_array_equal(grey, SCENE[np.newaxis, ..., 0])
    np.testing.assert_array_equal(colour, SCENE.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("shape", [(64, 127), (64, 128), (200, 301)])  # below, at and above 8192 pixels
def test_pixels_are_pillows_own_on_both_ways_out_of_it(shape: tuple[int, int], mode: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (*shape, 4), np.uint8)
    picture = Image.fromarray(values).convert(mode)
    pixels = images.to_array(picture, Rules(mode))
    expected = np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)
    np.testing.assert_array_equal(pixels, expected)
    assert type(pixels) is images.Pixels


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


@pytest.mark.parametrize("mode", ["LAB", "La"])
@pytest.mark.parametrize(("declared", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 4)])
def test_a_mode_that_pillow_converts_to_few_others_reaches_every_declared_one(
    mode: str, declared: str, channels: int
) -> None:
    picture = Image.new("L", (3, 2), 200)
    picture = picture.convert("LA").convert("La") if mode == "La" else picture.convert("RGB").convert("LAB")
    pixels = images.to_array(picture, Rules(mode=declared))
    assert pixels.shape == (channels, 2, 3)
    assert np.abs(pixels[0].astype(int) - 200).max() <= 3


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_more_than_8_bits_are_refused_where_no_mode_is_declared(mode: str) -> None:
    with pytest.raises(DataError, match=f"mode {mode}") as caught:
        images.to_array(Image.new(mode, (3, 2)))
    assert caught.value.code == "bad_sample"
    assert "--transform" in caught.value.remedy


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_a_16_bit_ramp_is_scaled_by_257_where_a_mode_is_declared(tmp_path: Path, suffix: str) -> None:
    ramp = np.linspace(0, 65535, 4096, dtype=np.uint16).reshape(64, 64)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{suffix}")
    data = (tmp_path / f"ramp.{suffix}").read_bytes()
    for mode, channels in (("L", 1), ("RGB", 3), ("RGBA", 3)):
        pixels = load(data, mode=mode)
        for channel in pixels[:channels]:
            np.testing.assert_array_equal(channel, np.round(ramp / 257).astype(np.uint8))
    with pytest.raises(DataError, match="8 bits"):
        load(data, mode="keep")


@given(st.integers(0, 255))
def test_each_8_bit_value_survives_16_bits_exactly(value: int) -> None:
    picture = Image.fromarray(np.full((2, 2), value * 257, np.uint16))
    assert images.to_array(picture, Rules("L")).tolist() == [[[value] * 2] * 2]


def test_a_float_tiff_is_refused_with_the_remedy_and_never_becomes_black(tmp_path: Path) -> None:
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(tmp_path / "f.tiff")
    for mode in MODES:
        with pytest.raises(DataError, match="mode F") as caught:
            load((tmp_path / "f.tiff").read_bytes(), mode=mode)
        assert "--transform" in caught.value.remedy


def test_a_32_bit_tiff_has_no_scale_and_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)).save(tmp_path / "i.tiff")
    with pytest.raises(DataError, match="mode I,"):
        load((tmp_path / "i.tiff").read_bytes(), mode="L")


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


def test_too_many_pixels_are_refused_by_the_header_before_decoding() -> None:
    data = io.BytesIO()
    Image.fromarray(SCENE).save(data, "PNG")
    header = data.getvalue()[:50]  # no pixel in it: nothing can be decoded
    with pytest.raises(DataError, match="3 x 2 pixels, more than 5"):
        load(header, max_pixels=5)
    with pytest.raises(OSError, match="truncated"):
        load(header, max_pixels=6)


def test_the_bound_on_pixels_may_lie_beyond_pillows_own_which_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    data = io.BytesIO()
    Image.fromarray(SCENE).save(data, "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2)  # 6 pixels are a bomb to Pillow now
    assert load(data.getvalue(), max_pixels=6).shape == (3, 2, 3)
    assert Image.MAX_IMAGE_PIXELS == 2
    with pytest.raises(DataError, match="has 6 pixels, more than 4"):
        load(data.getvalue(), max_pixels=4)


def test_truncated_pictures_are_taken_by_option_alone_and_the_global_does_not_leak() -> None:
    data = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(data, "JPEG")
    cut = data.getvalue()[: len(data.getvalue()) // 2]
    with pytest.raises(OSError, match="truncated"):
        load(cut, mode="L")
    assert load(cut, mode="L", truncated=True).shape == (1, 64, 64)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    with pytest.raises(OSError, match="truncated"):
        load(cut, mode="L")


def test_the_globals_come_back_after_a_failure() -> None:
    with pytest.raises(DataError):
        load(b"GIF89a is none", truncated=True, max_pixels=10**9)
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (89_478_485, False)


SIZES = st.integers(1, 70)


@given(
    SIZES,
    SIZES,
    st.one_of(st.tuples(SIZES), st.tuples(SIZES, SIZES)),
    st.one_of(st.tuples(SIZES), st.tuples(SIZES, SIZES)),
)
@settings(max_examples=40)
def test_resize_and_crop_are_torchvisions(
    width: int, height: int, resize: tuple[int, ...], crop: tuple[int, ...]
) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    pixels = np.random.default_rng(width * 100 + height).integers(0, 256, (height, width, 3), np.uint8)
    picture = Image.fromarray(pixels)
    if max(width, height) / min(width, height) * max(resize) > 4000:
        return
    expected = transforms.Compose([transforms.Resize(list(resize)), transforms.CenterCrop(list(crop * 2)[:2])])(picture)
    (found, label) = images.settle((picture, 7), Rules("RGB", resize, crop))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert label == 7


def test_a_declared_mode_decides_the_channels_of_every_picture() -> None:
    for source in ("1", "L", "LA", "RGB", "RGBA", "P", "CMYK", "YCbCr"):
        picture = Image.new("RGB", (3, 2), (200, 100, 50)).convert("L" if source == "LA" else "RGB").convert(source)
        assert [images.to_array(picture, Rules(mode)).shape[0] for mode in ("L", "RGB", "RGBA")] == [1, 3, 4]


def test_rgba_keeps_what_is_transparent() -> None:
    pixels = images.to_array(Image.new("RGBA", (1, 1), (10, 20, 30, 40)), Rules("RGBA"))
    assert pixels.ravel().tolist() == [10, 20, 30, 40]
    opaque = images.to_array(Image.new("RGB", (1, 1), (10, 20, 30)), Rules("RGBA"))
    assert opaque.ravel().tolist() == [10, 20, 30, 255]


def test_the_transparent_value_of_a_16_bit_png_is_laid_on_the_background() -> None:
    data = io.BytesIO()
    Image.fromarray(np.array([[1000, 257 * 9]], np.uint16)).save(data, "PNG", transparency=1000)
    found = load(data.getvalue(), mode="L")
    assert found.ravel().tolist() == [255, 9]


def test_16_bit_colour_with_a_transparent_colour_is_refused_for_its_high_bytes_do_not_tell_it() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def png(clear: bytes) -> bytes:
        pixels = chunk(b"IDAT", zlib.compress(b"\0" + struct.pack(">6H", 1000, 2000, 3000, 1001, 2000, 3000)))
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
        return b"\x89PNG\r\n\x1a\n" + head + clear + pixels + chunk(b"IEND", b"")

    assert load(png(b""), mode="RGB").ravel().tolist() == [3, 3, 7, 7, 11, 11]
    with pytest.raises(DataError, match="16-bit colour with one colour transparent"):
        load(png(chunk(b"tRNS", struct.pack(">3H", 1000, 2000, 3000))), mode="RGB")


def test_an_eps_file_under_a_pictures_name_is_refused_and_no_program_is_run() -> None:
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    assert Image.open(io.BytesIO(data)).format == "EPS", "Pillow itself would take it"
    with pytest.raises(DataError, match="EPS, which is a program"):
        load(data)


@pytest.fixture(scope="module")
def awkward(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All awkward files, those with odd names unpacked."""
    folder = shared_data / "awkward"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    copy = tmp_path_factory.mktemp("awkward") / "files"
    shutil.copytree(folder, copy)
    copy.chmod(0o755)
    for item in copy.iterdir():
        item.chmod(0o755)
    with tarfile.open(folder / "odd_names.tar") as archive:
        archive.extractall(copy, filter="data")
    return copy


def test_every_awkward_file_loads_or_is_refused_as_its_table_says(awkward: Path) -> None:
    with open(awkward / "awkward.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) > 80
    for row in rows:
        data = (awkward / row["file"]).read_bytes()
        words = row["pillow_rgb"].split()
        if words[0] == "ok":
            width, height = map(int, words[1].split("x"))
            if "orientation=" in row["pillow_open"] and int(row["pillow_open"][-1]) >= 5:
                width, height = height, width  # upright
            assert load(data, mode="RGB").shape == (3, height, width), row["file"]
        else:
            with pytest.raises((DataError, OSError, SyntaxError, ValueError)) as caught:
                load(data, mode="RGB")
            assert str(caught.value), row["file"]


def test_bombs_are_refused_before_they_take_memory(awkward: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in (awkward / "bomb").iterdir():
        with pytest.raises((DataError, ValueError)):
            load(path.read_bytes(), mode="RGB")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_what_is_no_picture_is_told_in_words_without_an_address(awkward: Path) -> None:
    told = {}
    for path in (awkward / "notimage").iterdir():
        with pytest.raises(DataError) as caught:
            load(path.read_bytes(), mode="RGB")
        told[path.name] = caught.value.text
        assert " at 0x" not in caught.value.text
    assert told["zero_bytes.jpg"] == "The file is empty."
    assert "Git LFS" in told["lfs_pointer.JPEG"]
    assert "<!DOCTYPE" in told["page.jpg"] or "starts with" in told["page.jpg"]
