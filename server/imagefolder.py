"""`imagefolder:PATH`: a folder a class, its pictures below it; the sample is (picture, label) as torchvision's
`ImageFolder` gives it, with its extensions, but the same on every machine.

- Classes are the folders below the root, sorted by the bytes of their names, whatever the locale; within a class the
  pictures are sorted by the bytes of their paths, sub-folders included.
- Left out and listed: names that start with a dot (`.ipynb_checkpoints`, `.DS_Store`, `._x.jpg`), `__MACOSX`,
  `Thumbs.db` and the like, what is no file (pipes, sockets), and files beside the classes. Files of other extensions
  are counted.
- Links to files and folders are followed; one to a folder above itself is a loop, which is left out and listed. A link
  to nothing that is named like a picture is a sample, and a bad one.
- A class without any picture is refused, for it shifts labels in silence; `allow_empty=true` keeps it in the list.
- A scan that finds absurdly much ends early, unless `max_entries=N` confirms that so many entries are meant.

Paths are bytes inside, so that a name that is no UTF-8 is one like any other. No torch here: `recall` scans too.
"""

from __future__ import annotations

import bisect
import errno
import os
import stat
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataserve.protocol import limits
from dataserve.protocol.errors import DataError, UserError

from . import census, images, store
from .census import Entry
from .sources import Identity, Source, checked_length, shown
from .spec import DatasetSpec

#: torchvision's, in any case of letters.
EXTENSIONS = frozenset((b".jpg", b".jpeg", b".png", b".ppm", b".bmp", b".pgm", b".tif", b".tiff", b".webp"))
JUNK = frozenset((b"__macosx", b"thumbs.db", b"ehthumbs.db", b"desktop.ini", b"@eadir", b"lost+found", b"$recycle.bin"))
ENTRIES = 5_000_000  #: a scan ends at so many entries,
OTHERS = 200_000  #: or at so many that are no pictures, unless `max_entries` says that they are meant
FILE_BYTES = 2**30  #: of one picture
LISTED = 100  #: entries left out that are named; the rest is counted
_KINDS = 64  #: extensions that are counted apart


