"""Pictures to arrays by stated rules: uint8 `C x H x W`, upright, of one declared mode. Nothing is clipped.

- More than `max_pixels` are refused by the header, before anything is decoded.
- EXIF orientation that the picture still names is applied; broken EXIF counts as none.
- The mode is `RGB`, `L`, `RGBA`, or `keep`: grey stays one channel and everything with colours becomes RGB. A palette's
  colours are looked up; CMYK and the like are converted as Pillow does, without colour profiles.
- Transparency is laid on `BACKGROUND`, except under `RGBA`.
- 16-bit grey becomes 8 bits as (value + 128) // 257, so that 257 * k becomes k, where a mode is declared; `keep` refuses
  it. 16-bit colour is what Pillow makes of it: the high byte, so that one with a transparent colour is refused. 32-bit
  and float pictures have no range that a file states: they are refused, and scaled by a transform of the operator's.
- `resize` and `crop` are torchvision's `Resize` and `CenterCrop` on Pillow pictures: SIZE is the shorter side,
  bilinear and antialiased; a crop beyond the picture is padded with black.
- A picture of several frames is its first one. Data that ends early is an error, or under `truncated` filled with grey.

Pillow's globals stay as they are, except for the moment in which `truncated`, or a `max_pixels` beyond Pillow's own
bound, needs one changed; a lock lets one thread at a time do so.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataserve.protocol.errors import DataError

from . import spec as specs
from .spec import DatasetSpec

if TYPE_CHECKING:
    from PIL.Image import Image

BACKGROUND = (255, 255, 255)
MAX_PIXELS = 128 * 1024 * 1024

_ORIENTATION = 0x0112
_GREY = ("1", "L", "LA", "La")
_COLOUR = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")
_FIRST = {"LAB": "RGB", "La": "LA"}  #: what Pillow converts to few modes, and the mode through which it reaches all
_ALPHA = ("LA", "La", "RGBA", "RGBa", "PA")
_lock = threading.Lock()


class Pixels(np.ndarray[Any, np.dtype[np.uint8]]):
    """A picture as uint8 `C x H x W`: an array that is known to be one."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What becomes of every picture of a data set; `resize` is `(shorter side,)` or `(height, width)`, `crop` too,
    in pixels."""

    mode: str = "keep"
    resize: tuple[int, ...] | None = None
    crop: tuple[int, ...] | None = None
    max_pixels: int = MAX_PIXELS
    truncated: bool = False

    @classmethod
    def of(cls, spec: DatasetSpec) -> Rules:
        """The rules that a spec asks for: an image folder's mode is RGB where none is named, else it is `keep`."""
        return cls(
            spec.mode or ("RGB" if spec.scheme == "imagefolder" else "keep"),
            None if spec.resize is None else specs.size("resize", spec.resize),
            None if spec.crop is None else specs.size("crop", spec.crop),
            spec.max_pixels or MAX_PIXELS,
            spec.truncated,
        )

    @property
    def plain(self) -> bool:
        """Whether pictures can go to a transform as they come."""
        return self == Rules(max_pixels=self.max_pixels)

    def to_map(self) -> dict[str, Any]:
        """All that shapes a row, for the fingerprint."""
        return {
            "16_bits": "refused" if self.mode == "keep" else "(value + 128) // 257",
            "alpha": "kept" if self.mode == "RGBA" else f"on {BACKGROUND}",
            "backend": "pillow",
            "crop": None if self.crop is None else "centre " + "x".join(map(str, self.crop)),
            "max_pixels": self.max_pixels,
            "mode": self.mode,
            "orientation": "applied",
            "resize": None if self.resize is None else "x".join(map(str, self.resize)) + " bilinear antialias",
            "truncated": self.truncated,
        }


def load(data: bytes, rules: Rules) -> Image:
    """The picture in a file's bytes: its header is read, nothing is decoded. Raises `bad_sample` where it has too many
    pixels, and what Pillow raises where the header is none."""
    pil = _pillow()
    beyond = pil.MAX_IMAGE_PIXELS is not None and rules.max_pixels > 2 * pil.MAX_IMAGE_PIXELS
    _hush()
    try:
        with _changed(pixels=beyond, truncated=rules.truncated):
            image: Image = pil.open(io.BytesIO(data))
    except pil.UnidentifiedImageError:
        raise DataError("bad_sample", _no_picture(data)) from None
    except pil.DecompressionBombError as error:
        raise _too_large(str(error).partition("(")[2].partition(" ")[0], rules) from None
    if image.format == "EPS":  # Pillow would have Ghostscript run what is in it
        raise DataError("bad_sample", "The file is EPS, which is a program.", "Convert it to PNG, or leave it out.")
    _check_pixels(image, rules)
    return image


