"""The client's only zmq: one socket factory, a caller for single questions, and the thread that speaks for an object.

One thread an object, not one a process: it lives and ends with its object, so that nothing is shared between objects,
nothing is counted, and a fork has one rule. It sleeps in `poll` until the daemon answers, its eventfd is written, or
the session has something due; an idle one wakes once in two seconds. A context belongs to each socket and ends with it,
so that a process that only described a data set has no zmq thread left when its loader forks.
"""

from __future__ import annotations

import atexit
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from dataserve.protocol import codec, limits, version
from dataserve.protocol.address import socket_path
from dataserve.protocol.errors import MachineError, PeerError, ServerError
from dataserve.protocol.messages import Hello, Message

from . import descriptors, events
from .events import Event, Iteration, Progress
from .leave import Leave
from .session import Session

log = logging.getLogger("dataserve")

CLOSE_WAIT_S = 0.1  #: a goodbye waits this long for its answer
JOIN_S = 0.3  #: the process's end waits this long for a thread
QUEUED = 64  #: messages either way; credit keeps them fewer


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A DEALER that connects to that address; every socket of the client comes from here.

    It never holds up an exit, queues nothing for a daemon that is not there, and takes no frame over the cap.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES)
    dealer.setsockopt(zmq.SNDHWM, QUEUED)
    dealer.setsockopt(zmq.RCVHWM, QUEUED)
    dealer.setsockopt(zmq.RECONNECT_IVL, 100)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    dealer.connect(address)
    return dealer


def why_unusable(address: str) -> str | None:
    """Why nobody can be asked at that address; None where a socket of ours lies there.

    A socket of another user is never spoken to (root's is).
    """
    try:
        found = os.lstat(socket_path(address))
    except (FileNotFoundError, NotADirectoryError):
        return "no socket there"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if not stat.S_ISSOCK(found.st_mode):
        return "no socket there, but another kind of file"
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, not to you ({os.geteuid()})"
    return None


def identity() -> Hello:
    """Who this process is, so that the daemon can see whether it lives."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return Hello(version.WIRE_VERSIONS, os.getpid(), int(fields[19]), os.uname().nodename, namespace)


class Caller:
    """Asks one address single questions on the caller's own thread: a constructor needs no more, and Ctrl-C works."""

    def __init__(self, address: str) -> None:
        descriptors.require()
        self._context = zmq.Context()
        self._dealer = make_dealer(self._context, address)
        self._last_id = 0

    def ask(self, message: Message, wait_s: float) -> Message | None:
        """The reply, or None if there is none in that time. An `error` is raised as what it carries."""
        self._last_id += 1
        deadline = time.monotonic() + wait_s
        frame = codec.encode_request(self._last_id, message)
        sent = False
        while (left_s := deadline - time.monotonic()) > 0:
            ready = self._dealer.poll(int(left_s * 1000) + 1, zmq.POLLIN if sent else zmq.POLLIN | zmq.POLLOUT)
            if ready & zmq.POLLIN and (reply := self._receive()) is not None:
                return reply
            if ready & zmq.POLLOUT:
                self._dealer.send(frame, zmq.NOBLOCK)
                sent = True
        return None

    def _receive(self) -> Message | None:
        parts = self._dealer.recv_multipart(zmq.NOBLOCK)
        try:
            reply = codec.decode_reply(parts[0])
        except PeerError:
            return None  # as if it had not come
        # A reply to the same question, asked before and given up, says the same.
        if not 1 <= reply.id <= self._last_id:
            return None
        if reply.message.KIND == "error":
            raise reply.message.to_exception()  # type: ignore[attr-defined]
        return reply.message

    def close(self) -> None:
        """Give the socket and its threads back."""
        self._dealer.close(0)
        self._context.term()


