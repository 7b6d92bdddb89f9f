"""What a store was made from, as named parts with one hash, and whether that is still so: HIT or MISS and why.

    files      the source's files and those of --depends (census.py): by stat or by content, wherever they lie
    source     its kind and arguments, and the code of a factory (codeprint.py)
    transform  the transform's code
    images     the rules for pictures (images.py)
    options    what else shapes the rows: --on-error, --allow-random, --version, --ragged where it is given
    not_seen   what none of these covers, in words: --version NAME does
    versions   major.minor of the libraries that touch a row, and of Python where code of the operator's does
    format     of the store

The child that prepares computes all of it. `recall` must answer at once and imports neither the source's libraries nor
the operator's code: it looks at files and versions, and takes the code for unchanged as long as the bytes of its module
files are (record.py). Where they differ it is a miss, and the child, which imports, may still find a hit.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataserve.protocol import limits, manifest, version
from dataserve.protocol.errors import DataserveError, UserError

from . import census, images, record, sources, store
from .census import Entry
from .record import Record
from .sources import Identity
from .spec import DatasetSpec

_ORDER = ("source", "files", "transform", "images", "options", "not_seen", "versions", "format")


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


@dataclass(frozen=True, slots=True)
class Code:
    """The operator's code behind a spec: items by role (`transform`, `factory`), its module files with their hashes,
    the distributions that it touches, and what cannot be followed."""

    items: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    not_seen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that a fingerprint rests on, at one moment."""

    identity: Identity
    parts: Mapping[str, Any]
    files: Mapping[str, Sequence[Entry]]  # by root
    code: Code

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the parts' canonical JSON, in hexadecimal."""
        return hashlib.sha256(manifest.canonical(self.parts)).hexdigest()


def survey(
    spec: DatasetSpec,
    identity: Identity,
    *,
    code: Code | None = None,
    earlier: Mapping[str, Sequence[Entry] | None] | None = None,
) -> Survey:
    """Looks at the files, the code and the versions behind a spec. The spec is `located`. Without `code` the operator's
    modules are imported and read; `earlier` are files whose hashes hold where their times do.

    Raises `no_access`, `bad_transform`, `bad_source`, `bad_option`.
    """
    code = read_code(spec) if code is None else code
    files = _files(spec, identity)
    if spec.identity == "content":
        files = {root: census.hashed(root, found, (earlier or {}).get(root)) for root, found in files.items()}
    parts = {
        "files": [census.digest(entries, spec.identity) for entries in files.values()],
        "format": version.STORE_FORMAT,
        "images": images.Rules.of(spec).to_map(),
        "not_seen": sorted({*identity.not_seen, *code.not_seen}),
        "options": {
            "on_error": spec.on_error,
            "random": "seeded by row" if spec.allow_random else "refused",
            "version": spec.version,
            **({"ragged": sorted(set(spec.ragged))} if spec.ragged else {}),
        },
        "source": _source_part(spec, code),
        "transform": None if spec.transform is None else _code_part(spec.transform, code.items["transform"]),
        "versions": {name: _major_minor(name) for name in sorted({*identity.libraries, *code.libraries})},
    }
    return Survey(identity, parts, files, code)


def _files(spec: DatasetSpec, identity: Identity) -> dict[str, Sequence[Entry]]:
    """By root: the files of the source and of `depends`. Raises `no_access`, `bad_option`."""
    files: dict[str, Sequence[Entry]]
    if identity.pictures:
        from .imagefolder import census_entries

        files = {identity.roots[0]: census_entries(spec)}
    else:
        files = {root: census.files(root) for root in identity.roots}
    for path in spec.depends:
        if not os.path.exists(path):  # as an empty root it would never be seen to change
            text = f"What --depends names is not there: {sources.shown(path)}."
            raise UserError("bad_option", text, "Correct its path, or leave it out.")
        if path not in files:
            files[path] = census.files(path)
    return files


def changed_since(spec: DatasetSpec, seen: Survey) -> list[str]:
    """What has changed behind a spec since that survey, as sentences: its files, and its code's. Raises `no_access`."""
    now = survey(spec, seen.identity, code=seen.code, earlier=seen.files)
    found = changes(seen.parts, now.parts, seen.files, now.files) if now.fingerprint != seen.fingerprint else []
    return found + _code_file_changes(seen.code.files)


