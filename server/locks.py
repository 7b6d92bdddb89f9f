"""Locks of a build that the kernel releases with their holder: who builds, and who still writes.

`builder.lock` is held by the one process that builds a fingerprint; it also carries what that process tells the ones
that wait. `writers.lock` is held shared by every worker, so that orphans of a killed build never write beside its
successor. Both lie beside the build's folder. Where the file system has no `flock`, claims (pidlock.py) take its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataserve.protocol.errors import MachineError

from . import store
from .pidlock import NO_FLOCK, Claim, claimants

POLL_S = 0.1
SILENT_HOLDER_S = 60.0  #: a builder tells something ten times a second; after this silence it is stopped or hung
ORPHANS_S = 30.0  #: workers end with their parent; after this one of them hangs in the kernel
BUILDER = ".builder.lock"
WRITERS = ".writers.lock"
_NOTE_BYTES = 512


class Lock:
    """An flock on a file that may be unlinked by its holder; a claim beside it where there is no flock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._claim: Claim | None = None

    def try_take(self, *, shared: bool = False) -> bool:
        """Takes it unless somebody holds it. Raises `no_access`."""
        while True:
            try:
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise store.machine_error(error, self.path, "The build's lock cannot be made") from None
            try:
                if not self._lock(handle, shared=shared):
                    os.close(handle)
                    return False
                current = os.fstat(handle).st_ino == os.stat(self.path).st_ino
            except FileNotFoundError:
                current = False
            except OSError as error:
                os.close(handle)
                raise store.machine_error(error, self.path, "The build's lock cannot be taken") from None
            if current:
                self._handle = handle
                return True
            os.close(handle)  # its last holder unlinked it between our open and our lock
            self._withdraw()

    def _lock(self, handle: int, *, shared: bool) -> bool:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            claim = Claim(self.path, shared=shared)
            if not claim.make():
                return False
            self._claim = claim
        return True

    def _withdraw(self) -> None:
        if self._claim is not None:
            self._claim.withdraw()
            self._claim = None

    def note(self, words: dict[str, Any]) -> None:
        """Leaves word for those who wait."""
        assert self._handle is not None
        with contextlib.suppress(OSError):  # a full disk must not end a build here; it will say so elsewhere
            os.pwrite(self._handle, json.dumps(words).encode().ljust(_NOTE_BYTES), 0)
        if self._claim is not None:
            self._claim.touch()

    def is_held_alone(self) -> bool:
        """Whether somebody, in whatever pid namespace, holds it for itself. The file is not made, and shared for a moment."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no flock here
            return bool(claimants(self.path))
        finally:
            os.close(handle)
        return False

    def holders(self) -> list[int]:
        """Processes that hold it, as far as the kernel, or their claims, tell."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            inode = str(self.path.stat().st_ino)
            with open("/proc/locks", encoding="ascii") as file:
                lines = [line.split() for line in file]
            found = [int(words[4]) for words in lines if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode]
            return sorted(set(found) | set(claimants(self.path)))
        return []

    def read_note(self) -> dict[str, Any] | None:
        """What the holder last left, or None."""
        try:
            words = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        return words if isinstance(words, dict) else None

    def release(self, *, unlink: bool = False) -> None:
        """Gives it up. `unlink` removes its file first: those who wait notice and take the next one."""
        if self._handle is None:
            return
        if unlink:
            self.path.unlink(missing_ok=True)
        self._withdraw()
        os.close(self._handle)
        self._handle = None


class BuildLocks:
    """Both locks of one fingerprint."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.builder = Lock(root / store.BUILDING / f"{fingerprint}{BUILDER}")
        self.writers = Lock(root / store.BUILDING / f"{fingerprint}{WRITERS}")

    def take(self, waiting: Callable[[dict[str, Any]], None]) -> None:
        """Becomes the builder, waiting for another one as long as it is alive, and for orphans of a dead one.

        `waiting` is told what the other last said, its `pid` among it: a builder leaves word once it builds. Raises
        `stuck`.
        """
        last, since = None, time.monotonic()
        while not self.builder.try_take():
            words = self.builder.read_note()
            if words:
                waiting(words)
            if words != last:
                last, since = words, time.monotonic()
            elif time.monotonic() - since > SILENT_HOLDER_S:
                who = f"Process {words['pid']}" if words and "pid" in words else "A process"
                text = f"{who} builds this data set and has said nothing for {SILENT_HOLDER_S:.0f} s."
                raise MachineError("stuck", text, "End or continue that process; what it has built is kept.")
            time.sleep(POLL_S * random.uniform(0.5, 1.5))  # two claims at once withdraw both; not so again
        self.builder.note({})  # a dead builder's last words are no longer true
        self._wait_for_orphans()

    def _wait_for_orphans(self) -> None:
        deadline = time.monotonic() + ORPHANS_S
        while not self.writers.try_take():
            if time.monotonic() > deadline:
                who = ", ".join(map(str, self.writers.holders())) or "not to be seen from here"
                text = (
                    f"Workers of a dead build still hold {str(self.writers.path)!r} after {ORPHANS_S:.0f} s: pid {who}."
                )
                raise MachineError("stuck", text, "End these processes; what they have built is kept.")
            time.sleep(POLL_S)
        self.writers.release()  # workers hold it shared from here on; nobody else is builder

    def release(self) -> None:
        """Gives both up and removes their files; a lock that an orphan holds keeps its file, or nobody would see it."""
        if self.writers.try_take():
            self.writers.release(unlink=True)
        self.builder.release(unlink=True)
