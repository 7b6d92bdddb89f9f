"""`dataserve start`: the daemon in the foreground, or detached with its progress shown until all is ready."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Sequence

from dataserve.protocol import address
from dataserve.protocol.errors import MachineError, ServerError, UserError

from .builders import Progress
from .claim import claim
from .command import EXIT_FAILED, EXIT_OK, Command, add_address, add_datasets, places, root, wanted
from .command_status import Status, ask_status
from .daemon import NOTHING, Order, serve
from .display import Display
from .store import machine_error, make_root
from .warm import Hold

SOCKET, LOG = "d.sock", "daemon.log"  #: beside the usual socket; beside another one a log of that one's name
LOG_BYTES = 4 * 1024 * 1024  #: a log that has grown so long begins anew: the runtime folder is memory mostly
LOOK_EACH_S = 0.2
ANSWER_EACH_S = 0.02
ANSWER_S = 30.0  #: a daemon that says nothing for so long, though its process is there, is not waited for
RELAY_BYTES = 64 * 1024

EXAMPLE = """
dataserve start torchvision:MNIST --arg root=/data --arg train=true --name mnist --detach
dataserve start --config data.toml --detach
"""

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")  # display.Display's


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_datasets(parser)
    add_address(parser)
    parser.add_argument("--detach", action="store_true", help="in the background; returns when all is ready")
    parser.add_argument("--warm", action="store_true", help="read all data into memory once they are ready")
    parser.add_argument("--lock", action="store_true", help="as --warm, and keep them there while the daemon lives")
    parser.add_argument("--no-progress", action="store_true", help="print no progress")
    parser.add_argument("--no-wait", action="store_true", help="with --detach: return once the daemon answers")


def run(args: argparse.Namespace) -> int:
    """Serve, or have it served."""
    if args.no_wait and not args.detach:
        raise UserError("bad_option", "--no-wait goes with --detach.", "Give both, or neither.")
    config = wanted(args)
    order = Order(
        config.specs, places(args, config.address), root(args, config.store), config.manner, _hold(args) or config.hold
    )
    if not args.detach:
        status = serve(order, Display(sys.stdout, stamped=True, bars=not args.no_progress, lasting=True))
        if status:
            print("dataserve: no data set could be prepared; the reasons stand above.", file=sys.stderr)
        return status
    # Claimed for a moment, so that what stands in the way is said here, and so that the log is not another daemon's.
    claimed = claim(order.addresses)
    claimed.release()
    make_root(order.store_root)
    return _Detached(args.argv, claimed.address).run(wait=not args.no_wait)


def _hold(args: argparse.Namespace) -> Hold | None:
    return "lock" if args.lock else "warm" if args.warm else None


class _Detached:
    """A daemon in a session of its own, and this process, which watches it: its log is relayed, its progress shown."""

    def __init__(self, argv: Sequence[str], where: str) -> None:
        verb, *rest = (word for word in argv if word not in ("--detach", "--no-wait"))
        program = [sys.executable, "-P", "-m", "dataserve.server.cli"]
        self._where = where
        self._display = Display(sys.stdout)
        self._log_path = log_path(where)
        self._log = _open_log(self._log_path)
        self._read = os.fstat(self._log).st_size  # what earlier daemons have said stays, and is not said again
        self._process = subprocess.Popen(
            [*program, verb, "--no-progress", "--address", where, *rest],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def run(self, *, wait: bool) -> int:
        """Until it answers, or with `wait` until all data sets are ready or have failed. Returns the exit status."""
        try:
            status = self._await_answer()
            while wait and status is not None and any(row["state"] == "preparing" for row in status["datasets"]):
                self._show_progress(status)
                time.sleep(LOOK_EACH_S)
                status = self._await_answer()
            return self._report(status, wait=wait)
        except KeyboardInterrupt:
            self._display.close()
            self._display.line(f"The daemon, pid {self._process.pid}, goes on. End it with: dataserve stop")
            raise
        finally:
            self._display.close()
            os.close(self._log)

    def _await_answer(self) -> Status | None:
        """Its status; None where it has ended. Raises `silent_daemon`."""
        deadline = time.monotonic() + ANSWER_S
        while self._process.poll() is None:
            try:
                status = ask_status([self._where], LOOK_EACH_S)
                if status["pid"] == self._process.pid:
                    self._relay()
                    return status
            except ServerError:
                pass  # not yet there, or it has just ended
            if time.monotonic() > deadline:
                text = f"The daemon, pid {self._process.pid}, has not answered at {self._where} for {ANSWER_S:.0f} s."
                raise ServerError("silent_daemon", text, f"See {self._log_path}.")
            time.sleep(ANSWER_EACH_S)
        return None

    def _report(self, status: Status | None, *, wait: bool) -> int:
        """The last words, and the exit status."""
        failed = [row["name"] for row in status["datasets"] if row["state"] == "failed"] if status else []
        if wait and status and failed and len(failed) == len(status["datasets"]):
            # It would end by itself, but stays some seconds for clients that wait; whoever started it waits here for it.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ANSWER_S)
                print(f"dataserve: nothing can be served; the daemon's log is {self._log_path}", file=sys.stderr)
                return self._process.returncode or EXIT_FAILED
        self._relay()
        if self._process.poll() is not None:
            print(f"dataserve: the daemon has ended; its log is {self._log_path}", file=sys.stderr)
            return self._process.returncode or EXIT_FAILED
        if wait and failed:
            text = f"dataserve: {', '.join(failed)} could not be prepared; the daemon serves the others."
            print(f"{text} Its log is {self._log_path}", file=sys.stderr)
            return EXIT_FAILED
        self._display.line(f"The daemon goes on, pid {self._process.pid}; its log is {self._log_path}")
        return EXIT_OK

    def _show_progress(self, status: Status) -> None:
        for row in status["datasets"]:
            if row["state"] == "preparing" and row["done"]:
                self._display.progress(row["name"], Progress("", row["done"], row["total"], None, row["eta_s"]))

    def _relay(self) -> None:
        """Whole lines that the log has grown by, without their times."""
        while piece := os.pread(self._log, RELAY_BYTES, self._read):
            whole = piece.rpartition(b"\n")[0]
            if not whole:
                return
            self._read += len(whole) + 1
            for line in whole.decode(errors="backslashreplace").split("\n"):
                if not (text := _STAMP.sub("", line)).startswith(NOTHING):  # it ends at once, as we see to it
                    self._display.line(text)


def log_path(where: str) -> str:
    """The log of the detached daemon at that address: two daemons in one folder have two."""
    folder, name = os.path.split(address.socket_path(where))
    return os.path.join(folder, LOG if name == SOCKET else f"{name}.log")


def _open_log(path: str) -> int:
    """The log, to append to and to read. Raises `no_access`, `no_space`: before there is a daemon that would be left."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        log = os.open(path, flags, 0o600)
    except OSError as error:
        raise machine_error(error, path, "The daemon's log cannot be made") from None
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        text = f"{path!r} is there and is no regular file, so it cannot be the daemon's log."
        raise MachineError("no_access", text, "Move it away, or choose another place with --address.")
    if os.fstat(log).st_size > LOG_BYTES:
        os.ftruncate(log, 0)
    return log


COMMANDS = (Command("start", "prepare and serve", add, run, EXAMPLE),)
