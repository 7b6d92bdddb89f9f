"""server/builders.py and child.py: the real child, and stand-ins that die, rave, flood, hang and do not want to end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.server import builders, child
from dataserve.server.builders import Builders, Manner, Progress
from dataserve.server.events import (
    ConfirmationEnded,
    ConfirmationStarted,
    DatasetSealed,
    Event,
    PreparationAdvanced,
    PreparationFailed,
)
from dataserve.server.spec import DatasetSpec

from .daemons import arrays, until
from .stores import write_store

LIMIT_S = 60.0
CONFIRMING = Manner()
PLAIN = Manner(confirm=False)

#: Acts by the name of its data set; leaves a line in `diary` when it comes and when it goes.
STAND_IN = """
import json, os, signal, subprocess, sys, time
request = json.loads(sys.stdin.readline())
name, build = request["spec"]["name"], request["build"]
def say(**words):
    os.write(1, json.dumps(words).encode() + b"\\n")
def note(word):
    with open("diary", "a") as file:
        file.write(json.dumps([word, name, "confirm" if request["confirm"] else build]) + "\\n")
def miss():
    say(event="verdict", hit=False, fingerprint=None, reasons=["nothing there"])
note("comes")
if name.startswith("hit"):
    say(event="verdict", hit=not (request["confirm"] and "gone" in name), fingerprint=None, reasons=["as it was"])
    if request["confirm"] and "gone" in name:
        note("goes")
        os._exit(0)
    say(**json.load(open("sealed")))
    if request["confirm"]:
        note(os.nice(0))
        say(event="confirming")
        if "killed" in name:
            os.kill(os.getpid(), signal.SIGKILL)
        elif "broken" in name:
            say(event="failed", code="bad_transform", text="No such module.", remedy="")
        elif "differs" in name:
            say(event="failed", code="source_changed", text="Row 3 differs.", remedy="Give --version.")
        else:
            time.sleep(0.05)
            say(event="confirmed", rows=16)
elif not build and not name.startswith("early"):
    miss()
elif "status" in name:
    os._exit(3)
elif "killed" in name:
    os.kill(os.getpid(), signal.SIGKILL)
elif "raves" in name:
    os.write(1, b"Traceback: no JSON at all\\n")
    time.sleep(60)
elif "endless" in name:
    while True:
        os.write(1, b"x" * 65536)
elif "floods" in name:
    while True:
        say(event="progress", stage="prepare", done=1, total=2, rate=None, eta_s=None)
elif "noisy" in name:
    for number in range(3000):
        os.write(2, b"TIFFFetchNormalTag: Warning, number %d, and a long sentence about what is odd in it.\\n" % number)
    os.write(2, b"Traceback: the last word\\n")
    code = "internal" if "ours" in name else "bad_source"
    say(event="failed", code=code, text="No.", remedy="")
elif "alike" in name:
    for number in range(100):
        say(event="bad", index=number, path=f"cat/{number}.png", stage="write",
            cause=f"does not fit the first one: image is uint8 3 x {number} x 9.")
    say(event="bad", index=100, path="cat/x.png", stage="open", cause="The file is empty.")
    say(event="bad_samples", count=300, table="x.bad.tsv", remedy="Declare them.")
    say(event="failed", code="bad_sample", text="No.", remedy="")
elif "mute" in name:
    os.close(1)
    time.sleep(60)
elif "stubborn" in name:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    say(event="waiting", pid=grandchild.pid)
    time.sleep(60)
elif "newer" in name:
    miss()
    say(event="of a later version", colour="blue")
    say(event="progress", stage="prepare", done=1, total=None, rate=2.5, eta_s=None, colour="blue")
    say(event="failed", code="bad_sample", text="Sample 3\\x07 is bad.", remedy="Mend it.")
else:
    time.sleep(0.05)
    say(event="failed", code="bad_source", text="No.", remedy="")