class Tree:
    """The pictures below a root, in their order: some 60 bytes each, for millions are held by every worker.

    Raises `bad_source`, `empty_source`, `no_access`.
    """

    def __init__(self, root: str, *, allow_empty: bool = False, max_entries: int | None = None) -> None:
        self.root = os.fsencode(root)
        self.place = os.path.join(self.root, b"")  #: what stands before a picture's path
        self.extensions: Counter[str] = Counter()
        self.unlike: Counter[str] = Counter()  #: of these, those within classes that are no picture's
        self.left_out: Counter[str] = Counter()
        self.listed: list[tuple[bytes, str]] = []
        self._most = max_entries
        self._entries = 0
        self._others = 0
        self._ends = array("Q")
        self._firsts = array("Q")
        try:
            self.classes, above = self._find_classes()
            self._paths = b"".join(self._collect(name, above) for name in self.classes)
        except OSError as error:
            where = os.fsdecode(error.filename or root)
            if error.errno in (errno.ENOENT, errno.ENOTDIR) and where == root:
                text = f"{shown(root)!r} is no folder: {error.strerror}."
                raise UserError("bad_source", text, "Write imagefolder:PATH with one folder a class in it.") from None
            raise store.machine_error(error, where, "The folder cannot be scanned") from None
        self._check(allow_empty)

    def __len__(self) -> int:
        return len(self._ends)

    def path(self, index: int) -> bytes:
        """The path of that picture below the root."""
        return self._paths[self._ends[index - 1] if index else 0 : self._ends[index]]

    def paths(self) -> Iterator[bytes]:
        """All of them in order."""
        return (self.path(index) for index in range(len(self)))

    def label(self, index: int) -> int:
        """The place of that picture's class in the list."""
        return bisect.bisect_right(self._firsts, index) - 1

    def empty_classes(self) -> list[bytes]:
        """Classes without a picture."""
        ends = [*self._firsts[1:], len(self)]
        return [name for name, first, end in zip(self.classes, self._firsts, ends, strict=True) if first == end]

    def found(self) -> dict[str, Any]:
        """What there is and what was left out, for people and as JSON."""
        return {
            "pictures": len(self),
            "classes": len(self.classes),
            "extensions": dict(self.extensions.most_common()),
            "unlike": dict(self.unlike.most_common()),
            "left_out": dict(self.left_out),
            "listed": [[shown(path), why] for path, why in self.listed],
        }

    def _find_classes(self) -> tuple[list[bytes], tuple[tuple[int, int], ...]]:
        """The folders at the top, sorted, and the root's own identity."""
        above = (_identity(self.root),)
        folders = []
        for entry in self._scan(self.root, b""):
            if _is_folder(entry):
                if _identity(entry.path) in above:
                    self._leave_out(entry.name, "a link to a folder above it")
                else:
                    folders.append(entry.name)
            else:
                self._count(entry.name)
                self._leave_out(entry.name, "a file beside the classes")
        return sorted(folders), above

    def _collect(self, name: bytes, above: tuple[tuple[int, int], ...]) -> bytes:
        """Takes the class of that name in: its pictures' paths in order, one after another."""
        found: list[bytes] = []
        pending = [(name, above)]
        while pending:
            folder, chain = pending.pop()
            place = os.path.join(self.root, folder)
            here = _identity(place)
            if here in chain:
                self._leave_out(folder, "a link to a folder above it")
                continue
            for entry in self._scan(place, folder + b"/"):
                path = folder + b"/" + entry.name
                if _is_folder(entry):
                    pending.append((path, (*chain, here)))
                elif not self._count(entry.name):
                    self.unlike[self._kind(entry.name)] += 1
                    self._other(path)
                elif entry.is_symlink() or entry.is_file():
                    found.append(path)
                else:
                    self._leave_out(path, "no file")
        self._firsts.append(len(self._ends))
        end = self._ends[-1] if self._ends else 0
        for path in sorted(found):
            end += len(path)
            self._ends.append(end)
        return b"".join(sorted(found))

    def _scan(self, place: bytes, below: bytes) -> Iterator[os.DirEntry[bytes]]:
        """The entries of a folder that are no junk."""
        with os.scandir(place) as entries:
            for entry in entries:
                self._entries += 1
                if self._entries > (self._most or ENTRIES):
                    self._too_much(f"more than {self._most or ENTRIES} entries")
                if entry.name.startswith(b".") or entry.name.lower() in JUNK:
                    self._leave_out(below + entry.name, "hidden or junk")
                else:
                    yield entry

    def _count(self, name: bytes) -> bool:
        """Counts the extension of a file; whether it is a picture's."""
        self.extensions[self._kind(name)] += 1
        return os.path.splitext(name)[1].lower() in EXTENSIONS

    def _kind(self, name: bytes) -> str:
        """What its extension is counted as."""
        kind = shown(os.path.splitext(name)[1].lower()) or "none"
        unknown = kind not in self.extensions and (len(kind) > 12 or len(self.extensions) >= _KINDS)
        return "others" if unknown else kind

    def _leave_out(self, path: bytes, why: str) -> None:
        self.left_out[why] += 1
        if len(self.listed) < LISTED:
            self.listed.append((path, why))
        self._other(path)

    def _other(self, path: bytes) -> None:
        self._others += 1
        if self._others > (self._most or OTHERS):
            self._too_much(f"more than {self._most or OTHERS} entries that are no pictures, {shown(path)!r} the last")

    def _too_much(self, what: str) -> None:
        text = f"The scan of {shown(self.root)!r} found {what}, and among them {_counts(self.extensions)}."
        raise UserError("bad_source", text, "Name a narrower folder, or confirm with --arg max_entries=N.")

    def _check(self, allow_empty: bool) -> None:
        if not self.classes:
            text = f"{shown(self.root)!r} has no class folders, and holds {_counts(self.extensions)}."
            raise UserError("bad_source", text, "Put the pictures into one folder a class: PATH/cat/1.jpg.")
        if not len(self):
            text = f"{shown(self.root)!r} has no pictures in its {len(self.classes)} classes, but "
            known = ", ".join(sorted(extension.decode() for extension in EXTENSIONS))
            raise DataError("empty_source", f"{text}{_counts(self.extensions)}.", f"Pictures are: {known}.")
        if not allow_empty and (empty := self.empty_classes()):
            names = ", ".join(repr(shown(name)) for name in empty[:5]) + (" ..." if len(empty) > 5 else "")
            text = f"{len(empty)} of the {len(self.classes)} classes have no pictures: {names}."
            raise UserError("bad_source", text, "Remove them, or keep them in the list by --arg allow_empty=true.")
        for name in self.classes:
            if len(name) > 255 or any(byte < 32 and byte != 10 or byte == 127 for byte in name):
                text = f"The class {shown(name)!r} has control characters in its name."
                raise UserError("bad_source", text, "Rename that folder.")
        if len(self.classes) > limits.CLASSES:
            text = f"{shown(self.root)!r} has {len(self.classes)} classes, more than {limits.CLASSES}."
            raise UserError("bad_source", text, "Is it the right folder?")


