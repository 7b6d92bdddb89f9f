"""The children that prepare: started, listened to without waiting, ended. Their words become the engine's events.

First every data set is looked up (`build` false: quick, some at a time), then what is missing is built, one after
another. The child's contract is in prepare.py. A child that dies without a word, or says something that is no word, is a
failure of its data set alone.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol.errors import DataserveError

from . import store
from .child import TERM_S, Child
from .events import DatasetSealed, Event, PreparationAdvanced, PreparationFailed
from .spec import DatasetSpec

LOOKUPS = 4  #: children at once that look up what is there
BAD_SAMPLE_CODES = ("bad_sample", "bad_schema")  #: the failures with an exit status of their own


class Progress(NamedTuple):
    """How far one preparation is: `rate` in rows per second, `eta_s` in seconds, None while unknown."""

    stage: str
    done: int
    total: int | None
    rate: float | None
    eta_s: float | None


class Builders:
    """All data sets of a daemon, or of `dataserve prepare`, on their way to being sealed.

    `log(text)` gets a line for each verdict and obstacle, `progress(name, Progress)` what a bar shows, `settled()` is called
    once, when every data set is sealed or failed and those events were handled. `ready` are the names of the sealed, `failed` the
    codes of the failed by name.
    """

    def __init__(
        self,
        specs: Sequence[DatasetSpec],
        store_root: Path,
        workers: int | None,
        log: Callable[[str], None],
        progress: Callable[[str, Progress], None] | None = None,
        settled: Callable[[], None] | None = None,
    ) -> None:
        self._store_root = store_root
        self._workers = workers
        self._log = log
        self._progress = progress
        self._settled = settled
        self._specs = list(specs)
        self._lookups = deque(specs)
        self._builds: list[DatasetSpec] = []
        self._children: list[Child] = []
        self._unstarted: list[Event] = []
        self.ready: set[str] = set()
        self.failed: dict[str, str] = {}

    def start(self) -> None:
        """Begin. What cannot even be started shows as a failure in `collect`."""
        self._start_next()

    @property
    def busy(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._children or self._lookups or self._builds or self._unstarted)

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
        return {child.descriptor for child in self._children}

    def collect(self) -> list[Event]:
        """What has happened since the last call, without waiting."""
        events, self._unstarted = self._unstarted, []
        for child in list(self._children):
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
        for child in self._children:
            child.dismiss()
        deadline = time.monotonic() + TERM_S
        while self._children:
            self._children.pop().kill(deadline)

    def _start_next(self) -> None:
        """As many look-ups as may run at once; a build only when nothing else runs."""
        while self._lookups and len(self._children) < LOOKUPS:
            self._start_child(self._lookups.popleft(), build=False)
        if not self._children and self._builds:
            self._start_child(self._builds.pop(0), build=True)

    def _start_child(self, spec: DatasetSpec, *, build: bool) -> None:
        request = {"spec": spec.to_map(), "store": str(self._store_root), "workers": self._workers, "build": build}
        try:
            self._children.append(Child(spec, request, build=build))
        except OSError as error:  # no memory or no process to be had: the data set's bad luck, not the daemon's end
            text = f"The process that prepares {spec.name!r} cannot be started: {error.strerror}."
            remedy = "Raise the limits on memory or processes, then start again."
            self._unstarted.append(PreparationFailed(spec.name, "worker_died", text, remedy))

    def _take(self, child: Child, words: dict[str, Any]) -> list[Event]:
        """One line of a child."""
        kind = words["event"]
        if kind == "progress":
            told = Progress(**{key: words[key] for key in Progress._fields})
            if self._progress is not None:
                self._progress(child.name, told)
            return [PreparationAdvanced(child.name, told.done, told.total, told.eta_s)]
        if kind in ("sealed", "failed"):
            child.settled = True
            if kind == "sealed":
                return [_sealed(child.name, words["path"], words["id"])]
            return [PreparationFailed(child.name, words["code"], words["text"], words["remedy"])]
        if kind == "verdict":
            child.missed = not words["hit"]
            if words["hit"] or child.build:  # a build says again, and better, why it was a miss
                self._log(f"{child.name}: {'HIT' if words['hit'] else 'MISS'}: {'; '.join(words['reasons'])}")
        else:
            self._log(f"{child.name}: {_told(words)}")
        return []

    def _note(self, event: Event) -> None:
        if isinstance(event, DatasetSealed):
            self.ready.add(event.name)
        elif isinstance(event, PreparationFailed):
            self.ready.discard(event.name)
            self.failed[event.name] = event.code

    def _part_with(self, child: Child) -> list[Event]:
        """What comes of a child that has ended: its data set's outcome, or its turn to be built."""
        child.release()
        if child.settled:
            return []
        if child.missed and not child.build and child.process.returncode == 0:
            self._builds.append(child.spec)
            self._builds.sort(key=self._specs.index)  # as they were named, whichever look-up was the first to end
            return []
        return [child.fault or _died(child)]


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
            text = f"{words['pictures']:,} pictures in {words['classes']:,} classes{left_out}"
        case "confirming":
            text = "some rows are prepared again, to be compared with the store"
        case "confirmed":
            text = f"{words['rows']} rows prepared again are as they are stored"
        case "resuming":
            text = f"goes on with an interrupted build: {words['done']} of {words['total'] or '?'} samples are done"
        case "bad":
            place = f" ({words['path']})" if words["path"] else ""
            text = f"bad sample {words['index']}{place} at the stage {words['stage']}: {words['cause']}"
        case _:
            listed = f", listed in {words['table']}" if words["table"] else ""
            text = f"{words['count']} bad samples{listed}"
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
