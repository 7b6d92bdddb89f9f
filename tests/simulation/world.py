"""A seed's world from its first event to the quiet end, in which everything must have healed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from dataserve.protocol import limits

from . import plans
from .clock import FaultError, Timeline
from .daemon import HOST, NAMESPACE, Daemon, Store
from .faults import Faults
from .jobs import Job, Site
from .shell import Link

SETTLE_S = 6.0  #: from the last fault until all loops have drawn on
HEAL_S = (
    SETTLE_S + 2 * limits.DEAD_S + 15.0
)  #: by then the daemon knows everybody: a dead one elsewhere takes DEAD_S, and
#: so does a job that it was in the way of
CHURN_S = 3 * limits.BEAT_S + 0.5  #: so long nobody may register anew
SLOW_S, FAST_S = 0.4, 0.15  #: how long a step takes while the daemon learns of everybody, and when it knows

CONSUMERS_A_JOB = 3  #: on the average


@dataclass(frozen=True)
class Summary:
    """What a world has gone through."""

    seed: int
    digest: str
    steps: int
    seconds: float
    counts: Counter[str]


class World:
    """Everything that a seed makes."""

    def __init__(self, seed: int, clients: int | None = None) -> None:
        self.seed = seed
        self._clients = clients
        self.timeline = Timeline(seed)
        random = self.timeline.random
        stores = [Store(f"set{number}", f"{number}" * 64, random.choice((7, 30, 64, 100, 333))) for number in (0, 1)]
        self.site = Site(self.timeline, Daemon(self.timeline, stores, self._probe))
        self.site.daemon.start(stores, 0.01)
        jobs = random.randint(1, 4) if clients is None else max(1, clients // CONSUMERS_A_JOB)
        self.site.daemon.validates_every = max(1, jobs // 16)
        for number in range(jobs):
            where = (HOST, NAMESPACE) if random.random() < 0.8 else ("elsewhere", number)
            store = random.choice(stores)
            for planned in plans.draw(random, store.rows, random.randrange(3)):
                self.site.jobs.append(Job(self.site, f"job{number}", store, where, planned))
        for job in self.site.jobs:
            self.timeline.after(random.uniform(0.0, 2.0), job.launch)
        self.faults = Faults(self.site, stores, hurry=max(1.0, jobs / 8))

    def _probe(self, pid: int, start_time: int) -> bool:
        return self.site.is_alive(pid, start_time)

    def run(self, steps: int) -> Summary:
        """So many steps under fire, then the quiet end. Raises `FaultError` with the story, and how to replay it."""
        try:
            while self.timeline.steps < steps:
                self.timeline.step()
            self._end_quietly()
        except Exception as error:
            raise FaultError(self._story(steps, error)) from error
        return Summary(self.seed, self.timeline.digest(), self.timeline.steps, self.timeline.now, self._counts())

    # --- the quiet end ----------------------------------------------------------------------------------------------

    def _end_quietly(self) -> None:
        site = self.site
        self.faults.heal()
        site.pace_s = SLOW_S
        self._pass(SETTLE_S)
        site.frozen = True
        deadline = self.timeline.now + HEAL_S - SETTLE_S
        while difference := self._difference():
            if self.timeline.now > deadline:
                raise FaultError(f"{HEAL_S:.0f} s after the last fault the daemon has it wrong: {difference}")
            self._pass(0.5)
        site.watch.quiet, site.frozen, site.pace_s = True, False, FAST_S
        self._pass(3.0)
        site.frozen = True
        self._pass(2.0)
        hellos = site.daemon.requests["hello"]
        self._pass(CHURN_S)
        if site.daemon.requests["hello"] != hellos:
            raise FaultError(f"{site.daemon.requests['hello'] - hellos} clients said hello though nothing happens")
        if difference := self._difference():
            raise FaultError(f"the daemon has it wrong though nothing happens: {difference}")
        for job in site.jobs:
            job.ledger.abandon()

    def _pass(self, seconds: float) -> None:
        end = self.timeline.now + seconds
        while self.timeline.now < end:
            self.timeline.step()

    def _difference(self) -> str:
        """Between who runs and who is registered, by `status`; nothing where they are the same."""
        running = [link for job in self.site.jobs if job.run is not None for link in job.run.links() if link.running]
        resting = [
            link for link in self.site.watch.links if link.process.alive and not link.running and not link.closed
        ]
        wanted = {self._row(link) for link in running}
        missing_jobs = [job.name for job in self.site.jobs if job.run is None and not job.guest]
        found = {_known(row) for row in self.site.daemon.status()}
        # A loop that is through may be registered or not, and its last word may have been lost.
        allowed = {link.process.pid for link in resting}
        missing, strange = wanted - found, {row for row in found - wanted if row[3] not in allowed}
        parts = (("not running", missing_jobs), ("missing", sorted(missing)), ("strange", sorted(strange)))
        return "; ".join(f"{what}: {items}" for what, items in parts if items)

    def _row(self, link: Link) -> tuple[Any, ...]:
        assert link.iteration is not None
        opened, total = link.iteration.open, link.iteration.total
        given = link.progress().given
        if given >= total:
            position = int(opened.plan["n"])
        else:  # the steps up to this worker's last batch are behind it
            steps = (given - 1) * opened.workers + opened.worker + 1 if given else 0
            position = opened.position + steps * opened.world_size * opened.batch_size
        return opened.job, opened.rank, opened.worker, link.process.pid, opened.epoch, position

    # --- words ------------------------------------------------------------------------------------------------------

    def _counts(self) -> Counter[str]:
        site = self.site
        own = Counter(
            frames=site.daemon.network.frames,
            daemons=site.daemon.starts,
            processes=len(site.processes),
            batches=sum(job.ledger.batches for job in site.jobs),
            epochs=sum(job.ledger.epochs for job in site.jobs),
            silences=site.watch.alone,
            refusals=site.refusals,
        )
        return own + self.faults.injected

    def _story(self, steps: int, error: Exception) -> str:
        lines = "\n".join(self.timeline.story)
        clients = "" if self._clients is None else f" --clients {self._clients}"
        return (
            f"{lines}\nseed {self.seed}, step {self.timeline.steps}, {self.timeline.now:.3f} s: "
            f"{type(error).__name__}: {error}\nreplay: scripts/simulate --seed {self.seed} --steps {steps}{clients}"
        )


def _known(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("job", "rank", "worker", "pid", "epoch", "position"))