class Link:
    """A daemon, as one data set object speaks to it: `begin` an iteration, `admit` each batch, `finish`, `close`.

    The thread holds the `_Speaker` behind it, never the link: when nobody holds the link any more, the thread ends.
    """

    def __init__(self, address: str, machine: Session, on_change: Callable[[bool, bool], None]) -> None:
        """Starts the thread. `on_change(alone, opened)` is called on it when either changes."""
        self._pid = os.getpid()
        descriptors.require()
        self._speaker = _Speaker(address, machine, on_change)
        self._thread = threading.Thread(target=self._speaker.run, name="dataserve-link", daemon=True)
        _live.append((self._speaker, self._thread))
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether this is its process and its thread lives."""
        return os.getpid() == self._pid and not self._speaker.closing and self._thread.is_alive()

    def begin(self, iteration: Iteration, progress: Callable[[], Progress]) -> Leave:
        """Register an iteration. `progress` is called on the link's thread; it must not hold the iterator."""
        leave = Leave(iteration.number)
        self._speaker.leave, self._speaker.progress = leave, progress
        self._speaker.post(events.Begun(iteration))
        return leave

    def await_registration(self, leave: Leave, timeout_s: float, *, first: bool) -> None:
        """Wait until `leave` is registered; raises the daemon's refusal.

        The first time an object registers it waits for an answer, or until the daemon counts as silent: a refusal must be
        seen before the first batch. Later the daemon has no more than `GRANT_WAIT_S`. While another process holds the
        rank nothing may be drawn, so that wait ends by registration or refusal alone.
        """
        patience_s = limits.SILENT_S + limits.BEAT_S if first else limits.GRANT_WAIT_S
        if not leave.wait(lambda it: it.registered or it.contested, patience_s) and first:
            raise MachineError("stuck", f"No registration and no silence in {patience_s:.0f} s: the link hangs.")
        leave.outlast_contest(timeout_s)

    def admit(self, leave: Leave, index: int, timeout_s: float) -> None:
        """Wait until batch `index` may be drawn, for `GRANT_WAIT_S` at most. Raises the daemon's refusal."""
        leave.check()
        if index >= leave.ask_at:
            self._speaker.post(events.Asked(leave.number, index))
        if index >= leave.granted:
            leave.wait(lambda it: index < it.granted or it.contested, limits.GRANT_WAIT_S)
            leave.outlast_contest(timeout_s)

    def finish(self, leave: Leave, progress: Progress) -> None:
        """The iteration is over; harmless for one that a newer has replaced."""
        if leave is self._speaker.leave and self.usable:
            self._speaker.post(events.Finished(progress))

    def __del__(self) -> None:
        if os.getpid() == self._pid and "_speaker" in self.__dict__:
            self._speaker.close()


