"""The daemon of a simulation: the real `Service` and `Engine`, with the hub, the children and the clock simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataserve.protocol import limits
from dataserve.protocol.codec import decode_reply, decode_request, encode_request
from dataserve.protocol.errors import PeerError
from dataserve.protocol.messages import AskStatus, Describe, Described, StatusPage, Stop
from dataserve.server.engine import About, Engine
from dataserve.server.events import ConfirmationEnded, ConfirmationStarted, DatasetSealed, Event, RequestArrived
from dataserve.server.service import Service

from .clock import FaultError, Timeline
from .network import Network

HOST, NAMESPACE = "here", 5  #: where the daemon can look processes up
OPERATOR = b"operator"  #: the command line's connection
CHILD_FD = 9


@dataclass(frozen=True)
class Store:
    """A data set's sealed store."""

    name: str
    store_id: str
    rows: int

    def sealed(self) -> DatasetSealed:
        """What the preparing child says of it."""
        return DatasetSealed(self.name, f"/store/{self.name}", self.store_id, "f" * 64, self.rows, 1, ("image",))


class Children:
    """The `Service`'s builders: they say what they are told to say."""

    def __init__(self) -> None:
        self.news: list[Event] = []

    def start(self) -> None:
        """Nothing to prepare."""

    def descriptors(self) -> set[int]:
        """Their pipe."""
        return {CHILD_FD}

    def collect(self) -> list[Event]:
        """What they have said."""
        news, self.news = self.news, []
        return news

    def close(self) -> None:
        """Nothing to end."""


