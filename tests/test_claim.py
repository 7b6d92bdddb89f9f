"""server/claim.py: who may bind an address, and what is never taken for a stale socket."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataserve.protocol.address import lock_path
from dataserve.protocol.errors import DataserveError, MachineError, UserError
from dataserve.server.claim import Claim, claim, clear_orders, holder, make_folder


def at(folder: Path) -> str:
    return f"ipc://{folder}/d.sock"


@contextmanager
def claimed(*addresses: str) -> Iterator[Claim]:
    held = claim(addresses)
    try:
        yield held
    finally:
        held.release()


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        yield server


def refusal(*addresses: str) -> DataserveError:
    with pytest.raises(DataserveError) as caught:
        claim(addresses)
    return caught.value


def test_the_folder_and_the_lock_are_ones_own_and_nothing_is_left(isolated: Path) -> None:
    folder = isolated / "fresh" / "run"
    with claimed(at(folder)) as held:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "d.sock.lock").stat().st_mode) == 0o600
        assert int((folder / "d.sock.lock").read_text()) == os.getpid() == holder(held.address)
    assert os.listdir(folder) == []
    assert holder(at(folder)) is None


def test_a_second_one_is_refused_with_the_first_ones_pid_and_the_remedy(isolated: Path) -> None:
    with claimed(at(isolated / "run")):
        error = refusal(at(isolated / "run"))
    assert error.code == "daemon_running"
    assert f"pid {os.getpid()}" in error.text
    assert "dataserve stop" in error.remedy
    assert "TOML file" in error.remedy
    with claimed(at(isolated / "run")):
        pass  # the refusal left nothing in the way


def test_a_stale_socket_and_a_dead_ones_lock_are_no_obstacle(isolated: Path) -> None:
    with listening(isolated / "run" / "d.sock"):
        pass
    (isolated / "run" / "d.sock.lock").write_text("99999999\n")
    with claimed(at(isolated / "run")):
        assert not (isolated / "run" / "d.sock").exists()


def test_a_socket_where_somebody_listens_stays_though_its_lock_is_gone(isolated: Path) -> None:
    path = isolated / "run" / "d.sock"
    with listening(path):
        assert refusal(at(isolated / "run")).code == "daemon_running"
        assert stat.S_ISSOCK(path.stat().st_mode)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_replaced(isolated: Path, kind: str) -> None:
    path = isolated / "run" / "d.sock"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    assert refusal(at(isolated / "run")).code == "bad_address"
    assert os.listdir(isolated / "run") == ["d.sock"]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o1777])
def test_a_folder_that_others_may_enter_is_refused_with_its_mode(isolated: Path, mode: int) -> None:
    folder = isolated / "open"
    folder.mkdir()
    folder.chmod(mode)
    error = refusal(at(folder))
    assert error.code == "unsafe_folder"
    assert f"{mode:04o}" in error.text


def test_a_link_in_the_place_of_the_folder_is_refused(isolated: Path) -> None:
    (isolated / "elsewhere").mkdir(mode=0o700)
    (isolated / "link").symlink_to(isolated / "elsewhere")
    with pytest.raises(MachineError, match="symbolic link"):
        make_folder(at(isolated / "link"))
    assert os.listdir(isolated / "elsewhere") == []


def test_a_link_in_the_place_of_the_lock_is_refused_and_its_target_untouched(isolated: Path) -> None:
    target = isolated / "target"
    target.write_text("precious")
    (isolated / "run" / "d.sock.lock").symlink_to(target)
    assert refusal(at(isolated / "run")).code == "no_access"
    assert target.read_text() == "precious"


def test_a_fifo_in_the_place_of_the_lock_is_refused_and_holds_nobody(isolated: Path) -> None:
    os.mkfifo(isolated / "run" / "d.sock.lock")
    assert holder(at(isolated / "run")) is None
    error = refusal(at(isolated / "run"))
    assert (error.code, "is no regular file" in error.text) == ("bad_address", True)


def test_a_pid_that_finds_no_room_is_a_sentence(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    error = refusal(at(isolated / "run"))
    assert (error.code, "cannot be written into its lock" in error.text) == ("no_space", True)


def test_what_was_removed_is_taken_again_and_a_second_one_is_still_refused(isolated: Path) -> None:
    folder = isolated / "run"
    with claimed(at(folder)) as held, listening(folder / "d.sock"):
        held.bound()
        assert not held.renew()
        (folder / "d.sock").unlink()
        assert held.renew(), "the socket alone"
        shutil.rmtree(folder)
        assert held.renew(), "all of it"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert refusal(at(folder)).code == "daemon_running"


def test_an_address_that_another_has_taken_meanwhile_is_left_to_it(isolated: Path) -> None:
    folder = isolated / "run"
    with claimed(at(folder)) as held:
        (folder / "d.sock.lock").unlink()
        with claimed(at(folder)), pytest.raises(UserError, match="already listens"):
            held.renew()
        assert held.renew()


def test_orders_of_earlier_clients_are_removed_and_nothing_behind_a_link(isolated: Path) -> None:
    orders, other = isolated / "run" / "orders", isolated / "other"
    for folder in (orders, other):
        folder.mkdir()
        (folder / "0-1.npy").write_text("")
    clear_orders(at(isolated / "run"))
    assert os.listdir(orders) == []
    orders.rmdir()
    clear_orders(at(isolated / "run"))  # none there
    orders.symlink_to(other)
    clear_orders(at(isolated / "run"))
    assert os.listdir(other) == ["0-1.npy"]


def test_anothers_folder_is_refused_faked(isolated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    error = refusal(at(isolated / "run"))
    assert (error.code, "not to 12345" in error.text) == ("unsafe_folder", True)


def test_the_first_usable_address_is_taken_and_the_first_failure_told(isolated: Path) -> None:
    (isolated / "file").write_text("")
    with claimed(at(isolated / "file" / "x"), at(isolated / "run")) as held:
        assert held.address == at(isolated / "run")
    assert str(isolated / "file" / "x") in refusal(at(isolated / "file" / "x"), at(isolated / "file" / "y")).text


def test_a_running_daemon_ends_the_search_for_an_address(isolated: Path) -> None:
    with claimed(at(isolated / "run")), pytest.raises(UserError, match="already listens"):
        claim([at(isolated / "run"), at(isolated / "other")])
    assert not (isolated / "other").exists()


def test_only_the_socket_that_was_bound_here_is_removed(isolated: Path) -> None:
    path = isolated / "run" / "d.sock"
    held = claim([at(isolated / "run")])
    with listening(path):
        held.bound()
        assert held.ours
        os.rename(path, isolated / "moved")  # somebody empties the folder, and another daemon starts in it
        os.unlink(lock_path(held.address))
        with listening(path), claimed_lock(held.address):
            held.release()
            assert path.exists()
            assert os.path.exists(lock_path(held.address))


@contextmanager
def claimed_lock(address: str) -> Iterator[None]:
    """Another daemon's lock, as a file of its own."""
    with open(lock_path(address), "x"):
        yield
