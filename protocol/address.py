"""Where a daemon listens: addresses as text, from the environment. Who may use a folder is the shells' business."""

from __future__ import annotations

from collections.abc import Mapping

from . import limits
from .errors import UserError

SCHEME = "ipc://"


def candidates(environ: Mapping[str, str], uid: int) -> list[str]:
    """Addresses in the order of preference: the daemon takes the first usable one, a client tries them all.

    `$DATASERVE_ADDRESS` stands alone where it is set. Raises `bad_address`.
    """
    if named := environ.get("DATASERVE_ADDRESS"):
        return [normalise(named)]
    fallback = normalise(f"/tmp/dataserve-{uid}/d.sock")
    try:
        return [normalise(f"{environ['XDG_RUNTIME_DIR']}/dataserve/d.sock"), fallback]
    except (KeyError, UserError):  # not set, or of no use: relative, or too long for a socket
        return [fallback]


def normalise(text: str) -> str:
    """`ipc:///absolute/path` of an address given as such or as a bare path. Raises `bad_address`."""
    path = text.removeprefix(SCHEME)
    if "://" in path:
        raise UserError("bad_address", f"The address {text!r} is not a Unix socket.", "Give ipc:///path or a path.")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise UserError("bad_address", f"The address {text!r} is not an absolute path of a file.", "Give ipc:///path.")
    try:
        size_bytes = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        text = f"The address {text!r} is no UTF-8, which the socket library takes alone."
        raise UserError("bad_address", text, "Choose another path with --address or $DATASERVE_ADDRESS.") from None
    if size_bytes > limits.SOCKET_PATH_BYTES:
        raise UserError(
            "bad_address",
            f"The socket path {path!r} has {size_bytes} bytes; Linux allows {limits.SOCKET_PATH_BYTES}.",
            "Choose a shorter one with --address or $DATASERVE_ADDRESS, under /tmp for instance.",
        )
    return SCHEME + path


def socket_path(address: str) -> str:
    """The path of a normalised address."""
    return address.removeprefix(SCHEME)


def lock_path(address: str) -> str:
    """The lock beside the socket: who holds it owns the address; the file holds its pid."""
    return socket_path(address) + ".lock"


def orders_path(address: str) -> str:
    """The folder beside the socket for orders that are too large to be made in each process."""
    return socket_path(address).rpartition("/")[0] + "/orders"