class Daemon:
    """A daemon that lives, dies, freezes and lives again. It is the `Service`'s hub; `Children` are its builders."""

    def __init__(self, timeline: Timeline, stores: Sequence[Store], probe: Callable[[int, int], bool]) -> None:
        self.timeline = timeline
        self.stores = list(stores)
        self.network = Network(timeline, self._arrived, self.accepts)
        self.engine: Engine | None = None
        self.frozen = False
        self.validates_every = 1  #: turns; it takes a time that grows with the consumers
        self.starts = 0
        self.requests: dict[str, int] = {}
        self.failing: set[str] = set()  # data sets whose confirmation has failed
        self._confirming: set[str] = set()
        self._probe = probe
        self._service: Service | None = None
        self._frames: list[tuple[bytes, bytes]] = []
        self._children = Children()
        self._answers: list[bytes] = []
        self._next_tick = 0.0

    # --- its life ---------------------------------------------------------------------------------------------------

    def start(self, stores: Sequence[Store], prepare_s: float) -> None:
        """A new process, with a new boot id; its stores are validated so much later."""
        assert self.engine is None
        self.starts += 1
        boot = self.timeline.random.randbytes(16)
        self.timeline.tell(f"the daemon starts as {boot.hex()[:8]}")
        self.stores = list(stores)
        about = About("0.1", 1, "ipc:///run/d.sock", "/store", HOST, NAMESPACE)
        self.engine = Engine([store.name for store in stores], about, self.timeline.now)
        self._service = Service(
            self.engine, self, self._children, self._probe, lambda: self.timeline.now, boot, -1, self._log
        )
        self._next_tick = self.timeline.now
        self.timeline.after(0.0, self._tick, self.starts)
        for store in stores:
            self.timeline.after(prepare_s, self._tell_news, self.starts, store.sealed())

    def kill(self) -> None:
        """SIGKILL."""
        if self.engine is not None:
            self.timeline.tell("the daemon dies")
            self.engine = self._service = None
            self.frozen = False
            self.failing.clear()
            self._confirming.clear()
            self._frames = []
            self._children.news.clear()
            self.network.daemon_ended()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so much later: what arrives in between is answered late."""
        if self.engine is not None and not self.frozen:
            self.timeline.tell("the daemon is frozen")
            self.frozen = True
            self.timeline.after(seconds, self.thaw, self.starts)

    def thaw(self, start: int) -> None:
        """SIGCONT."""
        if start == self.starts and self.frozen:
            self.timeline.tell("the daemon goes on")
            self.frozen = False
            self._turn(start)

    def ask_to_stop(self) -> None:
        """`dataserve stop`."""
        if self.engine is not None:
            self._arrived(OPERATOR, encode_request(1, Stop()))

    def confirm(self, name: str, seconds: float, text: str | None) -> None:
        """Some rows of that store are prepared again, and are the same (`text` is None) or not."""
        if self.serves(name) and name not in self._confirming:
            self.timeline.tell(f"{name} is being confirmed: {text}")
            self._confirming.add(name)
            self._tell_news(self.starts, ConfirmationStarted(name))
            self.timeline.after(seconds, self._tell_news, self.starts, ConfirmationEnded(name, text))

    # --- what others see of it --------------------------------------------------------------------------------------

    def accepts(self) -> bool:
        """Whether a connection can be made."""
        return self.engine is not None and not self.frozen

    def serves(self, name: str) -> Store | None:
        """What `describe` would say."""
        if self.engine is None or self.frozen:
            return None
        (effect,) = self.engine.handle(RequestArrived(OPERATOR, 1, Describe(name)), self.timeline.now)
        answer = getattr(effect, "message", None)
        return Store(name, answer.store_id, answer.rows) if isinstance(answer, Described) else None

    def status(self) -> list[dict[str, object]]:
        """The consumers, by `dataserve status`: all its pages, over the codec."""
        rows: list[dict[str, object]] = []
        pages, page = 1, 0
        while page < pages:
            self._answers.clear()
            self._arrived(OPERATOR, encode_request(page + 1, AskStatus(page)))
            answer = decode_reply(self._answers[0]).message
            assert isinstance(answer, StatusPage)
            rows += answer.consumers
            pages, page = answer.pages, page + 1
        return rows

    # --- HubLike ----------------------------------------------------------------------------------------------------

    def register(self, descriptor: int) -> None:
        """Nothing to watch: frames and news wake it."""

    unregister = register

    def poll(self, _timeout_s: float) -> tuple[list[tuple[bytes, bytes]], set[int]]:
        """What has come; the waiting is the time line's."""
        frames, self._frames = self._frames, []
        return frames, {CHILD_FD} if self._children.news else set()

    def send(self, peer: bytes, frame: bytes) -> bool:
        """A reply."""
        if peer == OPERATOR:
            self._answers.append(frame)
            return True
        self.timeline.tell(f"{peer.decode()} < {describe(decode_reply(frame).message)}")
        return self.network.send_reply(peer, frame)

    # --- its loop ---------------------------------------------------------------------------------------------------

    def _arrived(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode_request(frame).message
        except PeerError as error:
            raise FaultError(f"a client sent what is no request: {error}") from None
        self.requests[message.KIND] = self.requests.get(message.KIND, 0) + 1
        self.timeline.tell(f"{peer.decode()} > {describe(message)}")
        self._frames.append((peer, frame))
        self._turn(self.starts)

    def _tell_news(self, start: int, event: Event) -> None:
        if start != self.starts or self.engine is None:
            return
        if isinstance(event, ConfirmationEnded):
            (self._confirming.discard if event.text is None else self.failing.add)(event.name)
        self._children.news.append(event)
        self._turn(start)

    def _tick(self, start: int) -> None:
        self._turn(start)
        if start == self.starts and self._service is not None:
            left_s = limits.TICK_S if self.frozen else self._next_tick - self.timeline.now
            self.timeline.after(max(left_s, 1e-6), self._tick, start)

    def _turn(self, start: int) -> None:
        if start != self.starts or self._service is None or self.frozen:
            return
        self._next_tick = self._service._turn(self._next_tick)
        assert self.engine is not None
        if self.timeline.steps % self.validates_every == 0:
            self.engine.validate()
        if not self._service._running:
            self.kill()

    def _log(self, text: str) -> None:
        if text.startswith("internal"):
            raise FaultError(text)


def describe(message: object) -> str:
    """A message in a line of bounded length."""
    return repr(message)[:160]
