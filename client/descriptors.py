"""Whether this process may open what a connection needs: libzmq ends a process in which it cannot."""

from __future__ import annotations

import os
import resource

from dataserve.protocol.errors import MachineError

NEEDED = 16  #: what a context, its threads and a socket open, and some for whatever opens a file meanwhile


def require() -> None:
    """Raises `no_access` where fewer than `NEEDED` descriptors are left under the process's limit."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # the look itself takes one
    except OSError:  # not even that one is left
        used = allowed
    if allowed - used < NEEDED:
        raise MachineError(
            "no_access",
            f"This process has {used} of {allowed} file descriptors open; a connection to the daemon needs {NEEDED} more.",
            "Raise the limit (ulimit -n 65536), or close files.",
        )
