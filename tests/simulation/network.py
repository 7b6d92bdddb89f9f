"""DEALERs and one ROUTER: connections with identities, frames in flight, and what happens to them.

As ZeroMQ over a Unix socket a connection keeps the order and loses nothing but what is in flight when it breaks, and a
broken one comes back under another identity. Beyond that frames may be lost, repeated and overtaken, as told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dataserve.protocol import limits

from .clock import FaultError, Process, Timeline

RECONNECT_S = (0.1, 1.0)
QUEUED = 64  #: client/transport.py's high water mark


@dataclass
class Weather:
    """How frames travel: each one's chance of being lost, sent twice, overtaken; and its way's mean, in seconds."""

    way_s: float = 0.0005
    loss: float = 0.0
    repeat: float = 0.0
    overtake: float = 0.0


class Wire:
    """One client's DEALER. `ready` is called when there is something to read, or room to send again."""

    def __init__(self, network: Network, process: Process, ready: Callable[[], None]) -> None:
        self.peer: bytes | None = None
        self.ready = ready
        self.inbox: list[bytes] = []
        self.closed = False
        self.arrives = [0.0, 0.0]  # when the last frame there, and back, is through
        self._network = network
        process.at_death.append(self.close)
        network.connect(self)

    def send(self, frame: bytes) -> bool:
        """Send without waiting; False where there is no connection."""
        if self.peer is None:
            return False
        self._network.send_request(self, self.peer, frame)
        return True

    def take(self) -> list[bytes]:
        """All frames that are there."""
        frames, self.inbox = self.inbox, []
        return frames

    def close(self) -> None:
        """The socket is gone; what was sent still arrives."""
        self.closed = True
        self._network.forget(self)


class Network:
    """All wires, and the daemon's end of them: `arrived(peer, frame)` is called for each frame, `accepts()` says whether
    anybody listens."""

    def __init__(
        self, timeline: Timeline, arrived: Callable[[bytes, bytes], None], accepts: Callable[[], bool]
    ) -> None:
        self.weather = Weather()
        self.frames = 0
        self.breaks = 0
        self._timeline = timeline
        self._arrived = arrived
        self._accepts = accepts
        self._wires: dict[bytes, Wire] = {}
        self._last_peer = 0
        self._era = 0  # daemons so far: what was in flight to an older one is gone

    def connect(self, wire: Wire) -> None:
        """Connect now, or when it is tried again."""
        if wire.closed or wire.peer is not None:
            return
        if not self._accepts():
            self._timeline.after(self._timeline.random.uniform(*RECONNECT_S), self.connect, wire)
            return
        self._last_peer += 1
        wire.peer = b"peer%d" % self._last_peer
        self._wires[wire.peer] = wire
        wire.ready()

    def forget(self, wire: Wire) -> None:
        """Its connection is gone."""
        if wire.peer is not None:
            del self._wires[wire.peer]
            wire.peer = None
            wire.arrives = [0.0, 0.0]

    def break_one(self) -> None:
        """Some connection breaks, with the replies that are in flight; it comes back under another identity."""
        if self._wires:
            peer = self._timeline.random.choice(list(self._wires))
            self._timeline.tell(f"the connection of {peer.decode()} breaks")
            self.breaks += 1
            self._lose(self._wires[peer])

    def daemon_ended(self) -> None:
        """Every connection breaks, and nothing in flight arrives."""
        self._era += 1
        for wire in list(self._wires.values()):
            self._lose(wire)

    def _lose(self, wire: Wire) -> None:
        self.forget(wire)
        self._timeline.after(self._timeline.random.uniform(*RECONNECT_S), self.connect, wire)

    def send_request(self, wire: Wire, peer: bytes, frame: bytes) -> None:
        """Towards the daemon."""
        for way_s in self._ways(wire, 0, frame):
            self._timeline.after(way_s, self._arrive, self._era, peer, frame)

    def send_reply(self, peer: bytes, frame: bytes) -> bool:
        """Towards a client; False where its connection is gone."""
        wire = self._wires.get(peer)
        if wire is None:
            return False
        for way_s in self._ways(wire, 1, frame):
            self._timeline.after(way_s, self._deliver, peer, frame)
        return True

    def _ways(self, wire: Wire, direction: int, frame: bytes) -> list[float]:
        """How long that frame is under way: once for each time that it will arrive."""
        if len(frame) > limits.FRAME_BYTES:
            raise FaultError(f"a frame of {len(frame)} bytes")
        self.frames += 1
        random, weather, now = self._timeline.random, self.weather, self._timeline.now
        if weather.loss and random.random() < weather.loss:
            self._timeline.tell("a frame is lost")
            return []
        ways = []
        for _ in range(2 if weather.repeat and random.random() < weather.repeat else 1):
            way_s = random.expovariate(1 / weather.way_s)
            if weather.overtake and random.random() < weather.overtake:
                ways.append(way_s * 10)
            else:
                wire.arrives[direction] = max(wire.arrives[direction], now + way_s)
                ways.append(wire.arrives[direction] - now)
        return ways

    def _arrive(self, era: int, peer: bytes, frame: bytes) -> None:
        if era == self._era:
            self._arrived(peer, frame)

    def _deliver(self, peer: bytes, frame: bytes) -> None:
        wire = self._wires.get(peer)
        if wire is not None and len(wire.inbox) < QUEUED:
            wire.inbox.append(frame)
            wire.ready()
