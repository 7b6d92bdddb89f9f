"""server/cli.py and command_*.py: the verbs as an operator types them, with their exit statuses and sentences."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataserve.protocol.errors import ServerError
from dataserve.protocol.messages import StatusPage
from dataserve.server import cli, command_start, command_status, transport

from .daemons import DATASERVE, GATED, LIMIT_S, arrays, daemon, detached_ends, gated, run, until


def status() -> dict[str, Any]:
    ended = run("status", "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "required: VERB"),
        (["stat"], 2, "There is no verb 'stat'. Did you mean 'start'?"),
        (["rm", "mnist"], 2, "Did you mean 'remove'?"),
        (["zzz"], 2, "Known: start, prepare, status"),
        (["list", "mnist"], 2, "'mnist' is one word too many"),
        (["info"], 2, "required: NAME"),
        (["info", "x", "--row", "-1"], 2, "'-1' is not an integer of 0 or more"),
        (["preview", "x"], 2, "required: -o/--output"),
        (["preview", "x", "-o", "x.jpg"], 2, "Give a name that ends in .png"),
        (["prepare", "arrays:x", "--sample-timeout-s", "0"], 2, "'0' is no number of seconds above 0"),
        (["prepare", "imagefoldr:/x"], 2, "Did you mean 'imagefolder:/x'?"),
        (["prepare", "x.npz"], 2, "Did you mean 'arrays:x.npz'?"),
        (["prepare", "/tmp"], 2, "Did you mean 'imagefolder:/tmp'?"),
        (["prepare", "torchvison:MNIST"], 1, "Did you mean 'torchvision:MNIST'?"),
        (["prepare", "arrays:"], 2, "names nothing"),
        (["start"], 2, "Either SOURCE or --config FILE is needed"),
        (["start", "arrays:x", "--no-wait"], 2, "--no-wait goes with --detach"),
        (["start", "arrays:x", "--workers", "0"], 2, "'0' is not an integer of 1 or more"),
        (["start", "arrays:x", "--detatch"], 2, "There is no option '--detatch'. Did you mean '--detach'?"),
        (["start", "arrays:x", "--name", "A/B"], 2, "'A/B' is not allowed"),
        (["prepare", "arrays:x", "--name", ""], 2, "'' is not allowed"),
        (["prepare", "arrays:x", "--max-bad", "many"], 2, "max_bad='many' is neither N nor P%"),
        (["list", "--store", ""], 2, "--store is an empty text"),
        (["start", "arrays:x", "--on-error", "maybe"], 2, "invalid choice: 'maybe'"),
        (["start", "arrays:x", "--address", "tcp://0.0.0.0:5"], 2, "is not a Unix socket"),
        (["start", "--config", "/none.toml"], 2, "No such file or directory"),
        (["start", "arrays:/gone.npz", "--detach"], 1, "nothing can be served"),
        (["prepare", "arrays:/gone.npz"], 1, "No such file or directory"),
        (["prepare", "nonsense"], 2, "'nonsense' has no kind"),
        (["prepare", "no.such.module:make"], 1, "no.such.module"),
        (["prepare", "torchvision:MNITS"], 1, "MNIST"),
        (["prepare", "store:nothing"], 1, "There is no store called 'nothing'"),
        (["prepare", "arrays:x", "--store", "/dev/null/x"], 1, "is no folder but a file"),
        (["status"], 3, "Start one: dataserve start SOURCE --detach"),
        (["stop"], 3, "no socket there"),
        (["status", "--address", "/tmp/" + "x" * 200], 2, "Linux allows 107"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_a_status_and_no_traceback(words: list[str], code: int, text: str) -> None:
    ended = run(*words)
    assert ended.returncode == code
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


def test_where_no_daemon_is_all_addresses_are_named(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATASERVE_ADDRESS")
    ended = run("status")
    assert ended.returncode == 3
    assert f"{isolated}/run/dataserve/d.sock (no socket there)" in ended.stderr
    assert f"/tmp/dataserve-{os.geteuid()}/d.sock" in ended.stderr


def test_where_a_daemon_was_killed_its_pid_is_named(isolated: Path) -> None:
    with daemon(arrays(isolated / "data")) as serving:
        serving.kill()
        ended = run("status")
    assert ended.returncode == 3
    assert f"daemon pid {serving.pid} is dead" in ended.stderr


def test_prepare_makes_the_store_once_and_list_shows_it(isolated: Path) -> None:
    source = arrays(isolated / "data")
    first, second = run("prepare", source), run("prepare", source)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "digits: MISS: never prepared here" in first.stdout
    assert "digits: ready, 100 rows" in first.stdout
    assert second.stdout.startswith("digits: HIT: ")
    (found,) = json.loads(run("list", "--json").stdout)["stores"]
    assert (found["name"], found["rows"], found["columns"]) == ("digits", 100, ["image", "label"])
    assert Path(found["path"]).parent == isolated / "store"
    shown = run("list").stdout
    assert found["fingerprint"][:16] in shown
    assert not (isolated / "run" / "d.sock").exists()


SCALED = """
import pathlib
def scaled(sample):
    return {"label": sample["label"] * int(pathlib.Path("scale").read_text())}
