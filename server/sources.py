"""What the operator points at, opened: one small interface for all kinds, the same in the child and in each worker.

Nothing heavy is imported here until a source is opened. Code of others runs in `open_source`, `sample` and the
transform only; what it raises becomes a sentence.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.errors import DataError, DataserveError, UserError

from .spec import SCHEMES, DatasetSpec, Scalar

#: Libraries that may touch a row that goes through torchvision or a transform, by the names of their distributions.
PICTURE_LIBRARIES = ("numpy", "pillow", "torch", "torchvision")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a source's rows come from: files and folders to look at (absolute), and the libraries that touch a row."""

    roots: tuple[str, ...]
    libraries: tuple[str, ...]


class Source(ABC):
    """An open source. `length` is the number of its samples, at least 1."""

    length: int
    classes: tuple[str, ...] | None = None

    @abstractmethod
    def sample(self, index: int) -> Any:
        """The sample at that index, as the source gives it. Raises whatever the source raises."""

    @abstractmethod
    def identity(self) -> Identity:
        """What its rows come from."""

    def block(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:  # noqa: ARG002 - the interface
        """The samples `[start, stop)` as whole arrays by key, or None where it only has them one by one."""
        return None

    def close(self) -> None:
        """Gives back what it holds open."""
        return


def open_source(spec: DatasetSpec) -> Source:
    """Opens what the spec names. Raises `bad_source`, `empty_source`, `not_built`."""
    if spec.scheme == "arrays":
        from .arrays import ArraysSource

        return ArraysSource(spec)
    if spec.scheme == "torchvision":
        return TorchvisionSource(spec)
    if spec.scheme == "store":
        raise UserError("bad_source", "A store: source is prepared already.", "Serve it, or name its own source.")
    if re.fullmatch(r"imagefolder:.+|[\w.]+:[\w.]+", spec.source):
        raise UserError("not_built", f"The source {spec.source!r} is of a kind that this dataserve lacks.", _KINDS)
    raise UserError("bad_source", f"The source {spec.source!r} has no kind.", _KINDS)


_KINDS = "It knows torchvision:NAME, arrays:FILE.npz and store:PATH|NAME."
assert all(scheme in _KINDS for scheme in SCHEMES)


def located(spec: DatasetSpec) -> DatasetSpec:
    """The spec with the places that it names made absolute, so that it means the same from any current directory."""
    if spec.scheme == "arrays":
        return replace(spec, source=f"arrays:{_absolute(spec.target)}")
    if spec.scheme == "torchvision" and isinstance(root := spec.args.get("root"), str):
        return replace(spec, args={**spec.args, "root": _absolute(root)})
    return spec


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def checked_length(source: str, count: int) -> int:
    """That number of samples, if a store can hold them."""
    if count == 0:
        raise DataError("empty_source", f"The source {source!r} has no samples.", "Look at its place and arguments.")
    if count > limits.ROWS:
        text = f"The source {source!r} has {count} samples, more than {limits.ROWS}."
        raise UserError("bad_source", text, "Split it into several data sets.")
    return count


class TorchvisionSource(Source):
    """`torchvision:NAME`: a data set of `torchvision.datasets`, built with the spec's arguments."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        kind = _torchvision_class(spec.target)
        arguments = {key: _typed(value) for key, value in spec.args.items()}
        _check_arguments(spec, kind, arguments)
        try:
            self._dataset = kind(**arguments)
        except Exception as error:  # noqa: BLE001 - downloads, archives and folders fail in as many ways as there are sets
            sentence = _sentence(error)
            missing = "download" in inspect.signature(kind).parameters and not arguments.get("download")
            remedy = "Give --arg download=true, or another --arg root=FOLDER." if missing else ""
            raise UserError("bad_source", f"{spec.source} cannot be opened: {sentence}", remedy) from None
        try:
            count = len(self._dataset)
        except TypeError:
            raise UserError("not_built", f"{spec.source} does not say how many samples it has.") from None
        self.length = checked_length(spec.source, count)
        self.classes = _class_names(getattr(self._dataset, "classes", None))
        self.sample = self._dataset.__getitem__  # type: ignore[method-assign]  # no call in between, once a row

    def sample(self, index: int) -> Any:
        """The data set's own item."""
        return self._dataset[index]

    def identity(self) -> Identity:
        """The folder that this data set alone reads where it names one, else its whole root."""
        return Identity(tuple(_torchvision_roots(self._dataset, self._spec)), PICTURE_LIBRARIES)


def _torchvision_class(name: str) -> Any:
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except Exception as error:  # noqa: BLE001 - a broken installation raises OSError, RuntimeError and more
        text = f"torchvision cannot be imported: {_sentence(error)}"
        raise UserError("bad_source", text, "Install a torchvision that fits the torch that is there.") from None
    kind = getattr(datasets, name, None)
    if name in datasets.__all__ and inspect.isclass(kind) and hasattr(kind, "__getitem__"):
        return kind
    by_letters = {known.lower(): known for known in datasets.__all__}
    near = [by_letters[word] for word in difflib.get_close_matches(name.lower(), by_letters, n=3, cutoff=0.5)]
    remedy = f"Near it: {', '.join(near)}." if near else "See torchvision.datasets for those there are."
    raise UserError("bad_source", f"torchvision has no data set called {name!r}.", remedy)


def _typed(value: Scalar) -> Scalar:
    """An argument's value; text that reads as true, false or an integer becomes that."""
    if isinstance(value, str):
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        if re.fullmatch(r"[+-]?[0-9]{1,18}", value):
            return int(value)
    return value


def _check_arguments(spec: DatasetSpec, kind: Any, arguments: Mapping[str, Scalar]) -> None:
    """Finds what the constructor would not take before it runs, by its signature."""
    known = dict(inspect.signature(kind).parameters)
    for base in inspect.getmro(kind)[1:] if any(item.kind is item.VAR_KEYWORD for item in known.values()) else ():
        known.update((key, item) for key, item in inspect.signature(base).parameters.items() if key not in known)
    names = [key for key, item in known.items() if item.kind not in (item.VAR_KEYWORD, item.VAR_POSITIONAL)]
    for key in arguments:
        if key not in names:
            text = f"{spec.source} takes no argument {key!r}."
            raise UserError("bad_source", text, f"It takes: {', '.join(names)}.")
    required = [
        key
        for key, item in inspect.signature(kind).parameters.items()
        if item.default is item.empty and item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    ]
    if lacking := [key for key in required if key not in arguments]:
        shown = " ".join(f"--arg {key}=..." for key in lacking)
        raise UserError("bad_source", f"{spec.source} needs {', '.join(lacking)}.", f"Give {shown}")


def _class_names(found: object) -> tuple[str, ...] | None:
    """The class list where it is one of plain names, which a manifest can hold."""
    if not isinstance(found, list | tuple) or not 0 < len(found) <= limits.CLASSES:
        return None
    plain = all(type(name) is str and name.isprintable() and len(name) <= 4096 for name in found)
    return tuple(found) if plain else None


def _torchvision_roots(dataset: Any, spec: DatasetSpec) -> list[str]:
    """Folders that hold the data set's files. One that is too wide costs a preparation too many; one that is too
    narrow would miss a change: only folders that torchvision itself computes are trusted, else the root is taken."""
    root = spec.args.get("root")
    own = [getattr(dataset, "raw_folder", None), getattr(dataset, "processed_folder", None)]  # the MNIST family
    if own == [None, None] and isinstance(root, str):
        base = getattr(dataset, "base_folder", None)  # CIFAR
        own = [getattr(dataset, "_base_folder", None) or (os.path.join(root, base) if type(base) is str else None)]
    roots = [_absolute(os.fspath(path)) for path in own if path is not None and os.path.exists(path)]
    if not roots and isinstance(root, str):
        roots = [_absolute(root)]
    named = [value for key, value in spec.args.items() if key != "root" and isinstance(value, str)]
    return roots + [_absolute(value) for value in named if os.sep in value and os.path.exists(value)]


def load_transform(reference: str) -> Callable[[Any], Any]:
    """The callable behind `package.module:callable`, imported with the current directory in front of the path.

    Raises `bad_transform`.
    """
    name, _, attributes = reference.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", name) or not re.fullmatch(r"\w+(\.\w+)*", attributes):
        text = f"The transform {reference!r} is not of the form package.module:callable."
        raise UserError("bad_transform", text, "Write it as mypackage.transforms:resize, without parentheses.")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except Exception as error:  # noqa: BLE001 - the operator's module may raise anything
        text = f"The transform {reference!r} cannot be imported: {_sentence(error)}"
        raise UserError("bad_transform", text, f"It is looked for from {here} and in the environment.") from None
    if not callable(found):
        raise UserError("bad_transform", f"The transform {reference!r} is a {type(found).__name__}, not callable.")
    checked: Callable[[Any], Any] = found
    return checked


def read_sample(source: Source, transform: Callable[[Any], Any] | None, index: int) -> Any:
    """One sample, transformed. Raises `bad_sample` with the index, the stage and the cause."""
    stage = "read"
    try:
        sample = source.sample(index)
        if transform is not None:
            stage = "transform"
            sample = transform(sample)
    except DataserveError:
        raise
    except Exception as error:  # noqa: BLE001 - data sets and transforms raise anything
        text = f"Sample {index} failed at the stage {stage}: {type(error).__name__}: {_sentence(error)}"
        raise DataError("bad_sample", text, "Mend or remove it, then prepare again.") from None
    return sample


def _sentence(error: BaseException) -> str:
    """What an error says, on one line, ending as a sentence does."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text if len(text) <= 500 else text[:496] + " ..."
    return text if text.endswith((".", "!", "?")) else text + "."
