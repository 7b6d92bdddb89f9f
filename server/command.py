"""What the verbs of the command line share: their table's row, and the options that several take."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol.errors import UserError

from .builders import Manner
from .config import OPTIONS, SAMPLE_TIMEOUT_S, Config, addresses, read, scalar, store_root
from .spec import KINDS, DatasetSpec, check_source, default_name

ASK_S = 5.0  #: what a verb waits for the daemon's answer

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_BAD_SAMPLES = 4


class Command(NamedTuple):
    """One verb: `add` declares its arguments, `run` does it and returns the exit status, or raises a DataserveError;
    `example` are lines of a shell."""

    name: str
    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    example: str


def add_address(parser: argparse.ArgumentParser) -> None:
    """--address."""
    parser.add_argument("--address", metavar="A", help="the daemon's socket (else $DATASERVE_ADDRESS, else your own)")


def add_store(parser: argparse.ArgumentParser) -> None:
    """--store."""
    parser.add_argument("--store", metavar="DIR", help="where stores lie (else $DATASERVE_STORE, else your cache)")


def add_stored(parser: argparse.ArgumentParser) -> None:
    """NAME of a sealed store, and --store."""
    parser.add_argument("name", metavar="NAME", help="a sealed store: NAME, or NAME@DIGITS of its fingerprint")
    add_store(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="for programs")


def add_datasets(parser: argparse.ArgumentParser) -> None:
    """SOURCE and all that a data set can be given, or --config."""
    parser.add_argument("source", nargs="?", metavar="SOURCE", help=KINDS)
    parser.add_argument("--config", metavar="FILE", help="several data sets, in a TOML file")
    parser.add_argument("--name", help="the data set's name (else made from SOURCE)")
    parser.add_argument(
        "--arg",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="for the source's constructor; true, false and numbers are those, '\"12\"' is text",
    )
    for option in OPTIONS:
        _add_option(parser, option)
    add_store(parser)
    parser.add_argument("--workers", type=positive, metavar="N", help="processes that prepare (else one a core)")
    parser.add_argument("--sample-timeout-s", type=_seconds, metavar="S", help="what one sample may take")
    parser.add_argument(
        "--no-confirm",
        action="store_true",
        help="do not prepare some rows of a store that was found again, to compare them",
    )


def _add_option(parser: argparse.ArgumentParser, option: Any) -> None:
    """An absent flag is None, so that what was given can be told from what was not."""
    if option.kind == "flag":
        parser.add_argument(option.flag, dest=option.field, action="store_true", default=None, help=option.help)
        return
    shown = None if option.choices else option.metavar
    kind = positive if option.kind == "count" else str
    action = "append" if option.kind == "texts" else "store"
    parser.add_argument(
        option.flag,
        dest=option.field,
        type=kind,
        metavar=shown,
        choices=option.choices,
        action=action,
        help=option.help,
    )


def positive(text: str) -> int:
    """argparse's type of a count."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    """argparse's type of a time-out."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= SAMPLE_TIMEOUT_S:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, {SAMPLE_TIMEOUT_S} at most")


def wanted(args: argparse.Namespace) -> Config:
    """The data sets and places of a command line and its --config. Raises `bad_option`, and what `config.read` does."""
    if (args.config is None) == (args.source is None):
        raise UserError("bad_option", "Either SOURCE or --config FILE is needed.", "See --help.")
    found = {option.field: getattr(args, option.field) for option in OPTIONS}
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found.items() if value is not None
    }
    if args.config is None:
        if "depends" in given:
            given["depends"] = tuple(os.path.abspath(path) for path in given["depends"])
        check_source(args.source)
        name = default_name(args.source) if args.name is None else args.name
        spec = DatasetSpec(name, args.source, _arguments(args.arg), **given)
        return Config((spec,), manner=_manner(args, Manner()))
    flags = [option.flag for option in OPTIONS if option.field in given]
    flags += [flag for flag, value in (("--name", args.name is not None), ("--arg", args.arg)) if value]
    if flags:
        raise UserError("bad_option", f"{flags[0]} does not go with --config.", "Write it into the file.")
    config = read(args.config)
    return replace(config, manner=_manner(args, config.manner))


def _manner(args: argparse.Namespace, file: Manner) -> Manner:
    """Flags beat the file."""
    return Manner(
        args.workers or file.workers,
        args.sample_timeout_s or file.sample_timeout_s,
        file.confirm and not args.no_confirm,
    )


def _arguments(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UserError("bad_option", f"--arg {text!r} is not KEY=VALUE.", "Write --arg root=/data, for instance.")
        if key in found:
            raise UserError("bad_option", f"--arg {key} is given twice.")
        found[key] = scalar(value)
    return found


def places(args: argparse.Namespace, file: str | None = None) -> list[str]:
    """Where the daemon may be, best first; `file` is what a config file says. Raises `bad_address`."""
    return addresses(args.address, os.environ, file, os.geteuid())


def root(args: argparse.Namespace, file: str | None = None) -> Path:
    """Where stores lie."""
    return store_root(args.store, os.environ, file)
