"""`dataserve list`: the sealed stores there are, and the builds that have not come to their end; with or without a daemon."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from dataserve.protocol.errors import DataserveError

from . import store, unfinished, users
from .command import EXIT_OK, Command, add_address, add_json, add_store, places, root
from .command_status import Status
from .display import size, table
from .unfinished import Unfinished

ASK_S = 1.0  #: a daemon that is busy for longer is listed without
DAY_S = 24 * 3600


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_store(parser)
    add_address(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show them; a damaged one with what is wrong with it."""
    folder = root(args)
    statuses, _ = users.daemons(places(args), ASK_S)
    sealed, damaged = store.list_sealed(folder), store.list_damaged(folder)
    rows = [_described(found, statuses) for found in sealed]
    builds = unfinished.list_unfinished(folder)
    if args.json:
        others = {"damaged": [_damaged(*item) for item in damaged], "unfinished": [each._asdict() for each in builds]}
        print(json.dumps({"store": str(folder), "stores": rows, **others}))
        return EXIT_OK
    print(f"store {folder}")
    if rows:
        table(
            ("NAME", "FINGERPRINT", "ROWS", "SIZE", "USED", "JOBS", "COLUMNS"), [_row(row) for row in rows], sys.stdout
        )
    elif not damaged:
        print("No stores.")
    for path, error in damaged:
        print(f"{os.path.basename(path)}: damaged. {error.text}")
    for build in builds:
        print(_unfinished(build))
    return EXIT_OK


def _described(found: store.Sealed, statuses: list[Status]) -> dict[str, Any]:
    """One store. `jobs` is null where no daemon answers."""
    made = found.manifest
    jobs = sorted({each.job for each in users.attached(statuses, found.path)}) if statuses else None
    return {
        "name": made.name,
        "fingerprint": made.fingerprint,
        "id": found.id,
        "path": found.path,
        "rows": made.rows,
        "size_bytes": made.size_bytes,
        "columns": [column.name for column in made.columns],
        "used_s": _used(found),
        "jobs": jobs,
    }


def _used(found: store.Sealed) -> float:
    """Seconds since its data were last read, as the file system tells it: most write it down once a day."""
    files = [os.path.join(found.path, part.file) for part in found.manifest.files()]
    return max(0.0, round(time.time() - max(os.stat(file).st_atime for file in files), 1))


def _row(row: dict[str, Any]) -> list[str | int | None]:
    days = int(row["used_s"] // DAY_S)
    used = "in a day" if days == 0 else f"{days} d ago"
    jobs = None if row["jobs"] is None else ", ".join(row["jobs"]) or "none"
    columns = ", ".join(row["columns"])
    return [row["name"], row["fingerprint"][:16], row["rows"], size(row["size_bytes"]), used, jobs, columns]


def _unfinished(build: Unfinished) -> str:
    """One build: how far it is, and who is at it or what may be done with it."""
    total = "?" if build.total is None else f"{build.total:,}"
    far = f"{build.done:,} of {total} samples, {size(build.size_bytes)}"
    if build.alive:
        pids = ", ".join(map(str, build.pids)) or "not to be seen from here"
        return f"{build.label}: being built by pid {pids}: {far}"
    return f"{build.label}: unfinished: {far}. The next start of that data set goes on with it; dataserve remove {build.label}"


def _damaged(path: str, error: DataserveError) -> dict[str, str]:
    return {"path": path, "error": str(error)}


COMMANDS = (Command("list", "sealed stores", add, run, "dataserve list --json"),)