def _no_picture(data: bytes) -> str:
    if not data:
        return "The file is empty."
    if data.startswith(b"version https://git-lfs"):
        return "The file is a Git LFS pointer: git lfs pull fetches the picture."
    return f"The file is no picture that Pillow knows: it starts with {data[:16]!r}."


def settle(sample: Any, rules: Rules) -> Any:
    """The sample with its pictures decoded, upright, in their mode and size, still as pictures: what a transform gets.
    Plain rules leave it as it is. Raises `bad_sample` by the rules, and what Pillow raises for damaged data."""
    return sample if rules.plain else _each(sample, _settled, rules)


def finish(sample: Any, rules: Rules) -> Any:
    """What a transform has returned, with its pictures as `Pixels`. Raises as `settle`."""
    return _each(sample, to_array, rules)


def convert(sample: Any, rules: Rules) -> Any:
    """`settle` and `finish` in one, for a sample that no transform is to see. Raises as `settle`."""
    return _each(sample, _converted, rules)


def to_array(image: Image, rules: Rules = Rules()) -> Pixels:
    """That picture as uint8 `C x H x W` in the mode of the rules, read-only. Size is not touched. Raises as
    `settle`."""
    return _pixels(_decoded(image, rules))


def _converted(image: Image, rules: Rules) -> Pixels:
    return _pixels(_settled(image, rules))


def _pixels(image: Image) -> Pixels:
    """Of a picture whose bands have the names of its mode: L, RGB or RGBA."""
    bands, width, height = image.mode, *image.size
    shape = (len(bands), height, width)
    if width * height < _LARGE:
        return Pixels(shape, np.uint8, image.tobytes(), 0, (1, width * len(bands), len(bands)))
    return Pixels(shape, np.uint8, b"".join([image.tobytes("raw", band) for band in bands]))


_LARGE = 8192  #: pixels from which Pillow takes bands apart in less time than numpy, three calls and all


def upright(image: Image) -> Image:
    """The picture turned as its EXIF orientation says."""
    if getattr(image, "format", None) == "JPEG" and "exif" not in image.info and "xmp" not in image.info:
        return image  # nothing that could say so; to ask Pillow costs a tenth of a small picture
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - Pillow raises SyntaxError, struct.error, KeyError and more on broken EXIF
        return image
    if turn is None:
        return image
    from PIL.Image import Transpose

    return image.transpose(Transpose[turn])


_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def _each(sample: Any, change: Callable[[Image, Rules], Any], rules: Rules) -> Any:
    """The sample with each picture in it changed; what holds none is given back as it is."""
    if type(sample) is tuple or type(sample) is list:
        return type(sample)([_each(item, change, rules) for item in sample])
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*(_each(item, change, rules) for item in sample))
    if type(sample) is dict:
        return {key: _each(item, change, rules) for key, item in sample.items()}
    return change(sample, rules) if hasattr(sample, "getexif") else sample


def _settled(image: Image, rules: Rules) -> Image:
    image = _decoded(image, rules)
    if rules.resize is not None:
        image = _resized(image, rules.resize)
    return image if rules.crop is None else _cropped(image, rules.crop)


def _decoded(image: Image, rules: Rules) -> Image:
    """Upright and in its mode."""
    _check_pixels(image, rules)
    mode = rules.mode
    if image.mode not in _GREY and image.mode not in _COLOUR and (mode == "keep" or not _is_16_bit(image)):
        raise DataError(
            "bad_sample",
            f"The picture has mode {image.mode}, which 8 bits a channel cannot hold.",
            "Scale 16-bit ones with --mode L or RGB; others in a --transform that returns an array or tensor.",
        )
    if any(tile[3] == "RGB;16B" for tile in getattr(image, "tile", ())) and "transparency" in image.info:
        text = "The picture is 16-bit colour with one colour transparent, which its high bytes do not tell from others."
        raise DataError("bad_sample", text, "Save it with an alpha channel.")
    if image.info or getattr(image, "tile", None):  # one that was made from an array has neither: nothing to decode
        _hush()
        with _changed(truncated=rules.truncated):
            image.load()
            image = upright(image)
    if _is_16_bit(image):
        image = _eight_bits(image)
    if mode == "keep":
        mode = "L" if image.mode in _GREY else "RGB"
    if image.mode in _FIRST:
        image = image.convert(_FIRST[image.mode])
    if mode != "RGBA" and (image.mode in _ALPHA or "transparency" in image.info):
        return _opaque(image, mode)
    return image if image.mode == mode else image.convert(mode)


