"""The children that prepare: started, listened to without waiting, ended. Their words become the engine's events.

First every data set is looked up (quick, some at a time), then what is missing is built, one after another. Beside that
what was found is confirmed, one at a time and niced: some rows are prepared again, to be compared with the store, which is
served meanwhile. The child's contract is in prepare.py. A child that dies without a word, or says something that is no
word, is a failure of its data set alone; what could not be confirmed for such a reason is served on.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol.errors import CODES, DataserveError

from . import store
from .child import TERM_S, Child, Task
from .events import (
    ConfirmationEnded,
    ConfirmationStarted,
    DatasetSealed,
    Event,
    PreparationAdvanced,
    PreparationFailed,
)
from .overheard import Alike
from .spec import DatasetSpec

LOOKUPS = 4  #: children at once that look up what is there
OUR_CODES = ("internal", "worker_died", "stuck")  #: the failures whose traces on stderr somebody must see
BAD_SAMPLE_CODES = ("bad_sample", "bad_schema")  #: the failures with an exit status of their own
NICE = 10  #: of a confirming child: jobs may train already, and builds wait for no one


class Progress(NamedTuple):
    """How far one preparation is: `rate` in rows per second, `eta_s` in seconds, None while unknown."""

    stage: str
    done: int
    total: int | None
    rate: float | None
    eta_s: float | None


class Manner(NamedTuple):
    """How to prepare: `workers` processes (None: one a core), what one sample may take, whether hits are confirmed."""

    workers: int | None = None
    sample_timeout_s: float | None = None
    confirm: bool = True


class Builders:
    """All data sets of a daemon, or of `dataserve prepare`, on their way to being sealed.

    `log(text)` gets a line for each verdict and obstacle, `progress(name, Progress)` what a bar shows, `settled()` is called
    once, when every data set is sealed or failed and those events were handled; `admit` has the last word on a sealed store.
    `ready` are the names of the sealed, `failed` the codes of the failed by name.
    """

    def __init__(
        self,
        specs: Sequence[DatasetSpec],
        store_root: Path,
        manner: Manner,
        log: Callable[[str], None],
        progress: Callable[[str, Progress], None] | None = None,
        settled: Callable[[], None] | None = None,
        admit: Callable[[DatasetSealed], DatasetSealed | PreparationFailed] = lambda event: event,
    ) -> None:
        self._store_root = store_root
        self._manner = manner
        self._log = log
        self._progress = progress
        self._settled = settled
        self._admit = admit
        self._specs = list(specs)
        self._lookups = deque(specs)
        self._builds: list[DatasetSpec] = []
        self._confirmations: list[DatasetSpec] = []
        self._children: list[Child] = []
        self._alike: dict[str, Alike] = {}  # bad samples by data set
        self._unstarted: list[Event] = []
        self.ready: set[str] = set()
        self.failed: dict[str, str] = {}

    def start(self) -> None:
        """Begin. What cannot even be started shows as a failure in `collect`."""
        self._start_next()

    @property
    def busy(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._children or self._lookups or self._builds or self._confirmations or self._unstarted)

    @property
    def exit_status(self) -> int:
        """What the failures amount to: 0 none, 4 where samples were bad, else 1."""
        bad_samples = any(code in BAD_SAMPLE_CODES for code in self.failed.values())
        return 4 if bad_samples else 1 if self.failed else 0

    def descriptors(self) -> set[int]:
        """What becomes readable when a child has spoken or ended. Asked for before each wait, when whatever `collect` gave has
        been handled: so it is here that `settled` is told."""
        if self._settled is not None and len(self.ready | self.failed.keys()) == len(self._specs):
            settled, self._settled = self._settled, None
            settled()
        return set().union(*(child.descriptors for child in self._children))

    def collect(self) -> list[Event]:
        """What has happened since the last call, without waiting."""
        events, self._unstarted = self._unstarted, []
        for child in list(self._children):
            for line in child.stderr.hear():
                self._log(f"{child.name}: {line}")
            for words in child.hear():
                events += self._take(child, words)
            if child.ended():
                self._children.remove(child)
                events += self._part_with(child)
        for event in events:
            self._note(event)
        self._start_next()
        return events

    def close(self) -> None:
        """End all children, with those that they started, in `TERM_S` at most."""
        self._lookups.clear()
        self._builds.clear()
        self._confirmations.clear()
        for child in self._children:
            child.dismiss()
        deadline = time.monotonic() + TERM_S
        while self._children:
            self._children.pop().kill(deadline)

    def _start_next(self) -> None:
        """As many look-ups as may run at once; when all are over a build, and beside it a confirmation."""
        while self._lookups and len(self._children) < LOOKUPS:
            self._start_child(self._lookups.popleft(), "look up")
        if self._lookups or self._runs("look up"):
            return
        if self._builds and not self._runs("build"):
            self._start_child(self._builds.pop(0), "build")
        if self._confirmations and not self._runs("confirm"):
            self._start_child(self._confirmations.pop(0), "confirm")

    def _runs(self, task: Task) -> bool:
        return any(child.task == task for child in self._children)

    def _start_child(self, spec: DatasetSpec, task: Task) -> None:
        request = {
            "spec": spec.to_map(),
            "store": str(self._store_root),
            "workers": self._manner.workers,
            "sample_timeout_s": self._manner.sample_timeout_s,
            "build": task == "build",
            "confirm": task == "confirm",
        }
        try:
            self._children.append(Child(spec, request, task, nice=NICE if task == "confirm" else 0))
        except OSError as error:  # no memory or no process to be had: the data set's bad luck, not the daemon's end
            text = f"The process that prepares {spec.name!r} cannot be started: {error.strerror}."
            if task == "confirm":
                self._log(f"{spec.name}: not confirmed: {text}")
                return
            remedy = "Raise the limits on memory or processes, then start again."
            self._unstarted.append(PreparationFailed(spec.name, "worker_died", text, remedy))

    def _take(self, child: Child, words: dict[str, Any]) -> list[Event]:
        """One line of a child."""
        kind = words["event"]
        if child.task == "confirm":
            return self._take_confirming(child, words)
        if kind == "progress":
            told = Progress(**{key: words[key] for key in Progress._fields})
            if self._progress is not None:
                self._progress(child.name, told)
            return [PreparationAdvanced(child.name, told.done, told.total, told.eta_s)]
        if kind in ("sealed", "failed"):
            child.settled = True
            if kind == "sealed":
                sealed = _sealed(child.name, words["path"], words["id"])
                if isinstance(sealed, DatasetSealed):
                    sealed = self._admit(sealed)
                confirms = child.task == "look up" and self._manner.confirm and child.spec.scheme != "store"
                if confirms and isinstance(sealed, DatasetSealed):
                    self._queue(self._confirmations, child.spec)
                return [sealed]
            child.failed_by_us = words["code"] in OUR_CODES
            return [PreparationFailed(child.name, words["code"], words["text"], words["remedy"])]
        if kind in ("bad", "bad_samples"):
            self._tell_bad(child.name, words)
        elif kind == "verdict":
            child.missed = not words["hit"]
            if words["hit"] or child.task == "build":  # a build says again, and better, why it was a miss
                self._log(f"{child.name}: {'HIT' if words['hit'] else 'MISS'}: {'; '.join(words['reasons'])}")
        else:
            self._log(f"{child.name}: {_told(words)}")
        return []

    def _tell_bad(self, name: str, words: dict[str, Any]) -> None:
        """Bad samples, the first ones of each kind; of the others that there are such, when all are known."""
        alike = self._alike.setdefault(name, Alike())
        if words["event"] == "bad":
            if alike.shows(words["stage"], words["cause"]):
                self._log(f"{name}: {_told(words)}")
            return
        if left_out := alike.left_out():
            self._log(f"{name}: {left_out} more like these were not shown one by one")
        self._log(f"{name}: {_told(words)}")

    def _take_confirming(self, child: Child, words: dict[str, Any]) -> list[Event]:
        """One line of a child that compares: what it says of the store that was found is known already."""
        match words["event"]:
            case "verdict" if not words["hit"]:
                child.settled = True
                self._log(f"{child.name}: not confirmed: {'; '.join(words['reasons'])}. A new start prepares it anew.")
            case "confirming":
                child.confirming = True
                return [ConfirmationStarted(child.name)]
            case "confirmed":
                child.settled = True
                self._log(f"{child.name}: {_told(words)}")
                return [ConfirmationEnded(child.name, None)]
            case "failed":
                return self._refute(child, PreparationFailed(child.name, *(words[key] for key in _REASON)))
        return []

    def _refute(self, child: Child, why: PreparationFailed) -> list[Event]:
        """A comparison that came to no good end. Only what the data are to blame for speaks against the store."""
        child.settled = True
        if CODES.get(why.code) == "data":
            return [why]
        self._log(f"{child.name}: served, but not confirmed: {why.text} {why.remedy}".rstrip() + f" [{why.code}]")
        return [ConfirmationEnded(child.name, None)] if child.confirming else []

    def _note(self, event: Event) -> None:
        if isinstance(event, DatasetSealed):
            self.ready.add(event.name)
        elif isinstance(event, PreparationFailed):
            self.ready.discard(event.name)
            self.failed[event.name] = event.code

    def _queue(self, queue: list[DatasetSpec], spec: DatasetSpec) -> None:
        queue.append(spec)
        queue.sort(key=self._specs.index)  # as they were named, whichever look-up was the first to end

    def _part_with(self, child: Child) -> list[Event]:
        """What comes of a child that has ended: its data set's outcome, or its turn to be built."""
        unexplained = not child.settled and not (child.missed and child.process.returncode == 0)
        for line in child.stderr.end(failed=unexplained or child.failed_by_us):
            self._log(f"{child.name}: {line}")
        child.release()
        if child.settled:
            return []
        if child.task == "confirm":
            return self._refute(child, child.fault or _died(child))
        if child.missed and child.task == "look up" and child.process.returncode == 0:
            self._queue(self._builds, child.spec)
            return []
        return [child.fault or _died(child)]


