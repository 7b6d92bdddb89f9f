"""The daemon's socket: its options, what it lets in, and what the command line hears where nobody answers."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from dataserve.protocol import address, codec, limits
from dataserve.protocol.errors import ServerError, UserError
from dataserve.protocol.messages import AskStatus, Error, Ok, Stop
from dataserve.server.transport import DEALER_OPTIONS, ROUTER_OPTIONS, Hub, ask


@pytest.fixture
def where(isolated: Path) -> str:
    return address.normalise(f"{isolated}/run/d.sock")


@pytest.fixture
def hub(where: str) -> Iterator[Hub]:
    made = Hub(where)
    yield made
    made.close()


@pytest.fixture
def dealer(where: str) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(where)
    yield socket
    socket.close(0)
    context.term()


def frames_of(hub: Hub, count: int) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    for _ in range(100):
        found += hub.poll(0.1)[0]
        if len(found) >= count:
            break
    return found


def test_every_option_reads_back_as_it_was_set(hub: Hub) -> None:
    router = hub._router
    # ROUTER_MANDATORY can only be written; its effect is tested below.
    assert {option: router.getsockopt(option) for option in ROUTER_OPTIONS if option != zmq.ROUTER_MANDATORY} == {
        option: value for option, value in ROUTER_OPTIONS.items() if option != zmq.ROUTER_MANDATORY
    }
    assert DEALER_OPTIONS[zmq.LINGER] == ROUTER_OPTIONS[zmq.LINGER] == 0


def test_the_socket_is_the_users_own(hub: Hub, where: str) -> None:
    assert stat.S_IMODE(os.stat(address.socket_path(where)).st_mode) == 0o600


def test_a_socket_that_was_removed_is_bound_again_and_connections_go_on(
    hub: Hub, dealer: zmq.Socket[bytes], where: str
) -> None:
    dealer.send(b"1")
    ((first, _),) = frames_of(hub, 1)
    os.unlink(address.socket_path(where))
    hub.bind_again()
    assert stat.S_IMODE(os.stat(address.socket_path(where)).st_mode) == 0o600
    with contextlib.closing(dealer.context.socket(zmq.DEALER)) as late:
        late.connect(where)
        late.send(b"2")
        dealer.send(b"3")
        found = {frame: peer for peer, frame in frames_of(hub, 2)}
    assert (sorted(found), found[b"3"]) == ([b"2", b"3"], first)


def test_a_reply_to_nobody_is_counted_and_raises_nothing(hub: Hub) -> None:
    assert not hub.send(b"nobody", b"x")
    assert hub.undelivered_replies == 1


def test_messages_of_several_parts_are_dropped_and_the_next_is_read(hub: Hub, dealer: zmq.Socket[bytes]) -> None:
    dealer.send_multipart([b"x"] * 1000)
    dealer.send_multipart([b"", b"framed as a REQ does"])
    dealer.send(b"alone")
    assert [frame for _, frame in frames_of(hub, 1)] == [b"alone"]
    assert hub.dropped_messages == 2


def test_a_frame_over_the_cap_never_arrives(hub: Hub, dealer: zmq.Socket[bytes], where: str) -> None:
    dealer.send(b"x" * (limits.FRAME_BYTES + 1))
    dealer.send(b"x" * limits.FRAME_BYTES)
    context = zmq.Context()
    other = context.socket(zmq.DEALER)
    other.setsockopt(zmq.LINGER, 0)
    other.connect(where)
    other.send(b"beside it")
    assert b"beside it" in [frame for _, frame in frames_of(hub, 1)]
    assert all(len(frame) <= limits.FRAME_BYTES for _, frame in hub.poll(0.2)[0])
    other.close(0)
    context.term()


def answer_once(hub: Hub, reply: object) -> threading.Thread:
    def run() -> None:
        for peer, frame in frames_of(hub, 1):
            request = codec.decode_request(frame)
            hub.send(peer, b"\xff no reply at all")
            hub.send(peer, codec.encode_reply(request.id, b"b" * 16, reply))  # type: ignore[arg-type]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_ask_takes_the_reply_past_a_frame_that_is_none(hub: Hub, where: str) -> None:
    thread = answer_once(hub, Ok())
    assert ask([where], Stop(), 10.0) == Ok()
    thread.join(10)


def test_ask_raises_the_daemons_error(hub: Hub, where: str) -> None:
    thread = answer_once(hub, Error("unknown_dataset", "There is none.", "", False))
    with pytest.raises(UserError, match="There is none"):
        ask([where], AskStatus(), 10.0)
    thread.join(10)


def test_ask_names_every_address_and_why_it_failed(isolated: Path, where: str) -> None:
    stale = f"{isolated}/run/mute.sock"
    context = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    mute.bind(address.normalise(stale))
    Path(address.lock_path(stale)).write_text("999999999")
    with pytest.raises(ServerError) as caught:
        ask([where, address.normalise(stale)], AskStatus(), 0.6)
    mute.close(0)
    context.term()
    assert caught.value.code == "no_daemon"
    assert f"{address.socket_path(where)} (no socket there)" in caught.value.text
    assert "nobody answered in 0.6 s; daemon pid 999999999 is dead" in caught.value.text
    assert "dataserve start" in caught.value.remedy


def test_a_killed_daemons_socket_is_told_at_once_with_its_pid(where: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.socket_path(where))
    Path(address.lock_path(where)).write_text("999999999")
    began = time.monotonic()
    with pytest.raises(ServerError, match="nobody listens; daemon pid 999999999 is dead") as caught:
        ask([where], AskStatus(), 60.0)
    assert caught.value.code == "no_daemon"
    assert time.monotonic() - began < 6, "it waited for a reply"


def test_a_daemon_whose_queue_is_full_is_waited_for(where: str) -> None:
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
        deaf.bind(address.socket_path(where))
        deaf.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect_ex(address.socket_path(where))
        with pytest.raises(ServerError, match=r"nobody answered in 0\.3 s"):
            ask([where], AskStatus(), 0.3)
