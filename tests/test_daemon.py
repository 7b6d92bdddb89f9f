"""server/daemon.py: the real process over the real socket, killed, doubled, insulted and told to go."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from dataserve.protocol import codec, limits
from dataserve.protocol.address import lock_path, socket_path
from dataserve.protocol.messages import AskStatus, Describe, Described, Error, Preparing
from dataserve.server import transport
from dataserve.server.daemon import OPEN_FILES, is_running

from .daemons import DATASERVE, GATED, LIMIT_S, Daemon, arrays, daemon, gated, run, until

READY_S = 10.0  #: ten times what a daemon on a hit takes
RESIDENT_KB = 80_000  #: some 40 MB, with room for another libc or numpy


@pytest.fixture
def source(isolated: Path) -> str:
    """A data set that was prepared before."""
    named = arrays(isolated / "data")
    assert run("prepare", named).returncode == 0
    return named


def left(isolated: Path) -> list[str]:
    return os.listdir(isolated / "run")


def test_on_a_hit_it_serves_at_once_in_little_memory(source: str) -> None:
    began = time.monotonic()
    with daemon(source) as serving:
        took_s = time.monotonic() - began
        assert "digits: HIT: " in serving.said
        assert "data = ServedDataset('digits', batch_size=256)" in serving.said
        words = Path(f"/proc/{serving.pid}/status").read_text().split()
        maps = Path(f"/proc/{serving.pid}/maps").read_text()
    assert took_s < READY_S
    assert int(words[words.index("VmRSS:") + 1]) < RESIDENT_KB
    assert "libtorch" not in maps


def test_a_daemon_that_has_served_never_imported_what_is_heavy(source: str, isolated: Path) -> None:
    code = (
        "import json, sys; from dataserve.server import cli; status = cli.main(sys.argv[1:]); "
        "json.dump(sorted(sys.modules), open('modules', 'w')); sys.exit(status)"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "start", source], cwd=isolated, stdout=subprocess.DEVNULL
    )
    address = os.environ["DATASERVE_ADDRESS"]
    try:
        until(lambda: is_ready(address), "a described data set")
    finally:
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    modules = set(json.loads((isolated / "modules").read_text()))
    assert modules & {"torch", "torchvision", "multiprocessing", "rich", "PIL", "pickle"} <= {"pickle"}  # numpy's own
    assert "dataserve.server.engine" in modules


def is_ready(address: str) -> bool:
    with contextlib.suppress(Exception):
        return isinstance(transport.ask([address], Describe("digits"), 0.2), Described)
    return False


def test_the_socket_and_the_lock_are_for_one_user_only(source: str) -> None:
    with daemon(source) as serving:
        for path in (socket_path(serving.address), lock_path(serving.address)):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_cleanly_with_no_files_left(source: str, isolated: Path, number: int) -> None:
    with daemon(source) as serving:
        assert serving.stop(number) == 0
    assert left(isolated) == []
    assert "Traceback" not in serving.said


def test_a_second_one_is_refused_with_the_first_ones_pid_and_the_first_serves_on(source: str) -> None:
    with daemon(source) as first:
        second = run("start", source)
        assert second.returncode == 1
        assert f"pid {first.pid}, already listens" in second.stderr
        assert "Traceback" not in second.stderr
        assert first.status()


def test_after_a_kill_the_next_one_binds_at_once(source: str) -> None:
    with daemon(source) as first:
        first.kill()
        assert os.path.exists(socket_path(first.address)), "a kill -9 tidies nothing"
        began = time.monotonic()
        with daemon(source) as second:
            assert time.monotonic() - began < READY_S
            assert second.pid != first.pid


def test_what_killed_daemons_leave_does_not_add_up(source: str) -> None:
    for _ in range(5):
        with daemon(source, ready=False) as serving:
            serving.kill()
    with daemon(source) as serving:
        assert serving.status()


def test_a_regular_file_at_the_sockets_place_is_refused_and_kept(source: str, isolated: Path) -> None:
    path = isolated / "run" / "d.sock"
    path.write_text("precious")
    ended = run("start", source)
    assert (ended.returncode, path.read_text()) == (2, "precious")
    assert "is no socket" in ended.stderr


def test_a_daemon_whose_folder_was_emptied_leaves_its_successors_socket(source: str, isolated: Path) -> None:
    with daemon(source) as first:
        os.kill(first.pid, signal.SIGSTOP)  # or it would make them again
        for name in left(isolated):
            os.unlink(isolated / "run" / name)
        with daemon(source) as second:
            os.kill(first.pid, signal.SIGCONT)
            until(lambda: f"pid {second.pid}, already listens" in first.said, "what stands in its way")
            assert first.stop() == 0
            assert sorted(left(isolated)) == ["d.sock", "d.sock.lock"]
            assert second.status()


def test_a_folder_that_is_removed_under_the_daemon_is_made_again(source: str, isolated: Path) -> None:
    with daemon(source) as serving:
        shutil.rmtree(isolated / "run")
        until(serving.status, "an answer at the same address")
        assert stat.S_IMODE((isolated / "run").stat().st_mode) == 0o700
        refused = run("start", source)
        assert (refused.returncode, f"pid {serving.pid}, already listens" in refused.stderr) == (1, True)
        assert "is made again" in serving.said
        assert run("stop").returncode == 0
    assert left(isolated) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_ends_no_daemon(source: str) -> None:
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen((*DATASERVE, "start", source), stdout=full, stderr=-1) as told,
    ):
        until(lambda: run("status").returncode == 0, "an answer")
        assert run("stop").returncode == 0
        assert b"Traceback" not in told.communicate(timeout=LIMIT_S)[1]


def test_orders_that_earlier_clients_left_are_removed_at_the_start(source: str, isolated: Path) -> None:
    (isolated / "run" / "orders").mkdir()
    (isolated / "run" / "orders" / "0123456789abcdef-7.npy").write_text("old")
    with daemon(source) as serving:
        assert os.listdir(isolated / "run" / "orders") == []
        with open(f"/proc/{serving.pid}/limits") as file:
            (words,) = [line.split() for line in file if line.startswith("Max open files")]
        assert int(words[3]) == min(int(words[4]), OPEN_FILES)


@pytest.mark.parametrize(
    ("address", "code"), [("/tmp/" + "x" * 120 + "/d.sock", "bad_address"), ("/tmp/d.sock", "unsafe_folder")]
)
def test_a_place_that_cannot_be_is_a_sentence(source: str, address: str, code: str) -> None:
    ended = run("start", source, "--address", address)
    assert ended.returncode in (1, 2)
    assert f"[{code}]" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_status_and_describe_while_it_prepares_and_a_stop_leaves_no_process(isolated: Path) -> None:
    gated(isolated)
    with daemon(arrays(isolated / "data"), "--transform", GATED, ready=False, cwd=isolated) as serving:
        until((isolated / "held").exists, "a sample at work")
        children = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
        (row,) = (serving.status() or {})["datasets"]
        assert (row["name"], row["state"], row["path"]) == ("digits", "preparing", None)
        assert isinstance(transport.ask([serving.address], Describe("digits"), 5.0), Preparing)
        assert serving.stop() == 0
    assert [os.path.exists(f"/proc/{child}") for child in children] == [False]
    assert left(isolated) == []


def test_a_data_set_becomes_ready_under_a_client_that_waits(isolated: Path) -> None:
    gate = gated(isolated)
    with daemon(arrays(isolated / "data"), "--transform", GATED, ready=False, cwd=isolated) as serving:
        gate.touch()
        found = until(lambda: described(serving.address), "a described data set")
    assert (found.rows, found.columns) == (100, ("image", "label"))


def described(address: str) -> Described | None:
    reply = transport.ask([address], Describe("digits"), 5.0)
    return reply if isinstance(reply, Described) else None


def test_a_data_set_that_fails_leaves_the_others_served(source: str, isolated: Path) -> None:
    config = isolated / "data.toml"
    config.write_text(f'[[dataset]]\nsource = "{source}"\n[[dataset]]\nname = "gone"\nsource = "arrays:gone.npz"\n')
    with daemon("--config", str(config)) as serving:
        states = {row["name"]: (row["state"], row["error"]) for row in (serving.status() or {})["datasets"]}
        assert states["digits"] == ("ready", None)
        assert states["gone"][0] == "failed"
        assert "gone.npz" in states["gone"][1]
        with pytest.raises(Exception, match=r"is not served: .*gone\.npz") as caught:
            transport.ask([serving.address], Describe("gone"), 5.0)
        assert getattr(caught.value, "code", "") == "preparation_failed"
        assert serving.stop() == 0


def test_with_nothing_to_serve_it_ends_after_those_that_wait_have_heard_why(isolated: Path) -> None:
    with daemon("arrays:/gone.npz") as serving:
        assert isinstance(answer(serving.address, codec.encode_request(1, Describe("gone"))), Error)
        assert serving.process.wait(LIMIT_S) == 1
    assert left(isolated) == []
    assert "no data set could be prepared" in serving.said


# --- hostile connections --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dealer(address: str) -> Iterator[Any]:
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 0)
    connection.connect(address)
    try:
        yield connection
    finally:
        connection.close(0)
        context.term()


def answer(address: str, frame: bytes) -> Any:
    """What a frame is answered with."""
    with dealer(address) as connection:
        connection.send(frame)
        assert connection.poll(LIMIT_S * 1000), "no answer"
        return codec.decode_reply(connection.recv()).message


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


#: Frames that are no request, each with the code of its answer.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "bad_message"),
    "garbage": (b"GET / HTTP/1.1\r\n\r\n", "bad_message"),
    "array32 of 4 billion": (b"\xdd\xff\xff\xff\xff", "bad_message"),
    "map32 of 4 billion": (b"\xdf\xff\xff\xff\xff", "bad_message"),
    "deep nesting": (nested(60_000), "bad_message"),
    "60,000 nils": (b"\xdc\xea\x60" + b"\xc0" * 60_000, "bad_message"),
    "trailing bytes": (codec.encode_request(1, AskStatus()) + b"\x00", "bad_message"),
    "truncated": (codec.encode_request(1, AskStatus())[:-1], "bad_message"),
    "timestamp": (msgpack.packb({"kind": "status", "id": msgpack.Timestamp(1)}), "bad_message"),
    "unknown kind": (msgpack.packb({"kind": "explode", "id": 5}), "unknown_kind"),
    "a reply": (msgpack.packb({"kind": "ok", "id": 5}), "unknown_kind"),
    "no id": (msgpack.packb({"kind": "status"}), "bad_message"),
    "negative page": (msgpack.packb({"kind": "status", "id": 5, "page": -1}), "bad_message"),
    "NaN": (msgpack.packb({"kind": "status", "id": 5, "page": float("nan")}), "bad_message"),
    "open before hello": (msgpack.packb({"kind": "open", "id": 5}), "bad_message"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all insults: it has to outlive them."""
    base = Path("/tmp") / f"ds-{os.getpid()}-hostile"
    (base / "run").mkdir(parents=True, mode=0o700)
    base.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATASERVE_ADDRESS", f"ipc://{base}/run/d.sock")
        patch.setenv("DATASERVE_STORE", str(base / "store"))
        with daemon(arrays(base / "data")) as serving:
            yield serving
    for path in sorted(base.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    base.rmdir()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_frame_that_is_no_request_is_answered_with_its_error(target: Daemon, name: str) -> None:
    frame, code = HOSTILE[name]
    reply = answer(target.address, frame)
    assert isinstance(reply, Error)
    assert reply.code == code
    assert described(target.address)


def test_a_frame_above_the_cap_loses_its_connection_and_no_other(target: Daemon) -> None:
    with dealer(target.address) as good, dealer(target.address) as bad:
        bad.send(b"\x00" * (limits.FRAME_BYTES + 1))
        bad.send(b"\x00" * 1_000_000)
        good.send(codec.encode_request(7, Describe("digits")))
        assert good.poll(LIMIT_S * 1000)
        assert codec.decode_reply(good.recv()).id == 7


def test_a_message_of_a_thousand_parts_is_dropped_unread(target: Daemon) -> None:
    with dealer(target.address) as bad:
        bad.send_multipart([codec.encode_request(1, AskStatus())] * 1000)
        bad.send(codec.encode_request(2, AskStatus()))
        assert bad.poll(LIMIT_S * 1000)
        assert codec.decode_reply(bad.recv()).id == 2


def test_bytes_that_are_no_zmq_harm_nobody(target: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(LIMIT_S)
        raw.connect(socket_path(target.address))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        assert described(target.address)
    assert described(target.address)


def test_insults_do_not_slow_an_honest_client(target: Daemon) -> None:
    over = threading.Event()

    def insult() -> None:
        with dealer(target.address) as bad:
            bad.setsockopt(zmq.SNDTIMEO, 1000)
            while not over.is_set():
                for frame, _ in HOSTILE.values():
                    with contextlib.suppress(zmq.Again):
                        bad.send(frame)
                time.sleep(0.001)

    rude = threading.Thread(target=insult)
    rude.start()
    try:
        began = time.monotonic()
        for _ in range(50):
            assert described(target.address)
        assert time.monotonic() - began < 30
    finally:
        over.set()
        rude.join(LIMIT_S)


# --- processes ------------------------------------------------------------------------------------------------------


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_process_is_known_by_its_pid_and_its_start_time() -> None:
    assert is_running(os.getpid(), start_time(os.getpid()))
    assert not is_running(os.getpid(), start_time(os.getpid()) + 1), "a pid that has come round again"
    assert not is_running(2**22 + 1, 1)


def test_a_process_that_cannot_be_looked_at_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("builtins.open", refuse)
    running = is_running(2**22 + 1, 1)
    monkeypatch.undo()
    assert running


def test_a_zombie_does_not_run() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    began = start_time(process.pid)
    assert is_running(process.pid, began)
    process.stdin.close()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{process.pid}/stat").exists()
    assert not is_running(process.pid, began)
    process.wait()


def test_the_module_is_started_by_its_name() -> None:
    assert DATASERVE[-1] == "dataserve.server.cli"
    ended = run("--version")
    assert (ended.returncode, ended.stdout.split()[0]) == (0, "dataserve")
