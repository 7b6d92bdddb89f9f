"""The files behind a source, as a fingerprint sees them: by their times (`stat`) or by their bytes (`content`).

`stat` sees a file that is new, gone, renamed, of another size or of another time of modification. It misses an edit
that keeps both size and time, and takes a mere touch for an edit. `content` misses nothing and minds no time: every
file is read, but again only where its size or one of its times (that of its status cannot be set back) has changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from . import store
from .sources import shown

SHOWN_CHANGES = 5
#: A file that changed so shortly before it was read may change again within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000
_READERS = 8


class Entry(NamedTuple):
    """One file: its path below the root, its size, its times of modification and of its status, and in `content` mode
    the SHA-256 of its bytes. A folder that counts, as a class without pictures, ends with a slash."""

    path: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int = 0
    sha256: str = ""

    def identity(self) -> tuple[object, ...]:
        """What must be equal for the file to count as the same."""
        return (self.size_bytes, self.sha256) if self.sha256 else (self.size_bytes, self.mtime_ns)


def files(root: str) -> list[Entry]:
    """All regular files below a folder, or the file itself, sorted by the bytes of their paths. Links are followed,
    except to a folder above. A root that is missing has none. Raises `no_access`."""
    try:
        if os.path.isfile(root):
            return [entry(os.path.basename(root), os.stat(root))]
        entries = list(_walk(root, "", ()))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store.machine_error(error, error.filename or root, "The source cannot be looked at") from None
    return sorted(entries, key=lambda found: os.fsencode(found.path))


def entry(path: str, about: os.stat_result) -> Entry:
    """The entry of a file whose status is that."""
    return Entry(path, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


def _walk(folder: str, below: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    found = os.stat(folder)
    here = found.st_dev, found.st_ino
    if here in above:
        return
    with os.scandir(folder) as items:
        for item in items:
            path = f"{below}{item.name}"
            try:
                about = item.stat()
            except FileNotFoundError:  # a dangling link, or gone meanwhile: a later look will differ
                continue
            except OSError as error:
                if error.errno == errno.ELOOP:  # a link to itself holds nothing
                    continue
                raise
            if stat.S_ISREG(about.st_mode):
                yield entry(path, about)
            elif stat.S_ISDIR(about.st_mode):
                yield from _walk(item.path, f"{path}/", (*above, here))


def hashed(root: str, entries: Sequence[Entry], known: Sequence[Entry] | None) -> list[Entry]:
    """The entries with their SHA-256: the known one where size and times are the known ones, else by reading the file.
    Raises `no_access`."""
    by_path = {found.path: found for found in known or ()}
    base = root if os.path.isdir(root) else os.path.dirname(root)
    now = time.time_ns()

    def one(found: Entry) -> Entry:
        before = by_path.get(found.path)
        if before is not None and before.sha256 and before[:4] == found[:4]:
            return before
        settled = found.ctime_ns if found.ctime_ns < now - _SETTLED_NS else 0  # 0 is no file's: it is read again
        return found._replace(sha256=_sha256(os.path.join(base, found.path)), ctime_ns=settled)

    with ThreadPoolExecutor(_READERS) as readers:  # each waits for the disk, and hashes without the lock of Python
        return list(readers.map(one, entries))


def _sha256(path: str) -> str:
    """Of a file's bytes; for what has none that can be read, a word that is no hash. Raises `no_access`."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except IsADirectoryError:
        return "folder"
    except FileNotFoundError:
        return "missing"
    except PermissionError:  # a bad sample, when its turn comes
        return "unreadable"
    except OSError as error:
        raise store.machine_error(error, path, "A file of the source cannot be read") from None


def digest(entries: Sequence[Entry], look: str) -> dict[str, Any]:
    """The part of a fingerprint: count, bytes, and a hash over each file's path and identity."""
    total = hashlib.sha256()
    for found in entries:
        words = "\0".join(str(word) for word in found.identity())
        total.update(os.fsencode(found.path) + f"\0{words}\0".encode())
    return {
        "count": len(entries),
        "digest": total.hexdigest(),
        "look": look,
        "size_bytes": sum(found.size_bytes for found in entries),
    }


def changes(old: Mapping[str, Sequence[Entry] | None], new: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Which files differ, as sentences, the first `SHOWN_CHANGES` by name."""
    found: list[str] = []
    for root, listed in old.items():
        if listed is None:
            continue
        before = {item.path: item for item in listed}
        after = {item.path: item for item in new.get(root, ())}
        texts = {path: _change(before.get(path), after.get(path)) for path in before.keys() | after.keys()}
        found += [f"files: {shown(path)} {texts[path]}" for path in sorted(texts, key=os.fsencode) if texts[path]]
    more = len(found) - SHOWN_CHANGES
    return found if more <= 1 else [*found[:SHOWN_CHANGES], f"files: {more} more changed"]


def _change(before: Entry | None, after: Entry | None) -> str:
    if before is None or after is None:
        return "is new" if before is None else "is gone"
    if before.identity() == after.identity():
        return ""
    if before.size_bytes != after.size_bytes:
        return f"changed size {before.size_bytes} -> {after.size_bytes}"
    return "changed its bytes" if before.sha256 and after.sha256 else "changed its time of modification"
