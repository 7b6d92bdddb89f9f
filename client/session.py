"""One object's conversation with the daemon: a state machine without clock, socket or thread.

Rules of this file: events are what has happened, effects are what the shell must do, the time comes in; `handle` alone
changes state. Every range that the daemon grants can be computed here too, so nothing it says, or fails to say, may
change what a batch holds: a grant is leave to go on, and its absence is worth `GRANT_WAIT_S` and no more.

    idle ── Begun ──► connecting ── welcome ──► opening ── opened ──► open ── Begun ──► opening
                          │  ▲                     │                   │
                          └──┴── a new boot, unknown_stream, no_hello ─┘
    open ── unknown_stream from the same boot, when the loop is through ──► idle
    any ── SILENT_S without a word, or an error that the job can live with ──► alone ── welcome ──► opening
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataserve.protocol import limits
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.messages import (
    Beat,
    Close,
    Done,
    Error,
    Hello,
    Message,
    More,
    Open,
    Opened,
    Ranges,
    Welcome,
)

from .events import (
    Asked,
    Begun,
    Closed,
    Effect,
    Event,
    Finished,
    Iteration,
    Permit,
    Progress,
    Refuse,
    Replied,
    Send,
    Ticked,
    Warn,
)
from .pending import Requests

DONE_S = 1.0  #: `done` is said this often while batches are drawn

TRANSITIONS = {
    "idle": {"connecting", "alone", "closed"},
    "connecting": {"connecting", "opening", "open", "idle", "alone", "closed"},
    "opening": {"connecting", "opening", "open", "idle", "alone", "closed"},
    "open": {"connecting", "opening", "idle", "alone", "closed"},
    "alone": {"alone", "opening", "connecting", "closed"},
    "closed": {"closed"},
}
LOST = {"unknown_stream", "no_hello", "stale_epoch"}


@dataclass
class Session:
    """See the module. `alone` and `opened` carry over what an earlier process of the same object knew."""

    hello: Hello
    timeout_s: float = limits.TIMEOUT_S
    window: int = limits.WINDOW_BATCHES
    alone: bool = False
    opened: bool = False

    state: str = field(default="idle", init=False)
    _now: float = field(default=0.0, init=False)
    _effects: list[Effect] = field(default_factory=list, init=False)
    _pending: Requests = field(default_factory=Requests, init=False)
    _boot: bytes | None = field(default=None, init=False)
    _said: float = field(default=0.0, init=False)
    _silent: float | None = field(default=None, init=False)  # since when the daemon owes an answer
    _looked: float = field(default=0.0, init=False)
    _greeted: float = field(default=-1e9, init=False)
    _stream: int = field(default=-1, init=False)
    _iteration: Iteration | None = field(default=None, init=False)
    _began: float = field(default=0.0, init=False)
    _settled: bool = field(default=False, init=False)  # this iteration has been registered, or goes on without
    _contested: bool = field(default=False, init=False)
    _running: bool = field(default=False, init=False)
    _was_alone: bool = field(default=False, init=False)  # and the daemon has not been told yet
    _said_alone: bool = field(default=False, init=False)  # and the user has not been told that it is over
    _index: int = field(default=0, init=False)
    _asked: int = field(default=0, init=False)
    _granted: int = field(default=0, init=False)
    _told: Progress = field(default=Progress(), init=False)
    _told_at: float = field(default=0.0, init=False)
    _progress: Progress = field(default=Progress(), init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; returns what to do about it, in order."""
        self._now, self._effects = now, []
        _HANDLERS[type(event)](self, event)
        return self._effects

    def next_due(self) -> float | None:
        """When the next `Ticked` has something to do; None for never."""
        if self.state in ("idle", "closed"):
            return None
        times = self._pending.dues()
        if self.state != "alone" and self._silent is not None:
            times.append(self._silent + limits.SILENT_S)
        times.append(self._began + self._patience_s())
        if self.state == "open":
            times.append(self._said + limits.BEAT_S)
            if self._running:
                times.append(max(self._told_at, self._looked) + DONE_S)
        return None if (due := min(times)) == math.inf else due

    @property
    def last_id(self) -> int:
        """The id of the latest request."""
        return self._pending.last_id

    def awaits(self, identifier: int) -> bool:
        """Whether that request still wants its reply."""
        return identifier in self._pending

    # --- the loop's events ------------------------------------------------------------------------------------------

    def _begun(self, event: Begun) -> None:
        self._iteration, self._began, self._running = event.iteration, self._now, True
        self._settled = self._contested = False
        self._index = self._asked = self._granted = 0
        self._told = self._progress = Progress()
        self._told_at = self._now
        if self.state == "idle" and self.alone:
            self._greet("alone")
        elif self.state == "idle":
            self._greet("connecting")
        elif self.state in ("opening", "open"):
            self._open()
        if self.state == "alone":
            self._settled = True
        self._permit()

    def _asked_for(self, event: Asked) -> None:
        if self._iteration is None or event.number != self._iteration.number:
            return  # a thread that works ahead for an iteration that has been replaced
        self._index = max(self._index, event.batch)
        self._asked = max(self._asked, self._index)
        self._ask_ahead()
        self._permit()

    def _ticked(self, event: Ticked) -> None:
        self._looked = self._now
        if event.progress.given >= self._told.given:  # else it is the next iteration's, whose `Begun` is on its way
            self._progress = event.progress
        if self.state in ("idle", "closed"):
            return
        if self._silent is not None and self.state != "alone" and self._now - self._silent >= limits.SILENT_S:
            self._go_alone(f"The daemon has not answered for {limits.SILENT_S:g} s.")
        elif self._now - self._began >= self._patience_s():
            self._go_alone(f"The daemon has not registered this job in {self._patience_s():g} s.")
        self._effects += [Send(identifier, message) for identifier, message in self._pending.take_due(self._now)]
        if self.state == "open" and self._now - self._told_at >= DONE_S and self._progress != self._told:
            self._tell()
        elif self.state == "open" and self._now - self._said >= limits.BEAT_S:
            self._send(Beat(self._stream), None)

    def _patience_s(self) -> float:
        """How long `iter()` may wait for a registration: one answer now and then must not make that for ever. Where another
        process holds the rank, a little longer than until that is refused."""
        if self.state not in ("connecting", "opening") or self._settled:
            return math.inf
        return self.timeout_s + limits.BEAT_S if self._contested else limits.SILENT_S

    def _finished(self, event: Finished) -> None:
        self._progress, self._running = event.progress, False
        if self.state == "open" and self._progress != self._told:
            self._tell()

    def _closed(self, _event: Closed) -> None:
        if self.state == "open":
            self._send(Close(self._stream), None)
        self._enter("closed")

    # --- the daemon's replies ---------------------------------------------------------------------------------------

    def _replied(self, event: Replied) -> None:
        pending = self._pending.answered(event.reply.id)
        if pending is None or self.state == "closed":
            return  # late, or never asked for
        self._silent = self._now if self._pending else None
        message, request = event.reply.message, pending.message
        another = self._boot is not None and event.reply.boot != self._boot
        self._boot = event.reply.boot
        if isinstance(message, Error) and message.code in LOST and self.state == "open" and not another | self._running:
            self._rest()  # replaced by its object's loader workers: to open again would throw them out
        elif isinstance(message, Error):
            self._erred(request, message)
        elif another and not isinstance(request, Hello):
            self._greet("connecting")
        elif isinstance(message, Welcome):
            self._open()
        elif isinstance(message, Opened) and isinstance(request, Open):
            self._registered(message)
        elif isinstance(message, Ranges) and isinstance(request, More):
            self._was_granted(request, message)

    def _registered(self, message: Opened) -> None:
        if self._said_alone:
            self._said_alone = False
            self._warned.clear()
            self._warn("The daemon answers again.")
        self._enter("open")
        self.alone, self.opened = False, True
        self._stream, self._contested = message.stream, False
        self._settled = True
        self._asked = max(self._granted, self._index)
        self._ask_ahead()
        self._permit()
        if self._progress.given:
            self._tell()  # the daemon knows where this iteration began, not how far it is

    def _was_granted(self, request: More, message: Ranges) -> None:
        iteration = self._iteration
        assert iteration is not None
        own = iteration.partition.window(
            iteration.open.rank, iteration.open.worker, iteration.open.workers, request.first, request.count
        )
        if (message.stream, message.first) != (request.stream, request.first) or [*map(tuple, message.ranges)] != own:
            self._warn(
                f"The daemon's ranges for batches [{request.first}, {request.first + request.count}) are not those of the "
                "protocol; going on with the protocol's. [wrong_ranges]"
            )
        self._granted = max(self._granted, request.first + len(own))
        self._ask_ahead()
        self._permit()

    def _erred(self, request: Message, message: Error) -> None:
        error = message.to_exception()
        if error.code in LOST:
            self._greet("connecting")
        elif isinstance(request, Hello):
            self._not_registered(error)
        elif isinstance(request, Open) and error.code == "rank_taken" and not (self._settled or self.opened):
            self._wait_for_rank(error)
        elif isinstance(request, Open):
            self._not_registered(error)
        elif isinstance(request, More):
            self._warn(f"The daemon grants no ranges: {error}")

    def _not_registered(self, error: DataserveError) -> None:
        """Raise what only the user can mend, before the job's first batch. One that has been registered is never ended,
        whatever a daemon says that was restarted with other data, or has let somebody else in its place."""
        if self._settled or self.opened or error.retryable:
            # One that is starting again says for a while that it is not ready: no news to a job that is alone already, or
            # that such a daemon has registered before.
            starting = self.opened and error.code == "preparation_failed"
            self._go_alone(str(error), quietly=error.retryable and (self.alone or starting))
        else:
            self._refuse(error)

    def _refuse(self, error: DataserveError) -> None:
        assert self._iteration is not None
        self._rest()
        self._contested = False
        self._effects.append(Refuse(self._iteration.number, error))

    def _wait_for_rank(self, error: DataserveError) -> None:
        if self._now - self._began >= self.timeout_s:
            self._refuse(error)
            return
        self._contested = True
        self._warn(f"Waiting up to {self.timeout_s:.0f} s: {error.text}")
        assert self._iteration is not None
        self._send(self._iteration.open, limits.RETRY_S, delay_s=limits.RETRY_S)
        self._permit()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _enter(self, state: str) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a session cannot go from {self.state} to {state}: {self}")
        self.state = state

    def _greet(self, state: str) -> None:
        """Say hello, anew or for the first time; not more often than each RETRY_S, however the daemon behaves."""
        self._enter(state)
        self._pending.clear()
        self._boot, self._stream = None, -1
        delay_s = max(0.0, self._greeted + limits.RETRY_S - self._now)
        self._greeted = self._now + delay_s
        self._send(self.hello, limits.BEAT_S if state == "alone" else limits.RETRY_S, delay_s=delay_s)

    def _rest(self) -> None:
        """Have no registration, and want none before the next iteration."""
        self._enter("idle")
        self._pending.clear()
        self._silent = None

    def _open(self) -> None:
        """Register for the current iteration, forgetting what an older one still awaited."""
        self._enter("opening")
        self._pending.clear()
        assert self._iteration is not None
        self._send(self._iteration.open, limits.RETRY_S)

    def _go_alone(self, why: str, *, quietly: bool = False) -> None:
        if not quietly:
            self._warn(f"{why} This job goes on by itself and loses nothing; it registers again when it can.")
            self._said_alone = True
        self._greeted = self._now + limits.BEAT_S - limits.RETRY_S
        self._greet("alone")
        self.alone = self._was_alone = self._settled = True
        self._contested = False
        self._permit()

    def _ask_ahead(self) -> None:
        """Keep a window granted or on its way: the next is asked for when half of the last is used."""
        if self.state != "open" or self._iteration is None or not self._running:
            return
        total = self._iteration.total
        while self._asked < total and self._asked - self._index <= self.window // 2:
            count = min(self.window, total - self._asked)
            self._send(More(self._stream, self._iteration.open.epoch, self._asked, count), limits.RETRY_S)
            self._asked += count

    def _tell(self) -> None:
        """`done`, with what is new since the last one."""
        iteration, new, old = self._iteration, self._progress, self._told
        assert iteration is not None
        self._send(
            Done(
                self._stream,
                iteration.open.epoch,
                iteration.cursor(new.given),
                new.samples - old.samples,
                None if new.wait_s is None else max(0.0, new.wait_s - (old.wait_s or 0.0)),
                None if new.busy_s is None else max(0.0, new.busy_s - (old.busy_s or 0.0)),
                self._was_alone,
            ),
            None,
        )
        self._told, self._told_at, self._was_alone = new, self._now, False

    def _send(self, message: Message, pace_s: float | None, *, delay_s: float = 0.0) -> None:
        identifier = self._pending.add(message, self._now + (delay_s or pace_s or 0.0), pace_s)
        self._said = self._now
        if self._silent is None:  # else an older one waits, perhaps of an iteration that this one replaces
            self._silent = self._now
        if not delay_s:
            self._effects.append(Send(identifier, message))

    def _permit(self) -> None:
        if self._iteration is None:
            return
        total = self._iteration.total
        if self.state == "alone":
            self._granted = total
        granted = total if self._granted >= total else self._granted
        ask_at = total if max(self._asked, granted) >= total else max(self._index + 1, self._asked - self.window // 2)
        self._effects.append(
            Permit(
                self._iteration.number,
                self._settled,
                self._contested,
                granted,
                ask_at,
            )
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._effects.append(Warn(text))


_HANDLERS: dict[type, Callable[[Session, Any], None]] = {
    Begun: Session._begun,
    Asked: Session._asked_for,
    Replied: Session._replied,
    Ticked: Session._ticked,
    Finished: Session._finished,
    Closed: Session._closed,
}
