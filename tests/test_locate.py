"""client/locate: finding the daemon, waiting for it, and saying what failed where."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataserve.client import locate
from dataserve.protocol.address import lock_path, socket_path
from dataserve.protocol.errors import ServerError, UserError
from dataserve.protocol.messages import Describe, Error, Preparing

from .fakes import FakeDaemon, fake_daemon
from .stores import write_store


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_store(tmp_path_factory.mktemp("located"), {"label": np.arange(3)})


@pytest.fixture
def address(isolated: Path) -> str:
    return os.environ["DATASERVE_ADDRESS"]


@pytest.fixture
def stale(address: str) -> str:
    """A socket that a dead daemon has left."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(socket_path(address))
    return address


def test_the_first_address_that_answers_is_taken(sealed: Any, address: str) -> None:
    with fake_daemon(*sealed):
        found, described = locate.describe("digits", ["ipc:///nowhere/d.sock", address], 5.0)
    assert found == address
    assert (described.rows, described.store_id) == (3, sealed[1].id)


def test_nobody_there_lists_every_address_and_what_to_do(address: str) -> None:
    with pytest.raises(ServerError) as caught:
        locate.describe("digits", ["ipc:///nowhere/d.sock", address], 0.3, io.StringIO())
    assert caught.value.code == "no_daemon"
    text = str(caught.value)
    assert "ipc:///nowhere/d.sock (no socket there)" in text
    assert f"{address} (no socket there)" in text
    assert "dataserve start" in text


@pytest.mark.parametrize(
    ("pid", "words"),
    [(os.getpid(), "is alive"), (2**22 + 1, "is dead"), (None, "no daemon has left")],
    ids=["alive", "dead", "unknown"],
)
def test_a_socket_where_nobody_answers_says_whether_its_daemon_lives(stale: str, pid: int | None, words: str) -> None:
    if pid is not None:
        Path(lock_path(stale)).write_text(f"{pid}\n")
    with pytest.raises(ServerError, match=f"socket there but nobody answers, .*{words}"):
        locate.describe("digits", [stale], 0.6, io.StringIO())


def test_a_file_and_a_socket_of_somebody_else_are_not_spoken_to(
    stale: str, isolated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = isolated / "run" / "file"
    file.touch()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.getuid() == 0:
        os.chown(socket_path(stale), 54321, -1)
    with pytest.raises(ServerError, match=r"another kind of file.*belongs to user"):
        locate.describe("digits", [f"ipc://{file}", stale], 0.3, io.StringIO())


def test_a_daemon_that_comes_late_is_waited_for_with_one_line(
    sealed: Any, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "QUIET_S", 0.2)
    out = io.StringIO()
    daemons: list[FakeDaemon] = []
    timer = threading.Timer(1.0, lambda: daemons.append(FakeDaemon(address, *sealed)))
    timer.start()
    try:
        found, _ = locate.describe("digits", [address], 10.0, out)
    finally:
        timer.join()
        daemons[0].stop()
    assert found == address
    assert out.getvalue().splitlines() == [
        f"dataserve: waiting for a daemon at {address}; start one: dataserve start SOURCE"
    ]


def test_a_quick_daemon_is_found_without_a_word(sealed: Any) -> None:
    out = io.StringIO()
    with fake_daemon(*sealed) as daemon:
        began = time.monotonic()
        locate.describe("digits", [daemon.address], 5.0, out)
        assert time.monotonic() - began < 2
    assert out.getvalue() == ""


def test_an_unknown_data_set_is_refused_at_once_with_the_names_there_are(
    sealed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = UserError("unknown_dataset", "There is no data set 'digit'.", "There are: digits.")
    monkeypatch.setattr(FakeDaemon, "_described", lambda self: Error.of(refusal))
    with fake_daemon(*sealed) as daemon, pytest.raises(UserError, match="There are: digits") as caught:
        locate.describe("digit", [daemon.address], 60.0)
    assert caught.value.code == "unknown_dataset"


def stages() -> list[Preparing]:
    return [Preparing("digits", "preparing", done, 100, eta_s) for done, eta_s in ((0, None), (37, 12.4), (99, 0.2))]


def test_preparation_shows_its_progress_in_one_line_of_a_terminal(sealed: Any) -> None:
    out = Terminal()
    with fake_daemon(*sealed) as daemon:
        daemon.preparing = stages()
        locate.describe("digits", [daemon.address], 0.5, out)  # each wait is longer than the time-out of silence
    assert out.getvalue().split("\r\x1b[K") == [
        "",
        "dataserve: waiting for data set 'digits': 0 %",
        "dataserve: waiting for data set 'digits': 37 %, 12 s left",
        "dataserve: waiting for data set 'digits': 99 %, 0 s left\n",
    ]


def test_elsewhere_progress_is_a_line_each_ten_seconds(sealed: Any) -> None:
    out = io.StringIO()
    with fake_daemon(*sealed) as daemon:
        daemon.preparing = stages()
        locate.describe("digits", [daemon.address], 5.0, out)
        assert len(daemon.of(Describe)) == 4
    assert out.getvalue() == "dataserve: waiting for data set 'digits': 0 %\n"


def test_a_daemon_that_has_answered_once_is_not_asked_to_be_started(
    sealed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "QUIET_S", 0.1)
    out, answers = io.StringIO(), iter([stages()[0], None, None])
    with fake_daemon(*sealed) as daemon:
        ask = locate._ask
        monkeypatch.setattr(locate, "_ask", lambda *of: time.sleep(0.1) or next(answers, None) or ask(*of))
        locate.describe("digits", [daemon.address], 5.0, out)
    assert out.getvalue() == "dataserve: waiting for data set 'digits': 0 %\n"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Preparing("d", "preparing", 7, None, None), "7 rows"),
        (Preparing("d", "preparing", 50, 200, 119.6), "25 %, 2 min left"),
        (Preparing("d", "confirming", 200, 200, None), "confirming, 100 %"),
    ],
)
def test_progress_in_words(reply: Preparing, text: str) -> None:
    assert locate.describe_progress(reply) == text
