"""What breaks in a seed's world, and how: each seed draws its own choice of faults, so that rare combinations come up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from .clock import Timeline
from .daemon import Store
from .jobs import Job, Site
from .network import Weather


class Faults:
    """The faults of one world. Each is a method of its name, and is injected at random times until `heal`."""

    def __init__(self, site: Site, stores: Sequence[Store], hurry: float) -> None:
        """`hurry`: how many times as often as in a world of a few clients, whose steps take longer."""
        self.injected: Counter[str] = Counter()
        self._site = site
        self._stores = list(stores)
        self._hurry = hurry
        self._timeline: Timeline = site.timeline
        self._draw()

    def _draw(self) -> None:
        random, site = self._timeline.random, self._site
        every_s: dict[Callable[[], None], tuple[float, float]] = {  # chance of being there, mean interval
            self.kill_daemon: (0.6, 12.0),
            self.stop_daemon: (0.2, 25.0),
            self.freeze_daemon: (0.3, 20.0),
            self.break_connection: (0.4, 4.0),
            self.crash_job: (0.5, 15.0),
            self.leave_job: (0.3, 20.0),
            self.pause_process: (0.4, 10.0),
            self.intrude: (0.25, 20.0),
            self.confirm_stores: (0.2, 30.0),
            self.swap_stores: (0.15, 30.0),
        }
        for fault, (chance, mean_s) in every_s.items():
            if random.random() < chance:
                self._repeat(fault, mean_s / self._hurry)
        site.breaks_off = random.choice((0.0, 0.2, 0.5))
        site.validates = random.choice((0.0, 0.01, 0.05))
        site.daemon.network.weather = Weather(
            way_s=random.choice((0.0001, 0.0005, 0.005, 0.1)),
            loss=random.choice((0.0, 0.0, 0.02, 0.2)),
            repeat=random.choice((0.0, 0.0, 0.02, 0.2)),
            overtake=random.choice((0.0, 0.0, 0.05)),
        )

    def _repeat(self, fault: Callable[[], None], mean_s: float) -> None:
        self._timeline.after(self._timeline.random.expovariate(1 / mean_s), self._inject, fault, mean_s)

    def _inject(self, fault: Callable[[], None], mean_s: float) -> None:
        if not self._site.calm:
            self.injected[fault.__name__] += 1
            fault()
            self._repeat(fault, mean_s)

    def heal(self) -> None:
        """Nothing more breaks; what is broken is mended, but for what the system must mend itself."""
        site = self._site
        self._timeline.tell("all faults end")
        site.calm = True
        site.daemon.network.weather = Weather()
        site.daemon.thaw(site.daemon.starts)
        if site.daemon.failing or site.daemon.stores != self._stores:
            site.daemon.kill()
        self._start_daemon(site.daemon.starts, self._stores)
        for job in [job for job in site.jobs if job.guest]:
            job.leave(lingers_s=0.0)
        for process in list(site.processes.values()):
            process.proceed()
            process.poke()
        for job in site.jobs:
            if not job.guest:
                job.launch()

    def _start_daemon(self, after: int, stores: Sequence[Store]) -> None:
        """Start it, if nobody else has done it since its `after`-th start."""
        daemon = self._site.daemon
        if daemon.engine is None and daemon.starts == after:
            daemon.start(stores, self._timeline.random.choice((0.0, 0.05, 2.0)))
            if self.injected["intrude"] and not self._site.calm:
                self.intrude()  # nobody is registered yet: it may be the first

    def _start_later(self, stores: Sequence[Store]) -> None:
        daemon = self._site.daemon
        down_s = self._timeline.random.choice((0.01, 0.3, 1.0, 4.5, 5.5, 20.0, 90.0))
        if daemon.engine is None:
            self._timeline.after(down_s, self._start_daemon, daemon.starts, stores)

    def _some_job(self) -> Job | None:
        running = [job for job in self._site.jobs if job.run is not None and not job.guest]
        return self._timeline.random.choice(running) if running else None

    # --- the faults -------------------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        """It is killed, and starts again after an instant or after minutes."""
        if self._site.daemon.engine is not None:
            self._site.daemon.kill()
            self._start_later(self._stores)

    def stop_daemon(self) -> None:
        """It is asked to stop, and starts again."""
        if self._site.daemon.accepts():
            self._site.daemon.ask_to_stop()
            self._start_later(self._stores)

    def freeze_daemon(self) -> None:
        """It is stopped by a signal: what arrives is answered late."""
        self._site.daemon.freeze(self._timeline.random.choice((0.1, 0.3, 2.0, 6.0, 15.0)))

    def break_connection(self) -> None:
        """A connection breaks and comes back."""
        self._site.daemon.network.break_one()

    def crash_job(self) -> None:
        """One of a job's processes is killed, the others follow, and a new run goes on from the checkpoint: soon, perhaps
        before the last of the old ones is dead."""
        job = self._some_job()
        if job is not None and job.run is not None:
            random = self._timeline.random
            victim = random.choice([process for process in job.run.processes() if process.alive])
            victim.kill()
            job.leave(lingers_s=random.choice((0.0, 0.5, 10.0)))
            self._timeline.after(random.choice((0.01, 1.0, 8.0)), job.launch)

    def leave_job(self) -> None:
        """A job ends of its own will and is resumed later."""
        job = self._some_job()
        if job is not None:
            job.leave(lingers_s=0.5, graceful=True)
            self._timeline.after(self._timeline.random.uniform(0.0, 3.0), job.launch)

    def pause_process(self) -> None:
        """SIGSTOP, and SIGCONT seconds or minutes later."""
        living = [process for process in self._site.processes.values() if process.alive and not process.stopped]
        if living:
            process = self._timeline.random.choice(living)
            process.stop()
            self._timeline.after(self._timeline.random.choice((0.1, 3.0, 7.0, 45.0)), process.proceed)

    def intrude(self) -> None:
        """Somebody starts another run under the name of a job."""
        job = self._some_job()
        if job is not None:
            guest = Job(self._site, job.name, job.store, job.where, job.planned, guest=True)
            self._site.jobs.append(guest)
            guest.launch()
            self._timeline.after(self._timeline.random.uniform(5.0, 100.0), lambda: guest.leave(lingers_s=0.0))

    def confirm_stores(self) -> None:
        """A store is compared with its source, and may be found to differ: then no new job may use it."""
        random = self._timeline.random
        text = "Row 3 differs." if random.random() < 0.3 else None
        if text is not None:
            self._site.upsets.add("preparation_failed")
        self._site.daemon.confirm(random.choice(self._stores).name, random.uniform(0.1, 3.0), text)

    def swap_stores(self) -> None:
        """The daemon is started again with other data under the same names."""
        if self._site.daemon.engine is not None:
            self._site.upsets.add("store_mismatch")
            self._site.daemon.kill()
            other = [replace(store, store_id="e" * 64, rows=store.rows + 1) for store in self._stores]
            self._start_later(other)
