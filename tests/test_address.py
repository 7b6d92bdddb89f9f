"""Addresses: preference, form and length."""

from __future__ import annotations

import pytest

from dataserve.protocol import address, limits
from dataserve.protocol.errors import UserError


def test_the_environment_decides_in_order() -> None:
    runtime = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert address.candidates({}, 7) == ["ipc:///tmp/dataserve-7/d.sock"]
    assert address.candidates(runtime, 7) == ["ipc:///run/user/7/dataserve/d.sock", "ipc:///tmp/dataserve-7/d.sock"]
    assert address.candidates({**runtime, "DATASERVE_ADDRESS": "/x/y"}, 7) == ["ipc:///x/y"]


@pytest.mark.parametrize("text", ["x", "relative/d.sock", "tcp://127.0.0.1:5", "ipc://", "", "/tmp/", "/a\0b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        address.normalise(text)
    assert caught.value.code == "bad_address"


def test_a_path_that_is_no_utf8_is_refused_with_a_sentence() -> None:
    with pytest.raises(UserError, match=r"'/tmp/r\\udcff/d.sock' is no UTF-8") as caught:
        address.normalise("/tmp/r\udcff/d.sock")
    assert caught.value.code == "bad_address"
    assert address.candidates({"XDG_RUNTIME_DIR": "/run/\udcff"}, 7) == ["ipc:///tmp/dataserve-7/d.sock"]


def test_a_long_path_is_refused_with_both_lengths_and_the_longest_is_not() -> None:
    longest = "/" + "a" * (limits.SOCKET_PATH_BYTES - 1)
    assert address.normalise(longest) == "ipc://" + longest
    with pytest.raises(UserError, match=r"has 108 bytes; Linux allows 107"):
        address.normalise(longest + "a")
    with pytest.raises(UserError, match=r"has 109 bytes"):
        address.normalise("/" + "é" * 54)


def test_a_runtime_folder_that_is_too_long_is_passed_over() -> None:
    long = {"XDG_RUNTIME_DIR": "/run/" + "x" * 120}
    assert address.candidates(long, 7) == ["ipc:///tmp/dataserve-7/d.sock"]


def test_what_lies_beside_the_socket() -> None:
    name = address.normalise("/run/dataserve/d.sock")
    assert address.socket_path(name) == "/run/dataserve/d.sock"
    assert address.lock_path(name) == "/run/dataserve/d.sock.lock"
    assert address.orders_path(name) == "/run/dataserve/orders"
