"""What a scenario file is read by: commands to an engine, a session, or both with a wire between them; output as text.

A file is blocks of a command, `----` and its output, with an empty line behind it. Lines that begin with `#` are for the
reader. A command is a verb, words and `name=value` pairs; the verbs are the methods named `do_...` below.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from dataserve.client import events
from dataserve.client.events import Iteration, Permit, Progress, Refuse, Send, Warn
from dataserve.client.session import Session
from dataserve.protocol.codec import decode_reply, decode_request, encode_reply, encode_request
from dataserve.protocol.folds import fold_of_rows
from dataserve.protocol.messages import (
    REPLIES,
    REQUESTS,
    AskStatus,
    Error,
    Hello,
    Message,
    More,
    Open,
    Ranges,
    StatusPage,
)
from dataserve.protocol.partition import Partition
from dataserve.protocol.plan import Plan
from dataserve.protocol.subset import SubsetPlan
from dataserve.server.engine import About, Engine
from dataserve.server.events import (
    ConfirmationEnded,
    ConfirmationStarted,
    DatasetSealed,
    Event,
    Log,
    PreparationFailed,
    ProbeProcess,
    ProcessProbed,
    Reply,
    RequestArrived,
    StopDaemon,
    Ticked,
)

ROWS = 100
FOLDS = 3
POLL_S = 0.001  #: the thread wakes so much after what is due: poll() counts milliseconds


def run(stage: object, text: str) -> str:
    """The file with the output that its commands have now."""
    return "\n\n".join(_block(stage, block) for block in re.split(r"\n\n+", text.strip())) + "\n"


def _block(stage: object, block: str) -> str:
    lines = block.partition("\n----")[0].splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    if not commands:
        return "\n".join(lines)
    output: list[str] = []
    for command in commands:
        words, named = [], {}
        for part in shlex.split(command):
            name, equals, value = part.partition("=")
            if equals:
                named[name] = int(value) if value.isdecimal() else value
            else:
                words.append(part)
        output += getattr(stage, f"do_{words[0]}")(*words[1:], **named)
    return "\n".join([*lines, "----", *map(_shortened, output)])


def scenarios(folder: Path) -> list[Path]:
    """All scenario files."""
    return sorted(folder.glob("*.txt"))


# --- words ----------------------------------------------------------------------------------------------------------


def opening(
    job: str = "run", seed: int = 0, store: str = "A", instance: str = "i", fold: int | None = None, **more: Any
) -> Open:
    """An `open` whose fields have values that need no telling; `world` and `batch` are short for their fields. `fold`: what
    is held out of that fold, of `FOLDS`."""
    plan = Plan("shuffled", ROWS, seed)
    if fold is not None:
        rows = np.flatnonzero(fold_of_rows(ROWS, FOLDS, seed) == fold).astype(np.uint32)
        plan = SubsetPlan.of(ROWS, rows, Plan("shuffled", len(rows), seed))
    message = Open(
        "digits",
        store.lower() * 64,
        job,
        instance.encode().ljust(16),
        0,
        1,
        0,
        1,
        10,
        "even",
        plan.to_map(),
        plan.digest(),
        0,
        0,
    )
    short = {"world": "world_size", "batch": "batch_size"}
    return replace(message, **{short.get(name, name): value for name, value in more.items()})


def said(message: Message) -> str:
    """A message as its kind and what matters of it."""
    if isinstance(message, Error):
        return f"error {message.code}{' (retryable)' * message.retryable}: {message.text}"
    if isinstance(message, Ranges):
        ranges = " ".join(f"{start}-{stop}/{valid}" for start, stop, valid in message.ranges)
        return f"ranges stream={message.stream} epoch={message.epoch} first={message.first} [{ranges}]{' end' * message.end}"
    if isinstance(message, Hello):
        return f"hello pid={message.pid}"
    if isinstance(message, Open):
        return (
            f"open {message.job} by {_short(message.instance)}: rank {message.rank} of {message.world_size}, worker "
            f"{message.worker} of {message.workers}, {message.batch_size} rows, at {message.epoch}:{message.position}"
        )
    hidden = {"dataset", "digest", "wait_s", "busy_s", "server", "version"}
    words = [
        f"{item.name}={_short(getattr(message, item.name))}" for item in fields(message) if item.name not in hidden
    ]
    return " ".join([message.KIND, *words])


def _short(value: Any) -> str:
    return value.decode().strip() if isinstance(value, bytes) else str(value)


def _shortened(line: str) -> str:
    """A line with its store ids as letters."""
    return re.sub("a{64}|b{64}", lambda found: found[0][0].upper(), line)


def _message(kinds: dict[str, type[Message]], kind: str, named: dict[str, Any]) -> Message:
    return kinds[kind](**named)


# --- an engine ------------------------------------------------------------------------------------------------------


class Engines:
    """`engine_*.txt`: connections with names speak to an engine; `probe` lines are what it had looked up."""

    def __init__(self) -> None:
        self.now = 0.0
        self.dead: set[int] = set()
        self.do_restart()

    def do_restart(self, store: str = "A") -> list[str]:
        """A new daemon; nothing of the old one is known to it."""
        about = About("0.1", 1, "ipc:///run/d.sock", "/store", "here", 5)
        self.engine = Engine(["digits"], about, self.now)
        store_id = store.lower() * 64
        return self.take(DatasetSealed("digits", f"/store/{store}", store_id, "f" * 64, ROWS, 1, ("image",)))

    def take(self, event: Event) -> list[str]:
        """What the engine does about an event."""
        lines: list[str] = []
        for effect in self.engine.handle(event, self.now):
            self.engine.validate()
            if isinstance(effect, ProbeProcess):
                alive = effect.pid not in self.dead
                lines.append(f"probe {effect.pid}: {'lives' if alive else 'is gone'}")
                lines += self.take(ProcessProbed(effect.pid, effect.start_time, alive))
            elif isinstance(effect, Reply):
                lines.append(f"{effect.peer.decode()} < {said(effect.message)}")
            elif isinstance(effect, Log):
                lines.append(f"log {effect.text}")
            elif isinstance(effect, StopDaemon):
                lines.append("the daemon ends")
        self.engine.validate()
        return lines

    def ask(self, peer: str, message: Message, id: int = 1) -> list[str]:  # noqa: A002 - the envelope's word
        """A request over the codec."""
        request = decode_request(encode_request(id, message))
        return self.take(RequestArrived(peer.encode(), request.id, request.message))

    def do_hello(self, peer: str, pid: int, host: str = "here", id: int = 1) -> list[str]:  # noqa: A002
        """A connection says who it is."""
        return self.ask(peer, Hello((1,), pid, 1, host, 5), id)

    def do_open(self, peer: str, id: int = 1, **named: Any) -> list[str]:  # noqa: A002
        """It registers."""
        return self.ask(peer, opening(**named), id)

    def do_say(self, peer: str, kind: str, **named: Any) -> list[str]:
        """It says anything else."""
        if kind == "done":
            named = {"epoch": 0, "samples": 0, "wait_s": 0.0, "busy_s": 0.0} | named
        return self.ask(peer, _message(REQUESTS, kind, named))

    def do_dies(self, pid: int) -> list[str]:
        """A process is gone; nobody is told."""
        self.dead.add(pid)
        return []

    def do_wait(self, seconds: int) -> list[str]:
        """Time passes, and at its end the daemon ticks."""
        self.now += float(seconds)
        return self.take(Ticked())

    def do_confirm(self, outcome: str) -> list[str]:
        """The store is compared with its source: `same` or `differs`."""
        self.take(ConfirmationStarted("digits"))
        return self.take(ConfirmationEnded("digits", None if outcome == "same" else "Row 3 differs."))

    def do_fail(self) -> list[str]:
        """The preparation fails."""
        return self.take(PreparationFailed("digits", "bad_source", "The folder is gone.", "Bring it back."))

    def do_status(self) -> list[str]:
        """Who is registered."""
        effects = self.engine.handle(RequestArrived(b"status", 1, AskStatus()), self.now)
        (page,) = [effect.message for effect in effects if isinstance(effect, Reply)]
        assert isinstance(page, StatusPage)
        return [
            f"{row['job']} rank {row['rank']} of {row['world_size']} worker {row['worker']} pid {row['pid']} "
            f"at {row['epoch']}:{row['position']}"
            for row in page.consumers
        ] or ["nobody"]


# --- a session ------------------------------------------------------------------------------------------------------


class Talks:
    """`session_*.txt`: one object's session, and a daemon that answers as told. Each line has its time."""

    def __init__(self) -> None:
        self.session = Session(Hello((1,), 10, 1, "here", 5), window=4, timeout_s=3.0)
        self.now = 0.0
        self.boot = b"1" * 16
        self.iteration: Iteration | None = None
        self.progress = Progress()
        self.sent: dict[str, tuple[int, Message]] = {}

    def take(self, event: events.Event) -> list[str]:
        """What the session does about an event."""
        lines = []
        before = self.session.state
        for effect in self.session.handle(event, self.now):
            if isinstance(effect, Send):
                self.sent[effect.message.KIND] = (effect.id, effect.message)
                lines.append(f"{self.now:6.2f} > #{effect.id} {said(effect.message)}")
                self.carry(effect)
            elif isinstance(effect, Permit):
                lines.append(f"{self.now:6.2f} permit {permitted(effect)}")
            elif isinstance(effect, Warn):
                lines.append(f"{self.now:6.2f} warn {effect.text}")
            elif isinstance(effect, Refuse):
                lines.append(f"{self.now:6.2f} refuse {effect.error}")
        if self.session.state != before:
            lines.append(f"{self.now:6.2f} is {self.session.state}")
        return lines

    def carry(self, effect: Send) -> None:
        """What is sent goes nowhere here: the scenario answers."""

    def do_begin(self, number: int, **named: Any) -> list[str]:
        """`iter()`."""
        message = opening(**named)
        partition = Partition(
            int(message.plan["n"]), message.batch_size, message.world_size, message.last, message.position
        )
        self.iteration, self.progress = Iteration(number, message, partition), Progress()
        return self.take(events.Begun(self.iteration))

    def do_ask(self, batch: str) -> list[str]:
        """The loop has come to that batch."""
        assert self.iteration is not None
        return self.take(events.Asked(self.iteration.number, int(batch)))

    def do_given(self, batches: str) -> list[str]:
        """The loop has been given so many."""
        self.progress = Progress(int(batches), 10 * int(batches))
        return []

    def do_finish(self) -> list[str]:
        """The loop has ended."""
        return self.take(events.Finished(self.progress))

    def do_close(self) -> list[str]:
        """The object is gone."""
        return self.take(events.Closed())

    def do_boot(self, letter: str) -> list[str]:
        """Another daemon answers from here on."""
        self.boot = letter.encode() * 16
        return []

    def do_answer(self, asked: str, kind: str, id: int | None = None, **named: Any) -> list[str]:  # noqa: A002
        """A reply to the latest request of a kind, or to that id."""
        identifier, request = self.sent[asked]
        if kind == "ranges" and isinstance(request, More):
            assert self.iteration is not None
            it = self.iteration
            own = it.partition.window(it.open.rank, it.open.worker, it.open.workers, request.first, request.count)
            shifted = [[start + named.pop("shift", 0), stop, valid] for start, stop, valid in own]
            end = request.first + len(own) >= it.total
            message: Message = Ranges(request.stream, request.epoch, request.first, shifted, end)
        elif kind == "error":
            text, retryable = named.get("text", "It is so."), named.get("retryable") == "yes"
            message = Error(named["code"], text, "", retryable)
        else:
            named = {"version": 1, "server": "x"} if kind == "welcome" else named
            message = _message(REPLIES, kind, named)
        frame = encode_reply(identifier if id is None else id, self.boot, message)
        return self.take(events.Replied(decode_reply(frame)))

    def do_wait(self, seconds: str) -> list[str]:
        """Time passes; the thread wakes when the session has something due."""
        end, lines = self.now + float(seconds), list[str]()
        while (due := self.session.next_due()) is not None and due <= end:
            self.now = max(self.now, due) + POLL_S
            lines += self.take(events.Ticked(self.progress))
        self.now = end
        return lines


def permitted(permit: Permit) -> str:
    """What a loop may do, in words."""
    state = "contested" if permit.contested else "registered" if permit.registered else "wait"
    return f"#{permit.number} {state}, granted {permit.granted}, ask at {permit.ask_at}"
