"""Training runs: ranks in step, loader workers and threads that draw ahead, checkpoints, and runs after runs of one job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dataserve.client import state
from dataserve.client.events import Iteration
from dataserve.protocol import limits
from dataserve.protocol.errors import DataserveError
from dataserve.protocol.messages import Open
from dataserve.protocol.partition import Cursor, Partition

from .clock import FaultError, Loop, Process, Task, Timeline, Until
from .daemon import Daemon, Store
from .drawing import FOREVER_S, PREFETCH, Drawn, Shelf
from .ledger import Ledger
from .plans import Planned
from .shell import Link, Page, RefusedError, Watch

NUMBERS = 1_000_000  #: the iterations of a run are numbered from a multiple of it


class Shape(NamedTuple):
    """What may change when a job is resumed."""

    world_size: int
    batch_size: int
    last: str

    @property
    def step(self) -> int:
        """Positions that all ranks take together."""
        return self.world_size * self.batch_size


class Spell(NamedTuple):
    """One iteration as all ranks of a run agree on it: where it begins, after which step it is broken off (None: never),
    what comes then (`next`, `set_epoch` to that number, `load_state` of that step), and who draws."""

    number: int
    cursor: Cursor
    stop: int | None
    then: str
    target: int
    workers: int
    persistent: bool
    ahead: bool


@dataclass
class Site:
    """What all jobs share: the machine, and what may happen there."""

    timeline: Timeline
    daemon: Daemon
    watch: Watch = field(default_factory=Watch)
    processes: dict[int, Process] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    breaks_off: float = 0.0  #: the chance that an iteration is broken off
    validates: float = 0.0  #: the chance that a loop is busy elsewhere for a long time, after a step
    calm: bool = False  #: nothing breaks any more, nobody is busy elsewhere
    frozen: bool = False  #: all loops stay where they are
    pace_s: float | None = None  #: how long every step takes, where it is not the job's own time
    refusals: int = 0
    upsets: set[str] = field(default_factory=set)  #: codes of refusals that an operator's doings explain

    def spawn(self, host: str, pid_namespace: int) -> Process:
        """A new process."""
        process = Process(self.timeline, len(self.processes) + 10, host, pid_namespace)
        self.processes[process.pid] = process
        return process

    def is_alive(self, pid: int, start_time: int) -> bool:
        """What /proc says."""
        process = self.processes.get(pid)
        return process is not None and process.start_time == start_time and process.alive


class Job:
    """A name, an order and a checkpoint, through all the runs that have worked at it."""

    def __init__(
        self, site: Site, name: str, store: Store, where: tuple[str, int], planned: Planned, *, guest: bool = False
    ) -> None:
        random = site.timeline.random
        self.site = site
        self.name = name
        self.store = store
        self.where = where
        self.guest = guest  # it has the name of another job, and gives up when it is refused
        self.planned = planned
        self.plan = planned.plan
        self.ledger = Ledger(name, self.plan.n, planned.order)
        self.pace_s = random.choice((0.02, 0.1, 0.3, 1.0))
        self.window = random.choice((1, 2, 3, 4, 8, 256))
        self.timeout_s = 3.0 if guest else 60.0
        self.workers = random.choice(((0,), (0,), (0, 2), (1, 2, 3)))
        self.saved = self._state(Cursor(0, 0), 1, 1)
        self.over = False  # a guest that has been sent away
        self.run: Run | None = None
        self.runs: list[Run] = []

    def launch(self) -> None:
        """Start a run from the checkpoint, once `describe` shows its store."""
        if self.run is not None or self.over:
            return
        store, failing = self.site.daemon.serves(self.store.name), self.site.daemon.failing
        if store != self.store or self.store.name in failing:
            self.site.timeline.after(0.5, self.launch)
            return
        random = self.site.timeline.random
        largest = self.plan.n // 2
        shape = Shape(
            random.randint(1, self.planned.most_ranks), random.randint(1, 8), random.choice(("even", "drop", "short"))
        )
        if shape.step > largest:
            shape = shape._replace(world_size=1, batch_size=random.randint(1, largest))
        self.run = Run(self, shape, state.read(self.saved, self.store.store_id, self.plan))
        self.runs.append(self.run)

    def save(self, cursor: Cursor, shape: Shape) -> None:
        """Write a checkpoint."""
        self.saved = self._state(cursor, shape.batch_size, shape.world_size)

    def _state(self, cursor: Cursor, batch_size: int, world_size: int) -> dict[str, Any]:
        return state.make(self.store.store_id, self.plan, cursor, batch_size, world_size)

    def leave(self, *, lingers_s: float, graceful: bool = False) -> None:
        """Its run ends: all of its processes within that time, with a goodbye or without."""
        run, self.run, self.over = self.run, None, self.guest
        if run is not None:
            self.ledger.abandon()
            for process in run.processes():
                delay_s = self.site.timeline.random.uniform(0.0, lingers_s)
                self.site.timeline.after(delay_s, run.end_process, process, graceful)

    def refused(self, run: Run, page: Page, error: DataserveError) -> None:
        """`iter()` or `next()` raised: right only before the first batch, and where somebody was in the way."""
        self.site.refusals += 1
        if page.opened:
            raise FaultError(f"the daemon ended {self.name}, which was running: {error}")
        if not self._may_be_refused(run, error):
            raise FaultError(f"{self.name} was refused, and nobody was in its way: {error}")
        if self.run is run:
            self.leave(lingers_s=0.5, graceful=True)
            # In the end whoever is in the way without being there has to be waited for, not replaced by the next such.
            again_s = limits.DEAD_S + 1.0 if self.site.calm else self.site.timeline.random.uniform(1.0, 5.0)
            self.site.timeline.after(again_s, self.launch)

    def _may_be_refused(self, run: Run, error: DataserveError) -> bool:
        if error.code in self.site.upsets:
            return True
        same = [
            job for job in self.site.jobs if (job.name, job.plan) == (self.name, self.plan)
        ]  # other plans are in nobody's way
        others = [other for job in same for other in job.runs if other is not run]
        now = self.site.timeline.now
        rivals = [process for other in others for process in other.processes()]
        # Somebody who cannot be looked up is in the way for DEAD_S; and the refusal may be under way for long.
        return any(process.alive or now - process.died < 50 for process in rivals)


class Run:
    """The processes of one launch of a job."""

    def __init__(self, job: Job, shape: Shape, cursor: Cursor) -> None:
        job.site.timeline.tell(f"{job.name} starts: {shape} at {cursor}")
        self.job = job
        self.shape = shape
        self.first = (len(job.runs) + 1) * NUMBERS
        self._spells: dict[int, Spell] = {}
        self._ended: dict[int, int] = {}
        self._cursor = cursor
        self.ranks = [Rank(self, rank) for rank in range(shape.world_size)]

    def processes(self) -> list[Process]:
        """All that it has started."""
        return [process for rank in self.ranks for process in (rank.process, *rank.worker_processes)]

    def links(self) -> list[Link]:
        """All conversations of its living processes."""
        return [link for rank in self.ranks for link in rank.links if link.process.alive and not link.closed]

    def end_process(self, process: Process, graceful: bool) -> None:
        """A goodbye, perhaps, and its end."""
        for link in self.links():
            if graceful and link.process is process and not process.stopped:
                link.close()
        process.kill()

    def poke(self) -> None:
        """Something has changed that other ranks wait for."""
        for rank in self.ranks:
            rank.process.poke()

    def spell(self, number: int, cursor: Cursor) -> Spell:
        """The iteration of that number; all ranks must come to it with the same cursor."""
        found = self._spells.get(number)
        if found is None:
            found = self._spells[number] = self._plan(number, cursor)
            if self.job.run is self:
                self.job.ledger.begin(number, *cursor)
            self.job.site.timeline.tell(f"{self.job.name}: {found}")
        if found.cursor != cursor:
            raise FaultError(f"the ranks of {self.job.name} go on at {found.cursor} and {cursor}")
        return found

    def _plan(self, number: int, cursor: Cursor) -> Spell:
        random, site = self.job.site.timeline.random, self.job.site
        steps = (self.job.plan.n - cursor.position) // self.shape.step
        stop, then, target = None, "next", 0
        if steps > 1 and random.random() < site.breaks_off:
            stop = random.randint(1, steps - 1)
            then = random.choice(("next", "set_epoch", "load_state"))
            target = random.randint(0, stop) if then == "load_state" else cursor.epoch + random.randint(1, 3)
        workers = random.choice(self.job.workers)
        return Spell(number, cursor, stop, then, target, workers, random.random() < 0.5, random.random() < 0.5)

    def ended(self, spell: Spell) -> None:
        """One more rank is through with it."""
        self._ended[spell.number] = self._ended.get(spell.number, 0) + 1
        if self._ended[spell.number] == self.shape.world_size and self.job.run is self:
            tail = self.shape.step - 1 if self.shape.last == "drop" else 0
            self.job.ledger.end(spell.number, whole=spell.stop is None, tail=tail)


class Rank:
    """One rank's main process, and its loader workers."""

    def __init__(self, run: Run, rank: int) -> None:
        site = run.job.site
        self.run = run
        self.rank = rank
        self.page = Page()
        self.instance = site.timeline.random.randbytes(16)
        self.process = site.spawn(*run.job.where)
        self.worker_processes: list[Process] = []
        self.links: list[Link] = []
        self.number = 0
        self.given = 0
        self.total = 0
        self._own: Link | None = None
        self._workers: list[Link] = []
        self.process.at_death.append(self._end_workers)
        Task(self.process, self._guarded(self._main()))

    def _guarded(self, loop: Loop) -> Loop:
        try:
            yield from loop
        except RefusedError as refusal:
            self.run.job.refused(self.run, self.page, refusal.error)

    # --- the training loop ------------------------------------------------------------------------------------------

    def _main(self) -> Loop:
        run, job = self.run, self.run.job
        yield job.site.timeline.random.uniform(0.0, 1.0)
        cursor = run._cursor
        for number in itertools.count(run.first):
            spell = run.spell(number, cursor)
            shape = run.shape
            partition = Partition(job.plan.n, shape.batch_size, shape.world_size, shape.last, cursor.position)
            total = partition.count(self.rank)
            self.number, self.given = number, 0
            self.total = total if spell.stop is None else min(total, spell.stop)
            if self.rank == 0 and job.run is run:
                job.save(cursor, shape)
            run.poke()
            yield from self._draw(spell, partition)
            cursor = self._after(spell, partition)
            run.ended(spell)

    def _after(self, spell: Spell, partition: Partition) -> Cursor:
        """The cursor of the next iteration."""
        epoch = spell.cursor.epoch
        if spell.stop is None:
            return partition.cursor(epoch, self.rank, self.given)
        if spell.then == "load_state":
            return partition.cursor(epoch, self.rank, spell.target)
        return Cursor(spell.target if spell.then == "set_epoch" else epoch + 1, 0)

    def _draw(self, spell: Spell, partition: Partition) -> Loop:
        if spell.workers:
            shelves, drawn = self._start_workers(spell, partition), None
        else:
            self._own = self._own or self._link(self.process)
            drawn = Drawn(self.process, self._own, self._iteration(spell, partition, 0, 1))
            shelves = [drawn.shelf]
            if partition.count(self.rank):
                yield from drawn.begin(lambda: self.given)
                if spell.ahead:
                    Task(self.process, self._guarded(drawn.draw_all(PREFETCH)))
        for step in range(self.total):
            shelf = shelves[step % len(shelves)]
            if drawn is not None and not spell.ahead:
                yield from drawn.draw(step)
            yield Until(lambda shelf=shelf: bool(shelf.places), FOREVER_S)  # type: ignore[misc]
            self._give(spell, step, shelf)
            yield from self._compute(spell, partition, step)
        for shelf in shelves:
            shelf.stop()
        if drawn is not None:
            drawn.finish()
        if spell.workers and not spell.persistent:
            self._end_workers()

    def _give(self, spell: Spell, step: int, shelf: Shelf) -> None:
        place, job = shelf.take(), self.run.job
        rows = [int(row) for row in job.plan.rows(spell.cursor.epoch, place.start, place.stop)]
        if job.run is self.run:
            places = range(place.start, place.stop)
            job.ledger.give(spell.number, step, self.rank, places, place.valid, rows)
        self.given = step + 1
        self.run.poke()

    def _compute(self, spell: Spell, partition: Partition, step: int) -> Loop:
        """Forward, backward, the ranks' barrier; sometimes a checkpoint, an evaluation, a debugger."""
        run, site = self.run, self.run.job.site
        random = site.timeline.random
        yield site.pace_s or random.expovariate(1 / run.job.pace_s)
        yield Until(lambda: all(self._has_come(other, step + 1) for other in run.ranks), FOREVER_S)
        if self.rank == 0 and run.job.run is run and random.random() < 0.2:
            run.job.save(partition.cursor(spell.cursor.epoch, 0, self.given), run.shape)
        if random.random() < site.validates and not site.calm:
            yield Until(lambda: site.calm, random.uniform(1.0, 60.0))
        while site.frozen:
            yield 0.25

    def _has_come(self, other: Rank, given: int) -> bool:
        return other.number > self.number or (
            other.number == self.number and (other.given >= given or other.given >= other.total)
        )

    # --- who draws --------------------------------------------------------------------------------------------------

    def _iteration(self, spell: Spell, partition: Partition, worker: int, workers: int) -> Iteration:
        job, shape = self.run.job, self.run.shape
        plan = job.plan
        opened = Open(
            dataset=job.store.name,
            store_id=job.store.store_id,
            job=job.name,
            instance=self.instance,
            rank=self.rank,
            world_size=shape.world_size,
            worker=worker,
            workers=workers,
            batch_size=shape.batch_size,
            last=shape.last,
            plan=plan.to_map(),
            digest=plan.digest(),
            epoch=spell.cursor.epoch,
            position=spell.cursor.position,
        )
        return Iteration(spell.number, opened, partition)

    def _link(self, process: Process) -> Link:
        job, site = self.run.job, self.run.job.site
        link = Link(process, site.daemon.network, self.page, job.window, job.timeout_s, site.watch)
        self.links = [known for known in self.links if known.process.alive]
        self.links.append(link)
        return link

    def _start_workers(self, spell: Spell, partition: Partition) -> list[Shelf]:
        """Loader workers of an iteration: new processes, or the ones that persist."""
        if len(self._workers) != spell.workers:
            self._end_workers()
            self._workers = [self._worker() for _ in range(spell.workers)]
        shelves = []
        for worker, link in enumerate(self._workers):
            drawn = Drawn(self.process, link, self._iteration(spell, partition, worker, spell.workers))
            shelves.append(drawn.shelf)
            Task(link.process, self._guarded(drawn.work()))
        return shelves

    def _worker(self) -> Link:
        process = self.run.job.site.spawn(*self.run.job.where)
        self.worker_processes = [known for known in self.worker_processes if known.alive]
        self.worker_processes.append(process)
        return self._link(process)

    def _end_workers(self) -> None:
        """They are told to end, or find that their parent is dead."""
        random = self.run.job.site.timeline.random
        for link in self._workers:
            delay_s, graceful = random.uniform(0.0, 0.2), random.random() < 0.5
            self.run.job.site.timeline.after(delay_s, self.run.end_process, link.process, graceful)
        self._workers = []
