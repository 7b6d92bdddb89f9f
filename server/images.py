"""Pictures to arrays by stated rules: uint8 `C x H x W`, upright, opaque. Nothing is clipped, Pillow's globals stay.

- EXIF orientation that the picture still names is applied; broken EXIF counts as none.
- Grey stays one channel, everything with colours becomes RGB; a palette's colours are looked up.
- Transparency is laid on `BACKGROUND`.
- 16-bit, 32-bit and float pictures are refused: scaling them to 8 bits is a decision that a transform must take.
- More than `MAX_PIXELS` are refused by the header, before anything is decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataserve.protocol.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

BACKGROUND = (255, 255, 255)
MAX_PIXELS = 128 * 1024 * 1024
#: The rules that shape a row, for the fingerprint.
RULES: dict[str, Any] = {
    "alpha_on": list(BACKGROUND),
    "max_pixels": MAX_PIXELS,
    "modes": "grey or RGB",
    "orientation": "applied",
}

_ORIENTATION = 0x0112
_GREY = ("1", "L", "LA", "La")
_COLOUR = ("RGB", "RGBA", "RGBa", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB")
_ALPHA = ("LA", "La", "RGBA", "RGBa", "PA")


def to_array(image: Image) -> npt.NDArray[np.uint8]:
    """That picture as uint8 `1 x H x W` or `3 x H x W`, maybe a view. Raises `bad_sample` by the rules above, and
    what Pillow raises where the file is damaged."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            "bad_sample",
            f"The picture has {width} x {height} pixels, more than {MAX_PIXELS}.",
            "Make it smaller, or leave it out.",
        )
    if image.mode not in _GREY and image.mode not in _COLOUR:
        raise DataError(
            "bad_sample",
            f"The picture has mode {image.mode}, which 8 bits a channel cannot hold.",
            "Scale it in a --transform that returns an array or tensor, of 16 bits or float if you like.",
        )
    if image.mode in _ALPHA or "transparency" in image.info:
        image = _opaque(image)
    elif image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode in _GREY else "RGB")
    pixels: npt.NDArray[np.uint8] = np.asarray(upright(image))
    return pixels[np.newaxis] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def upright(image: Image) -> Image:
    """The picture turned as its EXIF orientation says."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - Pillow raises SyntaxError, struct.error, KeyError and more on broken EXIF
        return image
    if orientation not in range(2, 9):
        return image
    from PIL.Image import Transpose

    turn = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )[orientation - 2]
    return image.transpose(turn)


def _opaque(image: Image) -> Image:
    """The picture laid on the background: L for grey, else RGB; EXIF is kept."""
    from PIL import Image as pil

    target = "L" if image.mode in _GREY else "RGB"
    kept = image.info.get("exif")
    above = image.convert("RGBA")
    opaque = pil.alpha_composite(pil.new("RGBA", image.size, (*BACKGROUND, 255)), above).convert(target)
    if kept is not None:
        opaque.info["exif"] = kept
    return opaque