_REASON = ("code", "text", "remedy")


def _sealed(name: str, path: str, store_id: str) -> DatasetSealed | PreparationFailed:
    """The store as the daemon itself sees it: a child's word is not enough to serve it."""
    try:
        found = store.open_sealed(path)
    except DataserveError as error:
        return PreparationFailed(name, error.code, error.text, error.remedy)
    if found.id != store_id:
        return PreparationFailed(name, "bad_store", f"The store {path!r} has the id {found.id}, not {store_id}.", "")
    made = found.manifest
    columns = tuple(column.name for column in made.columns)
    return DatasetSealed(name, found.path, found.id, made.fingerprint, made.rows, made.size_bytes, columns)


def _told(words: dict[str, Any]) -> str:
    """What the operator reads of an event that changes nothing here."""
    match words["event"]:
        case "waiting":
            text = f"waiting for process {words['pid']}, which builds the same"
        case "space":
            need = words["need_bytes"]
            needed = "an unknown number of" if need is None else f"{need:,}"
            text = f"needs {needed} bytes, {words['free_bytes']:,} are free"
        case "scanned":
            left_out = "".join(f", {count:,} left out ({why})" for why, count in words["left_out"].items())
            others = [f"{count:,} {kind}" for kind, count in words["unlike"].items()]
            if others:  # a folder of .gif or .heic files would go missing without a word
                more = f" and {len(others) - 5} kinds more" if len(others) > 5 else ""
                left_out += f", not taken for pictures by their names: {', '.join(others[:5])}{more}"
            text = f"{words['pictures']:,} pictures in {words['classes']:,} classes{left_out}"
        case "confirmed":
            text = f"{words['rows']} rows prepared again are as they are stored"
        case "iterated":
            text = (
                "the source says no length: one process reads it from its first sample to its last, whatever --workers says. "
                "One with __len__ and __getitem__ is shared among workers"
            )
        case "resuming":
            text = f"goes on with an interrupted build: {words['done']} of {words['total'] or '?'} samples are done"
        case "uniform":
            rows = ", ".join(f"{row:,}" for row in words["rows"])
            text = (
                f"warning: {words['count']:,} of {words['of']:,} rows of {words['column']} are nearly one value (over 99 % of "
                f"each channel), the first {rows}. If that is not meant, see how the source reads them: dataserve preview"
            )
        case "bad":
            place = f" ({words['path']})" if words["path"] else ""
            text = f"bad sample {words['index']}{place} at the stage {words['stage']}: {words['cause']}"
        case _:
            listed = f", listed in {words['table']}" if words["table"] else ""
            text = f"{words['count']} bad samples{listed}" + (f". {words['remedy']}" if words["remedy"] else "")
    return text


def _died(child: Child) -> PreparationFailed:
    """A child that ended without a word."""
    status = child.process.returncode
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
        remedy = "See the kernel's log (dmesg) for the reason, lack of memory for instance; what is built is kept."
    else:
        how, remedy = f"ended with status {status} and said nothing", "See the daemon's log."
    return PreparationFailed(child.name, "worker_died", f"The process that prepares {child.name!r} {how}.", remedy)
