"""Builds that have not come to their end, below `.building`: what is known of each, and taking one away that nobody builds."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError

from . import journal, store
from .layout import Layout
from .locks import BuildLocks

PREFIX_DIGITS = 4  #: of a fingerprint alone must be named at least so many

_ALONE = re.compile(rf"[0-9a-f]{{{PREFIX_DIGITS},64}}")


class Unfinished(NamedTuple):
    """One build: `name` is None where it died before it knew what its samples are, `total` where only the source's end
    tells. `alive`: somebody builds it, or workers of a dead build still write; `pids` are those, as far as they are seen."""

    path: str
    fingerprint: str
    name: str | None
    done: int
    total: int | None
    size_bytes: int
    alive: bool
    pids: tuple[int, ...]

    @property
    def label(self) -> str:
        """What people call it, and can name it by."""
        digits = self.fingerprint[: store.LABEL_DIGITS]
        return digits if self.name is None else f"{self.name}@{digits}"


def list_unfinished(root: str | os.PathLike[str]) -> list[Unfinished]:
    """All there are, by fingerprint. Nothing is touched: a builder may be at work. Those of another user, who may have
    opened the sealed stores to this one, are that user's alone: none."""
    try:
        names = sorted(name for name in os.listdir(Path(root, store.BUILDING)) if limits.HEX256.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if isinstance(error, PermissionError) and os.stat(Path(root, store.BUILDING)).st_uid != os.geteuid():
            return []
        raise store.machine_error(error, Path(root, store.BUILDING), "Unfinished builds cannot be listed") from None
    return [_described(Path(root), name) for name in names]


def named(root: str | os.PathLike[str], name: str) -> list[Unfinished]:
    """Those that NAME, NAME@DIGITS or, where none is called so, the first digits of a fingerprint mean."""
    found = list_unfinished(root)
    plain, _, prefix = name.partition("@")
    called = [each for each in found if each.name == plain and each.fingerprint.startswith(prefix)]
    if called or not _ALONE.fullmatch(name):
        return called
    return [each for each in found if each.fingerprint.startswith(name)]


def remove(root: Path, found: Unfinished) -> None:
    """Takes it away, under its locks, so that no builder begins meanwhile. Raises `in_use` with who is at it."""
    locks = BuildLocks(root, found.fingerprint)
    for lock, who in (
        (locks.builder, "is being built by"),
        (locks.writers, "is still written by workers of a dead build,"),
    ):
        if not lock.try_take():
            pids = ", ".join(map(str, lock.holders())) or "not to be seen from here"
            locks.release()
            text = f"The unfinished build {found.label} {who} pid {pids}."
            raise UserError("in_use", text, "End these processes first, or wait for them.")
    try:
        store.discard(root, found.path)
    finally:
        locks.writers.release(unlink=True)
        locks.builder.release(unlink=True)


def _described(root: Path, fingerprint: str) -> Unfinished:
    path = root / store.BUILDING / fingerprint
    name, done, total = None, 0, None
    if (read := journal.read(path / journal.FILE)) is not None:
        header, chunks = read
        done = sum(chunk.scanned for chunk in chunks.values())
        with contextlib.suppress(KeyError, TypeError):  # of another version
            name, total = str(header["spec"]["name"]), Layout.from_map(header["layout"]).rows
    locks = BuildLocks(root, fingerprint)
    pids = sorted({*locks.builder.holders(), *locks.writers.holders()})
    alive = bool(pids) or locks.builder.is_held_alone()
    return Unfinished(str(path), fingerprint, name, done, total, disk_bytes(path), alive, tuple(pids))


def disk_bytes(path: str | os.PathLike[str]) -> int:
    """What a file, or all below a folder, takes on the disk; what is gone meanwhile takes nothing."""
    places: Sequence[str] = [os.fspath(path)]
    places = [*places, *(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)]
    total = 0
    for place in places:
        with contextlib.suppress(OSError):
            total += os.lstat(place).st_blocks * 512
    return total
