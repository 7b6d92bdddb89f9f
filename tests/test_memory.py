"""protocol/memory.py: what /proc and the control groups say, laid out as text."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dataserve.protocol.memory import Read, available_bytes
from dataserve.server.pages import read_text

MACHINE = {"/proc/meminfo": "MemTotal: 16 kB\nMemAvailable:    8000 kB\n", "/proc/self/cgroup": ""}
NONE = "9223372036854771712\n"


def files(*more: Mapping[str, str]) -> Read:
    """A machine of those files."""
    there: dict[str, str] = dict(MACHINE)
    for each in more:
        there |= each

    def read(path: str) -> str:
        if path not in there:
            raise FileNotFoundError(path)
        return there[path]

    return read


def group(folder: str, limit: str, usage: int, stat: str, version: int = 2) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": f"{usage}\n", f"{folder}/memory.stat": stat}


def test_without_control_groups_it_is_the_machines() -> None:
    assert available_bytes(files()) == 8000 * 1024


def test_a_limit_counts_with_the_page_cache_as_free() -> None:
    held = {"/proc/self/cgroup": "0::/a/b\n"}
    cache = "anon 5\ninactive_file 300\nactive_file 20\n"
    assert available_bytes(files(held, group("/sys/fs/cgroup/a/b", "1000\n", 900, cache))) == 420


def test_the_tightest_of_all_groups_above_counts() -> None:
    held = {"/proc/self/cgroup": "0::/a/b\n"}
    inner = group("/sys/fs/cgroup/a/b", "max\n", 10, "")
    outer = group("/sys/fs/cgroup/a", "100\n", 40, "")
    assert available_bytes(files(held, inner, outer)) == 60


def test_of_version_1_the_totals_count_and_no_limit_is_none() -> None:
    held = {"/proc/self/cgroup": "4:cpu:/x\n3:memory:/a\n0::/\n"}
    stat = "inactive_file 9000\ntotal_inactive_file 30\ntotal_active_file 5\n"
    limited = group("/sys/fs/cgroup/memory/a", "100\n", 50, stat, 1)
    root = group("/sys/fs/cgroup/memory", NONE, 9, "", 1)
    assert available_bytes(files(held, limited, root)) == 85
    assert available_bytes(files(held, root)) == 8000 * 1024


def test_in_a_container_the_root_of_what_it_sees_has_the_limit() -> None:
    held = {"/proc/self/cgroup": "3:memory:/docker/0123\n"}
    assert available_bytes(files(held, group("/sys/fs/cgroup/memory", "100\n", 70, "", 1))) == 30


def test_a_group_that_holds_more_than_its_limit_has_nothing_left() -> None:
    held = {"/proc/self/cgroup": "0::/\n"}
    assert available_bytes(files(held, group("/sys/fs/cgroup", "100\n", 170, ""))) == 0


@pytest.mark.parametrize("text", ["", "MemFree: 8 kB\n"])
def test_a_machine_that_does_not_say_is_not_guessed_at(text: str) -> None:
    assert available_bytes(files({"/proc/meminfo": text})) is None


def test_this_machine_says() -> None:
    found = available_bytes(read_text)
    assert found is not None
    assert 0 < found < 1 << 50
