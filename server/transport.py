"""The server side's only door to ZeroMQ: the ROUTER with its poll loop's eyes, and `ask` for the command line.

A peer that sends parts of one message for ever makes the daemon grow: libzmq hands over whole messages only, bounds the
size of a part and the number of messages, and has no option for the number of parts. Only this user's processes, which
could end the daemon as well, can connect: the folder is 0700, the socket 0600.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Sequence

import zmq

from dataserve.protocol import address, codec, limits
from dataserve.protocol.errors import MachineError, PeerError, ServerError
from dataserve.protocol.messages import Error, Message

QUEUED_FRAMES = 1000  #: replies that wait for one slow reader; credit keeps it far from this
TURN_FRAMES = 200  #: frames taken in one turn of the loop, so that children and ticks have theirs
FAREWELL_MS = 200

#: Every option of the ROUTER, set before it binds and read back by a test.
ROUTER_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.ROUTER_MANDATORY: 1,
    zmq.MAXMSGSIZE: limits.FRAME_BYTES,
    zmq.SNDHWM: QUEUED_FRAMES,
    zmq.RCVHWM: QUEUED_FRAMES,
    zmq.SNDTIMEO: 0,
}
DEALER_OPTIONS: dict[int, int] = {zmq.LINGER: 0, zmq.MAXMSGSIZE: limits.FRAME_BYTES, zmq.IMMEDIATE: 1}


class Hub:
    """The daemon's socket at one address, bound on construction with mode 0600, and a poller for it and other descriptors.

    Raises `no_access` where the socket cannot be made. The caller holds the address's lock
    and has removed a stale socket: libzmq replaces whatever lies there.
    """

    def __init__(self, where: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in ROUTER_OPTIONS.items():
            self._router.setsockopt(option, value)
        self._where = where
        try:
            self.bind_again()
        except MachineError:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self.dropped_messages = 0
        self.undelivered_replies = 0

    def bind_again(self) -> None:
        """Make the socket at the address, also where it was made before and was removed: connections that are there go
        on. Raises `no_access`.

        The listener of before stays, deaf, one descriptor each time: libzmq removes the file of one that is unbound, from
        a thread of its own, which could be the new one's.
        """
        mask = os.umask(0o177)
        try:
            self._router.bind(self._where)
        except zmq.ZMQError as error:
            text = f"The socket {address.socket_path(self._where)!r} cannot be made: {error.strerror}."
            raise MachineError(
                "no_access", text, "Choose another place with --address or $DATASERVE_ADDRESS."
            ) from None
        finally:
            os.umask(mask)

    def register(self, descriptor: int) -> None:
        """Have `poll` watch that descriptor for something to read."""
        self._poller.register(descriptor, zmq.POLLIN)

    def unregister(self, descriptor: int) -> None:
        """No longer watch it."""
        self._poller.unregister(descriptor)

    def poll(self, timeout_s: float) -> tuple[list[tuple[bytes, bytes]], set[int]]:
        """Wait for something: (frames with their connections, other descriptors that can be read)."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        frames = self._receive() if self._router in ready else []
        return frames, {item for item in ready if isinstance(item, int)}

    def _receive(self) -> list[tuple[bytes, bytes]]:
        frames = []
        for _ in range(TURN_FRAMES):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if (frame := self._one_frame()) is not None:
                frames.append((peer, frame))
        return frames

    def _one_frame(self) -> bytes | None:
        """The one frame behind a connection's name; a message of more parts is read away, a few bytes at a time."""
        frame, parts = b"", 0
        while self._router.getsockopt(zmq.RCVMORE):
            part = self._router.recv(zmq.NOBLOCK, copy=False)
            parts += 1
            frame = part.bytes if parts == 1 else b""
        if parts == 1:
            return frame
        self.dropped_messages += 1
        return None

    def send(self, peer: bytes, frame: bytes) -> bool:
        """Send without waiting; a connection that is gone or does not read loses it, which its client makes good."""
        try:
            self._router.send_multipart([peer, frame], zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):  # its queue is full; EHOSTUNREACH: it is gone
            self.undelivered_replies += 1
            return False
        return True

    def close(self) -> None:
        """Give everything back; replies under way have `FAREWELL_MS`. The socket file is left to the caller."""
        self._router.close(FAREWELL_MS)
        self._context.term()


