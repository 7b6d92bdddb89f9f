"""The record that a preparation leaves in `<root>/.index`, one a spec: by it `recall` knows in an instant, without an
import, what the store was made from. Losing one costs an import; a damaged one counts as none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import store
from .census import Entry
from .sources import Identity
from .spec import DatasetSpec

FORMAT = 2
LISTED_FILES = 20_000  #: above so many files a record in `stat` mode keeps no list, and a miss names none


@dataclass(frozen=True, slots=True)
class Record:
    """What one preparation rested on. `files` are by root, None where they were too many to list; `code_files` are
    own module files with the SHA-256 of their bytes, `libraries` the distributions that the code touches."""

    folder: str
    fingerprint: str
    parts: Mapping[str, Any]
    identity: Identity
    files: Mapping[str, Sequence[Entry] | None]
    code_files: Mapping[str, str]
    libraries: tuple[str, ...]


def write(root: Path, spec: DatasetSpec, record: Record) -> None:
    """Replaces the record of that spec. Raises `no_access`, `no_space`."""
    identity = record.identity
    words = {
        "format": FORMAT,
        "folder": record.folder,
        "fingerprint": record.fingerprint,
        "parts": record.parts,
        "identity": [identity.roots, identity.libraries, identity.pictures, identity.not_seen],
        "files": record.files,
        "code_files": record.code_files,
        "libraries": record.libraries,
    }
    path = _path(root, spec)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(words, file)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise store.machine_error(error, path, "The record of the preparation cannot be written") from None


def read(root: Path, spec: DatasetSpec) -> Record | None:
    """The record of that spec; None where there is none that this version can read."""
    try:
        raw = json.loads(_path(root, spec).read_bytes())
        if raw["format"] != FORMAT:
            return None
        files = {
            name: None if entries is None else [Entry(*found) for found in entries]
            for name, entries in raw["files"].items()
        }
        roots, libraries, pictures, not_seen = raw["identity"]
        folder = raw["folder"]
        if not isinstance(folder, str) or os.sep in folder or folder.startswith(".") or not folder:
            return None
        identity = Identity(tuple(roots), tuple(libraries), bool(pictures), tuple(not_seen))
        code_files = {str(path): str(digest) for path, digest in raw["code_files"].items()}
        parts: Mapping[str, Any] = dict(raw["parts"])
        return Record(folder, raw["fingerprint"], parts, identity, files, code_files, tuple(raw["libraries"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def plain_argument(value: object) -> object:
    """An argument as JSON that has one form: floats by their exact hexadecimal, text that is no UTF-8 by its bytes."""
    if isinstance(value, float):
        return f"float {value.hex()}"
    if isinstance(value, str) and not value.isascii():
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
        return f"bytes {os.fsencode(value).hex()}"
    return value


def _path(root: Path, spec: DatasetSpec) -> Path:
    fields = spec.to_map()
    fields["args"] = {key: plain_argument(value) for key, value in spec.args.items()}
    text = json.dumps(fields, sort_keys=True)  # ASCII, so that any path has a form
    return root / store.INDEX / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
