"""What a store was made from, as named parts with one hash, and whether that is still so: HIT or MISS and why.

The parts are computed from the spec, file stats and the versions of installed distributions alone, so that the same
function serves the child that prepares and `recall`, which must answer at once and imports neither the source's
libraries nor the transform. What `recall` cannot know by itself (which folders a source reads, which libraries touch a
row) it takes from a small record that the last preparation of that spec left in `<root>/.index`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol import limits, manifest, version
from dataserve.protocol.errors import DataserveError

from . import images, sources, store
from .sources import Identity
from .spec import DatasetSpec

RECORD_FORMAT = 1
LISTED_FILES = 20_000  #: above so many a record keeps no list, and a miss names no files
SHOWN_CHANGES = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a store can be used as it is. `reasons` are sentences, the weightiest first, at least one."""

    hit: bool
    path: str | None
    fingerprint: str | None
    reasons: list[str]

    @property
    def line(self) -> str:
        """The verdict on one line: HIT or MISS, and the first reason."""
        return f"{'HIT' if self.hit else 'MISS'}: {self.reasons[0]}"


class Entry(NamedTuple):
    """One file: its path below the root, its size, its time of change."""

    path: str
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that a fingerprint rests on, at one moment."""

    identity: Identity
    parts: Mapping[str, Any]
    files: Mapping[str, Sequence[Entry]]  # by root

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the parts' canonical JSON, in hexadecimal."""
        return hashlib.sha256(manifest.canonical(self.parts)).hexdigest()


def survey(spec: DatasetSpec, identity: Identity) -> Survey:
    """Looks at the files and versions behind a spec. The spec is `located`. Raises `no_access`."""
    files = {root: census(root) for root in identity.roots}
    libraries = identity.libraries
    if spec.transform is not None:
        libraries = tuple(sorted({*libraries, *sources.PICTURE_LIBRARIES}))
    parts = {
        "files": [_digest(entries) for entries in files.values()],
        "format": version.STORE_FORMAT,
        "images": images.RULES,
        "source": _source_part(spec),
        "transform": _transform_part(spec.transform),
        "versions": {name: _major_minor(name) for name in libraries},
    }
    return Survey(identity, parts, files)


def recall(root: Path, spec: DatasetSpec) -> Verdict:
    """Whether what was prepared for this spec is there and still holds, importing nothing. Never raises for a damaged
    record or store: that is a miss with its reason. Raises what `store:` sources raise, and `no_access`."""
    spec = sources.located(spec)
    if spec.scheme == "store":
        found = _stored(root, spec.target)
        return Verdict(True, found.path, found.manifest.fingerprint, [f"{found.path} is a sealed store"])
    record = _read_record(root, spec)
    if record is None:
        return Verdict(False, None, None, [f"never prepared here: {root} has no record of this source and its options"])
    now = survey(spec, record.identity)
    reasons = changes(record.parts, now.parts, record.files, now.files)
    path = root / record.folder
    try:
        found = store.open_sealed(path)
        if found.manifest.fingerprint != record.fingerprint:
            reasons.append(f"store: {path} has another fingerprint than the one recorded")
    except DataserveError as error:
        reasons.append(f"store: {error.text}")
    if not reasons and now.fingerprint != record.fingerprint:
        reasons.append("record: it contradicts itself")
    if reasons:
        return Verdict(False, None, None, reasons)
    return hit(path)


def hit(path: Path) -> Verdict:
    """The verdict for a store that is there."""
    found = store.open_sealed(path)
    kept = f"source files, options and library versions are those of {path.name}"
    return Verdict(True, found.path, found.manifest.fingerprint, [kept])


