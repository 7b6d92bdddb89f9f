"""A daemon of a few lines for tests of the client: it speaks the protocol, and has its faults by name."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from dataserve.protocol import codec
from dataserve.protocol.address import socket_path
from dataserve.protocol.errors import DataserveError, PeerError
from dataserve.protocol.manifest import Manifest
from dataserve.protocol.messages import (
    Describe,
    Described,
    Error,
    Hello,
    Message,
    More,
    Ok,
    Open,
    Opened,
    Preparing,
    Ranges,
    Welcome,
)
from dataserve.protocol.partition import Partition


class FakeDaemon:
    """Serves one store until `stop`. `seen` are the requests in order; each attribute that ends in a question of what
    to do wrong is read by the serving thread."""

    def __init__(self, address: str, folder: Path, manifest: Manifest) -> None:
        self.address = address
        self.folder = folder
        self.manifest = manifest
        self.seen: list[Message] = []
        self.silent = False
        self.preparing: list[Preparing] = []  # answers to the next `describe`s
        self.refusals: list[DataserveError] = []  # answers to the next `open`s
        self.wrong_ranges = False
        self.boot = secrets.token_bytes(16)
        self._streams: dict[int, Open] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="fake-daemon")
        self._thread.start()

    def restart(self) -> None:
        """Forget everything, as a new process would."""
        self._streams, self.boot = {}, secrets.token_bytes(16)

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        self._socket.close(0)
        self._context.term()
        Path(socket_path(self.address)).unlink(missing_ok=True)

    def of(self, kind: type[Message]) -> list[Message]:
        return [message for message in list(self.seen) if isinstance(message, kind)]

    def _serve(self) -> None:
        while not self._stopping:
            if not self._socket.poll(20):
                continue
            peer, frame = self._socket.recv_multipart()
            request = codec.decode_request(frame)
            self.seen.append(request.message)
            if not self.silent:
                answer = self._answer(request.message)
                self._socket.send_multipart([peer, codec.encode_reply(request.id, self.boot, answer)])

    def _answer(self, message: Message) -> Message:
        if isinstance(message, Hello):
            return Welcome(1, "fake")
        if isinstance(message, Describe):
            return self.preparing.pop(0) if self.preparing else self._described()
        if isinstance(message, Open):
            return self._open(message)
        if getattr(message, "stream", None) not in self._streams:
            return Error.of(PeerError("unknown_stream", "No such stream.", retryable=True))
        return self._ranges(message, self._streams[message.stream]) if isinstance(message, More) else Ok()

    def _open(self, message: Open) -> Message:
        if self.refusals:
            return Error.of(self.refusals.pop(0))
        stream = len(self._streams)
        self._streams[stream] = message
        return Opened(stream)

    def _described(self) -> Described:
        made = self.manifest
        names = [column.name for column in made.columns]
        return Described(made.name, str(self.folder), made.id, made.fingerprint, made.rows, made.size_bytes, names)

    def _ranges(self, more: More, opened: Open) -> Ranges:
        partition = Partition(opened.plan["n"], opened.batch_size, opened.world_size, opened.last, opened.position)
        own = partition.window(opened.rank, opened.worker, opened.workers, more.first, more.count)
        if self.wrong_ranges:
            own = own[::-1]
        end = more.first + len(own) >= partition.worker_count(opened.rank, opened.worker, opened.workers)
        return Ranges(more.stream, more.epoch, more.first, [list(item) for item in own], end)


@contextmanager
def fake_daemon(folder: Path, manifest: Manifest, address: str | None = None) -> Iterator[FakeDaemon]:
    """A fake at `$DATASERVE_ADDRESS` unless told."""
    daemon = FakeDaemon(address or os.environ["DATASERVE_ADDRESS"], folder, manifest)
    try:
        yield daemon
    finally:
        daemon.stop()
