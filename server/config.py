"""What the operator wants: data sets and places, from flags, the environment and a TOML file, in this order.

    address = "ipc:///run/user/1000/dataserve/d.sock"     # these are optional
    store = "stores"
    workers = 8
    sample_timeout_s = 60
    confirm = true
    warm = true                                           # or lock = true

    [[dataset]]
    name = "mnist"                                        # optional: made from the source
    source = "torchvision:MNIST"
    args = { root = "../data", train = true }
    resize = "32"                                         # and every other key of OPTIONS

In a file a relative path is relative to the file's folder, so that the file means the same from everywhere: `store`,
`depends`, the place in `arrays:`, `imagefolder:` and `store:./PATH`, and the argument `root`. On the command line it is
relative to the current directory. OPTIONS is the one table of what a data set can be given beside name, source and
arguments: the command line makes its flags of it, this module the keys.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dataserve.protocol import address
from dataserve.protocol.errors import DataserveError, UserError

from .builders import Manner
from .spec import IDENTITIES, MODES, ON_ERROR, DatasetSpec, Scalar, check_source, default_name, nearest
from .store import default_root
from .warm import Hold


class Option(NamedTuple):
    """One field of DatasetSpec as a flag and a key. `texts` may be given several times, `count` is 1 or more."""

    field: str
    kind: Literal["text", "count", "flag", "texts"]
    metavar: str
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        """The command line's form."""
        return "--" + self.field.replace("_", "-")


OPTIONS = (
    Option("transform", "text", "MODULE:CALLABLE", "applied to each sample before it is stored; must not be random"),
    Option("resize", "text", "SIZE|HxW", "pictures: the shorter side, or both, in pixels"),
    Option("crop", "text", "SIZE|HxW", "pictures: the middle that is kept, in pixels"),
    Option("mode", "text", "MODE", "pictures: what all become", MODES),
    Option("max_pixels", "count", "N", "pictures: one that claims more is a bad sample"),
    Option("truncated", "flag", "", "pictures: take those whose data ends early"),
    Option("ragged", "texts", "NAME", "a column whose rows may differ in length though the first ones do not"),
    Option("on_error", "text", "WHAT", "what becomes of samples that cannot be read", ON_ERROR),
    Option("max_bad", "text", "N|P%", "with skip: more bad samples than this fail all the same"),
    Option("identity", "text", "HOW", "whether files are told apart by size and time or by content", IDENTITIES),
    Option("version", "text", "TEXT", "a name for what cannot be seen, in the fingerprint"),
    Option("depends", "texts", "PATH", "a file or folder that the rows also come from"),
    Option("allow_random", "flag", "", "seed a random transform by each row, frozen for all epochs"),
)

SAMPLE_TIMEOUT_S = 86_400  #: the most that one sample may be given

_WHOLE = ("address", "store", "workers", "sample_timeout_s", "confirm", "warm", "lock")
_KEYS = ("name", "source", "args", *(option.field for option in OPTIONS))


@dataclass(frozen=True, slots=True)
class Config:
    """A file's, or a command line's, own words; None where it says nothing."""

    specs: tuple[DatasetSpec, ...] = ()
    address: str | None = None
    store: str | None = None
    manner: Manner = Manner()
    hold: Hold | None = None