note("goes")
"""


def spec(name: str, source: str = "arrays:x.npz") -> DatasetSpec:
    return DatasetSpec(name, source)


class Run:
    """Builders turned by hand, as the daemon's loop turns them."""

    def __init__(self, names: Sequence[str | DatasetSpec], root: Path, manner: Manner) -> None:
        specs = [spec(name) if isinstance(name, str) else name for name in names]
        self.log: list[str] = []
        self.progress: list[tuple[str, Progress]] = []
        self.settled: list[int] = []
        self.events: list[Event] = []
        self.builders = Builders(
            specs,
            root,
            manner,
            self.log.append,
            lambda name, told: self.progress.append((name, told)),
            lambda: self.settled.append(len(self.events)),
        )
        self.builders.start()

    def turn(self) -> None:
        poller = select.poll()
        for descriptor in self.builders.descriptors():
            poller.register(descriptor, select.POLLIN)
        poller.poll(100)
        self.events += self.builders.collect()

    def finish(self) -> list[Event]:
        until(lambda: self.turn() or self.settled, "all settled", LIMIT_S)
        until(lambda: self.turn() or not self.builders.busy, "the end of all children", LIMIT_S)
        return self.events

    @property
    def failures(self) -> dict[str, PreparationFailed]:
        return {event.name: event for event in self.events if isinstance(event, PreparationFailed)}


