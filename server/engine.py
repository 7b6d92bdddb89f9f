"""What the daemon knows and answers: a state machine without clock, socket, file or thread.

Rules of this file: events are past facts, effects are imperatives, the time comes in as an argument, and `handle`
alone changes state. An event that the tables (catalog.py, registry.py) do not allow raises and leaves the state as it
was, with the last events of what it is about. A mistake of a client is a reply, never an exception. Nothing is kept that
a client cannot give back: data sets come from the preparing children, consumers from `open`, their places from `done`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataserve.protocol import limits, version
from dataserve.protocol.errors import DataserveError, PeerError, ServerError, UserError
from dataserve.protocol.kinds import plan_of
from dataserve.protocol.messages import (
    AskStatus,
    Beat,
    Close,
    Describe,
    Done,
    Error,
    Hello,
    Message,
    More,
    Ok,
    Open,
    Opened,
    Ranges,
    StatusPage,
    Stop,
    Welcome,
)
from dataserve.protocol.partition import Partition

from .catalog import Catalog, News
from .events import (
    ConfirmationEnded,
    ConfirmationStarted,
    DatasetSealed,
    Effect,
    Event,
    FrameRefused,
    Log,
    MemoryLooked,
    PreparationAdvanced,
    PreparationFailed,
    ProbeProcess,
    ProcessProbed,
    Reply,
    RequestArrived,
    StopDaemon,
    Ticked,
)
from .readahead import Reading
from .registry import Consumer, Process, Registry


class About(NamedTuple):
    """The daemon, as `status` shows it, and where its processes can be looked up."""

    version: str
    pid: int
    address: str
    store: str
    host: str
    pid_namespace: int


@dataclass(slots=True)
class Peer:
    """One connection."""

    seen: float
    hello: Hello | None = None


class _Deferred(NamedTuple):
    """An `open` that would be refused, if those that stand in its way live."""

    request: RequestArrived
    lookups: set[Process]
    looked_up: frozenset[Process]


class Engine:
    """The daemon's whole state. `handle` takes an event and the time in seconds, and returns what to do."""

    def __init__(self, names: Sequence[str], about: About, started: float = 0.0) -> None:
        self._about = about
        self._started = started
        self._catalog = Catalog(names)
        self._registry = Registry()
        self._peers: dict[bytes, Peer] = {}
        self._deferred: list[_Deferred] = []
        self._stopping = False

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; returns the effects in order. Raises `IllegalTransitionError` and leaves all as it was."""
        return _HANDLERS[type(event)](self, event, now)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _request(self, event: RequestArrived, now: float) -> list[Effect]:
        peer = self._peers.setdefault(event.peer, Peer(now))
        peer.seen = now
        try:
            if self._stopping:
                raise ServerError("stopping", "The daemon is about to end.", retryable=True)
            if isinstance(event.message, Open):
                return self._open(event, event.message, now, frozenset())
            reply = _ANSWERS[type(event.message)](self, event.peer, event.message, now)
        except DataserveError as error:
            reply = Error.of(error)
        effects: list[Effect] = [Reply(event.peer, event.id, reply)]
        if isinstance(event.message, Stop) and self._stopping:
            effects.append(StopDaemon())
        return effects

    def _frame(self, event: FrameRefused, _now: float) -> list[Effect]:
        return [Reply(event.peer, event.id, Error.of(event.error))]

    def _hello(self, peer: bytes, message: Hello, _now: float) -> Message:
        common = [number for number in message.versions if number in version.WIRE_VERSIONS]
        if not common:
            raise ServerError(
                "version_mismatch",
                f"The client speaks wire versions {_listed(message.versions)}, the daemon {_listed(version.WIRE_VERSIONS)}.",
                f"Install the same dataserve on both sides; the daemon is {self._about.version}.",
            )
        self._peers[peer].hello = message
        return Welcome(common[0], self._about.version)

    def _describe(self, _peer: bytes, message: Describe, _now: float) -> Message:
        return self._catalog.find(message.dataset).describe()

    def _more(self, peer: bytes, message: More, now: float) -> Message:
        consumer = self._held(peer, message.stream, now)
        given = consumer.open
        if message.epoch != given.epoch:
            raise PeerError("stale_epoch", f"Stream {message.stream} is in epoch {given.epoch}, not {message.epoch}.")
        window = consumer.partition.window(given.rank, given.worker, given.workers, message.first, message.count)
        consumer.asked = message.first
        total = consumer.partition.worker_count(given.rank, given.worker, given.workers)
        return Ranges(message.stream, given.epoch, message.first, window, message.first + len(window) >= total)

    def _done(self, peer: bytes, message: Done, now: float) -> Message:
        consumer = self._held(peer, message.stream, now)
        if message.epoch != consumer.open.epoch:
            raise PeerError("stale_epoch", f"Stream {message.stream} is in epoch {consumer.open.epoch}.")
        if message.position > consumer.partition.n:
            raise PeerError(
                "bad_message", f"Position {message.position} is beyond the {consumer.partition.n} there are."
            )
        consumer.position = message.position
        consumer.alone = message.alone
        consumer.rates.add(now, message.samples, message.wait_s, message.busy_s)
        return Ok()

    def _beat(self, peer: bytes, message: Beat, now: float) -> Message:
        self._held(peer, message.stream, now)
        return Ok()

    def _close(self, peer: bytes, message: Close, now: float) -> Message:
        self._registry.drop([self._held(peer, message.stream, now)])
        return Ok()

    def _stop(self, _peer: bytes, _message: Stop, _now: float) -> Message:
        self._stopping = True
        return Ok()

    def _held(self, peer: bytes, stream: int, now: float) -> Consumer:
        consumer = self._registry.held(peer, stream)
        consumer.seen = now
        return consumer

    # --- open -------------------------------------------------------------------------------------------------------

    def _open(self, event: RequestArrived, message: Open, now: float, looked_up: frozenset[Process]) -> list[Effect]:
        """Register, refuse, or first have it looked up whether those in the way live; `looked_up` have been and do."""
        peer = self._peers[event.peer]
        if (again := self._registry.asked(event.peer, event.id, message)) is not None:
            return [Reply(event.peer, event.id, Opened(again.stream))]
        try:
            if peer.hello is None:
                raise PeerError("no_hello", "`open` came before `hello` on this connection.", retryable=True)
            partition = self._checked(message)
            hello = peer.hello
            self._drop_silent(now)
            obstacles, refusal = self._registry.obstacles(message)
        except DataserveError as error:
            return [Reply(event.peer, event.id, Error.of(error))]
        lookups = {held.process for held in obstacles if self._can_look_up(held.hello)} - looked_up
        if lookups:
            self._deferred.append(_Deferred(event, lookups, looked_up | lookups))
            return [ProbeProcess(*process) for process in sorted(lookups)]
        if refusal is not None:
            return [Reply(event.peer, event.id, Error.of(refusal))]
        stream = self._registry.register(event.peer, event.id, hello, message, partition, now).stream
        return [Reply(event.peer, event.id, Opened(stream))]

    def _checked(self, message: Open) -> Partition:
        """The iteration's partition, once everything in the message holds by itself."""
        dataset = self._catalog.find(message.dataset)
        if dataset.state == "failed" and not (dataset.sealed and self._registry.knows(message.instance)):
            raise dataset.failure()
        if dataset.sealed is None:
            raise ServerError(
                "preparation_failed", f"{dataset.name!r} is not prepared yet.", "Ask again.", retryable=True
            )
        if message.store_id != dataset.sealed.store_id:
            raise UserError(
                "store_mismatch",
                f"The client has mapped the store {message.store_id}; {dataset.name!r} is {dataset.sealed.store_id}.",
                "Build the data set object again, and give it the right store=.",
            )
        plan = plan_of(message.plan)
        if plan.digest() != message.digest:
            raise UserError("bad_plan", f"The plan's digest is {plan.digest()}, not {message.digest}.")
        if plan.store_rows != dataset.sealed.rows:
            raise UserError(
                "bad_plan", f"The plan is over {plan.store_rows} rows, {dataset.name!r} has {dataset.sealed.rows}."
            )
        if message.rank >= message.world_size:
            raise UserError("no_world", f"Rank {message.rank} does not exist in a world of {message.world_size}.")
        if message.worker >= message.workers:
            raise UserError("bad_batch", f"Loader worker {message.worker} is not one of {message.workers}.")
        return Partition(plan.n, message.batch_size, message.world_size, message.last, message.position)

    # --- the living and the dead ------------------------------------------------------------------------------------

    def _can_look_up(self, hello: Hello) -> bool:
        return (hello.host, hello.pid_namespace) == (self._about.host, self._about.pid_namespace)

    def _drop_silent(self, now: float) -> None:
        """Dead by silence: only where nothing better is known."""
        self._registry.drop(
            held for held in self._registry if not self._can_look_up(held.hello) and now - held.seen > limits.DEAD_S
        )

    def _probed(self, event: ProcessProbed, now: float) -> list[Effect]:
        process = (event.pid, event.start_time)
        if not event.alive:
            self._registry.drop(
                held for held in self._registry if held.process == process and self._can_look_up(held.hello)
            )
        waiting, self._deferred = self._deferred, []
        effects: list[Effect] = []
        for item in waiting:
            item.lookups.discard(process)
            if item.lookups:
                self._deferred.append(item)
            else:
                assert isinstance(item.request.message, Open)
                self._peers.setdefault(item.request.peer, Peer(now))
                effects += self._open(item.request, item.request.message, now, item.looked_up)
        return effects

    def _ticked(self, _event: Ticked, now: float) -> list[Effect]:
        self._drop_silent(now)
        speaking = {held.peer for held in self._registry}
        self._peers = {
            name: peer for name, peer in self._peers.items() if name in speaking or now - peer.seen <= limits.DEAD_S
        }
        processes = {held.process for held in self._registry if self._can_look_up(held.hello)}
        return [ProbeProcess(*process) for process in sorted(processes)]

    # --- read-ahead: looked at, never changed from outside ------------------------------------------------------------

    def stores(self) -> dict[str, str]:
        """The folder of each data set that is sealed, by name."""
        return {item.name: item.sealed.path for item in self._catalog.all() if item.sealed is not None}

    def readings(self, now: float) -> list[Reading]:
        """What each consumer reads next, as far as it has told."""
        paths = self.stores()
        return [
            Reading(
                held.stream,
                paths[held.open.dataset],
                held.open.plan,
                held.open.digest,
                held.open.epoch,
                held.partition,
                held.open.rank,
                held.open.worker,
                held.open.workers,
                held.position,
                held.asked,
                held.rates.samples_per_s(now),
            )
            for held in self._registry
        ]

    def _memory(self, event: MemoryLooked, _now: float) -> list[Effect]:
        self._catalog.note(event)
        return []

    # --- data sets and status ---------------------------------------------------------------------------------------

    def _news(self, event: News, _now: float) -> list[Effect]:
        told = self._catalog.take(event)
        return [] if told is None else [Log(told)]

    def _status(self, _peer: bytes, message: AskStatus, now: float) -> Message:
        datasets, some = _page([item.row() for item in self._catalog.all()], limits.STATUS_DATASETS, message.page)
        consumers, more = _page(
            [held.row(now) for held in self._registry.sorted()], limits.STATUS_CONSUMERS, message.page
        )
        about, uptime_s = self._about, now - self._started
        return StatusPage(
            about.version,
            about.pid,
            about.address,
            about.store,
            uptime_s,
            message.page,
            max(some, more),
            datasets,
            consumers,
        )

    def validate(self) -> None:
        """Asserts what must hold between any two events. Every test that touches an engine ends with it."""
        self._catalog.validate()
        self._registry.validate()
        for held in self._registry:
            assert self._peers[held.peer].hello is not None, "a consumer's connection is known"
            assert self._catalog.find(held.open.dataset).sealed is not None
        for item in self._deferred:
            assert item.lookups, "an open that waits for nobody is answered"


def _page(rows: list[dict[str, Any]], size: int, page: int) -> tuple[list[dict[str, Any]], int]:
    """That page of the rows, and how many pages there are."""
    return rows[page * size : (page + 1) * size], max(1, -(-len(rows) // size))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


_HANDLERS: dict[type[Any], Callable[[Engine, Any, float], list[Effect]]] = {
    RequestArrived: Engine._request,
    FrameRefused: Engine._frame,
    PreparationAdvanced: Engine._news,
    DatasetSealed: Engine._news,
    PreparationFailed: Engine._news,
    ConfirmationStarted: Engine._news,
    ConfirmationEnded: Engine._news,
    MemoryLooked: Engine._memory,
    ProcessProbed: Engine._probed,
    Ticked: Engine._ticked,
}
_ANSWERS: dict[type[Message], Callable[[Engine, bytes, Any, float], Message]] = {
    Hello: Engine._hello,
    Describe: Engine._describe,
    More: Engine._more,
    Done: Engine._done,
    Beat: Engine._beat,
    Close: Engine._close,
    AskStatus: Engine._status,
    Stop: Engine._stop,
}
