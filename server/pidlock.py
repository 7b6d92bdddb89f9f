"""Locks for file systems without `flock`: files that say who wants the lock, and count as long as that process lives.

Who wants a lock makes its claim first and looks for others' after: of two who come at once at least one sees the other,
maybe both do, and each that does withdraws. A claim of this host counts as long as its process lives; one of another
host, whose processes cannot be seen, for `CLAIM_S` after its holder last touched it. Workers need no touch: they end with
their builder, which touches its own ten times a second.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

CLAIM_S = 60.0
#: What `flock` answers where there is none.
NO_FLOCK = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)
_ANY = ".claim."


class Claim:
    """A claim to the lock at that path."""

    def __init__(self, path: Path, *, shared: bool) -> None:
        kind = "shared" if shared else "alone"
        me = f"{os.getpid()}-{_started(os.getpid())}-{os.urandom(4).hex()}"
        self._lock = path
        self._path = path.with_name(f"{path.name}{_ANY}{kind}.{_host()}.{me}")

    def make(self) -> bool:
        """Makes it, unless somebody else's stands in the way. Raises `OSError`."""
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        prefix = f"{self._lock.name}{_ANY}"
        alone = self._path.name.startswith(f"{prefix}alone.")
        for name in os.listdir(self._lock.parent):
            if not name.startswith(prefix) or name == self._path.name:
                continue
            if not _counts(self._lock.parent / name, name.removeprefix(prefix)):
                (self._lock.parent / name).unlink(missing_ok=True)
            elif alone or name.startswith(f"{prefix}alone."):
                self.withdraw()
                return False
        return True

    def touch(self) -> None:
        """Says to other hosts that its holder lives."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def withdraw(self) -> None:
        """Takes it back."""
        self._path.unlink(missing_ok=True)


def claimants(path: Path) -> list[int]:
    """Processes of this host that have a claim to the lock at that path."""
    prefix = f"{path.name}{_ANY}"
    names = [name.removeprefix(prefix) for name in os.listdir(path.parent) if name.startswith(prefix)]
    living = [name for name in names if _counts(path.with_name(prefix + name), name)]
    return [int(name.split(".")[2].split("-")[0]) for name in living if name.split(".")[1] == _host()]


def _counts(path: Path, words: str) -> bool:
    """Whether the process that made that claim is there."""
    try:
        _, host, process = words.split(".", 2)
        pid, started, _ = process.split("-")
        if host == _host():
            return _started(int(pid)) == started
        return time.time() - path.stat().st_mtime < CLAIM_S
    except (OSError, ValueError):  # withdrawn meanwhile, or none of ours
        return False


def _host() -> str:
    """This host's name and boot, with no dots; after a restart no claim of before counts."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{socket.gethostname().replace('.', '_')}-{file.read(8)}"


def _started(pid: int) -> str | None:
    """When that process started, in ticks since boot; None where there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
