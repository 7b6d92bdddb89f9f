"""`dataserve list`: the sealed stores there are, with or without a daemon."""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import store
from .command import EXIT_OK, Command, add_json, add_store, root
from .display import size, table


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_store(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show them; a damaged one with what is wrong with it."""
    folder = root(args)
    sealed, damaged = store.list_sealed(folder), store.list_damaged(folder)
    if args.json:
        rows = [
            {
                "name": found.manifest.name,
                "fingerprint": found.manifest.fingerprint,
                "id": found.id,
                "path": found.path,
                "rows": found.manifest.rows,
                "size_bytes": found.manifest.size_bytes,
                "columns": [column.name for column in found.manifest.columns],
            }
            for found in sealed
        ]
        print(json.dumps({"store": str(folder), "stores": rows, "damaged": [_damaged(*item) for item in damaged]}))
        return EXIT_OK
    print(f"store {folder}")
    if sealed:
        headers = ("NAME", "FINGERPRINT", "ROWS", "SIZE", "COLUMNS")
        table(headers, [_row(found) for found in sealed], sys.stdout)
    elif not damaged:
        print("No stores.")
    for path, error in damaged:
        print(f"{os.path.basename(path)}: damaged. {error.text}")
    return EXIT_OK


def _row(found: store.Sealed) -> list[str | int]:
    made = found.manifest
    columns = ", ".join(column.name for column in made.columns)
    return [made.name, made.fingerprint[:16], made.rows, size(made.size_bytes), columns]


def _damaged(path: str, error: Exception) -> dict[str, str]:
    return {"path": path, "error": str(error)}


COMMANDS = (Command("list", "sealed stores", add, run),)
