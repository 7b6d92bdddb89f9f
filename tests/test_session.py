"""client/session: the conversation as a state machine, under a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.client.events import (
    Asked,
    Begun,
    Closed,
    Effect,
    Event,
    Finished,
    Iteration,
    Permit,
    Progress,
    Refuse,
    Replied,
    Send,
    Ticked,
    Warn,
)
from dataserve.client.session import Session
from dataserve.protocol import limits
from dataserve.protocol.codec import Reply
from dataserve.protocol.errors import DataserveError, PeerError, ServerError, UserError
from dataserve.protocol.messages import (
    Beat,
    Close,
    Done,
    Error,
    Hello,
    Message,
    More,
    Ok,
    Open,
    Opened,
    Ranges,
    Welcome,
)
from dataserve.protocol.partition import Partition
from dataserve.protocol.plan import Plan

BOOT, LATER_BOOT = b"a" * 16, b"b" * 16
TAKEN = UserError("rank_taken", "Rank 0 is held by process 7.", retryable=True)


def iteration(
    number: int = 1,
    *,
    n: int = 100,
    batch_size: int = 1,
    epoch: int = 0,
    origin: int = 0,
    worker: int = 0,
    workers: int = 1,
) -> Iteration:
    plan = Plan("shuffled", n, 3)
    opened = Open(
        "mnist",
        "0" * 64,
        "job",
        b"i" * 16,
        0,
        1,
        worker,
        workers,
        batch_size,
        "even",
        plan.to_map(),
        plan.digest(),
        epoch,
        origin,
    )
    return Iteration(number, opened, Partition(n, batch_size, 1, "even", origin))


class Talk:
    """A session, its clock, and what it has said; `reply` answers the latest request of a kind."""

    def __init__(self, **options: object) -> None:
        self.session = Session(Hello((1,), 1, 1, "host", 1), **options)  # type: ignore[arg-type]
        self.now = 100.0
        self.boot = BOOT
        self.sent: list[Send] = []
        self.warned: list[str] = []
        self.refused: list[DataserveError] = []
        self.permit = Permit(0, False, False, 0, 0)

    def take(self, event: Event) -> list[Effect]:
        effects = self.session.handle(event, self.now)
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append(effect)
                case Warn(text):
                    self.warned.append(text)
                case Refuse(_, error):
                    self.refused.append(error)
                case Permit():
                    self.permit = effect
        return effects

    def last(self, kind: type[Message]) -> Send:
        return [sent for sent in self.sent if isinstance(sent.message, kind)][-1]

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(sent.message, kind) for sent in self.sent)

    def reply(self, kind: type[Message], message: Message) -> list[Effect]:
        return self.take(Replied(Reply(self.last(kind).id, self.boot, message)))

    def fail(self, kind: type[Message], error: DataserveError) -> list[Effect]:
        return self.reply(kind, Error.of(error))

    def open(self, stream: int = 5) -> None:
        self.reply(Hello, Welcome(1, "x"))
        self.reply(Open, Opened(stream))

    def grant(self) -> None:
        """Answer the latest `more` as section 6 says."""
        more = self.last(More).message
        assert isinstance(more, More)
        current = self.session._iteration
        assert current is not None
        own = current.partition.window(0, current.open.worker, current.open.workers, more.first, more.count)
        self.reply(More, Ranges(more.stream, more.epoch, more.first, own, more.first + len(own) >= current.total))

    def wait(self, seconds: float, progress: Progress | None = None) -> None:
        """Let time pass, as the shell does: a tick whenever something is due."""
        end = self.now + seconds
        wakes = 0
        while True:
            due = self.session.next_due()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            self.take(Ticked(self.session._progress if progress is None else progress))
            wakes += 1
            assert wakes <= 20 * seconds + 20, "the session wakes its thread for nothing"
        self.now = end


def opened(**options: object) -> Talk:
    talk = Talk(**options)
    talk.take(Begun(iteration()))
    talk.open()
    return talk


def test_says_hello_then_open_then_asks_for_ranges() -> None:
    talk = opened(window=8)
    assert [sent.message.KIND for sent in talk.sent] == ["hello", "open", "more"]
    assert talk.last(More).message == More(5, 0, 0, 8)
    assert talk.permit.registered
    assert talk.permit.granted == 0
    talk.grant()
    assert talk.permit.granted == 8


def test_the_second_window_is_asked_when_half_of_the_first_is_used() -> None:
    talk = opened(window=8)
    talk.grant()
    assert talk.permit.ask_at == 4
    talk.take(Asked(1, 3))
    assert talk.count(More) == 1
    talk.take(Asked(1, 4))
    assert talk.last(More).message == More(5, 0, 8, 8)
    assert talk.permit.granted == 8


def test_windows_cover_the_iteration_exactly_once() -> None:
    talk = opened(window=8)
    asked = []
    for index in range(100):
        if index >= talk.permit.ask_at:
            talk.take(Asked(1, index))
        more = talk.last(More).message
        assert isinstance(more, More)
        if not asked or asked[-1] != more:
            asked.append(more)
            talk.grant()
        assert index < talk.permit.granted
    assert [more.first for more in asked] == list(range(0, 100, 8))
    assert sum(more.count for more in asked) == 100
    assert (talk.permit.granted, talk.permit.ask_at) == (100, 100)


def test_an_unanswered_request_is_sent_again_under_the_same_id() -> None:
    talk = Talk()
    talk.take(Begun(iteration()))
    talk.wait(3 * limits.RETRY_S + 0.05)
    hellos = [sent.id for sent in talk.sent]
    assert len(hellos) == 4
    assert len(set(hellos)) == 1


def test_a_late_reply_is_dropped() -> None:
    talk = opened()
    first = talk.last(Hello).id
    before = len(talk.sent)
    assert talk.take(Replied(Reply(first, BOOT, Welcome(1, "x")))) == []
    assert talk.take(Replied(Reply(999, BOOT, Opened(9)))) == []
    assert len(talk.sent) == before


def test_five_seconds_of_silence_make_it_alone_with_one_warning() -> None:
    talk = opened(window=8)
    talk.wait(limits.SILENT_S - 0.2)
    assert talk.session.state == "open"
    assert talk.warned == []
    talk.wait(0.3)
    assert talk.session.state == "alone"
    assert talk.permit == Permit(1, True, False, 100, 100)
    talk.wait(60)
    assert len(talk.warned) == 1
    talk.take(Begun(iteration(2, epoch=1)))
    assert talk.permit == Permit(2, True, False, 100, 100)
    talk.wait(60)
    assert len(talk.warned) == 1


def test_alone_it_knocks_each_two_seconds_and_registers_again_where_it_stands() -> None:
    talk = opened(window=8)
    talk.wait(limits.SILENT_S + 0.1)
    before = talk.count(Hello)
    talk.wait(20.5, Progress(given=40, samples=40))
    assert talk.count(Hello) - before == 10
    talk.boot = LATER_BOOT
    talk.open(stream=1)
    assert talk.session.state == "open"
    assert talk.last(Open).message == iteration().open
    done = talk.last(Done).message
    assert isinstance(done, Done)
    assert (done.stream, done.position, done.samples, done.alone) == (1, 40, 40, True)
    assert talk.warned[1:] == ["The daemon answers again."]
    assert talk.permit.granted == 100


def test_a_process_that_starts_alone_waits_for_nothing() -> None:
    talk = Talk(alone=True, opened=True)
    talk.take(Begun(iteration()))
    assert talk.permit == Permit(1, True, False, 100, 100)
    assert talk.warned == []
    talk.open()
    assert talk.session.state == "open"
    assert not talk.session.alone


def test_a_new_boot_id_means_hello_and_open_again_and_the_loop_does_not_notice() -> None:
    talk = opened(window=8)
    talk.grant()
    talk.take(Asked(1, 4))
    talk.boot = LATER_BOOT
    talk.now += 1
    talk.fail(More, PeerError("unknown_stream", "No such stream.", retryable=True))
    assert talk.session.state == "connecting"
    assert talk.permit.granted == 8
    talk.open(stream=0)
    assert talk.last(More).message == More(0, 0, 8, 8)
    assert talk.warned == []


def test_another_boot_id_in_an_ordinary_reply_is_noticed_too() -> None:
    talk = opened()
    talk.wait(limits.BEAT_S + 0.1)
    talk.boot = LATER_BOOT
    talk.reply(Beat, Ok())
    assert talk.session.state == "connecting"


def test_a_daemon_that_always_forgets_is_not_asked_in_a_busy_loop() -> None:
    talk = opened()
    for _ in range(50):
        talk.fail(More, PeerError("unknown_stream", "No such stream.", retryable=True))
        talk.wait(0.1)
        if talk.session.state == "connecting" and talk.session.awaits(talk.last(Hello).id):
            talk.open()
    assert talk.count(Hello) <= 5.0 / limits.RETRY_S + 2


def test_wrong_ranges_are_reported_once_and_not_followed() -> None:
    talk = opened(window=8)
    talk.reply(More, Ranges(5, 0, 0, [[1, 2, 1]] * 8, False))
    assert talk.permit.granted == 8
    talk.take(Asked(1, 4))
    talk.grant()
    assert len(talk.warned) == 1
    assert "wrong_ranges" in talk.warned[0]


def test_a_taken_rank_is_asked_again_until_the_time_out_and_then_refused() -> None:
    talk = Talk(timeout_s=3.0)
    talk.take(Begun(iteration()))
    talk.reply(Hello, Welcome(1, "x"))
    for _ in range(40):
        if talk.session.state == "opening" and talk.session.awaits(talk.last(Open).id):
            talk.fail(Open, TAKEN)
            if not talk.refused:
                assert talk.permit.contested
        talk.wait(0.1)
    assert [error.code for error in talk.refused] == ["rank_taken"]
    assert len(talk.warned) == 1
    assert "held by process 7" in talk.warned[0]
    assert 6 <= talk.count(Open) <= 8


def test_a_rank_that_becomes_free_is_taken() -> None:
    talk = Talk()
    talk.take(Begun(iteration()))
    talk.reply(Hello, Welcome(1, "x"))
    talk.fail(Open, TAKEN)
    talk.wait(1)
    talk.reply(Open, Opened(3))
    assert (talk.permit.registered, talk.permit.contested) == (True, False)


@pytest.mark.parametrize("code", ["job_mismatch", "store_mismatch", "bad_plan", "bad_batch", "unknown_dataset"])
def test_what_only_the_user_can_mend_is_refused_at_once(code: str) -> None:
    talk = Talk()
    talk.take(Begun(iteration()))
    talk.reply(Hello, Welcome(1, "x"))
    talk.fail(Open, UserError(code, "No."))
    assert [error.code for error in talk.refused] == [code]
    talk.take(Begun(iteration(2)))
    talk.wait(limits.RETRY_S + 0.1)
    talk.open()
    assert talk.permit.number == 2
    assert talk.permit.registered


@pytest.mark.parametrize(
    "error", [UserError("unknown_dataset", "No."), UserError("store_mismatch", "No."), ServerError("internal", "Oh.")]
)
def test_a_running_job_outlives_a_daemon_that_was_restarted_with_other_data(error: DataserveError) -> None:
    talk = opened()
    talk.take(Begun(iteration(2, epoch=1)))
    talk.fail(Open, error)
    assert talk.refused == []
    assert talk.permit == Permit(2, True, False, 100, 100)
    assert len(talk.warned) == 1


def test_a_restarted_daemon_that_is_not_ready_yet_is_asked_again_without_a_word() -> None:
    talk = opened(window=8)
    talk.now += 1
    talk.fail(More, PeerError("unknown_stream", "No such stream.", retryable=True))
    talk.reply(Hello, Welcome(1, "x"))
    for _ in range(3):
        talk.fail(Open, ServerError("preparation_failed", "Not prepared yet.", "Ask again.", retryable=True))
        assert talk.permit == Permit(1, True, False, 100, 100)
        talk.wait(limits.BEAT_S + 0.1)
        talk.reply(Hello, Welcome(1, "x"))
    talk.reply(Open, Opened(6))
    assert (talk.session.state, talk.warned) == ("open", [])


def test_in_mid_iteration_even_a_taken_rank_does_not_stop_the_loop() -> None:
    talk = opened(window=8)
    talk.now += 1
    talk.fail(More, PeerError("unknown_stream", "No such stream."))
    talk.reply(Hello, Welcome(1, "x"))
    talk.fail(Open, TAKEN)
    assert talk.refused == []
    assert talk.permit == Permit(1, True, False, 100, 100)


def test_done_tells_what_is_new_about_once_a_second() -> None:
    talk = opened()
    talk.grant()
    talk.wait(1.05, Progress(10, 10, 0.5, 0.25))
    talk.wait(1.05, Progress(30, 30, 0.75, 1.0))
    dones = [sent.message for sent in talk.sent if isinstance(sent.message, Done)]
    assert [(done.position, done.samples, done.wait_s, done.busy_s) for done in dones] == [
        (10, 10, 0.5, 0.25),
        (30, 20, 0.25, 0.75),
    ]
    talk.take(Finished(Progress(100, 100, 1.0, 2.0)))
    last = talk.last(Done).message
    assert isinstance(last, Done)
    assert (last.epoch, last.position, last.samples) == (0, 100, 70)


def test_a_loader_worker_reports_its_own_place_and_unknown_times() -> None:
    talk = Talk()
    talk.take(Begun(iteration(n=40, batch_size=4, worker=1, workers=2)))
    talk.open()
    talk.take(Finished(Progress(2, 8, None, None)))
    done = talk.last(Done).message
    assert isinstance(done, Done)
    assert (done.position, done.wait_s, done.busy_s) == (16, None, None)


def test_an_idle_session_beats_each_two_seconds_and_wakes_for_nothing_else() -> None:
    talk = opened()
    talk.grant()
    talk.take(Finished(Progress()))
    wakes = 0
    start = talk.now
    while talk.now < start + 60:
        due = talk.session.next_due()
        assert due is not None
        assert due > talk.now - 1e-9
        talk.now = due
        wakes += 1
        talk.take(Ticked(Progress()))
        if talk.session.awaits(talk.last(Beat).id):
            talk.reply(Beat, Ok())
    assert talk.count(Beat) == 30
    assert wakes <= 60


def test_a_closed_session_says_goodbye_and_nothing_more() -> None:
    talk = opened()
    talk.take(Closed())
    assert talk.last(Close).message == Close(5)
    before = len(talk.sent)
    talk.wait(60)
    assert len(talk.sent) == before
    assert talk.session.next_due() is None


def test_an_illegal_transition_raises() -> None:
    with pytest.raises(RuntimeError, match="from idle to open"):
        Session(Hello((1,), 1, 1, "host", 1))._enter("open")


def test_a_thread_ahead_of_an_older_iteration_is_not_listened_to() -> None:
    talk = opened(window=8)
    talk.take(Begun(iteration(2, epoch=1)))
    talk.reply(Open, Opened(6))
    talk.take(Asked(1, 90))
    assert talk.last(More).message == More(6, 1, 0, 8)


def answer(talk: Talk, what: int) -> None:
    """Answer some pending request, rightly or wrongly, by a number that hypothesis draws."""
    pending = list(talk.session._pending.items())
    if not pending:
        return
    identifier, entry = pending[what % len(pending)]
    codes = ("unknown_stream", "no_hello", "rank_taken", "internal", "stopping", "unknown_dataset", "job_mismatch")
    message: Message = Ok()
    if what % 5 == 0:
        message = Error(codes[what % len(codes)], "No.", "", bool(what % 2))
    elif isinstance(entry.message, Hello):
        message = Welcome(1, "x")
    elif isinstance(entry.message, Open):
        message = Opened(what % 7)
    elif isinstance(entry.message, More):
        message = Ranges(entry.message.stream, 0, entry.message.first, [[0, 1, 1]], False)
    talk.take(Replied(Reply(identifier, LATER_BOOT if what % 11 == 0 else BOOT, message)))


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "ask", "answer", "wait", "finish"]), st.integers(0, 400)), max_size=60)
)
def test_no_daemon_however_wild_breaks_a_session_or_stops_its_loop(story: list[tuple[str, int]]) -> None:
    talk = Talk(window=8, timeout_s=3.0)
    number = 0
    for verb, what in [("begin", 0), *story]:
        if verb == "begin":
            number += 1
            talk.refused.clear()
            talk.take(Begun(iteration(number, epoch=number)))
        elif verb == "ask":
            talk.take(Asked(number, what % 100))
        elif verb == "answer":
            answer(talk, what)
        elif verb == "finish":
            talk.take(Finished(Progress(what % 100)))
        else:
            talk.wait(what / 100, Progress(what % 100, what))
        assert 0 <= talk.permit.granted <= 100
        assert len(talk.session._pending) <= 64
        due = talk.session.next_due()
        assert due is None or due > talk.now - 6
    # However it stands: after a silence the loop may go on, or has been told why not.
    talk.wait(20)
    assert talk.refused or talk.permit.registered