class FolderSource(Source):
    """The pictures of a `Tree` with the place of their class, opened one by one."""

    def __init__(self, spec: DatasetSpec) -> None:
        self._tree = tree(spec)
        self.length: int = checked_length(spec.source, len(self._tree))
        self.classes = tuple(os.fsdecode(name) for name in self._tree.classes)

    def sample(self, index: int) -> tuple[Any, int]:
        """The picture (Pillow's, its header read) and its label."""
        path = self._tree.place + self._tree.path(index)
        # Without O_NONBLOCK a pipe that took a picture's place since the scan would be waited for without end.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise DataError("bad_sample", "It is no file, but a device, pipe or folder.", "Leave it out.")
            if found.st_size > FILE_BYTES:
                text = f"The file has {found.st_size} bytes, more than {FILE_BYTES}."
                raise DataError("bad_sample", text, "Leave it out.")
            data = os.read(handle, found.st_size + 1)
            while len(data) < found.st_size and (more := os.read(handle, found.st_size - len(data))):
                data += more
        finally:
            os.close(handle)
        return images.load(data, self.rules), self._tree.label(index)

    def path(self, index: int) -> bytes:
        """Its path below the root."""
        return self._tree.path(index)

    def identity(self) -> Identity:
        """The pictures and the classes; Pillow reads them."""
        return Identity((os.fsdecode(self._tree.root),), ("numpy", "pillow"), pictures=True)

    def scanned(self) -> Mapping[str, Any]:
        """Counts by extension and reason, and the first that were left out."""
        return self._tree.found()


def tree(spec: DatasetSpec) -> Tree:
    """The pictures that an `imagefolder:` spec names. Raises as `Tree`."""
    arguments = spec.args
    for key in arguments.keys() - {"allow_empty", "max_entries"}:
        raise UserError(
            "bad_source", f"{spec.source} takes no argument {key!r}.", "It takes: allow_empty, max_entries."
        )
    allow_empty, most = arguments.get("allow_empty", False), arguments.get("max_entries")
    if type(allow_empty) is not bool or most is not None and (type(most) is not int or most < 1):
        text = f"{spec.source} was given {', '.join(f'{key}={value}' for key, value in arguments.items())}."
        raise UserError("bad_source", text, "allow_empty is true or false, max_entries a number from 1.")
    assert most is None or isinstance(most, int)
    return Tree(spec.target, allow_empty=allow_empty, max_entries=most)


def _identity(place: bytes) -> tuple[int, int]:
    found = os.stat(place)
    return found.st_dev, found.st_ino


def _is_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is a folder, or a link to one. A link to itself is nothing."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _counts(extensions: Counter[str]) -> str:
    found: Sequence[tuple[str, int]] = extensions.most_common(8)
    return ", ".join(f"{count} of {kind}" for kind, count in found) or "no files"


def census_entries(spec: DatasetSpec) -> list[Entry]:
    """The files behind an `imagefolder:` spec: its pictures, and its empty classes, which shift labels too."""
    found = tree(spec)
    entries = [census.entry(os.fsdecode(path), _status(os.path.join(found.root, path))) for path in found.paths()]
    return entries + [Entry(os.fsdecode(name) + "/", 0, 0) for name in found.empty_classes()]


def _status(place: bytes) -> os.stat_result:
    """Of a picture, or of the link itself where it leads to nothing."""
    try:
        return os.stat(place)
    except OSError:
        return os.lstat(place)
