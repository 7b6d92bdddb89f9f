"""The engine, turned by hand: no daemon, no socket, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import limits, version
from dataserve.protocol.messages import (
    AskStatus,
    Beat,
    Close,
    Describe,
    Described,
    Done,
    Error,
    Hello,
    Message,
    More,
    Ok,
    Open,
    Opened,
    Preparing,
    Ranges,
    StatusPage,
    Stop,
    Welcome,
)
from dataserve.protocol.partition import Partition
from dataserve.protocol.plan import Plan
from dataserve.server.catalog import TRANSITIONS, IllegalTransitionError
from dataserve.server.engine import About, Engine
from dataserve.server.events import (
    ConfirmationEnded,
    ConfirmationStarted,
    DatasetSealed,
    Effect,
    Event,
    FrameRefused,
    Log,
    MemoryLooked,
    PreparationAdvanced,
    PreparationFailed,
    ProbeProcess,
    ProcessProbed,
    Reply,
    RequestArrived,
    StopDaemon,
    Ticked,
)

ABOUT = About("0.1", 1, "ipc:///run/d.sock", "/store", "here", 5)
STORE = "a" * 64
SEALED = DatasetSealed("digits", "/store/digits-bbbb", STORE, "b" * 64, 1000, 5000, ("image", "label"))


SEQUENTIAL = {"plan": Plan("sequential", 1000).to_map(), "digest": Plan("sequential", 1000).digest()}


class Harness:
    """An engine with connections named by letters; validates after every event."""

    def __init__(self) -> None:
        self.engine = Engine(["digits", "slow"], ABOUT)
        self.now = 0.0
        self.alive: dict[tuple[int, int], bool] = {}
        self.take(SEALED)

    def take(self, event: Event) -> list[Effect]:
        """The event's effects, probes answered from `alive` (a process not in it lives)."""
        effects: list[Effect] = []
        waiting = self.engine.handle(event, self.now)
        while waiting:
            effect = waiting.pop(0)
            self.engine.validate()
            if isinstance(effect, ProbeProcess):
                waiting += self.engine.handle(ProcessProbed(*effect, self.alive.get(tuple(effect), True)), self.now)
            else:
                effects.append(effect)
        self.engine.validate()
        return effects

    def ask(self, peer: str, message: Message) -> Message:
        replies = [item for item in self.take(RequestArrived(peer.encode(), 7, message)) if isinstance(item, Reply)]
        assert [(item.peer, item.id) for item in replies] == [(peer.encode(), 7)]
        return replies[0].message

    def refused(self, peer: str, message: Message, code: str) -> Error:
        reply = self.ask(peer, message)
        assert isinstance(reply, Error), reply
        assert reply.code == code, reply
        return reply

    def greet(self, peer: str, pid: int, **more: Any) -> None:
        fields = {"versions": (1,), "pid": pid, "start_time": 1, "host": "here", "pid_namespace": 5} | more
        assert isinstance(self.ask(peer, Hello(**fields)), Welcome)

    def open(self, peer: str, **more: Any) -> int:
        reply = self.ask(peer, opening(**more))
        assert isinstance(reply, Opened), reply
        return reply.stream

    def rows(self) -> list[dict[str, Any]]:
        page = self.ask("status", AskStatus())
        assert isinstance(page, StatusPage)
        return list(page.consumers)


def opening(seed: int = 0, instance: str = "i", **more: Any) -> Open:
    plan = Plan("shuffled", 1000, seed)
    message = Open(
        "digits", STORE, "job", instance.encode().ljust(16), 0, 1, 0, 1, 32, "even", plan.to_map(), plan.digest(), 0, 0
    )
    return dataclasses.replace(message, **more)


@pytest.fixture
def daemon() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.engine.validate()


# --- hello and describe ---------------------------------------------------------------------------------------------


def test_hello_chooses_the_common_version_and_names_both_where_there_is_none(daemon: Harness) -> None:
    daemon.greet("a", 10, versions=(99, 1))
    error = daemon.refused("b", Hello((98, 99), 1, 1, "here", 5), "version_mismatch")
    assert "98, 99" in error.text
    assert str(version.WIRE_VERSIONS[0]) in error.text


