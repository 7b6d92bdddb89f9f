"""`dataserve remove`: a sealed store that nobody reads, or with --force any, whole or damaged."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from dataserve.protocol.errors import UserError

from . import store, users
from .command import ASK_S, EXIT_OK, Command, add_address, add_stored, places, root
from .display import size

LISTED_HOLDERS = 5
BAD_TABLE = ".bad.tsv"  #: badsamples.table_path: the folder's name and this

EXAMPLE = """
dataserve remove mnist
dataserve remove mnist@0123abcd --force
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_stored(parser)
    add_address(parser)
    parser.add_argument("--force", action="store_true", help="although it is in use: those who have it mapped keep it")


def run(args: argparse.Namespace) -> int:
    """Remove it. Raises `in_use` with who reads it, `unknown_dataset`, `ambiguous_dataset`, `no_access`."""
    folder = root(args)
    path, _ = store.locate(folder, args.name)
    name = store.label(path)
    holders = _holders(path, places(args))
    if holders and not args.force:
        more = f" and {len(holders) - LISTED_HOLDERS} more" if len(holders) > LISTED_HOLDERS else ""
        text = f"The store {name} is in use: {'; '.join(holders[:LISTED_HOLDERS])}{more}."
        remedy = "End these first, or give --force: whoever has it mapped keeps it, nobody can open it anew."
        raise UserError("in_use", text, remedy)
    table = Path(f"{path}{BAD_TABLE}")
    freed = sum(_disk_bytes(file) for file in (*Path(path).iterdir(), table))
    store.discard(folder, path)
    with contextlib.suppress(FileNotFoundError):
        table.unlink()
    when = " once those end who read it" if holders else ""
    print(f"Removed {name} from {folder}: {size(freed)} ({freed:,} bytes) are free again{when}.")
    return EXIT_OK


def _holders(path: str, addresses: Sequence[str]) -> list[str]:
    """Everybody who uses that store, jobs first."""
    statuses, silent = users.daemons(addresses, ASK_S)
    attached = users.attached(statuses, path)
    known = {each.pid for each in attached} | {status["pid"] for status in statuses}
    others = [pid for pid in users.mapped_by(path) if pid not in known]
    return [
        *(f"job {each.job!r}, pid {each.pid}, reads it" for each in attached),
        *(f"the daemon, pid {pid}, serves it" for pid in users.served_by(statuses, path)),
        *(f"process {pid} ({_command(pid)}) has it mapped" for pid in others),
        *(f"the daemon, pid {pid}, does not answer, so nobody knows what it serves" for pid in silent),
    ]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="backslashreplace").strip()
    except OSError:
        return "which has just ended"


def _disk_bytes(path: Path) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


COMMANDS = (Command("remove", "take a store away", add, run, EXAMPLE),)
