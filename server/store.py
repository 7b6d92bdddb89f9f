"""Sealed stores on disk: where they lie, opening and checking one, listing, finding, removing. numpy and json only.

A sealed store is a folder that appeared by one rename and is never written again (FORMAT.md). What is being built lies
under `.building`, what is being removed under `.trash`; nobody looks into either for a store.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dataserve.protocol import limits, manifest
from dataserve.protocol.errors import DataError, DataserveError, MachineError, UserError
from dataserve.protocol.manifest import Column, Manifest, Part

BUILDING = ".building"
INDEX = ".index"
TRASH = ".trash"
LABEL_DIGITS = 8

_FOLDER = re.compile(rf"({limits.NAME.pattern})-[0-9a-f]{{{limits.FINGERPRINT_DIGITS}}}")
_REBUILD = "Remove it and prepare the data again."
# Non-blocking, so that a planted FIFO cannot hang the opener; regular files do not care.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Sealed:
    """A checked store: its absolute folder, its manifest, and its id (the SHA-256 of the manifest's bytes)."""

    path: str
    manifest: Manifest
    id: str


_Found = TypeVar("_Found", bound=Sealed | DataserveError)


def default_root(environ: Mapping[str, str]) -> Path:
    """The store root: `$DATASERVE_STORE`, else `$XDG_CACHE_HOME/dataserve`, else `~/.cache/dataserve`."""
    if named := environ.get("DATASERVE_STORE"):
        return Path(os.path.abspath(named))
    cache = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification has relative paths ignored
        cache = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(cache, "dataserve")


def make_root(root: str | os.PathLike[str]) -> Path:
    """The store root as an absolute path, made 0700 where it is missing. Raises `no_access`, `no_space`,
    `unsafe_folder` where it belongs to another user or anybody may write in it."""
    path = Path(os.path.abspath(root))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except (FileExistsError, NotADirectoryError):
        raise _no_folder(path) from None
    except OSError as error:
        raise machine_error(error, path, "The store root cannot be made") from None
    if found.st_uid != os.geteuid():
        text = f"The store root {str(path)!r} belongs to user {found.st_uid}, not to {os.geteuid()}."
        raise MachineError("unsafe_folder", text, "Choose a folder of your own with --store or $DATASERVE_STORE.")
    if found.st_mode & stat.S_IWOTH:
        text = f"The store root {str(path)!r} has mode {stat.S_IMODE(found.st_mode):04o}: anybody may write in it."
        raise MachineError("unsafe_folder", text, f"Run chmod o-w {path}, or choose another with --store.")
    return path


def open_sealed(path: str | os.PathLike[str], *, thorough: bool = False) -> Sealed:
    """The store in that folder: manifest parsed, each file regular, of the exact size, with the exact header.

    `thorough` reads all of it and compares every checksum. Raises `bad_store`, or `no_access` with the path.
    """
    where = os.path.abspath(path)
    try:
        folder = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "Name a folder with a manifest.json in it; `dataserve list` shows the sealed stores."
        raise DataError("bad_store", f"There is no store at {where!r}.", remedy) from None
    except OSError as error:
        raise machine_error(error, where, "The store cannot be opened") from None
    try:
        data = _read_manifest(folder)
        found = manifest.parse(data)
        for column, part, dtype, shape in _files(found):
            _check_file(folder, part, dtype, shape, column.span_bytes(found.chunk_rows) if thorough else 0)
    except DataError as error:
        text = f"The store {where!r} cannot be used: {error.text}"
        raise DataError("bad_store", text, error.remedy or _REBUILD) from None
    except PermissionError as error:
        raise machine_error(error, where, "The store cannot be read") from None
    finally:
        os.close(folder)
    return Sealed(where, found, manifest.identify(data))


def list_sealed(root: str | os.PathLike[str]) -> list[Sealed]:
    """All usable stores below that root, by folder name. Empty where there is no such root."""
    return [found for _, found in _scan(root) if isinstance(found, Sealed)]


def list_damaged(root: str | os.PathLike[str]) -> list[tuple[str, DataserveError]]:
    """Folders below that root that look like stores and cannot be used, each with the reason."""
    return [(path, found) for path, found in _scan(root) if not isinstance(found, Sealed)]


def find(root: str | os.PathLike[str], name: str) -> Sealed:
    """The store called `NAME`, or `NAME@prefix` by the start of its fingerprint.

    Raises `unknown_dataset` or `ambiguous_dataset`, both with what there is, or what a damaged one raises.
    """
    found = _named(root, name)
    whole = [(path, item) for path, item in found if isinstance(item, Sealed)]
    _, item = _only(root, name, whole or found[:1])
    if isinstance(item, Sealed):
        return item
    raise item


def locate(root: str | os.PathLike[str], name: str) -> tuple[str, Sealed | DataserveError]:
    """The folder that `NAME` or `NAME@prefix` means, and the store in it or what is wrong with it: a damaged one counts
    as much as a whole one. Raises `unknown_dataset`, `ambiguous_dataset`."""
    return _only(root, name, _named(root, name))


def label(path: str | os.PathLike[str]) -> str:
    """What people call the store in that folder, and can name it by: `mnist@0123abcd`."""
    name, _, digits = os.path.basename(path).rpartition("-")
    return f"{name}@{digits[:LABEL_DIGITS]}"


def remove(root: str | os.PathLike[str], sealed: Sealed) -> None:
    """Takes a store away: by one rename into `.trash`, then file by file. Readers keep what they have mapped."""
    discard(root, sealed.path)


def discard(root: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """`remove` of a folder below the root that may be damaged. Raises `no_access`."""
    trash = Path(root, TRASH)
    target = trash / f"{Path(path).name}.{os.urandom(8).hex()}"
    try:
        trash.mkdir(mode=0o700, exist_ok=True)
        os.rename(path, target)
        sync_folder(root)
    except OSError as error:
        raise machine_error(error, path, "The store cannot be removed") from None
    empty_trash(root)


def empty_trash(root: str | os.PathLike[str]) -> None:
    """Takes away what removals have left, killed ones too. What cannot be removed stays for the next."""
    trash = Path(root, TRASH)
    with contextlib.suppress(OSError):
        for name in os.listdir(trash):
            shutil.rmtree(trash / name, ignore_errors=True)
        trash.rmdir()  # unless another removal has just begun


def machine_error(
    error: OSError, path: str | os.PathLike[str], what: str, need_bytes: int | None = None
) -> MachineError:
    """That refusal of the operating system as an error with the path, the room needed and free, and the remedy."""
    where = os.fspath(path)
    text = f"{what}: {where!r}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"; {need_bytes} bytes are needed" if need_bytes is not None else ""
        with contextlib.suppress(OSError):
            text += f"{need}, {free_bytes(where)} are free on that file system"
        remedy = "Make room or raise the quota, or choose another place with --store or $DATASERVE_STORE."
        return MachineError("no_space", text + ".", remedy)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return MachineError("no_access", text + ".", "Raise the limit on open files: ulimit -n 4096.")
    remedy = "Grant this user access, or choose another place with --store or $DATASERVE_STORE."
    return MachineError("no_access", text + ".", remedy)


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Room for an ordinary user on the file system of that path, or of its nearest folder that exists."""
    where = Path(path)
    while not where.exists() and where != where.parent:
        where = where.parent
    found = os.statvfs(where)
    return found.f_bavail * found.f_frsize


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _named(root: str | os.PathLike[str], name: str) -> list[tuple[str, Sealed | DataserveError]]:
    plain, _, prefix = name.partition("@")
    return [(path, item) for path, item in _scan(root) if _fits(path, plain, prefix) or os.path.basename(path) == name]


def _fits(path: str, name: str, prefix: str) -> bool:
    """Whether that folder is a store of that name, and its fingerprint goes with that prefix, as far as it is named."""
    plain, _, digits = os.path.basename(path).rpartition("-")
    return plain == name and digits.startswith(prefix[: limits.FINGERPRINT_DIGITS])


def _only(root: str | os.PathLike[str], name: str, found: Sequence[tuple[str, _Found]]) -> tuple[str, _Found]:
    """The one that there is. Raises `unknown_dataset`, `ambiguous_dataset`."""
    if len(found) == 1:
        return found[0]
    if found:
        which = ", ".join(label(path) for path, _ in found)
        text = f"{name!r} names {len(found)} stores in {os.fspath(root)!r}: {which}."
        raise UserError("ambiguous_dataset", text, "Name one of them with its digits.")
    text = f"There is no store called {name!r} in {os.fspath(root)!r}."
    labels = [label(path) for path, _ in _scan(root)]
    names = labels if "@" in name else sorted({text.partition("@")[0] for text in labels})
    near = difflib.get_close_matches(name, names, n=1)
    remedy = f"There are: {', '.join(names)}." if names else "There is none at all."
    raise UserError("unknown_dataset", text, f"Did you mean {near[0]!r}? {remedy}" if near else remedy)


def _scan(root: str | os.PathLike[str]) -> Iterator[tuple[str, Sealed | DataserveError]]:
    try:
        names = sorted(name for name in os.listdir(root) if _FOLDER.fullmatch(name))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise _no_folder(Path(root)) from None
    except OSError as error:
        raise machine_error(error, root, "The store root cannot be read") from None
    for name in names:
        path = os.path.join(os.path.abspath(root), name)
        try:
            yield path, open_sealed(path)
        except DataserveError as error:
            yield path, error


def _no_folder(path: Path) -> MachineError:
    """A store root that is, or lies below, something else than a folder."""
    file = next((place for place in (path, *path.parents) if os.path.lexists(place)), path)
    text = f"The store root {str(path)!r} cannot be used: {str(file)!r} is no folder but a file."
    return MachineError("no_access", text, "Name a folder with --store or $DATASERVE_STORE.")


def _files(found: Manifest) -> Iterator[tuple[Column, Part, str, tuple[int, ...]]]:
    """Each file with its column, and the element type and the shape that its header must name."""
    for column in found.columns:
        for part in column.parts:
            yield column, part, column.dtype, (part.rows, *column.shape)
        for part in column.offsets:
            yield column, part, "int64", (part.rows,)


def _open_regular(folder: int, name: str) -> int:
    """A descriptor of a regular file in that folder, never through a link."""
    try:
        handle = os.open(name, _READ, dir_fd=folder)
    except FileNotFoundError:
        raise DataError("bad_store", f"{name} is missing.") from None
    except PermissionError:
        raise
    except OSError as error:
        why = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise DataError("bad_store", f"{name} {why}.") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError("bad_store", f"{name} is no regular file.")
    return handle


def _read_manifest(folder: int) -> bytes:
    handle = _open_regular(folder, manifest.FILE)
    with open(handle, "rb") as file:
        return file.read(limits.MANIFEST_BYTES + 1)  # `parse` refuses what is longer than the cap


def _check_file(folder: int, part: Part, dtype: str, shape: tuple[int, ...], span_bytes: int) -> None:
    """One file against its manifest; its checksums too, each of `span_bytes` of data, where that is not 0."""
    handle = _open_regular(folder, part.file)
    try:
        size = os.fstat(handle).st_size
        if size != part.size_bytes:
            raise DataError("bad_store", f"{part.file} has {size} bytes, not {part.size_bytes}.")
        if os.pread(handle, limits.HEADER_BYTES, 0) != manifest.npy_header(dtype, shape):
            raise DataError("bad_store", f"{part.file} has a header that is not its manifest's.")
        if span_bytes:
            _check_sums(handle, part, span_bytes)
    finally:
        os.close(handle)


def _check_sums(handle: int, part: Part, span_bytes: int) -> None:
    for index, expected in enumerate(part.crcs):
        start = limits.HEADER_BYTES + index * span_bytes
        stop = min(start + span_bytes, part.size_bytes)
        crc = 0
        while start < stop:
            piece = os.pread(handle, min(stop - start, limits.CHUNK_BYTES), start)
            if not piece:
                raise DataError("bad_store", f"{part.file} ends at byte {start}.")
            crc = zlib.crc32(piece, crc)
            start += len(piece)
        if crc != expected:
            raise DataError("bad_store", f"Chunk {index} of {part.file} has CRC {crc:08x}, not {expected:08x}.")
