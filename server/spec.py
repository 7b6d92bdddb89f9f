"""What the operator asks for: one data set as named on the command line or in a TOML file. Plain data, and what was
likely meant by what it cannot be."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError

#: What a source's text starts with; anything else is `package.module:factory`.
SCHEMES = ("torchvision", "imagefolder", "arrays", "store")
KINDS = "torchvision:NAME, imagefolder:PATH, arrays:FILE.npz, store:PATH|NAME or package.module:factory"
assert all(f"{scheme}:" in KINDS for scheme in SCHEMES)
#: `package.module:name`: a factory or a transform.
REFERENCE = re.compile(r"(\w+(?:\.\w+)*):(\w+(?:\.\w+)*)")

Scalar = str | int | float | bool

MODES = ("RGB", "L", "RGBA", "keep")
IDENTITIES = ("stat", "content")
ON_ERROR = ("fail", "skip")
SIDE_PIXELS = 65535  #: `resize` and `crop` ask for at most so many a side


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """One data set to prepare and serve: each field is a flag of the command line and a key of the TOML file.

    `source` is `torchvision:NAME`, `imagefolder:PATH`, `arrays:FILE.npz`, `store:PATH|NAME` or `package.module:factory`;
    `args` go to the source's constructor; `transform` is `package.module:callable`, applied to each sample before it
    is stored.
    """

    name: str
    source: str
    args: Mapping[str, Scalar] = field(default_factory=dict)
    transform: str | None = None
    # Pictures: `resize` and `crop` are SIZE or HxW, in pixels.
    resize: str | None = None
    crop: str | None = None
    mode: str | None = None  #: RGB, L, RGBA or keep
    max_pixels: int | None = None
    truncated: bool = False  #: take pictures whose data ends early
    # What becomes of samples that cannot be read: `max_bad` is N or P%.
    on_error: str = "fail"  #: or skip
    max_bad: str | None = None
    # What the fingerprint covers.
    identity: str = "stat"  #: or content
    version: str | None = None
    depends: tuple[str, ...] = ()
    allow_random: bool = False
    ragged: tuple[str, ...] = ()  #: columns whose rows may differ in length, whatever the first ones do

    def __post_init__(self) -> None:
        if not limits.NAME.fullmatch(self.name):
            raise UserError(
                "bad_name",
                f"The data set's name {self.name!r} is not allowed.",
                "Names have 1 to 64 of a-z, 0-9, '.', '_', '-' and start with a letter or digit: give --name.",
            )
        for option, value, known in (
            ("mode", self.mode, (None, *MODES)),
            ("identity", self.identity, IDENTITIES),
            ("on_error", self.on_error, ON_ERROR),
        ):
            if value not in known:
                remedy = f"Known: {', '.join(word for word in known if word is not None)}."
                raise UserError("bad_option", f"{option}={value!r} is unknown.", remedy)
        for option, value in (("resize", self.resize), ("crop", self.crop)):
            if value is not None:
                size(option, value)
        if self.max_bad is not None:
            bad_limit(self.max_bad)
        if self.max_pixels is not None and not 1 <= self.max_pixels <= SIDE_PIXELS**2:
            text = f"max_pixels={self.max_pixels} is outside [1, {SIDE_PIXELS**2}]."
            raise UserError("bad_option", text, "Give the most pixels that one picture may have, width x height.")

    @property
    def scheme(self) -> str:
        """The part of the source before its first colon."""
        return self.source.partition(":")[0]

    @property
    def target(self) -> str:
        """The part of the source behind its first colon."""
        return self.source.partition(":")[2]

    @property
    def is_factory(self) -> bool:
        """Whether the source is `package.module:factory`."""
        return self.scheme not in SCHEMES and ":" in self.source

    def to_map(self) -> dict[str, Any]:
        """JSON for the preparing child."""
        return asdict(self)

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> DatasetSpec:
        """The spec of `to_map`."""
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


def size(option: str, text: str) -> tuple[int, ...]:
    """`(SIZE,)` or `(height, width)` in pixels, of `SIZE` or `HxW`. Raises `bad_option`."""
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", text)
    sides = () if found is None else tuple(int(side) for side in found.groups() if side is not None)
    if not sides or not all(1 <= side <= SIDE_PIXELS for side in sides):
        what = f"{option}={text!r} is no size: SIZE or HxW with sides in [1, {SIDE_PIXELS}] pixels."
        raise UserError("bad_option", what, f"Write --{option} 224 or --{option} 224x320 (height x width).")
    return sides


def bad_limit(text: str) -> tuple[int | None, float | None]:
    """`max_bad` as (N, None), or as (None, share) of `P%`. Raises `bad_option`."""
    found = re.fullmatch(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text)
    if found is None or found[2] is not None and float(found[2]) > 100:
        raise UserError("bad_option", f"max_bad={text!r} is neither N nor P%.", "Write --max-bad 20 or 0.5%.")
    return (int(found[1]), None) if found[1] is not None else (None, float(found[2]) / 100)


def check_source(source: str) -> None:
    """Raises `bad_source` for a text that is no source of any kind, with the one that was likely meant."""
    scheme, _, target = source.partition(":")
    if target and (scheme in SCHEMES or REFERENCE.fullmatch(source)):
        return
    meant = likely_source(source)
    remedy = f"Did you mean {meant!r}?" if meant else f"Write {KINDS}."
    what = "names nothing" if scheme in SCHEMES else "has no kind"
    raise UserError("bad_source", f"The source {source!r} {what}.", remedy)


def likely_source(text: str) -> str | None:
    """What was likely meant by a text that is no source: its kind mistyped, or left out before a place."""
    scheme, colon, target = text.partition(":")
    if colon and target and (near := difflib.get_close_matches(scheme.lower(), SCHEMES, n=1)):
        return f"{near[0]}:{target}"
    if not colon and text.endswith(".npz"):
        return f"arrays:{text}"
    if not colon and os.path.isdir(os.path.expanduser(text)):
        return f"store:{text}" if os.path.exists(os.path.join(text, "manifest.json")) else f"imagefolder:{text}"
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy: the known word that is nearest, or all."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."


def default_name(source: str) -> str:
    """A name from the source: `torchvision:MNIST` is `mnist`, `arrays:/data/Digits.npz` is `digits`."""
    target = source.partition(":")[2] or source
    last = target.rstrip("/").rpartition("/")[2].rpartition(":")[2]
    stem = re.sub(r"\.npz$", "", last.partition("@")[0])
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return name[:64] or "data"
