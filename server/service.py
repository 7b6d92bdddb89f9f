"""The daemon's loop: what comes in becomes an event, what the engine wants is done. One thread, no waiting but in `poll`.

It imports no clock, socket or file: all come as arguments, so that a test can turn it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from dataserve.protocol import codec, limits
from dataserve.protocol.errors import PeerError, ServerError
from dataserve.protocol.messages import Done, Error, More, Open

from .engine import Engine
from .events import (
    Effect,
    Event,
    FrameRefused,
    Log,
    MemoryLooked,
    ProbeProcess,
    ProcessProbed,
    Reply,
    RequestArrived,
    StopDaemon,
    Ticked,
)
from .readahead import Reading


class HubLike(Protocol):
    """What transport.Hub gives."""

    def register(self, descriptor: int) -> None:
        """Watch it."""

    def unregister(self, descriptor: int) -> None:
        """Watch it no longer."""

    def poll(self, timeout_s: float) -> tuple[list[tuple[bytes, bytes]], set[int]]:
        """Frames by connection, and other descriptors that can be read."""

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Send without waiting."""


class BuildersLike(Protocol):
    """What builders.Builders gives."""

    def start(self) -> None:
        """Begin to prepare."""

    def descriptors(self) -> set[int]:
        """What to watch."""

    def collect(self) -> list[Event]:
        """What has happened, without waiting."""

    def close(self) -> None:
        """End all children."""


class ResidenceLike(Protocol):
    """What residence.Residence gives."""

    @property
    def wants_readings(self) -> bool:
        """Whether anything may have to be read ahead."""

    def start(self) -> None:
        """Begin."""

    def follow(self, readings: Sequence[Reading], stores: Mapping[str, str]) -> None:
        """Who reads what next, and the data sets that are served, without waiting."""

    def collect(self, stores: Mapping[str, str]) -> Iterable[MemoryLooked]:
        """What was seen, without waiting."""

    def close(self) -> None:
        """End."""


class Service:
    """Runs one daemon until it is told to stop.

    `probe(pid, start_time)` says whether that process is there, `clock()` the seconds of a steady clock, `log(text)` tells
    the operator; `stop_fd` becomes readable when a signal wants the end; `each_tick()` looks after what else is the
    daemon's.
    """

    def __init__(
        self,
        engine: Engine,
        hub: HubLike,
        builders: BuildersLike,
        probe: Callable[[int, int], bool],
        clock: Callable[[], float],
        boot: bytes,
        stop_fd: int,
        log: Callable[[str], None],
        each_tick: Callable[[], None] = lambda: None,
        residence: ResidenceLike | None = None,
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._builders = builders
        self._probe = probe
        self._clock = clock
        self._boot = boot
        self._stop_fd = stop_fd
        self._log = log
        self._each_tick = each_tick
        self._residence = residence
        self._moved = False
        self._refused = 0
        self._watched: set[int] = set()
        self._running = True

    def run(self) -> None:
        """Serve until `stop` or a signal; the children are ended before it returns."""
        self._hub.register(self._stop_fd)
        try:
            self._builders.start()
            if self._residence is not None:
                self._residence.start()
            next_tick = self._clock()
            while self._running:
                next_tick = self._turn(next_tick)
        finally:
            self._builders.close()
            if self._residence is not None:
                self._residence.close()

    def _turn(self, next_tick: float) -> float:
        """Wait for one thing or more and deal with all of them; returns when the next tick is due."""
        self._watch(self._builders.descriptors())
        frames, ready = self._hub.poll(next_tick - self._clock())
        if self._stop_fd in ready:
            self._running = False
        for peer, frame in frames:
            self._take_frame(peer, frame)
        ticks = self._clock() >= next_tick
        if ticks or ready & self._watched:
            self._collect()
        if ticks or self._moved:
            self._follow()
        if not ticks:
            return next_tick
        self._take(Ticked())
        try:
            if self._residence is not None:
                for event in self._residence.collect(self._engine.stores()):
                    self._take(event)
            self._each_tick()
        except Exception as error:  # noqa: BLE001 - what is served already goes on
            self._log(f"internal: {type(error).__name__}: {error}, at a tick")
        return self._clock() + limits.TICK_S

    def _follow(self) -> None:
        """Tell the residence who reads what, if it may be of use: at a tick, and when a consumer has told its place."""
        self._moved = False
        if self._residence is not None:
            readings = self._engine.readings(self._clock()) if self._residence.wants_readings else []
            self._residence.follow(readings, self._engine.stores())

    def _collect(self) -> None:
        try:
            events = self._builders.collect()
        except Exception as error:  # noqa: BLE001 - what is served already goes on
            self._log(f"internal: {type(error).__name__}: {error}, in the preparing children")
            return
        for event in events:
            self._take(event)

    def _watch(self, wanted: set[int]) -> None:
        for descriptor in self._watched - wanted:
            self._hub.unregister(descriptor)
        for descriptor in wanted - self._watched:
            self._hub.register(descriptor)
        self._watched = set(wanted)

    def _take_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            request = codec.decode_request(frame)
        except PeerError as error:
            self._count_refused(error)
            self._take(FrameRefused(peer, codec.request_id(frame), error))
            return
        self._take(RequestArrived(peer, request.id, request.message))
        self._moved |= isinstance(request.message, Open | More | Done)

    def _count_refused(self, error: PeerError) -> None:
        """Count it, and tell the operator of the 1st, 10th, 100th, ...: a flood of them must not fill the log."""
        self._refused += 1
        if self._refused == 10 ** (len(str(self._refused)) - 1):
            self._log(f"frames that are no request, so far: {self._refused}. The last: {error}")

    def _take(self, event: Event) -> None:
        """The engine's effects of an event. A fault of the engine is logged with its story, and the daemon lives on."""
        try:
            for effect in self._engine.handle(event, self._clock()):
                self._do(effect)
        except Exception as error:  # noqa: BLE001 - one client's request must not end what others live on
            self._log(f"internal: {type(error).__name__}: {error}, by {repr(event)[:500]}")
            if isinstance(event, RequestArrived):
                fault = ServerError("internal", f"{type(error).__name__}: {error}", "See the daemon's log.")
                self._do(Reply(event.peer, event.id, Error.of(fault)))

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            self._hub.send(effect.peer, codec.encode_reply(effect.id, self._boot, effect.message))
        elif isinstance(effect, ProbeProcess):
            alive = self._probe(effect.pid, effect.start_time)
            self._take(ProcessProbed(effect.pid, effect.start_time, alive))
        elif isinstance(effect, Log):
            self._log(effect.text)
        elif isinstance(effect, StopDaemon):
            self._running = False
