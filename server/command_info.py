"""`dataserve info`: what a sealed store holds and what it was made from; with --row one row's origin and values."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dataserve.protocol import manifest
from dataserve.protocol.errors import UserError
from dataserve.protocol.manifest import Column, Manifest, Structure

from . import store
from .command import EXIT_OK, Command, add_json, add_stored, root
from .display import size, table
from .rows import Rows, class_name, described, sample_columns, shape_text
from .sources import shown

LISTED_CLASSES = 12
LISTED_SKIPPED = 10
_WIDTH = 13  #: of the words before the facts

EXAMPLE = """
dataserve info mnist
dataserve info mnist --row 7
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_stored(parser)
    parser.add_argument("--row", type=_row, metavar="N", help="one row: where it comes from and what it holds")
    add_json(parser)


def _row(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 or more")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Show it. Raises `unknown_dataset`, `ambiguous_dataset`, `bad_store`, `bad_option` for a row that is not there."""
    sealed = store.find(root(args), args.name)
    if args.row is not None:
        _show_row(sealed, args.row, as_json=args.json)
    elif args.json:
        print(json.dumps(_facts(sealed)))
    else:
        _show(sealed)
    return EXIT_OK


# --- the store ------------------------------------------------------------------------------------------------------


def _facts(sealed: store.Sealed) -> dict[str, Any]:
    """The whole manifest, less its checksums."""
    found = sealed.manifest
    facts = json.loads(found.to_bytes())
    for column in facts["columns"]:
        for part in (*column["parts"], *column["offsets"]):
            part["chunks"] = len(part.pop("crcs"))
    return {"path": sealed.path, "id": sealed.id, "size_bytes": found.size_bytes, **facts}


def _show(sealed: store.Sealed) -> None:
    found = sealed.manifest
    print(f"{store.label(sealed.path)}: {found.rows:,} rows, {size(found.size_bytes)}")
    _fact("folder", sealed.path)
    _fact("id", sealed.id)
    _fact("fingerprint", found.fingerprint)
    _fact("sample", sample_text(found.structure))
    for number, text in enumerate(_classes(found)):
        _fact("" if number else "classes", text)
    _fact("chunks", f"{found.chunk_rows:,} rows each, with a CRC-32")
    for number, text in enumerate(_skipped(found)):
        _fact("" if number else "skipped", text)
    for number, text in enumerate(_uniform(found)):
        _fact("" if number else "one value", text)
    print()
    headers = ("COLUMN", "TYPE", "SHAPE", "KIND", "MEANS", "SIZE", "FILES")
    table(headers, [_column_row(column) for column in found.columns], sys.stdout)
    print("\nmade from")
    for name, text in made_from(found.fingerprint_parts):
        _fact(f"  {name}", text)
    _fact("  libraries", _words(found.versions))


def _fact(word: str, text: str) -> None:
    print(f"{word:<{_WIDTH}} {text}".rstrip())


def sample_text(structure: Structure) -> str:
    """A sample's structure as Python would write it: `(image, label)`, `{'text': text}`."""
    ((kind, inner),) = structure.items()
    if kind == "column":
        return str(inner)
    if kind in ("tuple", "list"):
        items = ", ".join(sample_text(item) for item in inner)
        comma = "," if kind == "tuple" and len(inner) == 1 else ""
        return f"({items}{comma})" if kind == "tuple" else f"[{items}]"
    if kind == "namedtuple":
        return f"{inner['name']}({', '.join(f'{key}={sample_text(item)}' for key, item in inner['fields'])})"
    return "{" + ", ".join(f"{key!r}: {sample_text(item)}" for key, item in inner) + "}"


def _classes(found: Manifest) -> Iterator[str]:
    if found.classes is None:
        yield "none are known"
        return
    listed = [shown(name) for name in found.classes[:LISTED_CLASSES]]
    more = f", and {len(found.classes) - LISTED_CLASSES:,} more" if len(found.classes) > LISTED_CLASSES else ""
    yield f"{len(found.classes):,}: {', '.join(listed)}{more}"


def _skipped(found: Manifest) -> Iterator[str]:
    count = sum(item.get("more", 1) for item in found.skipped)
    yield f"{count:,} samples" if count else "none"
    listed = [item for item in found.skipped if "index" in item][:LISTED_SKIPPED]
    for item in listed:
        place = f" ({shown(item['path'])})" if item.get("path") else ""
        yield f"sample {item['index']}{place} at the stage {item.get('stage')}: {item.get('cause')}"
    if count > len(listed):
        yield f"and {count - len(listed):,} more: see --json"


def _uniform(found: Manifest) -> Iterator[str]:
    """Columns with rows that are nearly one value: not meant, maybe."""
    for item in found.uniform:
        rows = ", ".join(str(row) for row in item.get("rows", ()))
        yield f"over 99 % of each channel of {item.get('count')} rows of {item.get('column')}, the first {rows}: not meant?"


def _column_row(column: Column) -> list[str | int | None]:
    parts = (*column.parts, *column.offsets)
    shape = shape_text(column.shape) if column.kind == "fixed" else shape_text(("n", *column.shape))
    means = "where rows come from" if column.name == manifest.ORIGINS else column.logical
    size_bytes = sum(part.size_bytes for part in parts)
    return [
        column.name,
        column.dtype,
        shape,
        column.kind,
        means,
        size(size_bytes),
        ", ".join(part.file for part in parts),
    ]


def made_from(parts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a fingerprint covers, part by part, in words."""
    source = dict(parts.get("source", {}))
    kind, name = source.pop("kind", "?"), source.pop("name", "") or source.get("reference", "")
    arguments = _words(source.get("args", {}), ", ", "=")
    yield "source", f"{kind} {name}{f' ({arguments})' if arguments else ''}{_code(source)}".rstrip()
    looks = {"stat": "told apart by size and time", "content": "told apart by their bytes"}
    for files in parts.get("files", ()):
        how = looks.get(files.get("look"), "?")
        yield "files", f"{files.get('count', 0):,} with {size(files.get('size_bytes', 0))}, {how}"
    transform = parts.get("transform")
    yield "transform", "none" if transform is None else f"{transform.get('reference')}{_code(transform)}"
    yield "images", _words(parts.get("images", {}))
    yield "options", _words(parts.get("options", {}))
    yield "not seen", "; ".join(parts.get("not_seen", ())) or "nothing that is known"


def _code(part: Mapping[str, Any]) -> str:
    return f", the code of {', '.join(part['code'])}" if part.get("code") else ""


def _words(values: Mapping[str, Any], between: str = ", ", equals: str = " ") -> str:
    """`crop none, resize 224`: what is null is none."""
    texts = {
        key: "none" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in values.items()
    }
    return between.join(f"{key}{equals}{text}" for key, text in texts.items())


# --- a row ----------------------------------------------------------------------------------------------------------


def _show_row(sealed: store.Sealed, row: int, *, as_json: bool) -> None:
    found = sealed.manifest
    if row >= found.rows:
        text = f"There is no row {row} in {store.label(sealed.path)}: its rows are [0, {found.rows})."
        raise UserError("bad_option", text, "Give --row one of these.")
    rows = Rows(sealed)
    origin = rows.origin(row)
    values = {column.name: rows.value(column.name, row) for column in sample_columns(found)}
    classes = {name: class_name(found, name, value) for name, value in values.items()}
    if as_json:
        texts = {name: described(value) for name, value in values.items()}
        path = None if origin.path is None else os.fsdecode(origin.path)
        words = {"row": row, "sample": origin.sample, "path": path, "values": texts}
        print(json.dumps({**words, "classes": {name: each for name, each in classes.items() if each is not None}}))
        return
    print(f"row {row} of {store.label(sealed.path)}")
    where = "" if origin.path is None else f", {shown(origin.path)}"
    _fact("origin", f"sample {origin.sample:,} of the source{where}")
    for name, value in values.items():
        named = f" ({shown(each)})" if (each := classes[name]) is not None else ""
        _fact(name, described(value) + named)


COMMANDS = (Command("info", "what a store holds, and what it was made from", add, run, EXAMPLE),)