def _check_pixels(image: Image, rules: Rules) -> None:
    if image.width * image.height > rules.max_pixels:
        raise _too_large(f"{image.width} x {image.height}", rules)


def _too_large(pixels: str, rules: Rules) -> DataError:
    text = f"The picture has {pixels} pixels, more than {rules.max_pixels}."
    return DataError("bad_sample", text, "Make it smaller, leave it out, or raise --max-pixels.")


def _is_16_bit(image: Image) -> bool:
    """Whether its values lie in [0, 65535]: Pillow opens 16-bit PNG and PGM as `I;16` or, of old, as 32-bit `I`."""
    return image.mode.startswith("I;16") or image.mode == "I" and getattr(image, "format", None) in ("PNG", "PPM")


def _eight_bits(image: Image) -> Image:
    from PIL import Image as pil

    values = np.asarray(image).astype(np.uint32)  # both byte orders
    if values.size and int(values.max()) > 65535:
        raise DataError("bad_sample", f"The picture of mode {image.mode} has values beyond 65535.", "Mend it.")
    grey = ((values + 128) // 257).astype(np.uint8)
    if type(clear := image.info.get("transparency")) is int:  # a PNG may name one value that is no picture
        return pil.fromarray(np.stack([grey, np.where(values == clear, 0, 255).astype(np.uint8)], axis=-1))
    return pil.fromarray(grey)


def _opaque(image: Image, mode: str) -> Image:
    """The picture laid on the background, in that mode."""
    from PIL import Image as pil

    above = image.convert("RGBA")
    return pil.alpha_composite(pil.new("RGBA", image.size, (*BACKGROUND, 255)), above).convert(mode)


def _resized(image: Image, size: tuple[int, ...]) -> Image:
    from PIL.Image import Resampling

    width, height = image.size
    if len(size) == 2:
        height, width = size
    elif width <= height:
        width, height = size[0], int(size[0] * height / width)
    else:
        width, height = int(size[0] * width / height), size[0]
    return image.resize((width, height), Resampling.BILINEAR)


def _cropped(image: Image, size: tuple[int, ...]) -> Image:
    """The centre, by torchvision's rounding; Pillow gives black beyond the edges."""
    height, width = size[0], size[-1]
    left, top = (_start(have, want) for have, want in ((image.width, width), (image.height, height)))
    return image.crop((left, top, left + width, top + height))


def _start(have: int, want: int) -> int:
    # torchvision pads a side that is too short, the smaller half first, and rounds halves to even where it cuts
    return -((want - have) // 2) if want > have else round((have - want) / 2.0)


def _changed(*, pixels: bool = False, truncated: bool = False) -> contextlib.AbstractContextManager[None]:
    """Pillow without its own bound on pixels, or tolerant of data that ends early, for as long as this lasts."""
    return _really_changed(pixels=pixels, truncated=truncated) if pixels or truncated else _UNCHANGED


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def _really_changed(*, pixels: bool, truncated: bool) -> Iterator[None]:
    pil = _pillow()
    from PIL import ImageFile as files

    with _lock:  # nobody waits here for longer than one picture takes to decode
        before = pil.MAX_IMAGE_PIXELS, files.LOAD_TRUNCATED_IMAGES
        try:
            pil.MAX_IMAGE_PIXELS = None if pixels else before[0]
            files.LOAD_TRUNCATED_IMAGES = truncated or before[1]
            yield
        finally:
            pil.MAX_IMAGE_PIXELS, files.LOAD_TRUNCATED_IMAGES = before


def _hush() -> None:
    """Have Pillow not warn of what it finds in headers, in this process: what it means for a sample is decided here.

    A look at the first filter, where ours is; to save and restore all filters for each picture costs more than a look.
    """
    global _hushed  # noqa: PLW0603 - the filter is the process's own, too
    if not warnings.filters or warnings.filters[0] is not _hushed:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        _hushed = warnings.filters[0]


_hushed: object = None


@functools.cache
def _pillow() -> Any:
    """Pillow's main module: imported with the first picture, since a look-up of what is there needs none."""
    from PIL import Image as pil

    return pil