def remember(root: Path, spec: DatasetSpec, seen: Survey, folder: str) -> None:
    """Leaves the record by which `recall` will know this preparation. Raises `no_access`, `no_space`."""
    listed = {
        name: [list(entry) for entry in entries] if len(entries) <= LISTED_FILES else None
        for name, entries in seen.files.items()
    }
    record = {
        "format": RECORD_FORMAT,
        "folder": folder,
        "fingerprint": seen.fingerprint,
        "parts": seen.parts,
        "roots": list(seen.identity.roots),
        "libraries": list(seen.identity.libraries),
        "files": listed,
    }
    path = _record_path(root, spec)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(record, file)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise store.machine_error(error, path, "The record of the preparation cannot be written") from None


def census(root: str) -> list[Entry]:
    """All regular files below a folder, or the file itself, sorted by the bytes of their paths. Links are followed, each
    folder once. A root that is missing has none. Raises `no_access`."""
    try:
        if os.path.isfile(root):
            found = os.stat(root)
            return [Entry(os.path.basename(root), found.st_size, found.st_mtime_ns)]
        entries = list(_walk(root, "", set()))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store.machine_error(error, error.filename or root, "The source cannot be looked at") from None
    return sorted(entries, key=lambda entry: os.fsencode(entry.path))


def _walk(folder: str, below: str, seen: set[tuple[int, int]]) -> Iterator[Entry]:
    found = os.stat(folder)
    if (found.st_dev, found.st_ino) in seen:
        return
    seen.add((found.st_dev, found.st_ino))
    with os.scandir(folder) as items:
        for item in items:
            path = f"{below}{item.name}"
            try:
                about = item.stat()
            except FileNotFoundError:  # a dangling link, or gone meanwhile: a later look will differ
                continue
            except OSError as error:
                if error.errno == 40:  # ELOOP: a link to itself holds nothing
                    continue
                raise
            if stat.S_ISREG(about.st_mode):
                yield Entry(path, about.st_size, about.st_mtime_ns)
            elif stat.S_ISDIR(about.st_mode):
                yield from _walk(item.path, f"{path}/", seen)


def changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    old_files: Mapping[str, Sequence[Entry] | None] | None = None,
    new_files: Mapping[str, Sequence[Entry]] | None = None,
) -> list[str]:
    """What differs between two maps of parts, part by part, as sentences. Empty where nothing does."""
    found: list[str] = []
    for part in ("source", "files", "transform", "versions", "images", "format"):
        if old.get(part) == new.get(part):
            continue
        if part == "files" and old_files is not None and new_files is not None:
            found += _file_changes(old_files, new_files) or [_counts(old, new)]
        elif part == "files":
            found.append(_counts(old, new))
        else:
            found += _value_changes(part, old.get(part), new.get(part))
    return found


def _value_changes(place: str, old: object, new: object) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                found += _value_changes(
                    f"{place}: {key}" if ":" not in place else f"{place}.{key}", *_both(old, new, key)
                )
        return found
    return [f"{place} changed {_shown(old)} -> {_shown(new)}"]


def _both(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> tuple[object, object]:
    return old.get(key), new.get(key)


def _shown(value: object) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)