class _Speaker:
    """The thread's side of a link. `post` and `close` may be called from any thread, a finaliser's too."""

    def __init__(self, address: str, machine: Session, on_change: Callable[[bool, bool], None]) -> None:
        self.leave = Leave(-1)
        self.progress: Callable[[], Progress] = Progress
        self.closing = False
        self._address = address
        self._session = machine
        self._on_change = on_change
        self._events: deque[Event] = deque()
        self._outbox: dict[int, bytes] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def post(self, event: Event) -> None:
        """Hand an event to the thread."""
        self._events.append(event)
        self._nudge()

    def close(self) -> None:
        """Have the thread say goodbye and end."""
        self.closing = True
        self._nudge()

    def _nudge(self) -> None:
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        # Not at the thread's end: whoever still holds this may write to the number, and it may be another's by then. When
        # the interpreter ends, this may even run before the last `close`.
        wake, self._wake = self._wake, -1
        os.close(wake)

    def run(self) -> None:
        """The thread's whole life."""
        context = zmq.Context()
        dealer = None
        try:
            dealer = make_dealer(context, self._address)
            self._serve(dealer)
            self._farewell(dealer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job must not wait for a thread that is gone
            log.warning(
                "dataserve: the link to %s failed (%s: %s); going on alone", self._address, type(error).__name__, error
            )
            self.leave.set_free()
        finally:
            if dealer is not None:
                dealer.close(0)
            context.term()
            _live[:] = [pair for pair in _live if pair[0] is not self]

    def _serve(self, dealer: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        while not self.closing:
            poller.register(dealer, zmq.POLLIN | zmq.POLLOUT if self._outbox else zmq.POLLIN)
            due = self._session.next_due()
            timeout_s = limits.SILENT_S if due is None else max(0.0, due - time.monotonic())
            ready = dict(poller.poll(int(timeout_s * 1000) + 1))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._step(dealer)

    def _step(self, dealer: zmq.Socket[bytes]) -> None:
        """Everything that has happened, then what is due, then what can be sent."""
        while self._events:
            self._handle(self._events.popleft())
        for reply in _received(dealer):
            self._handle(events.Replied(reply))
        self._handle(events.Ticked(self.progress()))
        self._flush(dealer)

    def _handle(self, event: Event) -> None:
        before = self._session.alone, self._session.opened
        for effect in self._session.handle(event, time.monotonic()):
            if isinstance(effect, events.Send):
                self._outbox[effect.id] = codec.encode_request(effect.id, effect.message)
            elif isinstance(effect, events.Warn):
                log.warning("dataserve: %s", effect.text)
            else:
                self.leave.apply(effect)
        if (after := (self._session.alone, self._session.opened)) != before:
            self._on_change(*after)

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        for identifier in list(self._outbox):
            if self._session.awaits(identifier):
                try:
                    dealer.send(self._outbox[identifier], zmq.NOBLOCK)
                except zmq.Again:
                    return
            del self._outbox[identifier]

    def _farewell(self, dealer: zmq.Socket[bytes]) -> None:
        """`close`, and a moment for its answer: without it the frame may die with the socket."""
        self._step(dealer)  # the last `done` among it
        speaking = self._session.state == "open"
        self._handle(events.Closed())
        self._flush(dealer)
        deadline = time.monotonic() + CLOSE_WAIT_S
        goodbye = self._session.last_id
        while speaking and self._session.awaits(goodbye) and (left_s := deadline - time.monotonic()) > 0:
            dealer.poll(int(left_s * 1000) + 1)
            for reply in _received(dealer):
                self._handle(events.Replied(reply))


def _received(dealer: zmq.Socket[bytes]) -> list[codec.Reply]:
    """All replies that are there; a frame that is none is as good as lost, and its request will be sent again."""
    replies = []
    for _ in range(QUEUED):
        try:
            parts = dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            break
        try:
            replies.append(codec.decode_reply(parts[0]))
        except PeerError as error:
            log.debug("dataserve: a reply was dropped: %s", error)
    return replies


# --- the process ------------------------------------------------------------------------------------------------------

_live: list[tuple[_Speaker, threading.Thread]] = []
_parked: list[list[tuple[_Speaker, threading.Thread]]] = []


def _park() -> None:
    """In a forked child: what was inherited is neither closed nor joined nor locked, only kept out of the way."""
    global _live  # noqa: PLW0603 - the process's own list, made anew in a new process
    _parked.append(_live)
    _live = []


def _close_all() -> None:
    """At the process's end: goodbyes, for at most `JOIN_S` together."""
    deadline = time.monotonic() + JOIN_S
    live = list(_live)
    for speaker, _ in live:
        speaker.close()
    for _, thread in live:
        thread.join(max(0.0, deadline - time.monotonic()))


os.register_at_fork(after_in_child=_park)
atexit.register(_close_all)


def no_daemon(reasons: dict[str, str], waited_s: float) -> ServerError:
    """The error of a client that found nobody, with every address and why it failed."""
    tried = "; ".join(f"{address} ({why})" for address, why in reasons.items())
    return ServerError(
        "no_daemon",
        f"No dataserve daemon answered in {waited_s:g} s. Tried: {tried}.",
        "Start one: dataserve start SOURCE --detach",
    )