def test_describe_tells_the_store_the_progress_or_the_names_there_are(daemon: Harness) -> None:
    assert daemon.ask("a", Describe("digits")) == Described(
        "digits", SEALED.path, STORE, "b" * 64, 1000, 5000, ("image", "label")
    )
    daemon.take(PreparationAdvanced("slow", 3, 10, 7.5))
    assert daemon.ask("a", Describe("slow")) == Preparing("slow", "preparing", 3, 10, 7.5)
    assert "digits, slow" in daemon.refused("a", Describe("digit"), "unknown_dataset").remedy


def test_a_prefix_of_the_fingerprint_must_fit(daemon: Harness) -> None:
    assert isinstance(daemon.ask("a", Describe("digits@bbb")), Described)
    daemon.refused("a", Describe("digits@c"), "unknown_dataset")


def test_a_failed_preparation_is_told_with_its_reason(daemon: Harness) -> None:
    daemon.take(PreparationFailed("slow", "bad_source", "The folder is gone.", "Bring it back."))
    error = daemon.refused("a", Describe("slow"), "preparation_failed")
    assert "The folder is gone." in error.text
    assert error.remedy == "Bring it back."


def test_a_failed_confirmation_ends_new_opens_and_no_running_job(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.open("a")
    daemon.take(ConfirmationStarted("digits"))
    daemon.open("a", epoch=1)
    daemon.take(ConfirmationEnded("digits", "Row 5 differs."))
    daemon.greet("b", 11)
    assert "Row 5 differs." in daemon.refused("b", opening(job="other", instance="j"), "preparation_failed").text
    daemon.open("a", epoch=2)


@given(
    st.lists(
        st.sampled_from(
            [
                PreparationAdvanced("slow", 1, 2, None),
                SEALED._replace(name="slow"),
                PreparationFailed("slow", "bad_source", "x", "y"),
                ConfirmationStarted("slow"),
                ConfirmationEnded("slow", None),
                ConfirmationEnded("slow", "differs"),
            ]
        ),
        max_size=12,
    )
)
def test_data_sets_follow_the_table_and_an_illegal_event_changes_nothing(events: list[Event]) -> None:
    engine = Engine(["slow"], ABOUT)
    state = "preparing"
    for event in events:
        before = state_of(engine)
        wanted = TRANSITIONS[state].get(type(event))  # type: ignore[arg-type]
        if wanted is None:
            with pytest.raises(IllegalTransitionError, match=f"slow is {state}, where"):
                engine.handle(event, 0.0)
            assert state_of(engine) == before
        else:
            engine.handle(event, 0.0)
            state = "failed" if getattr(event, "text", None) == "differs" else wanted
        engine.validate()
        assert state_of(engine)["state"] == state


def state_of(engine: Engine) -> dict[str, Any]:
    (reply,) = engine.handle(RequestArrived(b"x", 1, AskStatus()), 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, StatusPage)
    return reply.message.datasets[0]


# --- open -----------------------------------------------------------------------------------------------------------


def test_open_needs_a_hello(daemon: Harness) -> None:
    daemon.refused("a", opening(), "no_hello")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"dataset": "nope"}, "unknown_dataset", "no data set 'nope'"),
        ({"dataset": "slow"}, "preparation_failed", "not prepared yet"),
        ({"store_id": "c" * 64}, "store_mismatch", "c" * 64),
        ({"digest": "d" * 64}, "bad_plan", "digest"),
        ({"plan": {"kind": "chunks", "n": 1000, "seed": 0}}, "bad_plan", "'chunks' is unknown"),
        ({"rank": 2, "world_size": 2}, "no_world", "Rank 2 does not exist in a world of 2"),
        ({"worker": 1}, "bad_batch", "Loader worker 1 is not one of 1"),
        ({"position": 1001}, "bad_batch", "origin is 1001"),
        ({"last": "drop", "batch_size": 1001}, "bad_batch", "1000 rows do not fill"),
    ],
)
def test_an_open_that_cannot_be_is_refused(daemon: Harness, change: dict[str, Any], code: str, words: str) -> None:
    daemon.greet("a", 10)
    assert words in daemon.refused("a", opening(**change), code).text
    assert daemon.rows() == []