@pytest.fixture
def stand_in(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in in the place of the real child; the current directory is the test's own."""
    script = isolated / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(child, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.chdir(isolated)
    return isolated


@contextlib.contextmanager
def running(names: Sequence[str | DatasetSpec], root: Path, manner: Manner = CONFIRMING) -> Iterator[Run]:
    run = Run(names, root, manner)
    try:
        yield run
    finally:
        run.builders.close()


def diary(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "diary").read_text().splitlines()]


def test_a_miss_is_built_and_the_next_time_a_hit(isolated: Path) -> None:
    wanted = spec("digits", arrays(isolated / "data"))
    with running([wanted], isolated / "store") as first:
        events = first.finish()
    assert isinstance(events[-1], DatasetSealed)
    assert (events[-1].rows, events[-1].columns) == (100, ("image", "label"))
    assert any(isinstance(event, PreparationAdvanced) for event in events)
    assert [line for line in first.log if "MISS" in line] == [
        line for line in first.log if line.startswith("digits: MISS: ")
    ]
    assert ("digits", 100) in [(name, told.done) for name, told in first.progress]
    with running([wanted], isolated / "store") as second:
        assert second.finish() == [events[-1], ConfirmationStarted("digits"), ConfirmationEnded("digits", None)]
    assert second.log[1] == "digits: 16 rows prepared again are as they are stored"
    assert second.log[0].startswith("digits: HIT: ")
    assert (second.builders.ready, second.builders.failed, second.builders.exit_status) == ({"digits"}, {}, 0)


def test_without_confirming_a_hit_is_one_look_up(isolated: Path) -> None:
    wanted = spec("digits", arrays(isolated / "data"))
    with running([wanted], isolated / "store", PLAIN) as first:
        sealed = first.finish()[-1]
    with running([wanted], isolated / "store", PLAIN) as second:
        assert second.finish() == [sealed]


SCALED = """
import pathlib
def scaled(sample):
    return {"label": sample["label"] * int(pathlib.Path("scale").read_text())}
"""


def test_a_transform_whose_output_silently_changed_is_served_until_its_rows_are_compared(
    isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(isolated)
    (isolated / "scales.py").write_text(SCALED)
    (isolated / "scale").write_text("2")
    wanted = DatasetSpec("digits", arrays(isolated / "data"), transform="scales:scaled")
    with running([wanted], isolated / "store") as first:
        sealed = first.finish()[-1]
    (isolated / "scale").write_text("3")
    with running([wanted], isolated / "store") as second:
        until(lambda: second.turn() or second.settled, "a store that is served")
        assert second.events == [sealed]
        second.finish()
    assert second.events[1] == ConfirmationStarted("digits")
    why = second.failures["digits"]
    assert why.code == "source_changed"
    assert "differs from the store in 1 of 1 values of label" in why.text
    assert "--version NAME" in why.remedy
    assert (second.builders.ready, second.builders.exit_status) == (set(), 1)


@pytest.fixture
def found(stand_in: Path) -> Path:
    """The stand-in finds a store for whatever is called hit..."""
    folder, made = write_store(stand_in / "store", {"label": np.arange(5)})
    (stand_in / "sealed").write_text(json.dumps({"event": "sealed", "path": str(folder), "id": made.id}))
    return stand_in


def test_hits_are_confirmed_one_at_a_time_niced_and_after_all_look_ups(found: Path) -> None:
    names = [*(f"hit{number}" for number in range(6)), "late"]
    with running(names, found) as run:
        run.finish()
    seen = diary(found)
    assert not any(task for _, _, task in seen[:14]), "look-ups are first"
    confirmed = [word for word, _, task in seen if task == "confirm"]
    assert confirmed == ["comes", os.nice(0) + builders.NICE, "goes"] * 6
    assert [name for word, name, task in seen if task == "confirm" and word == "goes"] == sorted(names[:-1])
    assert [task for _, name, task in seen if name == "late"] == [False, False, True, True], "it is built all the same"


@pytest.mark.parametrize(
    ("name", "events", "words"),
    [
        ("hit-killed", ["sealed", "started", "ended"], "served, but not confirmed: The process that prepares"),
        ("hit-broken", ["sealed", "started", "ended"], "served, but not confirmed: No such module. [bad_transform]"),
        ("hit-gone", ["sealed"], "not confirmed: as it was. A new start prepares it anew."),
        ("hit-differs", ["sealed", "started", "failed"], None),
    ],
)
def test_only_rows_that_differ_speak_against_a_store(
    found: Path, name: str, events: list[str], words: str | None
) -> None:
    kinds = {"sealed": DatasetSealed, "started": ConfirmationStarted, "ended": ConfirmationEnded}
    with running([name], found) as run:
        run.finish()
    assert [type(event) for event in run.events] == [kinds.get(kind, PreparationFailed) for kind in events]
    assert (words is None) == (run.builders.ready == set())
    assert words is None or any(words in line for line in run.log)


def test_what_one_sample_may_take_and_the_number_of_workers_reach_the_child(isolated: Path) -> None:
    (isolated / "slow.py").write_text("import time\ndef hangs(sample):\n    time.sleep(60)\n")
    wanted = DatasetSpec("slow", arrays(isolated / "data"), transform="slow:hangs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(isolated)
        with running([wanted], isolated / "store", Manner(1, 1.0)) as run:
            run.finish()
    assert "has taken 1 s" in run.failures["slow"].text


def test_a_sealed_store_is_served_by_its_name_and_its_path(isolated: Path) -> None:
    with running([spec("digits", arrays(isolated / "data"))], isolated / "store") as first:
        sealed = first.finish()[-1]
    assert isinstance(sealed, DatasetSealed)
    with running([spec("a", "store:digits"), spec("b", f"store:{sealed.path}")], isolated / "store") as second:
        found = sorted(second.finish())
    assert found == [sealed._replace(name="a"), sealed._replace(name="b")]


def test_all_are_looked_up_before_one_is_built_and_one_is_built_at_a_time(stand_in: Path) -> None:
    names = [f"set{number}" for number in range(6)]
    with running(names, stand_in) as run:
        run.finish()
    seen = diary(stand_in)
    assert [build for _, _, build in seen] == [False] * 12 + [True] * 12
    assert [word for word, _, _ in seen[12:]] == ["comes", "goes"] * 6
    assert [name for word, name, build in seen if build and word == "comes"] == sorted(names)
    assert set(run.failures) == set(names)


def test_settled_is_said_once_after_the_last_event_is_out(stand_in: Path) -> None:
    with running(["one", "two"], stand_in) as run:
        run.finish()
        for _ in range(3):
            run.turn()
    assert run.settled == [2]


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("status", "worker_died", "'status' ended with status 3 and said nothing."),
        ("early-status", "worker_died", "'early-status' ended with status 3"),
        ("killed", "worker_died", "'killed' was killed by SIGKILL."),
        ("early-killed", "worker_died", "was killed by SIGKILL."),
        ("raves", "internal", "b'Traceback: no JSON at all'"),
        ("endless", "internal", "a line of more than 1048576 bytes"),
    ],
)
def test_a_child_that_fails_in_its_own_way_is_one_failure_and_the_others_go_on(
    stand_in: Path, name: str, code: str, text: str
) -> None:
    with running(["before", name, "behind"], stand_in) as run:
        run.finish()
    assert {key: event.code for key, event in run.failures.items()} == {
        "before": "bad_source",
        name: code,
        "behind": "bad_source",
    }
    assert text in run.failures[name].text
    assert run.builders.exit_status == 1


def test_a_child_that_has_closed_its_pipe_and_stays_is_killed(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_S", 0.2)
    with running(["mute"], stand_in) as run:
        run.finish()
    assert "was killed by SIGKILL" in run.failures["mute"].text


def test_a_native_library_that_floods_stderr_is_twenty_lines_and_a_number(stand_in: Path) -> None:
    with running(["noisy"], stand_in) as run:
        run.finish()
    lines = [line for line in run.log if "MISS" not in line]
    assert len(lines) == 21
    assert lines[0].startswith("noisy: TIFFFetchNormalTag: Warning, number 0,")
    assert lines[-1] == "noisy: 2,981 more lines like these were left out"


def test_the_trace_of_a_fault_of_ours_comes_through_however_late(stand_in: Path) -> None:
    with running(["noisy-ours"], stand_in) as run:
        run.finish()
    assert run.log[-1] == "noisy-ours: Traceback: the last word"
    assert len(run.log) < 60


def test_bad_samples_of_one_kind_are_five_lines_and_a_number(stand_in: Path) -> None:
    with running(["alike"], stand_in) as run:
        run.finish()
    lines = [line for line in run.log if "MISS" not in line]
    assert sum("does not fit" in line for line in lines) == 5
    assert any("The file is empty" in line for line in lines), "another kind is not drowned"
    assert lines[-2:] == [
        "alike: 95 more like these were not shown one by one",
        "alike: 300 bad samples, listed in x.bad.tsv. Declare them.",
    ]


def test_a_child_that_floods_does_not_hold_the_loop(stand_in: Path) -> None:
    with running(["early-floods"], stand_in) as run:
        until(lambda: run.turn() or run.events, "a first event")
        began = time.monotonic()
        for _ in range(3):
            run.turn()
        assert time.monotonic() - began < 10
        assert len(run.events) < 4 * child.READS * child.READ_BYTES / 50


def test_what_a_later_child_says_beside_the_known_is_ignored(stand_in: Path) -> None:
    with running(["newer"], stand_in) as run:
        assert run.finish() == [
            PreparationAdvanced("newer", 1, None, None),
            PreparationFailed("newer", "bad_sample", "Sample 3\a is bad.", "Mend it."),
        ]
    assert run.progress == [("newer", Progress("prepare", 1, None, 2.5, None))]
    assert run.builders.exit_status == 4


def test_closing_ends_a_child_that_does_not_want_to_and_what_it_started(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "TERM_S", 0.2)
    with running(["early-stubborn"], stand_in) as run:
        until(lambda: run.turn() or run.log, "its word")
        grandchild = int(run.log[0].split()[4].rstrip(","))
        assert os.path.exists(f"/proc/{grandchild}")
    until(lambda: not is_alive(grandchild), "the end of the grandchild")


def is_alive(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_that_cannot_be_started_is_a_failure_of_its_data_set(
    isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PROGRAM", (str(isolated / "no such program"),))
    with running(["one", "two"], isolated) as run:
        run.finish()
    assert [(event.code, "cannot be started" in event.text) for event in run.failures.values()] == [
        ("worker_died", True)
    ] * 2


def test_a_description_that_is_too_long_for_the_pipe_is_refused(stand_in: Path) -> None:
    with running([DatasetSpec("long", "arrays:x", {"key": "x" * child.REQUEST_BYTES})], stand_in) as run:
        run.finish()
    assert run.failures["long"].code == "bad_option"


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*child._SAYINGS]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["event", "done", "total", "reasons"]), inner),
)


@given(st.binary() | _values.map(lambda value: json.dumps(value).encode()))
def test_a_line_is_checked_words_or_none_or_a_value_error(line: bytes) -> None:
    with contextlib.suppress(ValueError):
        words = child._parse(line)
        assert words is None or words["event"] in child._SAYINGS
