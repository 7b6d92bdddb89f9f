"""The time line of a simulation, processes, and loops written as generators that yield what they wait for."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Generator
from random import Random
from typing import Any, NamedTuple

STORY = 60  #: what a failure shows of the trace


class FaultError(AssertionError):
    """The system did what it must never do."""


class Timeline:
    """Runs actions in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.steps = 0
        self.random = Random(seed)
        self.story: deque[str] = deque(maxlen=STORY)
        self._hash = hashlib.blake2b(digest_size=16)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have that happen so much later."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._asked, action, arguments))

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, action, arguments = heapq.heappop(self._heap)
        self.steps += 1
        action(*arguments)

    def tell(self, text: str) -> None:
        """Put a line in the trace."""
        line = f"{self.now:12.6f} {text}"
        self._hash.update(line.encode())
        self.story.append(line)

    def digest(self) -> str:
        """Of the whole trace so far."""
        return self._hash.hexdigest()


class Until(NamedTuple):
    """Wait until that holds, for so long at most; the wait's value is whether it does."""

    holds: Callable[[], bool]
    timeout_s: float


Loop = Generator[float | Until, bool, None]  # a float is a sleep, in seconds


class Process:
    """A process that can be stopped (SIGSTOP), continued and killed. While stopped, what would run in it piles up."""

    def __init__(self, timeline: Timeline, pid: int, host: str, pid_namespace: int) -> None:
        self.timeline = timeline
        self.pid = pid
        self.start_time = 1000 + pid
        self.host = host
        self.pid_namespace = pid_namespace
        self.alive = True
        self.died = 0.0
        self.stopped = False
        self.at_death: list[Callable[[], None]] = []
        self.tasks: list[Task] = []
        self._stopped_at = 0.0
        self._stopped_s = 0.0
        self._backlog: list[Callable[[], None]] = []

    def awake(self) -> float:
        """The time that this process has seen: it does not pass while it is stopped."""
        return self.timeline.now - self._stopped_s - (self.timeline.now - self._stopped_at if self.stopped else 0.0)

    def run(self, action: Callable[[], None]) -> None:
        """Run that in the process: now, when it is continued, or never."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append(action)
        else:
            action()

    def poke(self) -> None:
        """Have its loops look again at what they wait for."""
        for task in self.tasks:
            task.poke()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.timeline.tell(f"process {self.pid} is stopped")
            self.stopped, self._stopped_at = True, self.timeline.now

    def proceed(self) -> None:
        """SIGCONT."""
        if self.alive and self.stopped:
            self.timeline.tell(f"process {self.pid} goes on")
            self.stopped = False
            self._stopped_s += self.timeline.now - self._stopped_at
            backlog, self._backlog = self._backlog, []
            for action in backlog:
                self.run(action)

    def kill(self) -> None:
        """SIGKILL: it does nothing more, and nobody is told."""
        if self.alive:
            self.timeline.tell(f"process {self.pid} dies")
            self.alive, self.died = False, self.timeline.now
            for action in self.at_death:
                action()


class Task:
    """A loop that runs in a process. `poke` has it look again at what it waits for."""

    def __init__(self, process: Process, loop: Loop) -> None:
        self.process = process
        self._loop = loop
        self._wanted: Until | None = None
        self._turn = 0
        process.tasks.append(self)
        self._wake(True, 0)

    def poke(self) -> None:
        """Something has changed."""
        if self._wanted is not None and self._wanted.holds():
            turn, self._wanted = self._turn, None
            self.process.timeline.after(0.0, self._wake, True, turn)

    def _wake(self, value: bool, turn: int) -> None:
        if turn == self._turn:
            self._turn += 1
            self._wanted = None
            self.process.run(lambda: self._advance(value))

    def _advance(self, value: bool) -> None:
        try:
            wait = self._loop.send(value) if self._turn > 1 else next(self._loop)
        except StopIteration:
            self.process.tasks.remove(self)
            return
        timeline = self.process.timeline
        if not isinstance(wait, Until):
            timeline.after(wait, self._wake, True, self._turn)
        elif wait.holds():
            timeline.after(0.0, self._wake, True, self._turn)
        else:
            self._wanted = wait
            timeline.after(wait.timeout_s, self._expire, self._turn)

    def _expire(self, turn: int) -> None:
        wanted = self._wanted
        if turn == self._turn and wanted is not None:
            self._wake(wanted.holds(), turn)
