"""What dead builds and removals have left: builds are gone on with by their own data set and removed by others' once they
are stale, trash is removed at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from dataserve.protocol import limits
from dataserve.protocol.errors import DataserveError

from . import journal, store
from .locks import BUILDER, BuildLocks

KEPT_S = 24 * 3600.0  #: an interrupted build of another data set is kept so long after its last chunk


def clean(root: Path, name: str, but: str | None = None) -> None:
    """Removes trash, and what nobody will go on with: builds of this data set under other fingerprints than `but`, which its source
    or options have left behind; builds whose store is there; builds of others that have lain for a day. What a living
    process builds is never touched, and what cannot be removed stays for the next."""
    store.empty_trash(root)
    folder = root / store.BUILDING
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            fingerprint = entry.partition(".")[0]
            if not limits.HEX256.fullmatch(fingerprint) or fingerprint == but:
                continue
            if entry == fingerprint and _is_stale(root, folder / entry, name):
                _remove(root, fingerprint, folder / entry)
            elif entry.endswith(BUILDER) and not (folder / fingerprint).exists():
                _remove(root, fingerprint, None)


def _is_stale(root: Path, build: Path, name: str) -> bool:
    found = journal.read(build / journal.FILE)
    theirs = found[0].get("spec", {}).get("name") if found is not None else None
    if theirs == name or theirs is not None and (root / f"{theirs}-{build.name[: limits.FINGERPRINT_DIGITS]}").exists():
        return True
    for place in (build / journal.FILE, build):
        with contextlib.suppress(OSError):
            return time.time() - place.stat().st_mtime > KEPT_S
    return False


def _remove(root: Path, fingerprint: str, build: Path | None) -> None:
    locks = BuildLocks(root, fingerprint)
    with contextlib.suppress(DataserveError):
        if not locks.builder.try_take():
            return
        try:
            if build is not None and locks.writers.try_take():  # else orphans are still at it
                locks.writers.release()
                shutil.rmtree(build, ignore_errors=True)
        finally:
            locks.release()