def test_a_plan_of_another_length_is_refused(daemon: Harness) -> None:
    daemon.greet("a", 10)
    plan = Plan("shuffled", 999, 0)
    daemon.refused("a", opening(plan=plan.to_map(), digest=plan.digest()), "bad_plan")


@given(st.integers(1, 300), st.integers(1, 5), st.integers(1, 4), st.integers(0, 999), st.integers(1, 64), st.data())
def test_ranges_are_the_partitions(
    batch: int, world: int, workers: int, origin: int, count: int, data: st.DataObject
) -> None:
    daemon = Harness()
    rank, worker = data.draw(st.integers(0, world - 1)), data.draw(st.integers(0, workers - 1))
    daemon.greet("a", 10)
    shape = {"batch_size": batch, "world_size": world, "rank": rank, "worker": worker, "workers": workers}
    stream = daemon.open("a", epoch=3, position=origin, **shape)
    partition = Partition(1000, batch, world, "even", origin)
    expected = partition.window(rank, worker, workers, 0, 10**6)
    found: list[Any] = []
    while True:
        reply = daemon.ask("a", More(stream, 3, len(found), count))
        assert isinstance(reply, Ranges)
        assert daemon.ask("a", More(stream, 3, len(found), count)) == reply, "asking twice is harmless"
        found += reply.ranges
        if reply.end:
            break
    assert found == expected


def test_more_of_another_epoch_or_connection_is_refused(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    stream = daemon.open("a")
    daemon.refused("a", More(stream, 1, 0, 1), "stale_epoch")
    daemon.refused("b", More(stream, 0, 0, 1), "unknown_stream")
    daemon.refused("a", Beat(stream + 1), "unknown_stream")


# --- who holds a rank -----------------------------------------------------------------------------------------------


def test_the_same_object_replaces_itself_and_its_older_loader_workers(daemon: Harness) -> None:
    for peer, pid in (("a", 10), ("b", 11), ("c", 12)):
        daemon.greet(peer, pid)
    old = [daemon.open(peer, worker=worker, workers=2) for worker, peer in enumerate("ab")]
    new = daemon.open("a", worker=0, workers=2, epoch=1)
    daemon.refused("a", Beat(old[0]), "unknown_stream")
    assert isinstance(daemon.ask("b", Beat(old[1])), Ok)
    assert isinstance(daemon.ask("a", Beat(new)), Ok)
    daemon.open("c")  # without loader workers: both are gone
    assert [row["pid"] for row in daemon.rows()] == [12]


def test_a_rank_of_a_living_process_is_refused_with_its_pid_and_a_dead_ones_is_taken(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    daemon.open("a")
    error = daemon.refused("b", opening(instance="j"), "rank_taken")
    assert error.retryable
    assert "process 10 on here" in error.text
    daemon.alive[10, 1] = False
    daemon.open("b", instance="j")
    assert [row["pid"] for row in daemon.rows()] == [11]


def test_another_loader_worker_of_another_object_is_the_same_rank(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    daemon.open("a", worker=0, workers=2)
    daemon.refused("b", opening(instance="j", worker=1, workers=2), "rank_taken")


def test_a_repeated_open_gets_the_same_stream(daemon: Harness) -> None:
    daemon.greet("a", 10)
    stream = daemon.open("a")
    assert daemon.open("a") == stream
    assert daemon.open("a", epoch=1) != stream


def test_a_killed_job_starts_again_in_another_shape_before_any_tick(daemon: Harness) -> None:
    for peer, pid, rank in (("a", 10, 0), ("b", 11, 1), ("c", 12, 2)):
        daemon.greet(peer, pid)
        daemon.open(peer, rank=rank, world_size=3)
        daemon.alive[pid, 1] = False
    daemon.greet("d", 13)
    daemon.open("d", instance="j", rank=0, world_size=2)
    assert [row["pid"] for row in daemon.rows()] == [13]


def test_a_new_seed_in_each_epoch_is_fine_while_ranks_are_an_epoch_apart(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    first = daemon.open("a", seed=0, instance="a0", world_size=2)
    daemon.open("b", seed=0, instance="b0", world_size=2, rank=1)
    daemon.ask("a", Close(first))
    daemon.open("a", seed=1, instance="a1", world_size=2)
    daemon.open("b", seed=1, instance="b1", world_size=2, rank=1)


def test_two_seeds_in_each_rank_are_fine_under_loader_workers(daemon: Harness) -> None:
    pid = 10
    for seed in (0, 1):
        for rank in (0, 1):
            for worker in (0, 1):
                peer = f"{pid}"
                daemon.greet(peer, pid)
                daemon.open(
                    peer, seed=seed, instance=f"{rank}{seed}", world_size=2, rank=rank, worker=worker, workers=2
                )
                pid += 1
    assert len(daemon.rows()) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 3}, ("world_size=3", "world_size=2")),
        ({"batch_size": 8}, ("batch_size=8", "batch_size=32")),
        ({"last": "short"}, ("last='short'", "last='even'")),
        ({"seed": 5}, ("seed=5", "seed=0")),
        ({"seed": 5, "batch_size": 8}, ("seed=5", "seed=0")),
        (SEQUENTIAL, ("kind='sequential'", "kind='shuffled'")),
    ],
)
def test_ranks_that_disagree_are_refused_with_both_values(
    daemon: Harness, change: dict[str, Any], words: tuple[str, str]
) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    daemon.open("a", world_size=2)
    second = opening(**({"world_size": 2, "rank": 1, "instance": "j"} | change))
    error = daemon.refused("b", second, "job_mismatch")
    assert all(word in error.text for word in words)
    daemon.alive[10, 1] = False  # a job that was killed and starts again in another shape
    assert isinstance(daemon.ask("b", second), Opened)


