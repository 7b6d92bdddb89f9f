"""Who owns an address: the runtime folder, the lock beside the socket, and what may lie where the socket will be.

libzmq would bind over anything that lies at the path, a living daemon's socket too. So the lock decides, before: who
holds it may remove a stale socket and bind. The kernel releases it with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, Sequence

from dataserve.protocol import address
from dataserve.protocol.errors import DataserveError, MachineError, UserError

from .store import machine_error

PROBE_S = 1.0  #: a process that listens takes a connection at once

_OTHER = "Choose another with --address or $DATASERVE_ADDRESS."


class Claim:
    """An address that this process alone may bind, from `claim` until `release`."""

    def __init__(self, where: str, lock: int) -> None:
        self.address = where
        self._lock = lock
        self._socket: tuple[int, int] | None = None

    def bound(self) -> None:
        """Remember the socket that was made there, so that no other is taken for it."""
        self._socket = _identity(address.socket_path(self.address))

    @property
    def ours(self) -> bool:
        """Whether the socket at the address is the one that was `bound`: the folder may have been emptied by hand."""
        return self._socket is not None and _identity(address.socket_path(self.address)) == self._socket

    def renew(self) -> bool:
        """Take again what was removed of the folder and the lock; whether the socket is gone too, so that its owner has to
        make it and to say so (`bound`). Until then a second daemon may get in, which keeps the address.

        Raises what `claim` does.
        """
        if not self._has_lock():
            make_folder(self.address)
            fresh = _lock(self.address)
            os.close(self._lock)
            self._lock = fresh
        if self.ours:
            return False
        _clear(self.address)
        return True

    def _has_lock(self) -> bool:
        """Whether the lock that we hold is the one that others would find."""
        held = os.fstat(self._lock)
        return _identity(address.lock_path(self.address)) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        """Remove the socket and the lock if they are still ours, and let the next one in."""
        if self.ours:
            os.unlink(address.socket_path(self.address))
        if self._has_lock():
            os.unlink(address.lock_path(self.address))
        os.close(self._lock)


def claim(addresses: Sequence[str]) -> Claim:
    """The first of the addresses that can be used, claimed. A daemon that runs at one ends the search.

    Raises `daemon_running` with its pid, `unsafe_folder`, `no_access`, `bad_address`.
    """
    failure: DataserveError | None = None
    for where in addresses:
        try:
            make_folder(where)
            lock = _lock(where)
        except MachineError as error:
            failure = failure or error
            continue
        claimed = Claim(where, lock)
        try:
            _clear(where)
        except DataserveError:
            claimed.release()
            raise
        return claimed
    assert failure is not None, "there is always an address to try"
    raise failure


def make_folder(where: str) -> str:
    """The runtime folder of an address, made 0700 where it is missing. Raises `unsafe_folder`, `no_access`."""
    folder = os.path.dirname(address.socket_path(where))
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
    except OSError as error:
        raise machine_error(error, folder, "The runtime folder cannot be made") from None
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise MachineError("unsafe_folder", f"The runtime folder {folder!r} is {kind}.", _OTHER)
    if found.st_uid != os.geteuid():
        text = f"The runtime folder {folder!r} belongs to user {found.st_uid}, not to {os.geteuid()}."
        raise MachineError("unsafe_folder", text, _OTHER)
    if found.st_mode & 0o077:
        text = f"The runtime folder {folder!r} has mode {stat.S_IMODE(found.st_mode):04o}: others may enter it."
        raise MachineError("unsafe_folder", text, "Choose a folder that only you may enter (chmod 700) with --address.")
    return folder


def clear_orders(where: str) -> None:
    """Remove the orders of epochs that clients of earlier daemons have left beside the socket, in memory as it mostly is:
    clients that still use one have it mapped, and make again what they miss. Files only, and as far as that can be done."""
    folder = address.orders_path(where)
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(folder).st_mode):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def holder(where: str) -> int | None:
    """The pid of the daemon that holds that address's lock; 0 where it has not left it; None where nobody holds it."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO there must not hold us
        lock = os.open(address.lock_path(where), flags)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _pid(lock)
    finally:
        os.close(lock)
    return None


def _lock(where: str) -> int:
    """The lock, taken, with our pid in it. Raises `daemon_running`, `no_access`."""
    path = address.lock_path(where)
    for lock in _openings(path):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _pid(lock)
            os.close(lock)
            raise _running(where, f"pid {pid}" if pid else "whose pid is not known yet") from None
        held = os.fstat(lock)
        if _identity(path) == (held.st_dev, held.st_ino):
            try:
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            except OSError as error:
                os.close(lock)
                raise machine_error(error, path, "The daemon's pid cannot be written into its lock") from None
            return lock
        os.close(lock)  # its last holder removed it between our open and our lock
    raise MachineError("stuck", f"The lock {path!r} changes all the time.", "Stop what removes it.")


def _openings(path: str) -> Iterator[int]:
    for _ in range(100):
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open(path, flags, 0o600)
        except OSError as error:
            raise machine_error(error, path, "The daemon's lock cannot be made") from None
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            os.close(lock)
            text = f"{path!r} is there and is no regular file, so it cannot be the daemon's lock."
            raise UserError("bad_address", text, _OTHER)
        yield lock


def _clear(where: str) -> None:
    """Remove a stale socket. Raises `daemon_running` where somebody listens, `bad_address` where it is no socket."""
    path = address.socket_path(where)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        text = f"{path!r} is there and is no socket, so the daemon does not take its place."
        raise UserError("bad_address", text, _OTHER)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:  # too busy to take us, for instance: somebody is there
            pass
    raise _running(where, "whose lock was removed")


def _running(where: str, who: str) -> UserError:
    text = f"A daemon, {who}, already listens at {address.socket_path(where)}."
    remedy = "One daemon serves many data sets: write all of them into a TOML file (--config), run `dataserve stop` and start "
    remedy += "with that file. Or choose another place with --address."
    return UserError("daemon_running", text, remedy)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _pid(lock: int) -> int:
    try:
        return int(os.pread(lock, 20, 0))
    except ValueError:
        return 0
