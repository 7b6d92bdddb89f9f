"""`ServedDataset`: a served data set as an `IterableDataset` of whole batches. README.md has the life of a batch."""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dataserve.protocol import address as addresses
from dataserve.protocol import limits
from dataserve.protocol.messages import Open
from dataserve.protocol.partition import Cursor, Partition
from dataserve.protocol.plan import Plan

from . import gather, locate, mapping, options, order, rivals, selection, state, transport, world
from .course import Course
from .epochs import Handle
from .events import Iteration
from .finish import Finish, Timed
from .iterator import BatchIterator, Draw, Info, Run
from .moved import Courier
from .selection import Blocks
from .session import Session
from .world import Loading, World

__all__ = ["Info", "ServedDataset"]

_iterations = itertools.count(1)
_living: weakref.WeakSet[ServedDataset] = weakref.WeakSet()


class ServedDataset(IterableDataset[Any]):
    """Batches of a data set that a dataserve daemon has prepared, assembled here from its mapped files.

    Yields whole batches in the source's structure, bare or in `DataLoader(train, batch_size=None, num_workers=k)`. Each
    `iter()` takes the next epoch; `rank` and `world_size` come from the arguments, `torch.distributed` or RANK and WORLD_SIZE.
    What the daemon does not say in time is computed: a running loop outlives it.

    - `batch_size`: rows of one rank in one step. `last`: `even` (all ranks have equally many batches), `drop`, `short`.
    - `job`: the run's name, the same for all its ranks; else `$DATASERVE_JOB`, else made up where there is one rank.
    - `seed`, `shuffle`: the order of each epoch, a pure function of (rows, seed, epoch). `shuffle=Blocks(...)` reads from few places
      of the store at a time.
    - `subset`: the rows that are read: a slice, row numbers, a mask, a `Fold`, or a predicate of the columns that gives one of these.
    - `weights`: rows are drawn by weight: a number a row of the store, a column's name, or `Balanced("label")`; `samples` an epoch
      (by default as many as there are rows), with `replacement` or without. All of this is looked up once, here, and pickled as
      numbers, 4 bytes a row; a predicate is never called again.
    - `dtype`, `normalize=(mean, std)` on the 0 to 1 scale or `{"column": (mean, std)}`, `columns`: outputs.py has their rules.
    - `ragged`: rows that differ in length come as `list` (text as str, bytes as bytes), `flat` (`Flat`: values, offsets) or `padded`
      (`Padded`: values, mask, lengths); `{"column": form}` says it by column. Flat and padded text is its UTF-8.
    - `transform(batch)` or `transform(batch, info)`, on the caller's thread with the global generators of torch, numpy and `random`
      seeded by (seed, epoch, position); one with a parameter `generator` is given one of its own instead.
    - `device="cuda"`: batches are copied there ahead of the loop, converted and transformed there; pictures in `memory_format`, if
      it is given. `resident=True` keeps fixed columns there whole, and gathers there. `Info` stays on the CPU.
    - `prefetch`: batches drawn ahead by a thread; by default 0 for batches on the CPU under 1 MB, else 2.
    - `info=True` yields `(batch, Info)`.
    - `address`, `store`: where the daemon listens, and where its store is seen from here, if not at its own path.
    - `timeout_s`: for a daemon, a rank, a batch.

    Raises `UserError` for what the caller can mend, `ServerError` where no daemon answers, `DataError` for a store that is damaged.
    """

    def __init__(
        self,
        name: str,
        *,
        batch_size: int,
        job: str | None = None,
        seed: int = 0,
        shuffle: bool | Blocks = True,
        subset: Any = None,
        weights: Any = None,
        replacement: bool = True,
        samples: int | None = None,
        last: str = options.EVEN,
        drop_last: bool | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format | None = None,
        resident: bool = False,
        dtype: torch.dtype | None = None,
        normalize: Any = None,
        transform: Callable[..., Any] | None = None,
        columns: str | list[str] | tuple[str, ...] | None = None,
        ragged: str | Mapping[str, str] = "list",
        prefetch: int | None = None,
        info: bool = False,
        address: str | None = None,
        store: str | None = None,
        timeout_s: float = limits.TIMEOUT_S,
    ) -> None:
        self._options = options.check(
            name=name,
            batch_size=batch_size,
            seed=seed,
            last=last,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            device=device,
            memory_format=memory_format,
            resident=resident,
            dtype=dtype,
            normalize=normalize,
            transform=transform,
            columns=columns,
            ragged=ragged,
            prefetch=prefetch,
            info=info,
            address=address,
            store=store,
            timeout_s=timeout_s,
        )
        chosen = selection.check(shuffle, subset, weights, replacement, samples)
        self._job, self._job_chosen = world.job_name(job, os.environ)
        world.require_job(world.resolve(rank, world_size, os.environ), self._job_chosen)
        self._world: World | None = None
        self._instance = secrets.token_bytes(limits.INSTANCE_BYTES)
        tried = [self._options.address] if self._options.address else addresses.candidates(os.environ, os.geteuid())
        self._address, described = locate.describe(name, tried, self._options.timeout_s)
        self._name = described.dataset
        self._store_id = described.store_id
        self._path = mapping.locate(described.path, self._options.store)
        self._course = Course()
        self._plan = selection.plan(chosen, mapping.Store(self._path, self._store_id), self._options.seed)
        self._set_up()

    def _set_up(self) -> None:
        """What is made anew in each process: the maps, and the state of iterations."""
        chosen = self._options
        self._store = mapping.Store(
            self._path, self._store_id, scattered=not (self._plan.is_fixed or self._plan.is_windowed)
        )
        self._courier = None if chosen.device.type == "cpu" else Courier(chosen.device, chosen.timeout_s)
        self._gatherer = gather.make(self._store, chosen, self._courier)
        self._takes = (False, False) if chosen.transform is None else options.signature(chosen.transform)
        self._link: transport.Link | None = None
        self._upcoming: order.Upcoming | None = None
        _living.add(self)

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The data set's name."""
        return self._name

    @property
    def rows(self) -> int:
        """Rows of the store, whatever part of it is read."""
        return self._store.manifest.rows

    @property
    def samples(self) -> int:
        """Samples of an epoch, those of all ranks together: `rows`, unless `subset`, `weights` or `samples` say otherwise."""
        return self._plan.n

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns in a batch, in the order of its structure."""
        return self._gatherer.columns

    @property
    def classes(self) -> tuple[str, ...] | None:
        """What labels index into, if the source has said so."""
        return self._store.manifest.classes

    @property
    def store_id(self) -> str:
        """SHA-256 of the store's manifest: the same wherever the content is the same."""
        return self._store_id

    @property
    def plan(self) -> Plan:
        """What defines the order of every epoch."""
        return self._plan

    @property
    def job(self) -> str:
        """The job's name at the daemon."""
        return self._job

    @property
    def batch_size(self) -> int:
        """Rows of one rank in one step."""
        return self._options.batch_size

    @property
    def seed(self) -> int:
        """Of the order, the row seeds and the transform."""
        return self._options.seed

    @property
    def rank(self) -> int:
        """This process's rank; frozen by the first look at it."""
        return self._frozen_world().rank

    @property
    def world_size(self) -> int:
        """Ranks that share an epoch; frozen by the first look at it."""
        return self._frozen_world().size

    @property
    def epoch(self) -> int:
        """The epoch of the running iteration; where none runs, the one that the next `iter()` takes."""
        return self._course.epoch

    def __len__(self) -> int:
        """Batches of this rank in a full epoch."""
        here = self._frozen_world()
        return self._partition(here, 0).count(here.rank)

    def __repr__(self) -> str:
        here = self._world or world.resolve(self._options.rank, self._options.world_size, os.environ)
        part = "" if self.samples == self.rows else f"samples={self.samples}, "
        return (
            f"ServedDataset({self._name!r}, rows={self.rows}, {part}columns={list(self.columns)}, batch_size={self.batch_size}, "
            f"job={self._job!r}, rank={here.rank} of {here.size}, {self._plan.kind}, seed={self.seed}, epoch={self.epoch})"
        )

    # --- iterations -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """The next epoch, or the rest of the one that the cursor stands in; counted at once, not at its first batch.

        Registers with the daemon and raises what it refuses. Ends the older iterator.
        """
        self._course.end("a newer iter() of the same ServedDataset")
        self._course.settle()
        here = self._frozen_world()
        self._partition(here, 0)  # a last='drop' that leaves nothing is refused before an epoch is spent on it
        loading = world.loading()
        cursor, drawn = self._course.take(loading)
        try:
            return self._begin(here, cursor, loading, drawn)
        except BaseException:
            if loading is None:
                self._course.epochs.move(cursor)  # nothing was drawn of it
            raise

    def _begin(self, here: World, cursor: Cursor, loading: Loading | None, drawn: int) -> BatchIterator:
        in_worker = loading is not None
        worker, workers = (loading.worker, loading.workers) if loading else (0, 1)
        opened = self._opening(here, cursor, worker, workers)
        iteration = Iteration(next(_iterations), opened, self._partition(here, cursor.position))
        run = Run(iteration, self._course.epochs, drawn, in_worker=in_worker)
        lasts = not in_worker or self._course.begun  # a worker that iterates again is persistent
        draw = self._drawing(iteration, run, lasts) if iteration.total > drawn else None
        prefetch = self._options.prefetch
        if prefetch is None:
            small = self._courier is None and self._gatherer.size_bytes(self.batch_size) < options.SMALL_BATCH_BYTES
            prefetch = 0 if in_worker or small else 2
        finish = Finish(self._options, self._takes, cursor.epoch, self._courier)
        iterator = BatchIterator(draw, run, prefetch, finish, passes_on=in_worker)
        self._course.begin(run, iterator)
        return iterator

    def _drawing(self, iteration: Iteration, run: Run, lasts: bool) -> Draw:
        """Registers the iteration; the order is made while the daemon answers."""
        epochs = self._course.epochs
        first = not epochs.opened and not epochs.alone
        rivals.refuse(self._address, iteration.open)
        link = self._usable_link()
        leave = link.begin(iteration, run.progress)
        epoch, folder = iteration.open.epoch, addresses.orders_path(self._address)
        epoch_order = order.of(self._plan, epoch, folder)
        self._upcoming = order.Upcoming(self._plan, epoch + 1, folder, lasts=lasts)  # the older one's is `epoch_order`
        link.await_registration(leave, self._options.timeout_s, first=first)
        rivals.note(self._address, iteration.open, link)
        return Draw(
            iteration,
            self._plan,
            epoch_order,
            self._gatherer,
            self.seed,
            link,
            leave,
            self._options.timeout_s,
            self._upcoming.start,
            with_info=self._options.info or self._takes[0],
        )

    def _opening(self, here: World, cursor: Cursor, worker: int, workers: int) -> Open:
        return Open(
            dataset=self._name,
            store_id=self._store_id,
            job=self._job,
            instance=self._instance,
            rank=here.rank,
            world_size=here.size,
            worker=worker,
            workers=workers,
            batch_size=self.batch_size,
            last=self._options.last,
            plan=self._plan.to_map(),
            digest=self._plan.digest(),
            epoch=cursor.epoch,
            position=cursor.position,
        )

    def _partition(self, here: World, origin: int) -> Partition:
        return Partition(self.samples, self.batch_size, here.size, self._options.last, origin)

    def _frozen_world(self) -> World:
        if self._world is None:
            here = world.resolve(self._options.rank, self._options.world_size, os.environ)
            world.require_job(here, self._job_chosen)
            self._world = here
        return self._world

    def _usable_link(self) -> transport.Link:
        if self._link is None or not self._link.usable:
            epochs, timeout_s = self._course.epochs, self._options.timeout_s
            machine = Session(transport.identity(), timeout_s, alone=epochs.alone, opened=epochs.opened)
            self._link = transport.Link(self._address, machine, epochs.note_link)
        return self._link

    def timed(self, loader: Any) -> Timed:
        """The loader, measured: under loader workers only the loop's own process can know how long it waits."""
        return Timed(self._course.epochs, loader)

    # --- the cursor -------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next `iter()` takes that epoch: from the cursor if it stands in it, else from its start. Ends the
        running iterator."""
        wanted = options.integer("set_epoch: the epoch", epoch, 0, limits.EPOCH - 1)
        world.refuse_in_worker("set_epoch")
        self._course.set_epoch(wanted)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """How far the loop is, as plain integers and text: what comes after the batches that it was given.

        Under loader workers this process does not see how many those are: `batches` says it, counted in this epoch (from its
        resumption, if it was resumed). Without it that raises `bad_state`.
        """
        here = self._frozen_world()
        loading = world.loading()
        if loading is not None and batches is None:
            cursor, drawn = self._course.drawn()
            made = state.make(self._store_id, self._plan, cursor, self.batch_size, here.size)
            return state.of_worker(made, loading, drawn)
        world.refuse_in_worker("state_dict")
        cursor = self._course.cursor(lambda origin: self._partition(here, origin), here.rank, batches)
        return state.make(self._store_id, self._plan, cursor, self.batch_size, here.size)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The next `iter()` goes on where that state was taken, on any world size, batch size and number of workers.
        Ends the running iterator. Raises `bad_state`, `state_mismatch`."""
        loading = world.loading()
        if loading is not None:
            size = self._frozen_world().size
            cursor, drawn = state.read_worker(saved, self._store_id, self._plan, loading, self.batch_size, size)
            self._course.resume(loading, cursor, drawn)
            return
        self._course.move(state.read(saved, self._store_id, self._plan), "load_state_dict()")

    # --- other processes --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if world.distributed_is_initialised():
            self._frozen_world()  # the group is not there where this is going
        self._course.settle()
        return {
            "options": self._options,
            "identity": (self._address, self._name, self._path, self._store_id, self._instance),
            "job": (self._job, self._job_chosen),
            "world": self._world,
            "plan": self._plan,
            "epochs": (tuple(self._course.epochs.handle()), tuple(self._course.epochs.next())),
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self._options = saved["options"]
        self._address, self._name, self._path, self._store_id, self._instance = saved["identity"]
        self._job, self._job_chosen = saved["job"]
        self._plan = saved["plan"]
        self._world = None if saved["world"] is None else World(*saved["world"])
        handle, cursor = saved["epochs"]
        self._course = Course(Handle(*handle), Cursor(*cursor))
        self._set_up()


def _settle_all() -> None:
    """Before a fork: its children, loader workers perhaps, share the page of this process and not of an older one."""
    for dataset in list(_living):
        dataset._course.settle()


os.register_at_fork(before=_settle_all)
