"""The consumers that are registered: who holds which rank of which job, and who may. Pure.

(absent) ── open ──► registered ── done, beat, more ──► registered ── close, death, replacement ──► (absent)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dataserve.protocol.errors import DataserveError, PeerError, UserError
from dataserve.protocol.messages import Hello, Open
from dataserve.protocol.partition import Partition

from .metrics import Rates

Process = tuple[int, int]  # pid and start time: a pid alone comes round again


Group = tuple[str, str, str]  # job, data set, plan digest
Key = tuple[str, str, str, int, int]  # a group's rank and loader worker


@dataclass(slots=True)
class Consumer:
    """One registered (rank, loader worker) of a job, in one iteration."""

    stream: int
    peer: bytes
    request: int
    hello: Hello
    open: Open
    partition: Partition
    seen: float
    rates: Rates
    position: int
    alone: bool = False
    asked: int = 0  # the first batch of the last window that it asked for

    @property
    def group(self) -> Group:
        """Who must agree with it."""
        return self.open.job, self.open.dataset, self.open.digest

    @property
    def key(self) -> Key:
        """What no other instance may hold while it lives."""
        return (*self.group, self.open.rank, self.open.worker)

    @property
    def process(self) -> Process:
        """Who holds it."""
        return self.hello.pid, self.hello.start_time

    def row(self, now: float) -> dict[str, Any]:
        """Its line in `status`."""
        return {
            "job": self.open.job,
            "dataset": self.open.dataset,
            "world_size": self.open.world_size,
            "batch_size": self.open.batch_size,
            "seed": self.open.plan["seed"],
            "rank": self.open.rank,
            "worker": self.open.worker,
            "pid": self.hello.pid,
            "epoch": self.open.epoch,
            "position": self.position,
            "samples_per_s": self.rates.samples_per_s(now),
            "wait_share": self.rates.wait_share,
            "bound": self.rates.bound,
            "last_seen_s": max(0.0, now - self.seen),
            "alone": self.alone,
        }


class Registry:
    """All consumers, by stream."""

    def __init__(self) -> None:
        self._consumers: dict[int, Consumer] = {}
        self._last_stream = 0
        self._ranks: dict[Group, set[int]] = {}  # all that have been in a group since it began to live

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._consumers.values())

    def sorted(self) -> list[Consumer]:
        """By job, data set, rank and loader worker."""
        return sorted(self._consumers.values(), key=lambda held: held.key)

    def knows(self, instance: bytes) -> bool:
        """Whether that data set object is registered."""
        return any(held.open.instance == instance for held in self)

    def held(self, peer: bytes, stream: int) -> Consumer:
        """The consumer of that stream. Raises `unknown_stream` where it is not this connection's."""
        consumer = self._consumers.get(stream)
        if consumer is None or consumer.peer != peer:
            text = f"Stream {stream} is not this connection's."
            raise PeerError("unknown_stream", text, "Open again.", retryable=True)
        return consumer

    def asked(self, peer: bytes, request: int, message: Open) -> Consumer | None:
        """The consumer that this very request has registered: a client may send it again."""
        for held in self:
            if (held.peer, held.request, held.open) == (peer, request, message):
                return held
        return None

    def register(
        self, peer: bytes, request: int, hello: Hello, message: Open, partition: Partition, now: float
    ) -> Consumer:
        """A new consumer in the place of what the same object had there: as this loader worker, or with another number
        of them."""
        self.drop(
            held
            for held in self
            if held.open.instance == message.instance
            and _same_rank(held, message)
            and (held.open.worker == message.worker or held.open.workers != message.workers)
        )
        self._last_stream += 1
        consumer = Consumer(
            self._last_stream, peer, request, hello, message, partition, now, Rates(now), message.position
        )
        self._consumers[consumer.stream] = consumer
        self._ranks.setdefault(consumer.group, set()).add(message.rank)
        return consumer

    def drop(self, consumers: Iterable[Consumer]) -> None:
        """Forget them."""
        for consumer in list(consumers):
            del self._consumers[consumer.stream]
        living = {held.group for held in self}
        self._ranks = {group: ranks for group, ranks in self._ranks.items() if group in living}

    def obstacles(self, message: Open) -> tuple[list[Consumer], DataserveError | None]:
        """The consumers that this one cannot live beside, and what to say if they live."""
        others = [held for held in self if held.open.instance != message.instance]
        taken = [held for held in others if _same_rank(held, message)]
        if taken:
            return taken, _rank_taken(taken[0])
        group = (message.job, message.dataset, message.digest)
        unlike = [held for held in others if held.group == group and _geometry(held.open) != _geometry(message)]
        if unlike:
            return unlike, _mismatch(message, unlike[0].open, ("world_size", "batch_size", "last"))
        return self._strangers(message)

    def _strangers(self, message: Open) -> tuple[list[Consumer], DataserveError | None]:
        """Other ranks of the same world that follow another plan: another seed, or no shuffle. Several plans in one job, or
        one after another, are fine where each rank comes to them all (training and evaluation); here no other rank
        follows this one's, and it has never followed theirs."""
        others = [
            held
            for held in self
            if (held.open.job, held.open.dataset, held.open.world_size)
            == (message.job, message.dataset, message.world_size)
            and held.open.rank != message.rank
            and message.rank not in self._ranks[held.group]
        ]
        group = (message.job, message.dataset, message.digest)
        if not others or group in self._ranks:
            return [], None
        theirs = others[0].open
        names = dict.fromkeys(("kind", "seed", "n", *message.plan, *theirs.plan))
        return others, _mismatch(message, theirs, tuple(names))

    def validate(self) -> None:
        """Asserts what must hold between any two events."""
        keys = [held.key for held in self]
        assert len(set(keys)) == len(keys), "a place is held once"
        assert {held.group for held in self} == set(self._ranks)
        for stream, held in self._consumers.items():
            assert held.stream == stream <= self._last_stream
            assert held.open.rank < held.open.world_size
            assert held.open.worker < held.open.workers
            assert 0 <= held.position <= held.partition.n


def _same_rank(held: Consumer, message: Open) -> bool:
    """Two data set objects as one rank, whatever their loader workers."""
    return held.group == (message.job, message.dataset, message.digest) and held.open.rank == message.rank


def _geometry(message: Open) -> tuple[int, int, str]:
    return message.world_size, message.batch_size, message.last


def _rank_taken(held: Consumer) -> UserError:
    return UserError(
        "rank_taken",
        f"Rank {held.open.rank} of the job {held.open.job!r} on {held.open.dataset!r} is held by process "
        f"{held.hello.pid} on {held.hello.host}.",
        "End that process, or give this run another job= or seed=.",
        retryable=True,
    )


def _mismatch(message: Open, other: Open, names: tuple[str, ...]) -> UserError:
    """The first of these in which two ranks differ, with both values."""
    mine = {**message.plan, "world_size": message.world_size, "batch_size": message.batch_size, "last": message.last}
    theirs = {**other.plan, "world_size": other.world_size, "batch_size": other.batch_size, "last": other.last}
    name = next((name for name in names if mine.get(name) != theirs.get(name)), names[0])
    return UserError(
        "job_mismatch",
        f"In the job {message.job!r}, rank {message.rank} has {name}={mine.get(name)!r} and rank {other.rank} "
        f"{name}={theirs.get(name)!r}.",
        "Give all ranks the same, or the runs different job names.",
    )
