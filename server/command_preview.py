"""`dataserve preview`: a contact sheet of random rows, so that a person sees whether pixels and classes are right."""

from __future__ import annotations

import argparse
import os

from dataserve.protocol.errors import UserError

from . import store
from .command import EXIT_OK, Command, add_stored, positive, root
from .display import size

ROWS = 40
MOST_ROWS = 1000

EXAMPLE = """
dataserve preview mnist -o mnist.png
dataserve preview photos -o photos.png --rows 100 --seed 7
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_stored(parser)
    parser.add_argument("-o", "--output", metavar="FILE.png", required=True, help="where the sheet goes")
    parser.add_argument("--rows", type=positive, default=ROWS, metavar="N", help=f"how many rows ({ROWS})")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="which rows (0)")
    parser.add_argument("--column", metavar="C", help="what is shown of them (else the first picture)")


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer in [0, 2^64)")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Draw it. Raises `unknown_dataset`, `ambiguous_dataset`, `bad_store`, `unknown_column`, `no_access`, `bad_option`."""
    if not args.output.lower().endswith(".png"):
        raise UserError("bad_option", f"-o {args.output!r} is no PNG.", "Give a name that ends in .png.")
    if args.rows > MOST_ROWS:
        raise UserError(
            "bad_option", f"--rows {args.rows} are more than one sheet takes.", f"Give {MOST_ROWS} at most."
        )
    sealed = store.find(root(args), args.name)
    from .preview import preview

    data = preview(sealed, args.rows, args.seed, args.column)
    try:
        with open(args.output, "wb") as file:
            file.write(data)
    except OSError as error:
        raise store.machine_error(error, os.path.abspath(args.output), "The sheet cannot be written") from None
    print(
        f"{args.output}: {min(args.rows, sealed.manifest.rows)} rows of {store.label(sealed.path)}, {size(len(data))}"
    )
    return EXIT_OK


COMMANDS = (Command("preview", "a contact sheet of random rows", add, run, EXAMPLE),)
