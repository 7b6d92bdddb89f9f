"""One preparing child: started, listened to without waiting, ended with all that it started. Its contract is in prepare.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any, Literal

from dataserve.protocol import limits
from dataserve.protocol.checks import Check, flag, integer, list_of, number, optional, record, text
from dataserve.protocol.errors import DataserveError, ServerError, UserError

from .events import PreparationFailed
from .overheard import Stderr
from .spec import DatasetSpec

REQUEST_BYTES = 32 * 1024  #: half of what a pipe takes without a reader
LINE_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024
READS = 16  #: of one child in one turn of the loop, so that a child that floods us does not hold it
END_S = 10.0  #: a child that has closed its pipe is gone, or killed, after this
TERM_S = 3.0  #: from SIGTERM to SIGKILL

Task = Literal["look up", "build", "confirm"]

#: What runs; a test puts another program in its place.
PROGRAM: tuple[str, ...] = (sys.executable, "-P", "-m", "dataserve.server.prepare")


def _words(value: Any) -> str:
    """Any text: it may quote what a source's code said."""
    if type(value) is not str:
        raise ValueError("is no text")
    return value


def _counts(value: Any) -> dict[str, int]:
    """How many of each kind."""
    if type(value) is not dict:
        raise ValueError("is no map")
    return {_words(key): _count(item) for key, item in value.items()}


_count = integer(0, 2**63 - 1)
_hex256 = text(64, limits.HEX256)
_number = optional(number(0, 1e15))
#: What a child may say, by event; one that is not here is ignored.
_FIELDS: dict[str, dict[str, Check]] = {
    "verdict": {"hit": flag, "fingerprint": optional(_hex256), "reasons": list_of(_words, 10_000, 1)},
    "waiting": {"pid": optional(_count)},
    "space": {"need_bytes": optional(_count), "free_bytes": _count},
    "scanned": {"pictures": _count, "classes": _count, "left_out": _counts, "unlike": _counts},
    "confirming": {},
    "iterated": {},
    "confirmed": {"rows": _count},
    "resuming": {"done": _count, "total": optional(_count)},
    "bad": {"index": _count, "path": optional(_words), "stage": _words, "cause": _words},
    "bad_samples": {"count": _count, "table": optional(_words), "remedy": optional(_words)},
    "uniform": {"column": _words, "count": _count, "rows": list_of(_count, 1000), "of": _count},
    "progress": {"stage": _words, "done": _count, "total": optional(_count), "rate": _number, "eta_s": _number},
    "sealed": {"path": _words, "id": _hex256},
    "failed": {"code": _words, "text": _words, "remedy": _words},
}
_SAYINGS = {name: record({"event": _words, **fields}) for name, fields in _FIELDS.items()}


class Child:
    """One preparing process and what it has said. Its stdin stays open: the end of it means that we are gone."""

    def __init__(self, spec: DatasetSpec, request: dict[str, Any], task: Task, *, nice: int = 0) -> None:
        self.spec = spec
        self.name = spec.name
        self.task = task
        self.settled = False  # it has said how it ends
        self.missed = False
        self.confirming = False
        self.failed_by_us = False  # by a fault that its stderr explains
        self.fault: PreparationFailed | None = None
        self._heard = b""
        self._deaf = False  # its pipe is at its end, or not worth hearing any more
        self._deadline = 0.0
        self.process = subprocess.Popen(
            PROGRAM,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        with contextlib.suppress(ProcessLookupError):  # before it starts a thread or a worker, which inherit it
            os.setpriority(os.PRIO_PROCESS, self.process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self.stderr = Stderr(os.dup(self.process.stderr.fileno()))  # what native libraries and user code print
        self.process.stderr.close()
        self._exit = os.pidfd_open(self.process.pid)  # readable once the process has ended
        os.set_blocking(self._stdout.fileno(), False)
        self._request(json.dumps(request).encode() + b"\n")

    def _request(self, line: bytes) -> None:
        try:
            if len(line) > REQUEST_BYTES:
                text = f"The description of {self.name!r} has {len(line)} bytes, more than {REQUEST_BYTES}."
                raise UserError("bad_option", text, "Give shorter arguments.")
            self._stdin.write(line)  # an empty pipe takes it without waiting
        except UserError as error:
            self._refuse(error)
        except BrokenPipeError:
            pass  # it is dead already; its status tells

    @property
    def descriptor(self) -> int:
        """What to watch now."""
        return self._exit if self._deaf else self._stdout.fileno()

    @property
    def descriptors(self) -> set[int]:
        """All that is worth a turn of the loop."""
        return {self.descriptor} | self.stderr.descriptors

    def hear(self) -> list[dict[str, Any]]:
        """The whole lines that have come, parsed and checked."""
        for _ in range(0 if self._deaf else READS):
            try:
                piece = os.read(self._stdout.fileno(), READ_BYTES)
            except BlockingIOError:
                break
            if not piece:
                self._hear_no_more()
                break
            self._heard += piece
            if len(self._heard) > LINE_BYTES:
                break
        *lines, self._heard = self._heard.split(b"\n")
        try:
            if len(self._heard) > LINE_BYTES:
                raise ValueError(f"a line of more than {LINE_BYTES} bytes")
            return [words for line in lines if (words := _parse(line)) is not None]
        except ValueError as error:
            text = f"The child that prepares {self.name!r} said what is none of its words: {error}."
            self._refuse(ServerError("internal", text, "See the daemon's log."))
            return []

    def ended(self) -> bool:
        """Whether it is gone and all that it said is heard. One that has closed its pipe is made to go."""
        if not self._deaf:
            return False
        if time.monotonic() > self._deadline:
            self._kill_group()
        return self.process.poll() is not None

    def dismiss(self) -> None:
        """Ask it to end: SIGTERM, and the end of its stdin, which its workers feel too."""
        self.process.terminate()
        self._stdin.close()

    def kill(self, deadline: float) -> None:
        """Wait for it until the deadline; then its whole group is killed, which is gone when this returns."""
        poller = select.poll()
        poller.register(self._exit, select.POLLIN)
        poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        self._kill_group()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nothing more can be done
            self.process.wait(TERM_S)
        self.release()

    def release(self) -> None:
        """Give the descriptors back."""
        os.close(self._exit)
        self._stdin.close()
        self._stdout.close()
        self.stderr.close()

    def _refuse(self, error: DataserveError) -> None:
        """End a child that makes no sense."""
        self.fault = PreparationFailed(self.name, error.code, error.text, error.remedy)
        self._heard = b""
        self._hear_no_more()
        self._kill_group()

    def _hear_no_more(self) -> None:
        self._deaf = True
        self._deadline = time.monotonic() + END_S

    def _kill_group(self) -> None:
        """SIGKILL to the child and all that it started. Its number cannot be another's: it was not waited for."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The checked fields of one line, None for an event that is unknown. Raises ValueError."""
    try:
        raw = json.loads(line)
        event = _words(raw["event"])
        return _SAYINGS[event](raw) if event in _SAYINGS else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{line[:80]!r} ({type(error).__name__})") from None