def _counts(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    def total(parts: Mapping[str, Any], key: str) -> int:
        return sum(root[key] for root in parts.get("files", ()))

    return (
        f"files: {total(old, 'count')} with {total(old, 'size_bytes')} bytes -> "
        f"{total(new, 'count')} with {total(new, 'size_bytes')} bytes, names or times differ"
    )


def _file_changes(old: Mapping[str, Sequence[Entry] | None], new: Mapping[str, Sequence[Entry]]) -> list[str]:
    found: list[str] = []
    for root, listed in old.items():
        if listed is None:
            continue
        before = {entry.path: entry for entry in listed}
        after = {entry.path: entry for entry in new.get(root, ())}
        for path in sorted(before.keys() | after.keys(), key=os.fsencode):
            one, other = before.get(path), after.get(path)
            if one == other:
                continue
            if one is None or other is None:
                found.append(f"files: {path} {'is new' if one is None else 'is gone'}")
            elif one.size_bytes != other.size_bytes:
                found.append(f"files: {path} changed size {one.size_bytes} -> {other.size_bytes}")
            else:
                found.append(f"files: {path} changed its time of modification")
    more = len(found) - SHOWN_CHANGES
    return found if more <= 1 else [*found[:SHOWN_CHANGES], f"files: {more} more changed"]


def _source_part(spec: DatasetSpec) -> dict[str, Any]:
    """The source without its place: the same tree elsewhere, with the same times, is the same source."""
    if spec.scheme == "arrays":
        return {"kind": "arrays"}
    arguments = {key: _plain(value) for key, value in spec.args.items() if key not in ("root", "download")}
    return {"kind": spec.scheme, "name": spec.target, "args": arguments}


def _plain(value: object) -> object:
    """An argument as JSON that has one form: floats by their exact hexadecimal, paths that are no UTF-8 by their bytes."""
    if isinstance(value, float):
        return f"float {value.hex()}"
    if isinstance(value, str) and not value.isascii():
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
        return f"bytes {os.fsencode(value).hex()}"
    return value


def _digest(entries: Sequence[Entry]) -> dict[str, Any]:
    hashed = hashlib.sha256()
    for path, size, mtime in entries:
        hashed.update(os.fsencode(path) + f"\0{size}\0{mtime}\0".encode())
    return {
        "count": len(entries),
        "digest": hashed.hexdigest(),
        "look": "stat",
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }


def _transform_part(reference: str | None) -> dict[str, Any] | None:
    """The transform by its name and the bytes of the module that it names. What that module imports is not seen."""
    if reference is None:
        return None
    origin = _module_file(reference.partition(":")[0])
    code = None
    if origin is not None:
        with contextlib.suppress(OSError):
            code = hashlib.sha256(Path(origin).read_bytes()).hexdigest()
    return {"reference": reference, "code": code, "not_seen": "modules that it imports"}


def _module_file(name: str) -> str | None:
    """The file that an import of that module would run, found without running anything; None where there is none."""
    here = os.getcwd()
    places: Sequence[str] | None = sys.path if here in sys.path else [here, *sys.path]
    words = name.split(".")
    found = None
    for count in range(1, len(words) + 1):
        found = importlib.machinery.PathFinder.find_spec(".".join(words[:count]), places)
        if found is None:
            return None
        places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if places is None and count < len(words):
            return None
    return found.origin if found is not None and found.has_location else None


def installed(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _major_minor(name: str) -> str | None:
    full = installed(name)
    return None if full is None else ".".join(full.split(".")[:2])


def _stored(root: Path, target: str) -> store.Sealed:
    """The store of `store:PATH|NAME`: a path has a separator in it, or is a folder that exists here."""
    if os.sep in target or not limits.NAME.fullmatch(target.partition("@")[0]):
        return store.open_sealed(os.path.expanduser(target))
    return store.find(root, target)


class _Record(NamedTuple):
    folder: str
    fingerprint: str
    parts: Mapping[str, Any]
    identity: Identity
    files: Mapping[str, Sequence[Entry] | None]


def _record_path(root: Path, spec: DatasetSpec) -> Path:
    fields = spec.to_map()
    fields["args"] = {key: _plain(value) for key, value in spec.args.items()}
    text = json.dumps(fields, sort_keys=True)  # ASCII, so that any path has a form
    return root / store.INDEX / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _read_record(root: Path, spec: DatasetSpec) -> _Record | None:
    """The record of that spec; None where there is none that this version can read."""
    try:
        raw = json.loads(_record_path(root, spec).read_bytes())
        if raw["format"] != RECORD_FORMAT:
            return None
        files = {
            name: None if entries is None else [Entry(*entry) for entry in entries]
            for name, entries in raw["files"].items()
        }
        identity = Identity(tuple(raw["roots"]), tuple(raw["libraries"]))
        folder = raw["folder"]
        if not isinstance(folder, str) or os.sep in folder or folder.startswith("."):
            return None
        return _Record(folder, raw["fingerprint"], raw["parts"], identity, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
