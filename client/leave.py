"""One iteration's permission: what the link's thread sets, and the loop's thread waits for."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dataserve.protocol import limits
from dataserve.protocol.errors import DataserveError, MachineError

from .events import Permit, Refuse

STOPPED_S = 1.0  #: a wait that ends so much too late belongs to a process that was stopped


@dataclass(slots=True)
class Leave:
    """One iteration's permission, shared by the loop's thread (which waits) and the link's (which sets it)."""

    number: int
    registered: bool = False
    contested: bool = False
    granted: int = 0
    ask_at: int = 0
    free: int = 0  #: batches below need no look at anything else here
    error: DataserveError | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, wanted: Callable[[Leave], bool], timeout_s: float) -> bool:
        """Wait until that holds or an error is there, which is raised; False at the time-out.

        A process that was stopped meanwhile (Ctrl-Z, a debugger) wakes with its time over before the link's thread has had
        a turn: it is given one.
        """
        until = time.monotonic() + timeout_s
        with self.changed:
            held = self.changed.wait_for(lambda: self.error is not None or wanted(self), timeout_s)
            if not held and time.monotonic() > until + STOPPED_S:
                held = self.changed.wait_for(lambda: self.error is not None or wanted(self), STOPPED_S)
        self.check()
        return held

    def outlast_contest(self, timeout_s: float) -> None:
        """While another process holds the rank, wait for its end or the refusal, which come within `timeout_s`."""
        patience_s = timeout_s + limits.SILENT_S
        if self.contested and not self.wait(lambda it: not it.contested, patience_s):
            raise MachineError("stuck", f"The rank was neither granted nor refused in {patience_s:.0f} s.")

    def set_free(self) -> None:
        """Whoever would have spoken is gone for good: everything may be drawn, unless it has been refused."""
        with self.changed:
            self.registered, self.contested = True, False
            self.granted = self.ask_at = limits.ROWS
            self.free = 0 if self.error else limits.ROWS
            self.changed.notify_all()

    def apply(self, effect: Permit | Refuse) -> None:
        """Take in what the session says, if it is about this iteration."""
        if effect.number != self.number:
            return
        with self.changed:
            if isinstance(effect, Refuse):
                self.error, self.free = effect.error, 0
            else:
                _, self.registered, self.contested, self.granted, self.ask_at = effect
                self.free = 0 if self.error else min(self.granted, self.ask_at)
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the refusal, if there is one: a copy, for the traceback of one that is kept would keep its frames."""
        if self.error is not None:
            raise copy.copy(self.error)
