"""The loop, turned by hand: a hub and builders that are lists, a clock that is a number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dataserve.protocol import codec
from dataserve.protocol.messages import AskStatus, Error, Ok, StatusPage, Stop
from dataserve.server.engine import About, Engine
from dataserve.server.events import DatasetSealed, Event, MemoryLooked
from dataserve.server.readahead import Reading
from dataserve.server.service import Service

BOOT = b"b" * 16
STOP_FD = 99


class Hub:
    """Gives the frames that it was made with, all in one turn, and keeps what is sent."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = [(b"peer", frame) for frame in frames]
        self.sent: list[Any] = []

    def register(self, descriptor: int) -> None:
        """Watched by nobody."""

    def unregister(self, descriptor: int) -> None:
        """Watched by nobody."""

    def poll(self, timeout_s: float) -> tuple[list[tuple[bytes, bytes]], set[int]]:
        """The frames; once there are none the signal that ends the loop."""
        frames, self.frames = self.frames, []
        return frames, set() if frames else {STOP_FD}

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Kept, decoded."""
        self.sent.append(codec.decode_reply(frame).message)
        return True


class Builders:
    """Nothing to prepare; `collect` may be made to fail."""

    def __init__(self, collect: Callable[[], list[Event]] = list) -> None:
        self.collect = collect
        self.closed = False

    def start(self) -> None:
        """Nothing."""

    def descriptors(self) -> set[int]:
        """None."""
        return set()

    def close(self) -> None:
        """Seen."""
        self.closed = True


class Residence:
    """Keeps what it is told; `collect` may be made to fail."""

    def __init__(self, fails: bool = False, *, wants: bool = True) -> None:
        self.wants_readings = wants
        self.fails = fails
        self.scenes: list[tuple[Sequence[Reading], Mapping[str, str]]] = []
        self.calls: list[str] = []

    def start(self) -> None:
        """Seen."""
        self.calls.append("start")

    def follow(self, readings: Sequence[Reading], stores: Mapping[str, str]) -> None:
        """Kept."""
        self.scenes.append((readings, stores))

    def collect(self, stores: Mapping[str, str]) -> list[MemoryLooked]:
        """What is in memory of all of them, or an error."""
        if self.fails:
            raise OSError("no more memory")
        return [MemoryLooked(name, 0.25, None) for name in stores]

    def close(self) -> None:
        """Seen."""
        self.calls.append("close")


def run(
    hub: Hub,
    builders: Builders | None = None,
    engine: Engine | None = None,
    residence: Residence | None = None,
) -> list[str]:
    """What the operator was told."""
    told: list[str] = []
    engine = engine or Engine([], About("0", 1, "ipc:///a", "/s", "here", 5))
    builders = builders or Builders()
    Service(
        engine, hub, builders, lambda _pid, _start: True, lambda: 0.0, BOOT, STOP_FD, told.append, residence=residence
    ).run()
    assert builders.closed
    return told


def test_refused_frames_are_answered_counted_and_told_of_ever_more_rarely() -> None:
    hub = Hub(*[b"\xff"] * 250, codec.encode_request(1, AskStatus()))
    told = run(hub)
    assert [message.code for message in hub.sent[:250]] == ["bad_message"] * 250
    assert isinstance(hub.sent[250], StatusPage)
    assert [line.partition(".")[0].rpartition(" ")[2] for line in told] == ["1", "10", "100"]


def test_a_fault_of_the_engine_is_told_answered_and_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([], About("0", 1, "ipc:///a", "/s", "here", 5))
    handle = engine.handle

    def faulty(event: Event, now: float) -> Any:
        if getattr(event, "id", 0) == 1:
            raise RuntimeError("a bug")
        return handle(event, now)

    monkeypatch.setattr(engine, "handle", faulty)
    hub = Hub(codec.encode_request(1, AskStatus()), codec.encode_request(2, AskStatus()))
    told = run(hub, engine=engine)
    assert isinstance(hub.sent[0], Error)
    assert hub.sent[0].code == "internal"
    assert isinstance(hub.sent[1], StatusPage)
    assert "RuntimeError: a bug" in told[0]


def test_builders_that_fail_do_not_end_what_is_served() -> None:
    def broken() -> list[Event]:
        raise OSError("no more descriptors")

    hub = Hub(codec.encode_request(1, AskStatus()))
    assert any("no more descriptors" in line for line in run(hub, Builders(broken)))
    assert isinstance(hub.sent[0], StatusPage)


def test_stop_is_answered_before_the_loop_ends() -> None:
    hub = Hub(codec.encode_request(1, Stop()))
    run(hub)
    assert hub.sent == [Ok()]


SEALED = DatasetSealed("digits", "/s/digits", "a" * 64, "b" * 64, 100, 5000, ("image",))


def test_a_residence_is_told_who_reads_and_what_it_has_seen_is_in_the_status() -> None:
    engine = Engine(["digits"], About("0", 1, "ipc:///a", "/s", "here", 5))
    engine.handle(SEALED, 0.0)
    residence, hub = Residence(), Hub(codec.encode_request(1, AskStatus()))
    run(hub, engine=engine, residence=residence)
    assert residence.calls == ["start", "close"]
    assert residence.scenes[0] == ([], {"digits": "/s/digits"})
    assert engine._catalog.find("digits").resident == 0.25


def test_a_residence_that_fails_ends_nothing() -> None:
    hub = Hub(codec.encode_request(1, AskStatus()))
    told = run(hub, residence=Residence(fails=True))
    assert any("no more memory" in line for line in told)
    assert isinstance(hub.sent[0], StatusPage)
