"""Finds the daemon and the data set: tries every address, waits, shows that it waits, and says what failed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from dataserve.protocol import limits
from dataserve.protocol.address import lock_path
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.messages import Describe, Described, Preparing

from . import transport

QUIET_S = 1.0  #: a daemon may take this long before the user hears that it is waited for
LINE_EACH_S = 10.0  #: progress where there is no terminal
ASK_EACH_S = 0.25


def describe(name: str, addresses: Sequence[str], timeout_s: float, out: TextIO | None = None) -> tuple[str, Described]:
    """The address that serves `name`, and its description. Waits for a daemon, and while the data set is prepared.

    `timeout_s` counts silence only: preparation may take all the time it needs while it answers. Raises `no_daemon` with each
    address and why it failed, and at once what the daemon refuses (`unknown_dataset`, ...).
    """
    notice = _Notice(out or sys.stderr)
    began = heard = time.monotonic()
    callers: dict[str, transport.Caller] = {}
    reasons: dict[str, str] = {}
    answered = False
    try:
        while True:
            for address in addresses:
                reply = _ask(callers, reasons, address, name)
                if isinstance(reply, Described):
                    return address, reply
                if isinstance(reply, Preparing):
                    heard, answered = time.monotonic(), True
                    notice.progress(name, reply)
                    time.sleep(ASK_EACH_S)
                    break
            now = time.monotonic()
            if now - heard >= timeout_s:
                raise transport.no_daemon(reasons, timeout_s)
            if now - began >= QUIET_S and not answered:  # else one is there, and busy for a moment
                notice.waiting(addresses)
            if all(address not in callers for address in addresses):
                time.sleep(min(ASK_EACH_S, timeout_s))  # nobody was asked, so nobody took the time
    finally:
        notice.end()
        for caller in callers.values():
            caller.close()


def _ask(
    callers: dict[str, transport.Caller], reasons: dict[str, str], address: str, name: str
) -> Described | Preparing | None:
    """One question to one address; None, and the reason, where nobody answers."""
    why = transport.why_unusable(address)
    if why is not None:
        reasons[address] = why
        if address in callers:
            callers.pop(address).close()
        return None
    if address not in callers:
        callers[address] = transport.Caller(address)
    try:
        reply = callers[address].ask(Describe(name), ASK_EACH_S)
    except DataserveError as error:
        if not error.retryable:
            raise
        reasons[address] = error.text
        time.sleep(ASK_EACH_S)
        return None
    if isinstance(reply, Described | Preparing):
        return reply
    reasons[address] = f"socket there but nobody answers, {_holder(address)}"
    return None


def _holder(address: str) -> str:
    """What the lock beside the socket says of the daemon."""
    try:
        with open(lock_path(address), "rb") as file:
            pid = int(file.read(32).split()[0])
    except (OSError, ValueError, IndexError):
        return "no daemon has left its pid"
    with contextlib.suppress(OSError):
        os.stat(f"/proc/{pid}")
        return f"daemon pid {pid} is alive"
    return f"daemon pid {pid} is dead"


class _Notice:
    """Says what is waited for: over and over in one line of a terminal, elsewhere a line each ten seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._waited = False
        self._open_line = False
        self._last = -LINE_EACH_S

    def waiting(self, addresses: Sequence[str]) -> None:
        """Nobody answers yet; said once."""
        if not self._waited:
            self._waited = True
            self.end()
            where = " or ".join(addresses)
            print(
                f"dataserve: waiting for a daemon at {where}; start one: dataserve start SOURCE",
                file=self._out,
                flush=True,
            )

    def progress(self, name: str, reply: Preparing) -> None:
        """How far the daemon is."""
        text = f"dataserve: waiting for data set {name!r}: {describe_progress(reply)}"
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=self._out, flush=True)
            self._open_line = True
        elif (now := time.monotonic()) - self._last >= LINE_EACH_S:
            self._last = now
            print(text, file=self._out, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._open_line:
            print(file=self._out, flush=True)
            self._open_line = False


def describe_progress(reply: Preparing) -> str:
    """`37 %, 12 s left`; without a total the rows, without an ETA nothing of it."""
    done = f"{reply.done} rows" if not reply.total else f"{100 * reply.done // reply.total} %"
    if reply.state != "preparing":
        done = f"{reply.state}, {done}"
    if reply.eta_s is None:
        return done
    left = round(reply.eta_s)
    return f"{done}, {left} s left" if left < 120 else f"{done}, {left // 60} min left"


assert ASK_EACH_S < limits.RETRY_S
