"""`dataserve remove`: a sealed store that nobody reads, or with --force any, whole or damaged; or an unfinished build."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from dataserve.protocol.errors import UserError

from . import store, unfinished, users
from .command import ASK_S, EXIT_OK, Command, add_address, add_stored, places, root
from .display import size
from .unfinished import Unfinished

LISTED_HOLDERS = 5
BAD_TABLE = ".bad.tsv"  #: badsamples.table_path: the folder's name and this

EXAMPLE = """
dataserve remove mnist
dataserve remove mnist@0123abcd --force
dataserve remove 0123abcd
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_stored(parser)
    add_address(parser)
    parser.add_argument("--force", action="store_true", help="although it is in use: those who have it mapped keep it")


def run(args: argparse.Namespace) -> int:
    """Remove it. Raises `in_use` with who reads it, `unknown_dataset`, `ambiguous_dataset`, `no_access`."""
    folder = root(args)
    builds = unfinished.named(folder, args.name)
    try:
        path, _ = store.locate(folder, args.name)
    except UserError as error:
        if error.code != "unknown_dataset" or not builds:
            raise
        return _remove_unfinished(folder, args.name, builds)
    name = store.label(path)
    if builds:
        raise _ambiguous(args.name, [name, *(f"{build.label} (unfinished)" for build in builds)])
    holders = _holders(path, places(args))
    if holders and not args.force:
        more = f" and {len(holders) - LISTED_HOLDERS} more" if len(holders) > LISTED_HOLDERS else ""
        text = f"The store {name} is in use: {'; '.join(holders[:LISTED_HOLDERS])}{more}."
        remedy = "End these first, or give --force: whoever has it mapped keeps it, nobody can open it anew."
        raise UserError("in_use", text, remedy)
    table = Path(f"{path}{BAD_TABLE}")
    freed = unfinished.disk_bytes(path) + unfinished.disk_bytes(table)
    store.discard(folder, path)
    with contextlib.suppress(FileNotFoundError):
        table.unlink()
    when = " once those end who read it" if holders else ""
    print(f"Removed {name} from {folder}: {size(freed)} ({freed:,} bytes) are free again{when}.")
    return EXIT_OK


def _remove_unfinished(folder: Path, name: str, builds: Sequence[Unfinished]) -> int:
    if len(builds) > 1:
        raise _ambiguous(name, [build.label for build in builds])
    unfinished.remove(folder, builds[0])
    freed = builds[0].size_bytes
    print(
        f"Removed the unfinished build {builds[0].label} from {folder}: {size(freed)} ({freed:,} bytes) are free again."
    )
    return EXIT_OK


def _ambiguous(name: str, labels: Sequence[str]) -> UserError:
    text = f"{name!r} names {len(labels)}: {', '.join(labels)}."
    return UserError("ambiguous_dataset", text, "Name one of them with its digits.")


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


COMMANDS = (Command("remove", "take a store away", add, run, EXAMPLE),)