def ask(addresses: Sequence[str], message: Message, timeout_s: float) -> Message:
    """The message of `ask_reply`."""
    return ask_reply(addresses, message, timeout_s).message


def ask_reply(addresses: Sequence[str], message: Message, timeout_s: float) -> codec.Reply:
    """One question to the first daemon that answers at any of the addresses, in `timeout_s` all told.

    Raises the daemon's own error, or `no_daemon` with every address and why it failed.
    """
    reasons = []
    deadline = time.monotonic() + timeout_s
    for index, where in enumerate(addresses):
        why = _absence(where)
        if why is None:
            now = time.monotonic()
            share_s = (deadline - now) / (len(addresses) - index)  # a dead daemon's socket must not use up all of it
            reply = _ask_one(where, message, now + share_s)
            if reply is not None:
                if isinstance(reply.message, Error):
                    raise reply.message.to_exception()
                return reply
            why = f"a socket is there and nobody answered in {share_s:.1f} s; {_holder(where)}"
        reasons.append(f"{address.socket_path(where)} ({why})")
    raise ServerError(
        "no_daemon",
        f"No daemon answers at {', nor at '.join(reasons)}.",
        "Start one: dataserve start SOURCE --detach",
    )


def _ask_one(where: str, message: Message, deadline: float) -> codec.Reply | None:
    """The reply, or None at the deadline. The request is sent again each `RETRY_S`: that is always harmless."""
    context = zmq.Context(io_threads=1)
    dealer = context.socket(zmq.DEALER)
    try:
        for option, value in DEALER_OPTIONS.items():
            dealer.setsockopt(option, value)
        dealer.connect(where)
        frame = codec.encode_request(1, message)
        while (left_s := deadline - time.monotonic()) > 0:
            if dealer.poll(int(min(left_s, limits.RETRY_S) * 1000), zmq.POLLOUT):
                dealer.send(frame, zmq.NOBLOCK)
                reply = _await_reply(dealer, min(deadline, time.monotonic() + limits.RETRY_S))
                if reply is not None:
                    return reply
        return None
    finally:
        dealer.close(0)
        context.term()


def _await_reply(dealer: zmq.Socket[bytes], until: float) -> codec.Reply | None:
    while (left_s := until - time.monotonic()) > 0:
        if not dealer.poll(max(1, int(left_s * 1000)), zmq.POLLIN):
            continue
        frames = dealer.recv_multipart(zmq.NOBLOCK)
        try:
            return codec.decode_reply(frames[-1])
        except PeerError:
            continue  # no reply of ours; the daemon's may still come
    return None


def _absence(where: str) -> str | None:
    """Why there is certainly no daemon at that address; None where somebody listens."""
    try:
        found = os.lstat(address.socket_path(where))
    except FileNotFoundError:
        return "no socket there"
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    if not stat.S_ISSOCK(found.st_mode):
        return "what lies there is no socket"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, not to you ({os.geteuid()})"
    return _deafness(where)


def _deafness(where: str) -> str | None:
    """Why nobody listens at a socket that is there: a killed daemon's refuses at once. None where somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        refused = probe.connect_ex(address.socket_path(where))
    if refused in (0, errno.EAGAIN):  # EAGAIN: so busy that its queue is full
        return None
    if refused == errno.ECONNREFUSED:
        return f"a socket is there and nobody listens; {_holder(where)}"
    return f"it cannot be reached: {os.strerror(refused)}"


def _holder(where: str) -> str:
    """What the lock beside the socket says of its daemon."""
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO there must not hold us
        with open(os.open(address.lock_path(where), flags), "rb") as file:
            pid = int(file.read(20))
    except (OSError, ValueError, TypeError):
        return "no daemon has left its pid"
    alive = os.path.exists(f"/proc/{pid}")
    return f"daemon pid {pid} is {'alive: it may be busy or stopped' if alive else 'dead'}"