"""


@pytest.fixture
def scaled(isolated: Path) -> tuple[str, ...]:
    """The words for a data set whose transform reads a number that no fingerprint sees."""
    (isolated / "scales.py").write_text(SCALED)
    (isolated / "scale").write_text("2")
    words = (arrays(isolated / "data"), "--transform", "scales:scaled")
    assert run("prepare", *words, cwd=isolated).returncode == 0
    return words


def test_a_hit_that_no_longer_holds_is_served_at_first_and_then_refused_with_the_row(
    isolated: Path, scaled: tuple[str, ...]
) -> None:
    (isolated / "scale").write_text("3")
    with detached_ends():
        began = run("start", *scaled, "--detach", cwd=isolated)
        assert began.returncode == 0, began.stderr
        assert "Serving digits" in began.stdout
        failed = until(
            lambda: (rows := status()["datasets"]) and rows[0]["state"] == "failed" and rows[0], "the failure"
        )
        assert "differs from the store in 1 of 1 values of label" in failed["error"]
        assert "--version NAME" in failed["error"]
        assert failed["path"] is not None, "jobs that run go on with it"
        assert "failed" in run("status").stdout
        assert run("stop").returncode == 0
    ended = run("prepare", *scaled, cwd=isolated)
    assert (ended.returncode, "[source_changed]" in ended.stderr) == (1, True)


def test_while_a_hit_is_confirmed_status_says_so_and_it_is_served(isolated: Path, scaled: tuple[str, ...]) -> None:
    (isolated / "scale").unlink()
    os.mkfifo(isolated / "scale")  # the child waits in it
    with daemon(*scaled, cwd=isolated) as serving:
        row = until(
            lambda: (rows := status()["datasets"]) and rows[0]["state"] == "confirming" and rows[0], "confirming"
        )
        assert row["rows"] == 100
        assert "confirming" in run("status").stdout
        with open(isolated / "scale", "w") as waited_for:
            (isolated / "scale").unlink()
            (isolated / "scale").write_text("2")
            waited_for.write("2")
        until(lambda: status()["datasets"][0]["state"] == "ready", "the end of it")
        until(lambda: "16 rows prepared again are as they are stored" in serving.said, "its word")


def test_without_confirming_no_child_is_started_on_a_hit(isolated: Path, scaled: tuple[str, ...]) -> None:
    (isolated / "scale").write_text("3")
    with daemon(*scaled, "--no-confirm", cwd=isolated) as serving:
        children = Path(f"/proc/{serving.pid}/task/{serving.pid}/children")
        until(lambda: not children.read_text(), "the end of the look-up")
        assert status()["datasets"][0]["state"] == "ready"
        assert "prepared again" not in serving.said


def test_list_shows_a_damaged_store_and_why(isolated: Path) -> None:
    assert run("prepare", arrays(isolated / "data")).returncode == 0
    (found,) = json.loads(run("list", "--json").stdout)["stores"]
    Path(found["path"], "label.npy").chmod(0o644)
    os.truncate(Path(found["path"], "label.npy"), 10)
    listed = json.loads(run("list", "--json").stdout)
    assert listed["stores"] == []
    assert "label.npy has 10 bytes" in listed["damaged"][0]["error"]
    assert "damaged" in run("list").stdout


def test_list_of_nothing_is_no_error() -> None:
    ended = run("list")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "No stores.")


def test_bad_samples_end_with_status_four(isolated: Path) -> None:
    (isolated / "steps.py").write_text("def fails(sample):\n    raise ValueError('torn')\n")
    source = arrays(isolated / "data")
    for words in (["prepare", source], ["start", source], ["start", source, "--detach"]):
        ended = run(*words, "--transform", "steps:fails", cwd=isolated)
        assert ended.returncode == 4, (words, ended)
        assert "torn" in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prepare_that_is_interrupted_leaves_no_process_and_no_traceback(isolated: Path, number: int) -> None:
    gated(isolated)
    words = ("prepare", arrays(isolated / "data"), "--transform", GATED)
    with subprocess.Popen((*DATASERVE, *words), cwd=isolated, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as one:
        until((isolated / "held").exists, "a sample at work")
        one.send_signal(number)
        assert one.wait(LIMIT_S) == 128 + number
        assert one.stderr is not None
        assert one.stderr.read() == b""


def test_detach_returns_when_all_is_ready_and_shows_what_was_found(isolated: Path) -> None:
    source = arrays(isolated / "data")
    with detached_ends():
        began = run("start", source, "--detach")
        assert began.returncode == 0, began.stderr
        assert "digits: MISS: " in began.stdout
        assert "Serving digits at" in began.stdout
        (row,) = status()["datasets"]
        assert (row["state"], row["rows"]) == ("ready", 100)
        assert (isolated / "run" / "daemon.log").stat().st_mode & 0o777 == 0o600
        assert run("start", source, "--detach").returncode == 1, "one is there already"
        stopped = run("stop")
        assert (stopped.returncode, "has ended" in stopped.stdout) == (0, True)
    assert os.listdir(isolated / "run") == ["daemon.log"]
    assert "The daemon has ended." in (isolated / "run" / "daemon.log").read_text()


def test_no_wait_returns_while_it_prepares_and_stop_ends_the_child(isolated: Path) -> None:
    gated(isolated)
    with detached_ends():
        words = ("start", arrays(isolated / "data"), "--transform", GATED, "--detach", "--no-wait")
        assert run(*words, cwd=isolated).returncode == 0
        until((isolated / "held").exists, "a sample at work")
        (row,) = status()["datasets"]
        assert (row["state"], row["rows"], row["error"]) == ("preparing", None, None)
        assert run("stop").returncode == 0
    assert run("status").returncode == 3


def test_detach_that_is_interrupted_says_that_the_daemon_goes_on(isolated: Path) -> None:
    gate = gated(isolated)
    words = ("start", arrays(isolated / "data"), "--transform", GATED, "--detach")
    with (
        detached_ends(),
        subprocess.Popen((*DATASERVE, *words), cwd=isolated, stdout=subprocess.PIPE, text=True) as one,
    ):
        until((isolated / "held").exists, "a sample at work")
        one.send_signal(signal.SIGINT)
        assert one.wait(LIMIT_S) == 130
        assert one.stdout is not None
        assert "goes on. End it with: dataserve stop" in one.stdout.read()
        gate.touch()
        until(lambda: status()["datasets"][0]["state"] == "ready", "a ready data set")
        assert run("stop").returncode == 0


def test_detach_with_one_data_set_that_fails_serves_the_other_and_says_which(isolated: Path) -> None:
    (isolated / "data.toml").write_text(
        f'[[dataset]]\nsource = "{arrays(isolated)}"\n[[dataset]]\nname = "gone"\nsource = "arrays:gone.npz"\n'
    )
    with detached_ends():
        began = run("start", "--config", str(isolated / "data.toml"), "--detach")
        assert began.returncode == 1
        assert "gone could not be prepared; the daemon serves the others" in began.stderr
        assert "gone: failed." in began.stdout
        assert {row["name"]: row["state"] for row in status()["datasets"]} == {"digits": "ready", "gone": "failed"}
        assert run("stop").returncode == 0


def test_a_detached_start_with_nothing_to_serve_says_why_once_and_ends_at_once(isolated: Path) -> None:
    with detached_ends():
        began = run("start", "arrays:gone.npz", "--name", "gone", "--detach")
        assert began.returncode == 1
        assert began.stdout.count("gone: failed.") == 1
        assert "nothing to serve" not in began.stdout
        log = isolated / "run" / "daemon.log"
        assert began.stderr == f"dataserve: nothing can be served; the daemon's log is {log}\n"
        assert run("status").returncode == 3, "nobody is left"
        earlier = log.read_text()
        assert run("start", "arrays:gone.npz", "--detach").stdout.count("failed.") == 1, "old lines are not said again"
        assert log.read_text().startswith(earlier)


def test_two_daemons_in_one_folder_have_two_logs() -> None:
    assert command_start.log_path("ipc:///run/x/d.sock") == "/run/x/daemon.log"
    assert command_start.log_path("ipc:///run/x/e.sock") == "/run/x/e.sock.log"


def test_the_detached_daemon_lets_go_of_the_terminal_and_the_pipes(isolated: Path) -> None:
    with detached_ends():
        run("start", arrays(isolated / "data"), "--detach")  # would wait for its pipes' end otherwise
        pid = status()["pid"]
        assert os.getsid(pid) == pid
        for number in (0, 1, 2):
            assert os.readlink(f"/proc/{pid}/fd/{number}") in ("/dev/null", str(isolated / "run" / "daemon.log"))
        assert run("stop").returncode == 0


def test_status_of_a_daemon_has_the_fields_of_the_design(isolated: Path) -> None:
    with daemon(arrays(isolated / "data")) as serving:
        found = status()
        shown = run("status").stdout
    assert list(found) == ["version", "pid", "address", "boot", "store", "uptime_s", "datasets", "jobs"]
    assert (found["pid"], found["address"], found["store"]) == (serving.pid, serving.address, str(isolated / "store"))
    assert len(bytes.fromhex(found["boot"])) == 16
    fields = "name fingerprint id path state rows size_bytes done total eta_s resident locked error"
    assert list(found["datasets"][0]) == fields.split()
    assert found["jobs"] == []
    assert "digits   ready   100" in shown
    assert "No jobs." in shown


def test_status_watches_until_it_is_interrupted(isolated: Path) -> None:
    words = (*DATASERVE, "status", "--json", "--watch")
    with daemon(arrays(isolated / "data")), subprocess.Popen(words, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        seen = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(LIMIT_S) == 130
    assert seen[0]["uptime_s"] < seen[1]["uptime_s"]


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_a_log_that_cannot_be_is_a_sentence_and_starts_no_daemon(isolated: Path, kind: str) -> None:
    (os.mkdir if kind == "folder" else os.mkfifo)(isolated / "run" / "daemon.log")
    ended = run("start", arrays(isolated / "data"), "--detach")
    assert (ended.returncode, ended.stderr.count("\n"), "daemon.log" in ended.stderr) == (1, 1, True)
    assert os.listdir(isolated / "run") == ["daemon.log"]


def test_an_interrupt_while_it_is_imported_is_no_traceback() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "dataserve.server.command_status":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
import dataserve.server.cli
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_finds_no_room_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        ended = run("list", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr.count("\n"), "No space left" in ended.stderr) == (1, 1, True)


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    try:
        ended = run("list", capture_output=False, stdout=writable, stderr=subprocess.PIPE)
    finally:
        os.close(writable)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_path_that_is_no_utf8_is_shown_and_does_not_break_the_output(isolated: Path) -> None:
    store = os.fsencode(isolated) + b"/sto\xffre"
    environ = {**os.environb, b"DATASERVE_STORE": store, b"LC_ALL": b"C"}
    made = subprocess.run(
        (*DATASERVE, "prepare", arrays(isolated / "data")),
        env=environ,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert b"ready, 100 rows" in made.stdout


# --- status, by hand ------------------------------------------------------------------------------------------------


def consumer(**fields: Any) -> dict[str, Any]:
    row = {
        "job": "a",
        "dataset": "digits",
        "world_size": 2,
        "batch_size": 8,
        "seed": 1,
        "rank": 0,
        "worker": 0,
        "pid": 5,
    }
    row |= {"epoch": 0, "position": 0, "samples_per_s": 1.5, "wait_share": 0.25, "bound": "data", "last_seen_s": 0.1}
    return {**row, "alone": False, **fields}


def test_consumers_are_nested_in_their_jobs() -> None:
    rows = [consumer(), consumer(rank=1), consumer(seed=2), consumer(job="b", world_size=1)]
    found = command_status.nested(rows)
    assert [(job["job"], job["seed"], [row["rank"] for row in job["consumers"]]) for job in found] == (
        [("a", 1, [0, 1]), ("a", 2, [0]), ("b", 1, [0])]
    )
    assert list(found[0]) == ["job", "dataset", "world_size", "batch_size", "seed", "consumers"]
    assert list(found[0]["consumers"][0]) == (
        ["rank", "worker", "pid", "epoch", "position", "samples_per_s", "wait_share", "bound", "last_seen_s", "alone"]
    )


class Pages:
    """Answers `status` in the place of transport, page by page; each answer may come from another daemon."""

    def __init__(self, pages: int, boots: Iterator[int]) -> None:
        self.pages = pages
        self.boots = boots

    def ask_reply(self, _addresses: Any, message: Any, _timeout_s: float) -> Any:
        page = StatusPage("0", 1, "ipc:///x", "/s", 1.0, message.page, self.pages, [{"n": message.page}], [consumer()])
        return transport.codec.Reply(1, bytes([next(self.boots)]) * 16, page)


def test_all_pages_become_one_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ask_reply", Pages(3, iter([1] * 3)).ask_reply)
    found = command_status.ask_status(["ipc:///x"], 1.0)
    assert found["datasets"] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert len(found["jobs"][0]["consumers"]) == 3


def test_pages_of_two_daemons_are_never_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ask_reply", Pages(2, iter([1, 2, 3, 3])).ask_reply)
    assert command_status.ask_status(["ipc:///x"], 1.0)["boot"] == "03" * 16
    monkeypatch.setattr(transport, "ask_reply", Pages(2, iter(range(100))).ask_reply)
    with pytest.raises(ServerError, match="again and again"):
        command_status.ask_status(["ipc:///x"], 1.0)


def test_a_daemon_that_does_not_answer_is_named_in_some_seconds(
    isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_status, "ASK_S", 0.3)
    with socket.socket(socket.AF_UNIX) as deaf, contextlib.redirect_stderr(sys.stdout):
        deaf.bind(str(isolated / "run" / "d.sock"))
        deaf.listen()
        assert cli.main(["status"]) == 3


def test_every_verb_has_help_and_a_place_in_the_table() -> None:
    verbs = ["start", "prepare", "status", "stop", "list", "info", "verify", "preview", "remove"]
    assert [command.name for command in cli.COMMANDS] == verbs
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as out:
            cli.main([command.name, "--help"])
        assert ended.value.code == 0
        assert f"example:\n  dataserve {command.name}" in out.getvalue()


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_example_is_a_command_that_is_understood(command: cli.Command) -> None:
    for line in command.example.strip().splitlines():
        program, *words = shlex.split(line)
        assert (program, words[0]) == ("dataserve", command.name)
        assert cli.parser().parse_args(words).run is command.run
