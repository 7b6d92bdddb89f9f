"""What a piece of the operator's code would do, as named items that can be compared: the transform's, the factory's.

Followed: a function's bytecode, constants and names (nested ones too), its defaults and closure cells; the module
globals that it names where they are plain values; functions, classes and modules that it names where they are the
operator's own; a class's methods and attributes; an instance's attributes; the steps of a torchvision `Compose`, with
the state of modules. Own is what lies in the top package of the reference, or in no library folder. What belongs to a
library counts by its name, and by the library's version.

Comments, blank lines and names of files change nothing. No item depends on an address, a place, the order of a set or
the process. What cannot be followed is `not_seen`, in words. Nothing here runs the operator's code: its module is
imported already.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import itertools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .plain import code_text, plain

SHOWN_CHARS = 120  #: of a value; the digest covers all of it
DEPTH = 40
VALUES = 20_000  #: that are followed; a graph beyond that is not seen to its end
_OWNER = "\0"  #: stands for the name of the object whose state is being read
#: Modules whose objects shape no row: what they hold is the process's.
_INERT = frozenset(
    ("logging", "_thread", "threading", "weakref", "_weakref", "contextvars", "_contextvars", "warnings")
)
#: Ways in which code reads what is written nowhere in it.
_READERS = frozenset(
    """open eval exec compile __import__ globals environ getenv import_module
    load loadtxt fromfile memmap imread read_csv""".split()
)
_SKIPPED = frozenset(
    """__module__ __doc__ __dict__ __weakref__ __qualname__ __annotations__ __annotate__ __annotate_func__
    __annotations_cache__ __firstlineno__ __static_attributes__ __abstractmethods__ _abc_impl __parameters__
    __orig_bases__ __match_args__ __dataclass_params__ __slots__""".split()
)


@dataclass(slots=True)
class CodePrint:
    """Items by name, each (shown, digest): `shown` is for people, empty where there is nothing short to show."""

    items: dict[str, tuple[str, str]] = field(default_factory=dict)
    not_seen: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)  #: own module files, each with the SHA-256 of its bytes
    libraries: set[str] = field(default_factory=set)  #: top-level names of the libraries it touches


def read(reference: str, code: Callable[..., Any]) -> CodePrint:
    """The print of the callable that `package.module:name` names, imported already."""
    reader = _Reader(reference.partition(":")[0].partition(".")[0])
    reader.visit(code, "transform", 0)
    reader.module(reference.partition(":")[0])
    return reader.found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between the items of two prints, as sentences: constants, steps and attributes with both values."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            found.append(f"{name} is {'new' if before is None else 'gone'}")
        elif list(before) != list(after):
            shown = before[0], after[0]
            if shown[0] == shown[1]:
                found.append(f"{name} changed")
            elif name.startswith("step "):
                found.append(f"{shown[0]} became {shown[1]}")
            else:
                found.append(f"{name} changed {shown[0] or 'its kind'} -> {shown[1] or 'another kind'}")
    return found


class _Reader:
    """One walk from a callable over all that it reaches."""

    def __init__(self, package: str) -> None:
        self.found = CodePrint()
        self._package = package
        self._left = VALUES
        self._seen: dict[int, tuple[str, Any]] = {}  # by id: where first, and the object, so that no id is used twice

    def visit(self, value: Any, name: str, depth: int) -> None:
        """Takes in whatever is reached under that name."""
        try:
            text = plain(value)
        except RecursionError:  # a container that holds itself
            self.found.not_seen.add(f"{name}, nested without end")
            return
        if text is not None:
            self._note(name, text)
            return
        if isinstance(value, types.FunctionType | type):  # what is bound to the name, and in which order
            self._note(name, f"{value.__module__}.{value.__qualname__}")
        if isinstance(value, types.ModuleType):
            self.module(value.__name__)
        elif id(value) in self._seen:
            self._note(name, f"the same as {self._seen[id(value)][0]}".replace(_OWNER, "it"))
        elif depth > DEPTH or self._left <= 0:
            self.found.not_seen.add(f"{name}, beyond {DEPTH} levels or {VALUES} values")
        else:
            self._seen[id(value)] = name, value
            self._left -= 1
            self._complex(value, name, depth + 1)

    def _complex(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
            self.visit(value.__wrapped__, name, depth)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, name, depth)
            self.visit(value.__self__, f"object of {name}", depth)
        elif isinstance(value, property):
            for part in ("fget", "fset", "fdel"):
                self.visit(getattr(value, part), f"{part} of {name}", depth)
        elif isinstance(value, functools.partial):
            self.visit(value.func, f"function of {name}", depth)
            self.visit(list(value.args), f"arguments of {name}", depth)
            self.visit(dict(value.keywords), f"arguments of {name}, named", depth)
        elif isinstance(value, types.FunctionType | type):
            if not self.is_own(value.__module__):
                self.module(str(value.__module__))
            elif isinstance(value, type):
                self._class(value, depth)
            else:
                self._function(value, depth)
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self._container(value, name, depth)
        elif callable(value) and isinstance(value, types.BuiltinFunctionType | types.WrapperDescriptorType):
            self._library(value, name)
        else:
            self._instance(value, name, depth)

    def module(self, name: str) -> None:
        """Notes a module: its file where it is own, else its library."""
        if not self.is_own(name):
            self.found.libraries.add(name.partition(".")[0])
            return
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and path not in self.found.files:
            try:
                self.found.files[os.path.abspath(path)] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except OSError:
                self.found.not_seen.add(f"the file of the module {name}")

    def is_own(self, name: str | None) -> bool:
        """Whether the module of that name is the operator's."""
        if name is None or name == "builtins":
            return False
        if name.partition(".")[0] == self._package:
            return True
        path = getattr(sys.modules.get(name), "__file__", None)
        return path is not None and not in_library(path)

    def _note(self, name: str, text: str, shown: str | None = None) -> None:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        shown = text if shown is None else shown
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]} ... ({digest[:8]})"
        # Two things may bear one name, as lambdas do: the order in which they are reached is the code's own.
        count, free = 2, name
        while free in self.found.items and self.found.items[free][1] != digest:
            free, count = f"{name} #{count}", count + 1
        self.found.items[free] = (shown.encode("ascii", "backslashreplace").decode(), digest)

    def _library(self, value: Any, name: str) -> None:
        where = str(getattr(value, "__module__", None) or "builtins")
        self.found.libraries.add(where.partition(".")[0])
        self._note(name, f"{where}.{getattr(value, '__qualname__', value.__class__.__qualname__)}")

    def _function(self, function: types.FunctionType, depth: int) -> None:
        self.module(function.__module__)
        name = f"{function.__qualname__} of {function.__module__}"
        self._note(f"function {name}", code_text(function.__code__), shown="")
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for argument, value in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
            self.visit(value, f"default {argument} of {name}", depth)
        for argument, value in (function.__kwdefaults__ or {}).items():
            self.visit(value, f"default {argument} of {name}", depth)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is empty still
                self.visit(cell.cell_contents, f"closure {variable} of {name}", depth)
        for label, value in self._named(function.__code__, function.__globals__):
            self.visit(value, label, depth)

    def _class(self, kind: type, depth: int) -> None:
        self.module(kind.__module__)
        name = f"{kind.__qualname__} of {kind.__module__}"
        self._note(f"class {name}", ", ".join(f"{base.__module__}.{base.__qualname__}" for base in kind.__bases__))
        for base in kind.__bases__:
            self.visit(base, f"base of {name}", depth)
        for attribute, value in vars(kind).items():
            if attribute not in _SKIPPED and not isinstance(
                value, types.MemberDescriptorType | types.GetSetDescriptorType
            ):
                self.visit(value, f"attribute {attribute} of {name}", depth)

    def _container(self, value: Any, name: str, depth: int) -> None:
        """One that holds more than plain values, in its own order; a set has none."""
        self._note(name, f"{type(value).__name__} of {len(value)}")
        if isinstance(value, dict):
            for key, item in value.items():
                self.visit(item, f"{name}[{plain(key) or type(key).__name__}]", depth)
        elif isinstance(value, set | frozenset):
            named = sorted(
                value, key=lambda item: f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', '')}"
            )
            for place, item in enumerate(named):
                self.visit(item, f"{name}[{place}]", depth)
        else:
            for place, item in enumerate(value):
                self.visit(item, f"{name}[{place}]", depth)

    def _instance(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        library = kind.__module__.partition(".")[0]
        what = f"{kind.__module__}.{kind.__qualname__}"
        if library in _INERT:
            self._note(name, what)
            return
        fields = _attributes(value)
        if fields is None:
            self.found.not_seen.add(f"{name}: a {what}")
            return
        steps = _take_steps(fields)
        for place, step in enumerate(steps, 1):
            self.visit(step, f"step {place} of {name}", depth)
        shown = kind.__name__ if steps else _repr(value)
        if self.is_own(kind.__module__):
            self.visit(kind, f"type of {name}", depth)
            self._note(name, what, shown)
            for attribute, item in fields.items():
                self.visit(item, f"attribute {attribute} of {name}", depth)
        else:
            self.found.libraries.add(library)
            self._note(name, f"{what} {self._state(fields, name, depth)}", shown)

    def _state(self, fields: Mapping[str, Any], name: str, depth: int) -> str:
        """The attributes of a library's object as one text, so that a change of it reads as one: what it shows of itself
        is all that people need. The operator's own code that is found there has its own items."""
        inner = _Reader(self._package)
        inner._seen, inner._left = self._seen, self._left
        for attribute, item in fields.items():
            inner.visit(item, f"{attribute} of {_OWNER}", depth)
        self._left = inner._left
        mine = {key: item for key, item in inner.found.items.items() if _OWNER in key}
        self.found.items.update({key: item for key, item in inner.found.items.items() if key not in mine})
        self.found.not_seen |= {text.replace(_OWNER, name) for text in inner.found.not_seen}
        self.found.files.update(inner.found.files)
        self.found.libraries |= inner.found.libraries
        return repr(sorted(mine.items()))

    def _named(self, code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """(label, value) of each global that this code or one nested in it names, attributes of own modules and classes
        followed; imports within the code count by their module's file."""
        module = str(scope.get("__name__"))
        instructions = list(dis.get_instructions(code))
        for place, step in enumerate(instructions):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield from self._global(
                    step.argval, itertools.islice(instructions, place + 1, place + 8), scope, module
                )
            elif step.opname == "IMPORT_NAME":
                yield from self._import(step.argval, instructions, place, scope)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._named(constant, scope)

    def _global(
        self, name: str, following: Iterable[dis.Instruction], scope: Mapping[str, Any], module: str
    ) -> Iterator[tuple[str, Any]]:
        if name not in scope:
            if name in _READERS:
                self.found.not_seen.add(f"what {module} reaches by {name}()")
            return
        value, label = scope[name], f"constant {name} of {module}"
        for step in following:
            if not step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) or not isinstance(
                value, types.ModuleType | type
            ):
                break
            if step.argval in _READERS:
                self.found.not_seen.add(f"what {module} reaches by {name}.{step.argval}")
            if not self.is_own(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
                break
            yield label, value
            if not hasattr(value, step.argval):
                return
            label = f"constant {step.argval} of {value.__name__}"
            value = inspect.getattr_static(value, step.argval)
        yield label, value

    def _import(
        self, name: str, instructions: list[dis.Instruction], place: int, scope: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        level = instructions[place - 2].argval if place >= 2 else 0
        package = str(scope.get("__package__") or "")
        try:
            full = importlib.util.resolve_name("." * level + name, package) if level else name
            if full.partition(".")[0] != self._package and full not in sys.modules:
                importlib.import_module(full)
            found = importlib.import_module(full)
        except Exception:  # noqa: BLE001 - it may only be importable where it is needed
            self.found.not_seen.add(f"the module {name}, imported within {scope.get('__name__')}")
            return
        self.module(full)
        if not self.is_own(full):
            return
        if (path := getattr(found, "__file__", None)) is not None:
            yield f"module {full}", self.found.files.get(os.path.abspath(path), "")
        for step in instructions[place + 1 :]:
            if step.opname != "IMPORT_FROM":
                if step.opname.startswith("STORE"):
                    continue
                break
            if hasattr(found, step.argval):
                yield f"constant {step.argval} of {full}", getattr(found, step.argval)


def _attributes(value: Any) -> dict[str, Any] | None:
    """An instance's own attributes, slots included; None where it keeps its state elsewhere."""
    fields = dict(vars(value)) if hasattr(value, "__dict__") else {}
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    fields.update({name: getattr(value, name) for name in slots if hasattr(value, name)})
    return fields if fields or slots or hasattr(value, "__dict__") else None


def _slots(kind: type) -> tuple[str, ...]:
    found = vars(kind).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


def _take_steps(fields: dict[str, Any]) -> list[Any]:
    """Takes the steps of a Compose, or of a torch container, out of an instance's attributes."""
    steps = fields.get("transforms")
    if isinstance(steps, list | tuple):
        del fields["transforms"]
        return list(steps)
    if isinstance(modules := fields.get("_modules"), dict) and modules:
        del fields["_modules"]
        return list(modules.values())
    return []


def _repr(value: Any) -> str:
    """How an instance prints itself, on one line, where that says more than an address."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - the operator's code may raise anything
        return type(value).__name__
    return type(value).__name__ if " at 0x" in text else text


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def in_library(path: str) -> bool:
    """Whether a module file lies where libraries are installed."""
    path = os.path.realpath(path)
    return path.startswith(_library_folders()) or f"{os.sep}site-packages{os.sep}" in path or "dist-packages" in path