def read(path: str) -> Config:
    """The data sets and places of a TOML file. Raises `bad_config`, `bad_name`, `bad_address`."""
    try:
        text = Path(path).read_text("utf-8")
        raw = tomllib.loads(text)
    except OSError as error:
        raise UserError("bad_config", f"The file {path!r} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # TOML's and UTF-8's errors are both
        raise UserError("bad_config", f"The file {path!r} is no TOML: {error}.") from None
    try:
        return _parse(raw, os.path.dirname(os.path.abspath(path)))
    except DataserveError as error:
        raise UserError(error.code, f"In {path}: {error.text}", error.remedy) from None


def addresses(flag: str | None, environ: Mapping[str, str], file: str | None, uid: int) -> list[str]:
    """Where a daemon may listen, best first. Raises `bad_address`."""
    if flag is not None:
        return [address.normalise(flag)]
    if file is not None and not environ.get("DATASERVE_ADDRESS"):
        return [address.normalise(file)]
    return address.candidates(environ, uid)


def store_root(flag: str | None, environ: Mapping[str, str], file: str | None) -> Path:
    """Where stores lie, absolute. Raises `bad_option`."""
    if flag == "":  # the path of an empty text is the current folder, which is hardly meant
        raise UserError(
            "bad_option", "--store is an empty text.", "Name a folder (--store . is this one), or leave it out."
        )
    if flag is not None:
        return Path(os.path.abspath(flag))
    if file is not None and not environ.get("DATASERVE_STORE"):
        return Path(file)
    return default_root(environ)


def scalar(text: str) -> Scalar:
    """The value of a `--arg key=value`, as TOML reads it bare: true, false, integers and floats are those, all else is
    text. Double quotes keep text text: `--arg year='"2012"'`. Python's True and False are meant as such too: as text
    both would be true."""
    if text in ("true", "false", "True", "False"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?(0|[1-9][0-9]{0,17})", text):
        return int(text)
    if re.fullmatch(r"[+-]?[0-9]+\.[0-9]+([eE][+-]?[0-9]+)?", text):
        return float(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _parse(raw: Mapping[str, Any], folder: str) -> Config:
    _known(raw, (*_WHOLE, "dataset"), "the file")
    tables = raw.get("dataset", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError("bad_config", "`dataset` is no list of tables.", "Begin each data set with [[dataset]].")
    if not tables:
        raise UserError("bad_config", "There is no data set.", "Add [[dataset]] and source = ...")
    specs = tuple(_dataset(table, number, folder) for number, table in enumerate(tables, 1))
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UserError("bad_config", f"{names.count(name)} data sets are called {name!r}.", "Give each a name.")
    where = _typed(raw, "address", str, "the file")
    store = _typed(raw, "store", str, "the file")
    if store == "":
        raise UserError("bad_config", "`store` is an empty text.", "Name a folder, or leave the key out.")
    return Config(specs, where and address.normalise(where), store and _beside(folder, store), _manner(raw), _hold(raw))


def _manner(raw: Mapping[str, Any]) -> Manner:
    workers = _typed(raw, "workers", int, "the file")
    if workers is not None and workers < 1:
        raise UserError("bad_config", f"workers is {workers}.", "Give 1 or more.")
    timeout_s = raw.get("sample_timeout_s")
    if timeout_s is not None and not (type(timeout_s) in (int, float) and 0 < timeout_s <= SAMPLE_TIMEOUT_S):
        remedy = f"Give seconds above 0, {SAMPLE_TIMEOUT_S} at most."
        raise UserError("bad_config", f"sample_timeout_s is {timeout_s!r}.", remedy)
    return Manner(workers, timeout_s, _typed(raw, "confirm", bool, "the file") is not False)


def _hold(raw: Mapping[str, Any]) -> Hold | None:
    warm, lock = (_typed(raw, key, bool, "the file") for key in ("warm", "lock"))
    return "lock" if lock else "warm" if warm else None


def _dataset(table: Mapping[str, Any], number: int, folder: str) -> DatasetSpec:
    place = f"data set {number}"
    _known(table, _KEYS, place)
    source = _typed(table, "source", str, place)
    if not source:
        raise UserError("bad_config", f"{place} has no source.", 'Give source = "torchvision:MNIST", for instance.')
    fields: dict[str, Any] = {
        option.field: _option(table, option, place) for option in OPTIONS if option.field in table
    }
    if "depends" in fields:
        fields["depends"] = tuple(_beside(folder, path) for path in fields["depends"])
    check_source(source)
    args = _args(table, place)
    if isinstance(args.get("root"), str):
        args["root"] = _beside(folder, str(args["root"]))
    source = _placed(source, folder)
    name = _typed(table, "name", str, place)
    return DatasetSpec(default_name(source) if name is None else name, source, args, **fields)


def _option(table: Mapping[str, Any], option: Option, place: str) -> Any:
    if option.kind == "texts":
        value = table[option.field]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError("bad_config", f"In {place}, {option.field} is no list of texts.")
        return tuple(value)
    kind = {"text": str, "count": int, "flag": bool}[option.kind]
    value = _typed(table, option.field, kind, place)
    if option.kind == "count" and value < 1:
        raise UserError("bad_config", f"In {place}, {option.field} is {value}.", "Give 1 or more.")
    if option.choices and value not in option.choices:
        text = f"In {place}, {option.field} is {value!r}."
        raise UserError("bad_config", text, f"Give one of {', '.join(option.choices)}.")
    return value


def _args(table: Mapping[str, Any], place: str) -> dict[str, Scalar]:
    args = _typed(table, "args", dict, place) or {}
    for key, value in args.items():
        if not isinstance(value, str | int | float):  # a bool is an int
            text = f"In {place}, the argument {key} is {type(value).__name__}."
            raise UserError("bad_config", text, "Give text, a number, true or false.")
    return dict(args)


def _typed(table: Mapping[str, Any], key: str, kind: type, place: str) -> Any:
    """The value, or None where there is none."""
    value = table.get(key)
    if value is None or type(value) is kind:
        return value
    wanted = {str: "text in quotes", int: "an integer", bool: "true or false", dict: "a table {key = value}"}[kind]
    raise UserError("bad_config", f"In {place}, {key} is {value!r}, not {wanted}.")


def _known(table: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    for key in table:
        if key not in known:
            raise UserError("bad_config", f"{key!r} in {place} is no key.", nearest(key, known))


def _placed(source: str, folder: str) -> str:
    """The source with the path that it names made absolute; a factory's and a data set's name stay."""
    scheme, _, target = source.partition(":")
    if scheme in ("arrays", "imagefolder") or scheme == "store" and os.sep in target:
        return f"{scheme}:{_beside(folder, target)}"
    return source


def _beside(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
