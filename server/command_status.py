"""`dataserve status` and `dataserve stop`: what the daemon knows, and its end."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TextIO

from dataserve.protocol import address
from dataserve.protocol.errors import ServerError
from dataserve.protocol.messages import AskStatus, StatusPage, Stop

from . import transport
from .claim import holder
from .command import ASK_S, EXIT_OK, Command, add_address, add_json, places
from .display import duration, size, table

WATCH_EACH_S = 1.0
STOP_S = 15.0  #: a daemon ends its children in some seconds
LOOK_EACH_S = 0.02
ATTEMPTS = 3  #: at a status whose pages belong together

Status = dict[str, Any]

_JOB = ("job", "dataset", "world_size", "batch_size", "seed")
_CONSUMER = (
    *("rank", "worker", "pid", "epoch", "position", "samples_per_s", "wait_share", "bound", "last_seen_s", "alone"),
)


def ask_status(addresses: Sequence[str], timeout_s: float) -> Status:
    """The whole status, as `status --json` shows it. Raises `no_daemon`, `silent_daemon`."""
    for _ in range(ATTEMPTS):
        pages = [_page(addresses, 0, timeout_s)]
        while len(pages) < pages[0]["pages"]:
            pages.append(_page([pages[0]["address"]], len(pages), timeout_s))
        if len({page["boot"] for page in pages}) == 1:  # else another daemon has taken its place meanwhile
            return _status(pages)
    raise ServerError("silent_daemon", "The daemon was started again and again while it was asked.", "Ask again.")


def _page(addresses: Sequence[str], number: int, timeout_s: float) -> dict[str, Any]:
    reply = transport.ask_reply(addresses, AskStatus(number), timeout_s)
    if not isinstance(reply.message, StatusPage):
        raise ServerError("version_mismatch", f"The daemon answers `status` with `{reply.message.KIND}`.")
    page = {field.name: getattr(reply.message, field.name) for field in fields(reply.message)}
    return {**page, "boot": reply.boot.hex()}


def _status(pages: Sequence[dict[str, Any]]) -> Status:
    head = {key: pages[0][key] for key in ("version", "pid", "address", "boot", "store", "uptime_s")}
    datasets = [row for page in pages for row in page["datasets"]]
    consumers = [row for page in pages for row in page["consumers"]]
    return {**head, "datasets": datasets, "jobs": nested(consumers)}


def nested(consumers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of consumers as jobs, each with its consumers, in the order in which they come."""
    jobs: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in consumers:
        job = jobs.setdefault(tuple(row[key] for key in _JOB), {**{key: row[key] for key in _JOB}, "consumers": []})
        job["consumers"].append({key: row[key] for key in _CONSUMER})
    return list(jobs.values())


def add_status(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_address(parser)
    add_json(parser)
    parser.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")


def run_status(args: argparse.Namespace) -> int:
    """Show it."""
    while True:
        status = ask_status(places(args), ASK_S)
        if args.watch and sys.stdout.isatty() and not args.json:
            print("\x1b[H\x1b[2J", end="")
        if args.json:
            print(json.dumps(status), flush=True)
        else:
            show(status, sys.stdout)
        if not args.watch:
            return EXIT_OK
        time.sleep(WATCH_EACH_S)


def show(status: Status, stream: TextIO) -> None:
    """The status for people."""
    print(
        f"dataserve {status['version']}, pid {status['pid']}, up {duration(status['uptime_s'])}, at {status['address']}",
        file=stream,
    )
    print(f"store {status['store']}\n", file=stream)
    table(
        ("DATASET", "STATE", "ROWS", "SIZE", "IN MEMORY", "FOLDER"),
        [_dataset_row(row) for row in status["datasets"]],
        stream,
    )
    for row in status["datasets"]:
        if row["error"]:
            print(f"{row['name']}: {row['error']}", file=stream)
    if not status["jobs"]:
        print("\nNo jobs.", file=stream)
        return
    print(file=stream)
    headers = ("JOB", "DATASET", "RANK", "WORKER", "PID", "EPOCH", "POSITION", "SAMPLES/S", "WAITS", "BOUND BY", "SEEN")
    table(headers, [_consumer_row(job, row) for job in status["jobs"] for row in job["consumers"]], stream)
    stream.flush()


def _dataset_row(row: dict[str, Any]) -> list[str | int | None]:
    state = row["state"]
    if state == "preparing" and row["total"]:
        left = f", {duration(row['eta_s'])} left" if row["eta_s"] is not None else ""
        state += f" {100 * row['done'] // row['total']} %{left}"
    folder = os.path.basename(row["path"]) if row["path"] else None
    return [row["name"], state, row["rows"], row["size_bytes"] and size(row["size_bytes"]), _in_memory(row), folder]


def _in_memory(row: dict[str, Any]) -> str | None:
    if row["resident"] is None:
        return None
    locked = "" if row["locked"] is None else f", {row['locked']:.0%} locked"
    return f"{row['resident']:.0%}{locked}"


def _consumer_row(job: dict[str, Any], row: dict[str, Any]) -> list[str | int | float | None]:
    waits = None if row["wait_share"] is None else f"{row['wait_share']:.1%}"
    seen = f"{duration(row['last_seen_s'])} ago" + (", alone" if row["alone"] else "")
    return [
        *(job["job"], job["dataset"], f"{row['rank']}/{job['world_size']}", row["worker"], str(row["pid"])),
        *(row["epoch"], row["position"], row["samples_per_s"], waits, row["bound"], seen),
    ]


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_address(parser)


def run_stop(args: argparse.Namespace) -> int:
    """End the daemon and wait until it is gone. Raises `silent_daemon`."""
    status = ask_status(places(args), ASK_S)
    where, pid = status["address"], status["pid"]
    with contextlib.suppress(ServerError):  # it may be gone before its answer is here
        transport.ask([where], Stop(), ASK_S)
    deadline = time.monotonic() + STOP_S
    while holder(where) == pid:
        if time.monotonic() > deadline:
            text = f"The daemon, pid {pid}, was told to end and is still there after {STOP_S:.0f} s."
            raise ServerError("silent_daemon", text, f"End it with: kill -9 {pid}. Nothing is lost by that.")
        time.sleep(LOOK_EACH_S)
    print(f"The daemon, pid {pid}, at {address.socket_path(where)} has ended.")
    return EXIT_OK


COMMANDS = (
    Command("status", "data sets and jobs", add_status, run_status, "dataserve status --watch"),
    Command("stop", "end the daemon", add_stop, run_stop, "dataserve stop"),
)
