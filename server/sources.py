"""What the operator points at, opened: one small interface for all kinds, the same in the child and in each worker.

Nothing heavy is imported here until a source is opened. Code of others runs in `open_source`, `sample`, `samples` and
the transform only; what it raises becomes a sentence.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.errors import DataError, DataserveError, UserError

from . import images
from .images import Rules
from .spec import REFERENCE, DatasetSpec, check_source, likely_source

#: Libraries that may touch a row that goes through torchvision or a transform, by the names of their distributions.
PICTURE_LIBRARIES = ("numpy", "pillow", "torch", "torchvision")
_STAGES = ("open", "decode", "transform", "write")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a source's rows come from: files and folders to look at (absolute), and the libraries that touch a row.

    `pictures`: only the pictures below the roots count, as `imagefolder` lists them, and not every file.
    `not_seen`: what its rows come from beside these, in words; `--version` is what covers it.
    """

    roots: tuple[str, ...]
    libraries: tuple[str, ...]
    pictures: bool = False
    not_seen: tuple[str, ...] = ()


class BadSample(DataError):  # noqa: N818 - it is named for what it tells of
    """A sample that cannot be read: `index` in the source, `path` below its root where it has one, `stage` (open,
    decode, transform, write) and `cause`, the exception's type and sentence."""

    def __init__(self, index: int, path: bytes | None, stage: str, cause: str, remedy: str = "") -> None:
        assert stage in _STAGES
        where = f"Sample {index}" if path is None else f"Sample {index} ({shown(path)})"
        remedy = remedy or "Mend or remove it, then prepare again, or leave such samples out with --on-error skip."
        super().__init__("bad_sample", f"{where} failed at the stage {stage}: {cause}", remedy)
        self.index = index
        self.path = path
        self.stage = stage
        self.cause = cause