def test_several_plans_of_one_job_live_beside_each_other_where_every_rank_has_them(daemon: Harness) -> None:
    for peer, pid in (("a", 10), ("b", 11)):
        daemon.greet(peer, pid)
    for seed, instance in ((0, "train"), (1, "other")):
        daemon.open("a", seed=seed, instance=f"a{instance}", world_size=2)
    for seed, instance in ((0, "train"), (1, "other")):
        daemon.open("b", seed=seed, instance=f"b{instance}", world_size=2, rank=1)
    evaluation = SEQUENTIAL | {"last": "short"}
    daemon.open("a", instance="aval", world_size=2, **evaluation)
    daemon.open("b", instance="bval", world_size=2, rank=1, **evaluation)
    assert len(daemon.rows()) == 6


def test_independent_jobs_do_not_know_each_other(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    daemon.open("a", job="x")
    daemon.open("b", job="y", instance="j", batch_size=7, seed=3)
    assert [row["job"] for row in daemon.rows()] == ["x", "y"]


def test_a_holder_that_cannot_be_looked_up_is_dead_after_its_silence(daemon: Harness) -> None:
    daemon.greet("a", 10, pid_namespace=6)
    daemon.greet("b", 11)
    stream = daemon.open("a")
    daemon.now = limits.DEAD_S
    daemon.refused("b", opening(instance="j"), "rank_taken")
    assert isinstance(daemon.ask("a", Beat(stream)), Ok)
    daemon.now = 2 * limits.DEAD_S
    daemon.take(Ticked())
    daemon.refused("b", opening(instance="j"), "rank_taken")
    daemon.now += 0.1
    daemon.open("b", instance="j")


def test_a_local_holder_never_expires_while_its_process_lives(daemon: Harness) -> None:
    daemon.greet("a", 10)
    stream = daemon.open("a")
    daemon.now = 86_400.0
    daemon.take(Ticked())
    assert isinstance(daemon.ask("a", More(stream, 0, 0, 1)), Ranges)
    daemon.alive[10, 1] = False
    daemon.take(Ticked())
    assert daemon.rows() == []


def test_silent_connections_without_a_consumer_are_forgotten(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.now = limits.DEAD_S + 1
    daemon.take(Ticked())
    daemon.refused("a", opening(), "no_hello")


def test_close_frees_the_rank(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.greet("b", 11)
    assert isinstance(daemon.ask("a", Close(daemon.open("a"))), Ok)
    daemon.open("b", instance="j")


# --- status and stop ------------------------------------------------------------------------------------------------


def test_status_shows_where_each_consumer_is_and_what_it_waits_for(daemon: Harness) -> None:
    daemon.greet("a", 10)
    stream = daemon.open("a", epoch=2)
    for second in range(1, 30):
        daemon.now = float(second)
        daemon.ask("a", Done(stream, 2, second * 10, 320, 0.9, 0.1))
    (row,) = daemon.rows()
    assert (row["epoch"], row["position"], row["bound"], row["pid"]) == (2, 290, "data", 10)
    assert row["samples_per_s"] == pytest.approx(320, rel=0.01)
    assert row["wait_share"] == pytest.approx(0.9, rel=0.01)
    daemon.now = 30.0
    daemon.ask("a", Done(stream, 2, 300, 320, None, None))
    assert daemon.rows()[0]["bound"] == "unknown"
    daemon.now = 90.0
    assert daemon.rows()[0]["samples_per_s"] < 5


def test_what_each_consumer_reads_next_can_be_looked_at(daemon: Harness) -> None:
    daemon.greet("a", 1)
    stream = daemon.open("a")
    daemon.ask("a", More(stream, 0, 12, 4))
    daemon.ask("a", Done(stream, 0, 320, 320, 0.5, 0.5, False))
    opened = opening()
    assert daemon.engine.stores() == {"digits": SEALED.path}
    (found,) = daemon.engine.readings(daemon.now)
    assert (found.stream, found.path, found.plan, found.digest) == (stream, SEALED.path, opened.plan, opened.digest)
    assert (found.epoch, found.partition, found.rank, found.worker, found.workers) == (0, Partition(1000, 32), 0, 0, 1)
    assert (found.position, found.asked, found.samples_per_s, found.next_batch) == (320, 12, 320.0, 10)
    daemon.ask("a", Close(stream))
    assert daemon.engine.readings(daemon.now) == []


def test_what_is_in_memory_shows_in_the_status(daemon: Harness) -> None:
    assert daemon.take(MemoryLooked("digits", 0.5, None)) == []
    page = daemon.ask("status", AskStatus())
    assert isinstance(page, StatusPage)
    row = next(row for row in page.datasets if row["name"] == "digits")
    assert (row["resident"], row["locked"]) == (0.5, None)


def test_a_place_beyond_the_end_is_refused(daemon: Harness) -> None:
    daemon.greet("a", 10)
    daemon.refused("a", Done(daemon.open("a"), 0, 1001, 0, 0.0, 0.0), "bad_message")


def test_status_comes_in_pages_that_together_are_whole(daemon: Harness) -> None:
    daemon.greet("a", 10)
    for number in range(60):
        daemon.open("a", job=f"job-{number:03}", instance=f"i{number}")
    jobs: list[str] = []
    datasets: list[str] = []
    pages = 1
    while len(jobs) < 60:
        page = daemon.ask("a", AskStatus(pages - 1))
        assert isinstance(page, StatusPage)
        assert page.pages == -(-60 // limits.STATUS_CONSUMERS)
        jobs += [row["job"] for row in page.consumers]
        datasets += [row["name"] for row in page.datasets]
        pages += 1
    assert jobs == [f"job-{number:03}" for number in range(60)]
    assert datasets == ["digits", "slow"]


def test_stop_answers_then_ends_and_takes_nothing_more(daemon: Harness) -> None:
    effects = daemon.take(RequestArrived(b"a", 1, Stop()))
    assert effects == [Reply(b"a", 1, Ok()), StopDaemon()]
    daemon.refused("b", Describe("digits"), "stopping")


def test_a_refused_frame_gets_its_error(daemon: Harness) -> None:
    error = Error("bad_message", "It is none.", "", False).to_exception()
    assert daemon.take(FrameRefused(b"a", 9, error)) == [Reply(b"a", 9, Error.of(error))]


def test_news_are_told_to_the_operator(daemon: Harness) -> None:
    (told,) = daemon.take(PreparationFailed("slow", "bad_source", "Gone.", "Bring it."))
    assert isinstance(told, Log)
    assert "slow: failed. Gone. Bring it. [bad_source]" in told.text


def test_an_event_about_no_data_set_tells_those_there_are(daemon: Harness) -> None:
    with pytest.raises(IllegalTransitionError, match="digits, slow"):
        daemon.take(PreparationAdvanced("nope", 1, 1, None))
