"""`dataserve prepare`: make the stores and stop; no daemon, no socket."""

from __future__ import annotations

import argparse
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dataserve.protocol import limits

from .builders import Builders
from .command import Command, add_datasets, root, wanted
from .display import Display, size
from .events import DatasetSealed, Event, PreparationFailed
from .store import make_root

EXAMPLE = """
dataserve prepare imagefolder:/data/photos --resize 256 --crop 224
dataserve prepare torchvision:CIFAR10 --arg root=/data --arg train=true
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_datasets(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare all; the exit status says whether it worked."""
    config = wanted(args)
    display = Display(sys.stdout)
    builders = Builders(
        config.specs, make_root(root(args, config.store)), config.manner, display.line, display.progress
    )
    with _term_as_interrupt():
        try:
            builders.start()
            while builders.busy:
                _wait(builders.descriptors())
                for event in builders.collect():
                    _show(display, event)
        finally:
            builders.close()
            display.close()
    return builders.exit_status


def _wait(descriptors: set[int]) -> None:
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    poller.poll(limits.TICK_S * 1000)


def _show(display: Display, event: Event) -> None:
    if isinstance(event, DatasetSealed):
        display.line(f"{event.name}: ready, {event.rows:,} rows, {size(event.size_bytes)} in {event.path}")
    elif isinstance(event, PreparationFailed):
        display.close()
        print(f"dataserve: {event.name}: {event.text} {event.remedy}".rstrip() + f" [{event.code}]", file=sys.stderr)


@contextmanager
def _term_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does, children first."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


COMMANDS = (Command("prepare", "make the store and stop", add, run, EXAMPLE),)