def recall(root: Path, spec: DatasetSpec) -> Verdict:
    """Whether what was prepared for this spec is there and still holds, importing nothing. Never raises for a damaged
    record or store: that is a miss with its reason. Raises what `store:` sources raise, and `no_access`."""
    spec = sources.located(spec)
    if spec.scheme == "store":
        found = _stored(root, spec.target)
        return Verdict(True, found.path, found.manifest.fingerprint, [f"{found.path} is a sealed store"])
    known = record.read(root, spec)
    if known is None:
        return Verdict(False, None, None, [f"never prepared here: {root} has no record of this source and its options"])
    try:
        now = survey(spec, known.identity, code=_known_code(known), earlier=known.files)
    except DataserveError as error:
        return Verdict(False, None, None, [f"source: {error.text}"])
    reasons = changes(known.parts, now.parts, known.files, now.files)
    reasons += _code_file_changes(known.code_files) + _moved(spec, known)
    path = root / known.folder
    try:
        found = store.open_sealed(path)
        if found.manifest.fingerprint != known.fingerprint:
            reasons.append(f"store: {path} has another fingerprint than the one recorded")
    except DataserveError as error:
        reasons.append(f"store: {error.text}")
    if not reasons and now.fingerprint != known.fingerprint:
        reasons.append("record: it contradicts itself")
    if reasons:
        return Verdict(False, None, None, reasons)
    return hit(path)


def hit(path: Path) -> Verdict:
    """The verdict for a store that is there."""
    found = store.open_sealed(path)
    parts = found.manifest.fingerprint_parts
    kept = f"source files, code, options and library versions are those of {path.name}"
    if any(part.get("look") == "stat" for part in parts.get("files", ())):
        kept += " (files by size and time; --identity content compares their bytes)"
    return Verdict(True, found.path, found.manifest.fingerprint, [kept, *notes(parts)])


def miss(root: Path, spec: DatasetSpec, recalled: Verdict, seen: Survey) -> Verdict:
    """The verdict where nothing that is there will do, with what changed since the last preparation of this spec; without
    a record of one, since the nearest store of this name."""
    known = record.read(root, spec)
    if known is not None:
        found = changes(known.parts, seen.parts, known.files, seen.files) or recalled.reasons
    else:
        sealed = store.list_sealed(root)
        same = [item.manifest.name for item in sealed if item.manifest.fingerprint == seen.fingerprint]
        if same:
            text = f"prepared here only under the name {same[0]!r}, which --name {same[0]} serves as it is"
            return Verdict(False, None, seen.fingerprint, [text, *notes(seen.parts)])
        named = [item for item in sealed if item.manifest.name == spec.name]
        differences = [changes(item.manifest.fingerprint_parts, seen.parts) for item in named]
        found = min(differences, key=len, default=[]) or recalled.reasons
    return Verdict(False, None, seen.fingerprint, [*found, *notes(seen.parts)])


def notes(parts: Mapping[str, Any]) -> list[str]:
    """What a fingerprint does not cover, and what to do about it. Empty where there is no such thing, or a version."""
    unseen = parts.get("not_seen", ())
    if not unseen or parts.get("options", {}).get("version") is not None:
        return []
    return [f"not seen: {'; '.join(unseen)}. Give --version NAME, and another name whenever that changes"]


def remember(root: Path, spec: DatasetSpec, seen: Survey, folder: str) -> None:
    """Leaves the record by which `recall` will know this preparation. Raises `no_access`, `no_space`."""
    listed = {
        name: entries if spec.identity == "content" or len(entries) <= record.LISTED_FILES else None
        for name, entries in seen.files.items()
    }
    found = Record(folder, seen.fingerprint, seen.parts, seen.identity, listed, seen.code.files, seen.code.libraries)
    record.write(root, spec, found)


def read_code(spec: DatasetSpec) -> Code:
    """The code behind a spec, imported and followed. Raises `bad_transform`, `bad_source`."""
    from . import codeprint

    wanted: dict[str, tuple[str, Any]] = {}
    if spec.transform is not None:
        wanted["transform"] = spec.transform, sources.load_transform(spec.transform)
    if spec.is_factory:
        wanted["factory"] = spec.source, sources.load_factory(spec.source)
    if not wanted:
        return Code()
    prints = {role: codeprint.read(reference, code) for role, (reference, code) in wanted.items()}
    names = {name for found in prints.values() for name in found.libraries}
    return Code(
        {role: {name: list(item) for name, item in found.items.items()} for role, found in prints.items()},
        {path: digest for found in prints.values() for path, digest in sorted(found.files.items())},
        tuple(sorted({"python", *_distributions(names)})),
        tuple(sorted({f"{role}: {text}" for role, found in prints.items() for text in found.not_seen})),
    )


def changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    old_files: Mapping[str, Sequence[Entry] | None] | None = None,
    new_files: Mapping[str, Sequence[Entry]] | None = None,
) -> list[str]:
    """What differs between two maps of parts, part by part, as sentences. Empty where nothing does."""
    found: list[str] = []
    for part in _ORDER:
        if old.get(part) == new.get(part):
            continue
        if part == "files":
            named = [] if old_files is None or new_files is None else census.changes(old_files, new_files)
            found += named or [_counts(old, new)]
        else:
            found += _value_changes(part, old.get(part), new.get(part))
    return found


def _value_changes(place: str, old: object, new: object) -> list[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = []
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) == new.get(key):
                continue
            if key == "code" and isinstance(old.get(key), Mapping) and isinstance(new.get(key), Mapping):
                from . import codeprint

                found += [f"{place}: {text}" for text in codeprint.changes(old[key], new[key])]
            else:
                below = f"{place}: {key}" if ":" not in place else f"{place}.{key}"
                found += _value_changes(below, old.get(key), new.get(key))
        return found
    return [f"{place} changed {_shown(old)} -> {_shown(new)}"]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("reference", value)
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)


def _counts(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    def total(parts: Mapping[str, Any], key: str) -> int:
        return sum(root[key] for root in parts.get("files", ()))

    return (
        f"files: {total(old, 'count')} with {total(old, 'size_bytes')} bytes -> "
        f"{total(new, 'count')} with {total(new, 'size_bytes')} bytes, names or times differ"
    )


def _source_part(spec: DatasetSpec, code: Code) -> dict[str, Any]:
    """The source without its place: the same tree elsewhere, with the same times, is the same source."""
    if spec.scheme in ("arrays", "imagefolder"):
        return {"kind": spec.scheme}
    arguments = {
        key: record.plain_argument(value) for key, value in spec.args.items() if key not in ("root", "download")
    }
    if spec.is_factory:
        return {"kind": "factory", "args": arguments, **_code_part(spec.source, code.items["factory"])}
    return {"kind": spec.scheme, "name": spec.target, "args": arguments}


def _code_part(reference: str, items: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {"reference": reference, "code": {name: list(item) for name, item in items.items()}}


def _known_code(known: Record) -> Code:
    """The code as the record has it."""
    items = {
        role: part["code"]
        for role, part in (("transform", known.parts.get("transform")), ("factory", known.parts.get("source")))
        if isinstance(part, Mapping) and "code" in part
    }
    not_seen = tuple(text for text in known.parts.get("not_seen", ()) if text not in known.identity.not_seen)
    return Code(items, known.code_files, known.libraries, not_seen)


def _code_file_changes(files: Mapping[str, str]) -> list[str]:
    """Which of these module files have other bytes now."""
    found = []
    for path, digest in files.items():
        try:
            same = hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest
        except OSError as error:
            found.append(f"code: {sources.shown(path)} cannot be read any more: {error.strerror}")
            continue
        if not same:
            found.append(f"code: {sources.shown(path)} has changed")
    return found


def _moved(spec: DatasetSpec, known: Record) -> list[str]:
    """References that an import would now find elsewhere: another module of that name comes first."""
    from . import codeprint

    found = []
    for reference in (spec.transform, spec.source if spec.is_factory else None):
        if reference is not None:
            name = reference.partition(":")[0]
            origin = _module_file(name)
            if origin is None or not (os.path.abspath(origin) in known.code_files or codeprint.in_library(origin)):
                found.append(f"code: the module {name} is now {origin or 'nowhere to be found'}")
    return found


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
    """The version of an installed distribution, or of Python."""
    if name == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _major_minor(name: str) -> str | None:
    full = installed(name)
    return None if full is None else ".".join(full.split(".")[:2])


def _distributions(modules: set[str]) -> set[str]:
    """The distributions that hold these top-level modules; the standard library's have none."""
    wanted = {name for name in modules if name not in sys.stdlib_module_names}
    return {found[0].lower() for name in wanted if (found := _packages().get(name))}


@functools.cache
def _packages() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _stored(root: Path, target: str) -> store.Sealed:
    """The store of `store:PATH|NAME`: a path has a separator in it, or is a folder that exists here."""
    if os.sep in target or not limits.NAME.fullmatch(target.partition("@")[0]):
        return store.open_sealed(os.path.expanduser(target))
    return store.find(root, target)
