"""client/transport: sockets that hold up nothing, a thread that sleeps, and forks and exits that leave no trace."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from dataserve.client import transport
from dataserve.client.transport import make_dealer
from dataserve.protocol import limits
from dataserve.protocol.errors import MachineError
from dataserve.protocol.messages import Close, Describe, Described, Hello

from .fakes import FakeDaemon, fake_daemon
from .stores import write_store

EXIT_S = 1.0  #: the promise; measured between the last words of a script and the end of its process
SLOW = 10  #: bounds on time are this much looser


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_store(tmp_path_factory.mktemp("exits"), {"label": np.arange(50)})


@pytest.fixture
def daemon(sealed: Any, isolated: Path) -> Iterator[FakeDaemon]:
    with fake_daemon(*sealed) as serving:
        yield serving


def test_every_option_of_the_socket_is_set(isolated: Path) -> None:
    with zmq.Context() as context, make_dealer(context, os.environ["DATASERVE_ADDRESS"]) as dealer:
        options = {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.MAXMSGSIZE: limits.FRAME_BYTES,
            zmq.SNDHWM: 64,
            zmq.RCVHWM: 64,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
        assert {option: dealer.getsockopt(option) for option in options} == options
        assert dealer.type == zmq.DEALER


def test_no_other_socket_is_made_than_by_the_factory() -> None:
    source = Path(transport.__file__).read_text()
    assert source.count(".socket(") == 1


def test_the_identity_is_this_process() -> None:
    me = transport.identity()
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert (me.pid, me.start_time, me.pid_namespace) == (os.getpid(), started, os.stat("/proc/self/ns/pid").st_ino)


def test_a_caller_asks_again_after_a_silence_and_leaves_no_thread(daemon: FakeDaemon) -> None:
    before = len(os.listdir("/proc/self/task"))
    caller = transport.Caller(daemon.address)
    try:
        daemon.silent = True
        assert caller.ask(Describe("digits"), 0.2) is None
        daemon.silent = False
        assert isinstance(caller.ask(Describe("digits"), SLOW), Described)
    finally:
        caller.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_a_frame_over_the_cap_or_of_nonsense_is_as_good_as_none(isolated: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(os.environ["DATASERVE_ADDRESS"])
        caller = transport.Caller(os.environ["DATASERVE_ADDRESS"])
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(caller.ask(Describe("digits"), 0.5)))
        asking.start()
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"nonsense"])
        router.send_multipart([peer, b"x" * (limits.FRAME_BYTES + 1)])
        asking.join()
        caller.close()
        assert answers == [None]


def served() -> Any:
    from dataserve.client import ServedDataset

    return ServedDataset("digits", batch_size=5)


def link_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dataserve-link"]


def test_a_link_ends_with_its_holder_and_says_goodbye(daemon: FakeDaemon) -> None:
    train = served()
    assert link_threads() == []
    list(train)
    (thread,) = link_threads()
    del train
    thread.join(SLOW)
    assert not thread.is_alive()
    assert len(daemon.of(Close)) == 1
    assert transport._live == []


def test_an_iterator_outlives_its_data_set(daemon: FakeDaemon) -> None:
    batches = iter(served())
    first = [label for (labels,) in itertools.islice(batches, 2) for label in labels]
    assert len(link_threads()) == 1
    assert len(first + [label for (labels,) in batches for label in labels]) == 50


def wakes_of(thread: threading.Thread) -> int:
    for line in Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("no such line")


def test_an_idle_link_sleeps(daemon: FakeDaemon) -> None:
    train = served()
    list(train)
    (thread,) = link_threads()
    time.sleep(0.3)  # the last words of the iteration
    before = wakes_of(thread)
    time.sleep(1.5)
    assert wakes_of(thread) - before < 20


def test_a_fork_has_a_link_of_its_own_and_the_parents_goes_on(daemon: FakeDaemon) -> None:
    train = served()
    list(train)
    pid = os.fork()
    if pid == 0:
        good = len(list(train)) == 10 and len(transport._parked) == 1
        transport._close_all()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert {hello.pid for hello in daemon.of(Hello)} == {os.getpid(), pid}  # type: ignore[attr-defined]
    assert len(list(train)) == 10
    assert len(daemon.of(Hello)) == 2


ENDS = {
    "returns": ("pass", 0),
    "raises": ("raise ZeroDivisionError", 1),
    "exits": ("sys.exit(3)", 3),
    "is interrupted": ("os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)", -signal.SIGINT),
}
BEFORE = "import os, signal, sys, time\nfrom dataserve.client import ServedDataset\n"
USES = "train = ServedDataset('digits', batch_size=5, prefetch=2)\nbatches = iter(train)\nnext(batches)\n"


def run(code: str) -> tuple[subprocess.Popen[str], list[str]]:
    """The process of that code, once it has said `ready`; what it says on standard error goes along."""
    command = [sys.executable, "-c", BEFORE + code]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [process.stdout.readline().strip()]


def end(process: subprocess.Popen[str], said: list[str]) -> tuple[float, int, str]:
    """Let it go on; seconds from there to its end, exit status, standard error."""
    began = time.monotonic()
    try:
        _, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert said == ["ready"], errors
    return time.monotonic() - began, process.returncode, errors


@pytest.mark.parametrize("present", ["answers", "is silent", "is gone"])
@pytest.mark.parametrize("how", ENDS)
def test_a_script_ends_at_once(sealed: Any, isolated: Path, present: str, how: str) -> None:
    code, status = ENDS[how]
    with fake_daemon(*sealed) as daemon:
        process, said = run(f"{USES}print('ready', flush=True)\nsys.stdin.readline()\n{code}")
        daemon.silent = present == "is silent"
        if present != "is gone":
            took_s, returned, errors = end(process, said)
    if present == "is gone":
        took_s, returned, errors = end(process, said)
    assert (returned, took_s < EXIT_S * SLOW) == (status, True), errors
    assert "Exception ignored" not in errors


def test_ctrl_c_ends_the_wait_for_a_daemon(isolated: Path) -> None:
    process, said = run("print('ready', flush=True)\nServedDataset('digits', batch_size=5)")
    assert process.stderr is not None
    first = process.stderr.readline()  # it waits, and says so
    process.send_signal(signal.SIGINT)
    took_s, status, errors = end(process, said)
    assert "dataserve: waiting for a daemon" in first
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert took_s < EXIT_S * SLOW


def test_a_process_short_of_descriptors_is_told_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/proc/self/fd")) - 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 15, used + 15))
    with pytest.raises(MachineError, match=rf"has {used} of {used + 15} file descriptors open.*ulimit -n") as caught:
        transport.Caller("ipc:///nowhere/d.sock")
    assert caught.value.code == "no_access"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + 16, used + 16))
    transport.Caller("ipc:///nowhere/d.sock").close()
