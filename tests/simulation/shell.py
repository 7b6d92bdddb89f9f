"""The real `Session` in a model of `client/transport.py`: a thread that owns the socket, and a loop that waits for leave.

Each method has its original's name there. What the loop waits for is measured here, because here it must not be long.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from dataserve.client import events
from dataserve.client.events import Iteration, Permit, Progress, Refuse, Send, Warn
from dataserve.client.session import Session
from dataserve.protocol import codec, limits
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.messages import Hello

from .clock import FaultError, Loop, Process, Until
from .network import Network, Wire

SLACK_S = 0.05  #: a wait may be longer than its limit by so much: a thread's turn
PENDING = 40  #: requests without a reply: a window for each batch that waits until it is alone, a `done` a second


@dataclass
class Page:
    """What the processes of one object tell each other: two words of client/epochs.py."""

    alone: bool = False
    opened: bool = False


@dataclass
class Leave:
    """One iteration's permission."""

    number: int
    registered: bool = False
    contested: bool = False
    granted: int = 0
    ask_at: int = 0
    error: DataserveError | None = None


class RefusedError(Exception):
    """The daemon's refusal comes out of the loop."""

    def __init__(self, error: DataserveError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Watch:
    """What all links together have done, and how patient the checks are just now."""

    quiet: bool = False  # no faults for a while: nobody may wait
    alone: int = 0
    waits: int = 0
    links: list[Link] = field(default_factory=list)


class Link:
    """One process's conversation for one object: the loop's side, and the thread's."""

    def __init__(
        self, process: Process, network: Network, page: Page, window: int, timeout_s: float, watch: Watch
    ) -> None:
        hello = Hello((1,), process.pid, process.start_time, process.host, process.pid_namespace)
        self.process = process
        self.page = page
        self.timeout_s = timeout_s
        self.session = Session(hello, timeout_s, window, alone=page.alone, opened=page.opened)
        self.leave = Leave(-1)
        self.progress: Callable[[], Progress] = Progress
        self.iteration: Iteration | None = None
        self.running = False
        self.closed = False
        self._owed: float | None = None  # since when the daemon owes an answer, as the process has seen time pass
        self._watch = watch
        self._network = network
        self._events: list[events.Event] = []
        self._outbox: dict[int, bytes] = {}
        self._wake_at = 0.0
        self._spins = 0
        self._said_alone = False  # since the daemon was last heard to answer again
        self._silence_told = False
        self._wire = Wire(network, process, self._nudge)
        watch.links.append(self)

    # --- the loop's side --------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration, progress: Callable[[], Progress]) -> Leave:
        """Register an iteration."""
        self.iteration, self.running = iteration, True
        self.leave, self.progress = Leave(iteration.number), progress
        self._post(events.Begun(iteration))
        return self.leave

    def await_registration(self, leave: Leave, *, first: bool) -> Loop:
        """Wait for the daemon's word: the first time until it counts as silent, later for `GRANT_WAIT_S`."""
        patience_s = limits.SILENT_S + limits.BEAT_S if first else limits.GRANT_WAIT_S
        held = yield from _wait(lambda: leave.error is not None or leave.registered or leave.contested, patience_s)
        self._check(leave)
        if not held and first and leave is self.leave:  # else a newer iteration has replaced it
            raise FaultError(f"no registration and no silence in {patience_s} s: {self.session}")
        yield from self._outlast_contest(leave)

    def admit(self, leave: Leave, index: int) -> Loop:
        """Wait until batch `index` may be drawn."""
        self._check(leave)
        if index >= leave.ask_at:
            self._post(events.Asked(leave.number, index))
        if index < leave.granted:
            return
        began = self.process.awake()
        silent_s = 0.0 if self._owed is None else began - self._owed
        yield Until(lambda: leave.error is not None or index < leave.granted or leave.contested, limits.GRANT_WAIT_S)
        self._judge_wait(self.process.awake() - began, silent_s)
        self._check(leave)
        yield from self._outlast_contest(leave)

    def _judge_wait(self, waited_s: float, silent_s: float) -> None:
        self._watch.waits += 1
        if waited_s > limits.GRANT_WAIT_S + SLACK_S:
            raise FaultError(f"a batch waited {waited_s:.3f} s for its grant")
        if waited_s > SLACK_S and silent_s > limits.SILENT_S + SLACK_S:
            raise FaultError(f"a batch waited for a daemon that has been silent for {silent_s:.3f} s: {self.session}")
        if waited_s > SLACK_S and self._watch.quiet:
            raise FaultError(f"a batch waited {waited_s:.3f} s though the daemon answers: {self.session}")

    def _outlast_contest(self, leave: Leave) -> Loop:
        patience_s = self.timeout_s + limits.SILENT_S
        if leave.contested:
            ended = yield from _wait(lambda: leave.error is not None or not leave.contested, patience_s)
            self._check(leave)
            if not ended and leave is self.leave:
                raise FaultError(f"the rank was neither granted nor refused in {patience_s} s: {self.session}")

    def _check(self, leave: Leave) -> None:
        if leave.error is not None:
            raise RefusedError(leave.error)

    def finish(self, leave: Leave, progress: Progress) -> None:
        """The iteration is over."""
        if leave is self.leave and not self.closed:
            self.running = False
            self._post(events.Finished(progress))

    def close(self) -> None:
        """The object is gone; the thread says goodbye."""
        if not self.closed:
            self._step()
            self._handle(events.Closed())
            self._flush()
            self.closed = True
            self._wire.close()

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _post(self, event: events.Event) -> None:
        self._events.append(event)
        self._nudge()

    def _nudge(self) -> None:
        self._wake_in(self.process.timeline.random.uniform(0.0, 0.0002))

    def _wake_in(self, seconds: float) -> None:
        timeline = self.process.timeline
        if not timeline.now < self._wake_at <= timeline.now + seconds:
            self._wake_at = timeline.now + seconds
            timeline.after(seconds, self._woken, self._wake_at)

    def _woken(self, at: float) -> None:
        if at == self._wake_at and not self.closed:
            self.process.run(self._step)

    def _step(self) -> None:
        """What has happened; then, perhaps after the loop's thread had a turn, what is due and what can be sent."""
        if self.closed:
            return
        happened, self._events = self._events, []
        for event in happened:
            self._handle(event)
        for frame in self._wire.take():
            reply = codec.decode_reply(frame)
            awaited = self.session.awaits(reply.id)
            if awaited:
                self._owed, self._silence_told = None, False
            self._handle(events.Replied(reply))
            if awaited and self._owed is None and self.session._pending:
                self._owed = self.process.awake()
        random = self.process.timeline.random
        if random.random() < 0.05:
            self.process.timeline.after(0.0001, self.process.run, self._finish_step)
        else:
            self._finish_step()

    def _finish_step(self) -> None:
        if self.closed:
            return
        self._handle(events.Ticked(self.progress()))
        self._flush()
        due = self.session.next_due()
        left_s = limits.SILENT_S if due is None else due - self.process.timeline.now
        self._spins = self._spins + 1 if left_s <= 0 else 0
        if self._spins > 3:
            raise FaultError(f"the session wants to be woken again at once: {self.session}")
        if len(self.session._pending) > PENDING:
            raise FaultError(f"{len(self.session._pending)} requests wait for their replies: {self.session}")
        self._wake_in(0.0 if self._events else max(0, int(left_s * 1000)) / 1000 + 0.001)

    def _handle(self, event: events.Event) -> None:
        for effect in self.session.handle(event, self.process.timeline.now):
            if isinstance(effect, Send):
                frame = codec.encode_request(effect.id, effect.message)
                codec.decode_request(frame)
                self._owed = self.process.awake() if self._owed is None else self._owed
                self._outbox[effect.id] = frame
            elif isinstance(effect, Warn):
                self._hear_warning(effect.text)
            else:
                self._apply(effect)
        self.page.alone = self.session.alone
        self.page.opened |= self.session.opened

    def _hear_warning(self, text: str) -> None:
        self.process.timeline.tell(f"process {self.process.pid} warns: {text}")
        if "wrong_ranges" in text:
            raise FaultError(text)
        if "answers again" in text:
            if not self._said_alone:
                raise FaultError("the daemon is said to answer again, and was never said not to")
            self._said_alone = False
        if "has not answered" in text:
            if self._silence_told:
                raise FaultError("it is said twice in one silence that the job goes on by itself")
            self._silence_told = True
            self._watch.alone += 1
        if "goes on by itself" in text:
            self._said_alone = True

    def _apply(self, effect: Permit | Refuse) -> None:
        leave = self.leave
        if effect.number != leave.number:
            return
        if isinstance(effect, Refuse):
            self.process.timeline.tell(f"process {self.process.pid} is refused: {effect.error}")
            leave.error = effect.error
        else:
            _, leave.registered, leave.contested, leave.granted, leave.ask_at = effect
            assert self.iteration is not None
            if not 0 <= leave.granted <= self.iteration.total:
                raise FaultError(f"{leave.granted} batches granted of {self.iteration.total}")
        self.process.poke()

    def _flush(self) -> None:
        for identifier in list(self._outbox):
            if self.session.awaits(identifier) and not self._wire.send(self._outbox[identifier]):
                return
            del self._outbox[identifier]


def _wait(holds: Callable[[], bool], timeout_s: float) -> Generator[float | Until, bool, bool]:
    """`Leave.wait`. A process that was stopped finds its time over: the thread must have had its turn before that counts."""
    return (yield Until(holds, timeout_s)) or (yield Until(holds, SLACK_S))