class Source(ABC):
    """An open source. `length` is the number of its samples, at least 1; None where only the end of `samples` tells."""

    length: int | None
    classes: tuple[str, ...] | None = None
    rules: Rules = Rules()  #: what becomes of the pictures in its samples
    row_key: str | None = None  #: with `allow_random`: the generators start anew for each row, from this and its index

    @abstractmethod
    def sample(self, index: int) -> Any:
        """The sample at that index, as the source gives it. Raises whatever the source raises."""

    def samples(self) -> Iterator[Any]:
        """All samples from the first, each time anew: the only way into a source of unknown length."""
        assert self.length is not None, "a source of unknown length overrides this"
        return (self.sample(index) for index in range(self.length))

    @abstractmethod
    def identity(self) -> Identity:
        """What its rows come from."""

    def path(self, index: int) -> bytes | None:  # noqa: ARG002 - the interface
        """Where the sample at that index lies below the root, as the file system has it; None where it has no file of
        its own."""
        return None

    def block(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:  # noqa: ARG002 - the interface
        """The samples `[start, stop)` as whole arrays by key, or None where it only has them one by one."""
        return None

    def scanned(self) -> Mapping[str, Any] | None:
        """What was found and what was left out, for people and as JSON; None where there was nothing to look for."""
        return None

    def close(self) -> None:
        """Gives back what it holds open."""
        return


def open_source(spec: DatasetSpec) -> Source:
    """Opens what the spec names. Raises `bad_source`, `empty_source`, `no_access`."""
    check_source(spec.source)
    source = _opened(spec)
    source.rules = Rules.of(spec)
    return source


def _opened(spec: DatasetSpec) -> Source:
    if spec.scheme == "arrays":
        from .arrays import ArraysSource

        return ArraysSource(spec)
    if spec.scheme == "imagefolder":
        from .imagefolder import FolderSource

        return FolderSource(spec)
    if spec.scheme == "torchvision":
        from .datasets import TorchvisionSource

        return TorchvisionSource(spec)
    if spec.scheme == "store":
        raise UserError("bad_source", "A store: source is prepared already.", "Serve it, or name its own source.")
    from .datasets import FactorySource

    return FactorySource(spec)


def located(spec: DatasetSpec) -> DatasetSpec:
    """The spec with the places that it names made absolute, so that it means the same from any current directory."""
    if spec.depends:
        spec = replace(spec, depends=tuple(absolute(path) for path in spec.depends))
    if spec.scheme in ("arrays", "imagefolder") and spec.target:
        return replace(spec, source=f"{spec.scheme}:{absolute(spec.target)}")
    if spec.scheme == "torchvision" and isinstance(root := spec.args.get("root"), str):
        return replace(spec, args={**spec.args, "root": absolute(root)})
    return spec


def absolute(path: str) -> str:
    """That path from the root of the file system, `~` written out."""
    return os.path.abspath(os.path.expanduser(path))


def checked_length(source: str, count: int) -> int:
    """That number of samples, if a store can hold them."""
    if count == 0:
        raise DataError("empty_source", f"The source {source!r} has no samples.", "Look at its place and arguments.")
    if count > limits.ROWS:
        text = f"The source {source!r} has {count} samples, more than {limits.ROWS}."
        raise UserError("bad_source", text, "Split it into several data sets.")
    return count


def load_object(reference: str, what: str, code: str) -> Callable[..., Any]:
    """The callable behind `package.module:callable`, imported with the current directory in front of the path.

    Raises that code; `what` names it in the text.
    """
    found = REFERENCE.fullmatch(reference)
    if found is None:
        text = f"{what} {reference!r} is not of the form package.module:callable."
        raise UserError(code, text, "Write it as mypackage.transforms:resize, without parentheses.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        item: Any = importlib.import_module(found[1])
        for attribute in found[2].split("."):
            item = getattr(item, attribute)
    except Exception as error:  # noqa: BLE001 - the operator's module may raise anything
        text = f"{what} {reference!r} cannot be imported: {sentence(error)}"
        remedy = f"It is looked for from {here} and in the environment."
        if code == "bad_source" and (meant := likely_source(reference)):
            remedy = f"Did you mean {meant!r}? As a factory it is looked for from {here} and in the environment."
        raise UserError(code, text, remedy) from None
    if not callable(item):
        raise UserError(code, f"{what} {reference!r} is a {type(item).__name__}, not callable.")
    checked: Callable[..., Any] = item
    return checked


def load_transform(reference: str) -> Callable[[Any], Any]:
    """The callable behind `package.module:callable`. Raises `bad_transform`."""
    return load_object(reference, "The transform", "bad_transform")


def load_factory(reference: str) -> Callable[..., Any]:
    """The callable behind `package.module:factory`. Raises `bad_source`."""
    return load_object(reference, "The factory", "bad_source")


def read_sample(source: Source, transform: Callable[[Any], Any] | None, index: int) -> Any:
    """One sample, transformed, its pictures as `images.Pixels`. Raises `BadSample`."""
    if source.row_key is not None:
        _seed(source.row_key, index)
    try:
        sample = source.sample(index)
    except Exception as error:  # noqa: BLE001 - data sets raise anything
        raise _bad(source, index, "open", error) from None
    return finish_sample(source, transform, index, sample)


def finish_sample(source: Source, transform: Callable[[Any], Any] | None, index: int, sample: Any) -> Any:
    """What the source gave at that index, transformed, its pictures as `images.Pixels`. Raises `BadSample`."""
    stage = "decode"
    try:
        if transform is None:
            return images.convert(sample, source.rules)
        sample = images.settle(sample, source.rules)
        stage = "transform"
        sample = transform(sample)
        stage = "decode"
        return images.finish(sample, source.rules)
    except Exception as error:  # noqa: BLE001 - Pillow raises OSError, SyntaxError, ValueError; transforms anything
        raise _bad(source, index, stage, error) from None


def _bad(source: Source, index: int, stage: str, error: Exception) -> DataserveError:
    """What is raised for a sample that cannot be read: an error of ours that no sample is to blame for is kept."""
    if isinstance(error, DataserveError):
        if error.code != "bad_sample":
            return error
        return BadSample(index, source.path(index), stage, error.text, error.remedy)
    return BadSample(index, source.path(index), stage, named(error, source.identity().roots))


def _seed(key: str, index: int) -> None:
    from . import randomness

    randomness.seed_row(key, index)


def named(error: BaseException, roots: Sequence[str] = ()) -> str:
    """An exception's type and what it says. Paths in it are given below these roots: causes stand in the manifest,
    which is the same wherever the source lies."""
    return f"{type(error).__name__}: {sentence(error, roots)}"


def sentence(error: BaseException, roots: Sequence[str] = ()) -> str:
    """What an error says, on one line, ending as a sentence does; with paths as `named` has them."""
    text = re.sub(r" at 0x[0-9a-f]+", "", _below(error, roots))
    text = " ".join(text.split()) or type(error).__name__
    text = text if len(text) <= 500 else text[:496] + " ..."
    return text if text.endswith((".", "!", "?")) else text + "."


def _below(error: BaseException, roots: Sequence[str]) -> str:
    text = str(error)
    for root in sorted(roots, key=len, reverse=True):
        place = os.path.join(root, "")
        name = error.filename if isinstance(error, OSError) else None
        if isinstance(name, str | bytes) and os.fsencode(name).startswith(os.fsencode(place)):
            # Anew, since the root decides how it is quoted.
            text = text.replace(repr(name), repr(name[len(place if isinstance(name, str) else os.fsencode(place)) :]))
        if len(place) > 1:
            text = text.replace(place, "")
    return text


def shown(path: bytes | str) -> str:
    """A path as people may see it anywhere: what is no UTF-8, and what does not print, as escapes."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
