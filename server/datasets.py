"""Data sets that code of others defines: `torchvision:NAME`, and `package.module:factory` for any map-style or
iterable one. Each process opens its own, so that no handle is shared between workers.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError

from .sources import PICTURE_LIBRARIES, Identity, Source, absolute, checked_length, load_factory, sentence
from .spec import DatasetSpec, Scalar


class TorchvisionSource(Source):
    """`torchvision:NAME`: a data set of `torchvision.datasets`, built with the spec's arguments."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        kind = _torchvision_class(spec.target)
        arguments = dict(spec.args)
        _check_arguments(spec, kind, arguments)
        try:
            self._dataset = kind(**arguments)
        except Exception as error:  # noqa: BLE001 - downloads, archives and folders fail in as many ways as there are sets
            reason = sentence(error)
            missing = "download" in inspect.signature(kind).parameters and not arguments.get("download")
            remedy = "Give --arg download=true, or another --arg root=FOLDER." if missing else ""
            raise UserError("bad_source", f"{spec.source} cannot be opened: {reason}", remedy) from None
        try:
            count = len(self._dataset)
        except TypeError:
            text = f"{spec.source} does not say how many samples it has."
            raise UserError("bad_source", text, "Wrap it in a factory of yours that iterates over it.") from None
        self.length: int = checked_length(spec.source, count)
        self.classes = _class_names(getattr(self._dataset, "classes", None))
        self.sample = self._dataset.__getitem__  # type: ignore[method-assign]  # no call in between, once a row

    def sample(self, index: int) -> Any:
        """The data set's own item."""
        return self._dataset[index]

    def path(self, index: int) -> bytes | None:
        """The file's path below the root, for data sets that list one file a sample, as `ImageFolder` does."""
        return _listed_path(self._dataset, index)

    def identity(self) -> Identity:
        """The folder that this data set alone reads where it names one, else its whole root."""
        return Identity(tuple(_torchvision_roots(self._dataset, self._spec)), PICTURE_LIBRARIES)


class FactorySource(Source):
    """`package.module:factory`: what the factory gives for the spec's arguments.

    Map-style is what has `__len__` and `__getitem__`; anything else that iterates, a torch `IterableDataset` among it,
    has an unknown length and is read from the first sample to the last.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._spec = spec
        self._factory = load_factory(spec.source)
        dataset = self._make()
        self.classes = _class_names(getattr(dataset, "classes", None))
        self._dataset = dataset
        self._fresh = True
        self.length: int | None = None
        if _is_iterable(dataset):
            return
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            text = f"{spec.source} gave a {type(dataset).__name__}, which is neither map-style nor iterable."
            raise UserError("bad_source", text, "Return an object with __len__ and __getitem__, or with __iter__.")
        try:
            count = len(dataset)
        except Exception as error:  # noqa: BLE001 - the operator's code may raise anything
            text = f"The length of what {spec.source} gave cannot be had: {sentence(error)}"
            raise UserError("bad_source", text, "Mend its __len__, or return an iterable data set.") from None
        self.length = checked_length(spec.source, count)
        self.sample = dataset.__getitem__  # type: ignore[method-assign]  # no call in between, once a row

    def _make(self) -> Any:
        arguments = self._spec.args
        try:
            return self._factory(**arguments)
        except Exception as error:  # noqa: BLE001 - the operator's code may raise anything
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            text = f"{self._spec.source}({given}) failed: {type(error).__name__}: {sentence(error)}"
            raise UserError("bad_source", text, "Its arguments come from --arg key=value.") from None

    def sample(self, index: int) -> Any:
        """The data set's own item."""
        return self._dataset[index]

    def samples(self) -> Iterator[Any]:
        """All samples from the first. The second time the factory is called again: a generator runs only once."""
        if self.length is not None:
            return super().samples()
        if not self._fresh:
            self._dataset = self._make()
        self._fresh = False
        iterator: Iterator[Any] = iter(self._dataset)
        return iterator

    def path(self, index: int) -> bytes | None:
        """As for torchvision's folders."""
        return _listed_path(self._dataset, index)

    def identity(self) -> Identity:
        """What the spec says that it depends on: nobody else can know what the factory reads."""
        unseen = (
            ()
            if self._spec.depends or self._spec.version is not None
            else (f"the data that {self._spec.source} reads",)
        )
        return Identity(self._spec.depends, PICTURE_LIBRARIES, not_seen=unseen)


def _is_iterable(dataset: Any) -> bool:
    """Whether it is to be iterated. torch's `IterableDataset` inherits a `__getitem__` that only raises."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def _torchvision_class(name: str) -> Any:
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except Exception as error:  # noqa: BLE001 - a broken installation raises OSError, RuntimeError and more
        text = f"torchvision cannot be imported: {sentence(error)}"
        raise UserError("bad_source", text, "Install a torchvision that fits the torch that is there.") from None
    kind = getattr(datasets, name, None)
    if name in datasets.__all__ and inspect.isclass(kind) and hasattr(kind, "__getitem__"):
        return kind
    by_letters = {known.lower(): known for known in datasets.__all__}
    near = [by_letters[word] for word in difflib.get_close_matches(name.lower(), by_letters, n=3, cutoff=0.5)]
    remedy = f"Near it: {', '.join(near)}." if near else "See torchvision.datasets for those there are."
    raise UserError("bad_source", f"torchvision has no data set called {name!r}.", remedy)


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


def _listed_path(dataset: Any, index: int) -> bytes | None:
    """The file of a `DatasetFolder`'s sample, below its root; None for other data sets."""
    listed = getattr(dataset, "samples", None)
    root = getattr(dataset, "root", None)
    if not isinstance(listed, list) or not 0 <= index < len(listed) or not isinstance(root, str):
        return None
    item = listed[index]
    if not isinstance(item, tuple) or not item or not isinstance(item[0], str):
        return None
    return os.fsencode(os.path.relpath(item[0], root))


def _torchvision_roots(dataset: Any, spec: DatasetSpec) -> list[str]:
    """Folders that hold the data set's files. One that is too wide costs a preparation too many; one that is too
    narrow would miss a change: only folders that torchvision itself computes are trusted, else the root is taken."""
    root = spec.args.get("root")
    own = [getattr(dataset, "raw_folder", None), getattr(dataset, "processed_folder", None)]  # the MNIST family
    if own == [None, None] and isinstance(root, str):
        base = getattr(dataset, "base_folder", None)  # CIFAR
        own = [getattr(dataset, "_base_folder", None) or (os.path.join(root, base) if type(base) is str else None)]
    roots = [absolute(os.fspath(path)) for path in own if path is not None and os.path.exists(path)]
    if not roots and isinstance(root, str):
        roots = [absolute(root)]
    named = [value for key, value in spec.args.items() if key != "root" and isinstance(value, str)]
    return roots + [absolute(value) for value in named if os.sep in value and os.path.exists(value)]
