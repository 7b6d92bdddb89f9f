"""The seeded simulation in short, its determinism, and proof that it finds faults: each planted one is found."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dataserve.client import events, session
from dataserve.client.session import Session
from dataserve.protocol.messages import Message, More, Ranges
from dataserve.protocol.partition import Cursor, Partition, Range
from dataserve.server import engine
from dataserve.server.engine import Engine
from dataserve.server.registry import Consumer, Registry

from .simulation import dumb, plans
from .simulation.clock import FaultError
from .simulation.ledger import Ledger
from .simulation.world import World

CHECKOUT = Path(__file__).resolve().parent.parent
SEEDS, BATCHES = 200, 5  # in all, and tests that share them
STEPS = 1200


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS // BATCHES))
def test_whatever_breaks_every_job_is_given_its_order_once(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first, first + SEEDS // BATCHES):
        total += World(seed).run(STEPS).counts
    # A simulation in which nothing happens would find nothing.
    for what, least in (("batches", 1000), ("epochs", 50), ("kill_daemon", 5), ("crash_job", 1), ("silences", 1)):
        assert total[what] >= least, total


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_clients() -> None:
    summary = World(2, clients=1000).run(100_000)
    assert summary.counts["processes"] > 1000
    assert summary.counts["daemons"] > 1


def test_a_seed_is_one_story_in_every_process() -> None:
    traces = set()
    for hashing in ("0", "1", "random"):
        environ = os.environ | {"PYTHONHASHSEED": hashing, "PYTHONPATH": str(CHECKOUT / "tests")}
        environ.pop("PYTHONSAFEPATH", None)
        command = [sys.executable, "-m", "simulation", "--seed", "7", "--steps", "3000"]
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
        traces.update(re.findall(r"^trace (\w+)$", ran.stdout, re.MULTILINE))
    assert len(traces) == 1, traces
    assert World(7).run(3000).digest in traces
    assert World(8).run(3000).digest not in traces


# --- what it would find ---------------------------------------------------------------------------------------------


def found(words: str, steps: int = 1500, seeds: int = 60) -> None:
    """Some seed fails, and says so in those words."""
    for seed in range(seeds):
        try:
            World(seed).run(steps)
        except FaultError as fault:
            story = str(fault)
            assert f"scripts/simulate --seed {seed} --steps {steps}" in story
            assert re.search(words, story.splitlines()[-2]), "\n".join(story.splitlines()[-2:])
            return
    pytest.fail(f"none of {seeds} seeds found it")


def test_it_finds_an_engine_that_grants_another_window(monkeypatch: pytest.MonkeyPatch) -> None:
    right = engine._ANSWERS[More]

    def wrong(self: Engine, peer: bytes, message: Any, now: float) -> Message:
        reply = right(self, peer, message, now)
        assert isinstance(reply, Ranges)
        return dataclasses.replace(
            reply, ranges=[(start, stop, max(0, valid - 1)) for start, stop, valid in reply.ranges]
        )

    monkeypatch.setitem(engine._ANSWERS, More, wrong)
    found("wrong_ranges")


def test_it_finds_a_resumption_that_repeats_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Partition.cursor

    def wrong(self: Partition, epoch: int, rank: int, batches: int) -> Cursor:
        return right(self, epoch, rank, max(0, batches - 1) if batches < self.count(rank) else batches)

    monkeypatch.setattr(Partition, "cursor", wrong)
    found("the daemon has it wrong|was given|begins at", seeds=20)


def test_it_finds_a_resumption_that_skips_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Partition.cursor

    def wrong(self: Partition, epoch: int, rank: int, batches: int) -> Cursor:
        return right(self, epoch, rank, batches + 1 if 0 < batches < self.count(rank) else batches)

    monkeypatch.setattr(Partition, "cursor", wrong)
    found("the daemon has it wrong|begins at .* and was given|the ranks of .* go on at")


def test_it_finds_a_loader_worker_that_draws_its_siblings_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Partition, rank: int, worker: int, workers: int, index: int) -> Range:
        return self.batch(rank, min(index * workers + max(0, worker - 1), self.count(rank) - 1))

    monkeypatch.setattr(Partition, "worker_batch", wrong)
    found("had been given|were not given")


def test_it_finds_a_daemon_that_never_forgets_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_drop_silent", lambda self, now: None)
    monkeypatch.setattr(Engine, "_can_look_up", lambda self, hello: False)
    found("the daemon has it wrong|nobody was in its way")


def test_it_finds_a_daemon_that_lets_two_hold_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "obstacles", lambda self, message: ([], None))
    found("a place is held once", steps=3000)


def test_it_finds_a_place_that_is_told_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = events.Iteration.cursor
    monkeypatch.setattr(events.Iteration, "cursor", lambda self, given: right(self, max(0, given - 1)))
    found("the daemon has it wrong")


def test_it_finds_a_client_that_asks_nothing_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Session._registered

    def wrong(self: Session, message: Any) -> None:
        asked, right_ahead = self._asked, self._ask_ahead
        self._ask_ahead = lambda: None  # type: ignore[method-assign]
        right(self, message)
        self._ask_ahead = right_ahead  # type: ignore[method-assign]
        self._asked = max(asked, 1)

    monkeypatch.setattr(Session, "_registered", wrong)
    found("though the daemon answers")


def test_it_finds_a_client_that_waits_for_a_silent_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "limits", _Limits(SILENT_S=60.0))
    found("waited for a daemon that has been silent|no registration and no silence")


def test_it_finds_a_client_that_complains_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Session._go_alone

    def wrong(self: Session, why: str, *, quietly: bool = False) -> None:
        self._warned.clear()
        right(self, why, quietly=quietly)
        self.state = "connecting"

    monkeypatch.setattr(Session, "_go_alone", wrong)
    found("said twice in one silence")


def test_it_finds_a_running_job_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[[Session, Any], None] = Session._not_registered

    def wrong(self: Session, error: Any) -> None:
        if error.code == "store_mismatch":
            self._refuse(error)
        else:
            right(self, error)

    monkeypatch.setattr(Session, "_not_registered", wrong)
    found("the daemon ended .* which was running")


def test_it_finds_a_session_that_throws_its_own_workers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_rest", lambda self: self._greet("connecting"))
    found("said hello though nothing happens|though the daemon answers|the daemon has it wrong")


def test_it_finds_a_daemon_that_looks_up_the_wrong_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consumer, "process", property(lambda self: (1, 1)))
    found("the daemon has it wrong|said hello though nothing happens")


class _Limits:
    """`limits` with some of them changed."""

    def __init__(self, **changed: float) -> None:
        self._changed = changed

    def __getattr__(self, name: str) -> Any:
        from dataserve.protocol import limits

        return self._changed.get(name, getattr(limits, name))


# --- its own parts --------------------------------------------------------------------------------------------------


def test_the_dumb_order_is_protocol_mds() -> None:
    assert dumb.shuffled(10, dumb.base(0, 1)) == [0, 8, 1, 7, 6, 4, 2, 3, 9, 5]
    assert dumb.shuffled(17, dumb.base(42, 3)) == [7, 13, 9, 11, 10, 2, 6, 8, 5, 0, 15, 4, 16, 1, 14, 12, 3]


def order_of_ten(epoch: int) -> list[int]:
    return dumb.shuffled(10, dumb.base(0, epoch))


def test_every_kind_of_plan_is_drawn_and_agrees_with_its_dumb_order() -> None:
    random, kinds, folds = Random(0), Counter[str](), 0
    for number in range(60):
        found = plans.draw(random, random.choice((7, 30, 64)), number % 3)
        folds += len(found) == 2
        for plan, order, _ in found:
            kinds[plan.kind] += 1
            assert plan.rows(number, 0, plan.n).tolist() == list(order(number))
    assert set(kinds) == {"shuffled", "blocks", "subset", "weighted"}
    assert folds > 3


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([range(4), range(4, 8), range(8, 10)], None),
        ([range(4), range(4, 8)], "2 of its 10 positions were not given"),
        ([range(4), range(5, 10)], "6 of its 10 positions were not given"),
        ([range(4), range(3, 10)], "all before 4 had been given"),
        ([range(4, 8), range(4), range(8, 10)], "10 of its 10"),
    ],
)
def test_the_ledger_counts_each_position_once_and_in_order(batches: list[range], words: str | None) -> None:
    ledger = Ledger("job", 10, order_of_ten)
    ledger.begin(1, 0, 0)
    for step, places in enumerate(batches):
        ledger.give(1, step, 0, places, len(places), [order_of_ten(0)[place] for place in places])
    if words is None:
        ledger.end(1, whole=True, tail=0)
    else:
        with pytest.raises(FaultError, match=words):
            ledger.end(1, whole=True, tail=0)


def test_the_ledger_knows_the_rows() -> None:
    ledger = Ledger("job", 10, order_of_ten)
    ledger.begin(1, 0, 0)
    with pytest.raises(FaultError, match="was given the rows"):
        ledger.give(1, 0, 0, range(2), 2, [7, 6])
