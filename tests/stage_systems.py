"""The stage of `system_*.txt`: clients and a daemon with a wire between them. stage.py says what a scenario file is."""

from __future__ import annotations

from typing import Any

from dataserve.client import events
from dataserve.client.events import Send
from dataserve.client.session import Session
from dataserve.protocol.codec import decode_reply, decode_request, encode_reply, encode_request
from dataserve.protocol.messages import Hello
from dataserve.server.events import Event, ProbeProcess, ProcessProbed, Reply, RequestArrived

from .stage import POLL_S, Engines, Talks, said


class Client(Talks):
    """A session with a name, whose frames go to a daemon."""

    def __init__(self, name: str, pid: int, outbox: list[tuple[Client, Send]]) -> None:
        super().__init__()
        self.name = name
        self.peer = f"{name}1"
        self.session = Session(Hello((1,), pid, 1, "here", 5), window=4, timeout_s=3.0)
        self._outbox = outbox

    def carry(self, effect: Send) -> None:
        """Into the socket, or nowhere where nobody listens."""
        self._outbox.append((self, effect))


class Systems:
    """`system_*.txt`: clients with names and a daemon on one wire without delay. `>` and `<` are what passes on it; the
    daemon may be dead, and replies may be kept back or lost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.engine = Engines()
        self.up = True
        self.boots = 1
        self.clients: dict[str, Client] = {}
        self.outbox: list[tuple[Client, Send]] = []
        self.replies = "arrive"  # or `are lost`, or `are late`
        self.late: list[tuple[Client, bytes]] = []

    def do_client(self, name: str, pid: int) -> list[str]:
        """A process with one data set object."""
        self.clients[name] = Client(name, pid, self.outbox)
        return []

    def do_kill_daemon(self) -> list[str]:
        """SIGKILL: what it knew is gone."""
        self.up = False
        return []

    def do_start_daemon(self, store: str = "A") -> list[str]:
        """A new process, with a new boot id; every connection has another identity there."""
        self.up, self.boots = True, self.boots + 1
        self.engine.do_restart(store)
        for client in self.clients.values():
            client.peer = f"{client.name}{self.boots}"
        return []

    def do_kill_client(self, name: str) -> list[str]:
        """SIGKILL."""
        client = self.clients.pop(name)
        return self.engine.do_dies(client.session.hello.pid)

    def do_replies(self, *fate: str) -> list[str]:
        """From here on they `arrive`, `are lost`, or `are late` until they arrive again."""
        self.replies = " ".join(fate)
        late, self.late = (self.late, []) if self.replies == "arrive" else ([], self.late)
        return [line for client, frame in late for line in self._deliver(client, frame)] + self._carry()

    def do_at(self, name: str, verb: str, *words: str, **named: Any) -> list[str]:
        """A client does what session scenarios have verbs for."""
        client = self.clients[name]
        client.now = self.now
        return self._with_name(client, getattr(client, f"do_{verb}")(*words, **named)) + self._carry()

    def do_wait(self, seconds: str) -> list[str]:
        """Time passes: every client wakes when it has something due."""
        end, lines = self.now + float(seconds), list[str]()
        while True:
            dues = [(client.session.next_due() or end + 1, name) for name, client in sorted(self.clients.items())]
            due, name = min(dues, default=(end + 1, ""))
            if due > end:
                break
            self.now = max(self.now, due) + POLL_S
            client = self.clients[name]
            client.now = self.now
            lines += self._with_name(client, client.take(events.Ticked(client.progress))) + self._carry()
        self.now = end
        return lines

    def do_status(self) -> list[str]:
        """Who is registered."""
        return self.engine.do_status()

    def _carry(self) -> list[str]:
        lines = []
        while self.outbox:
            client, sent = self.outbox.pop(0)
            if not self.up or not client.session.awaits(sent.id):
                continue
            self.engine.now = self.now
            request = decode_request(encode_request(sent.id, sent.message))
            for effect in self._effects(RequestArrived(client.peer.encode(), request.id, request.message)):
                frame = encode_reply(effect.id, b"%d" % self.boots * 16, effect.message)
                if self.replies == "arrive":
                    lines += self._deliver(client, frame)
                elif self.replies == "are late":
                    self.late.append((client, frame))
        return lines

    def _effects(self, event: Event) -> list[Reply]:
        replies: list[Reply] = []
        for effect in self.engine.engine.handle(event, self.now):
            if isinstance(effect, ProbeProcess):
                replies += self._effects(ProcessProbed(*effect, effect.pid not in self.engine.dead))
            elif isinstance(effect, Reply):
                replies.append(effect)
        self.engine.engine.validate()
        return replies

    def _deliver(self, client: Client, frame: bytes) -> list[str]:
        reply = decode_reply(frame)
        client.now = self.now
        heard = f"{self.now:6.2f} < #{reply.id} {said(reply.message)}"
        return self._with_name(client, [heard, *client.take(events.Replied(reply))])

    def _with_name(self, client: Client, lines: list[str]) -> list[str]:
        """Leave out the beats: they say nothing."""
        beats = {identifier for kind, (identifier, _) in client.sent.items() if kind == "beat"}
        shown = [
            line for line in lines if "beat stream" not in line and not any(f"< #{one} ok" in line for one in beats)
        ]
        return [f"{client.name} {line}" for line in shown]
