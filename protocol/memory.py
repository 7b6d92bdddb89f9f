"""How much memory a process may still take, as Linux tells it: of the machine, and of the control groups that it is in.

Pure: the files of /proc and /sys come through an argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Read = Callable[[str], str]  # the text of that file; raises OSError

_CGROUPS = "/sys/fs/cgroup"
_NO_LIMIT = 1 << 60  #: what version 1 says where there is none is near 2^63


def available_bytes(read: Read) -> int | None:
    """Bytes that can be had without swapping: the least of the machine's MemAvailable and of what each control group
    above this process has left, its page cache counted as free. None where the machine does not say."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    except OSError:
        return None
    if found is None:
        return None
    return min([int(found[1]) * 1024, *_left(read)])


def _left(read: Read) -> Iterator[int]:
    """What each control group of this process that has a limit has left."""
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            yield from _upwards(read, path, "" if controllers == "" else "/memory")


def _upwards(read: Read, path: str, mount: str) -> Iterator[int]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if mount else ("memory.max", "memory.current")
    parts = path.strip("/").split("/") if path.strip("/") else []
    for depth in range(len(parts), -1, -1):
        folder = "/".join([_CGROUPS + mount, *parts[:depth]])
        try:
            limit, usage = (read(f"{folder}/{name}").strip() for name in names)
            statistics = read(f"{folder}/memory.stat")
        except OSError:
            continue  # the root has none, and a container does not see what is above it
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            whole = "total_" if mount else ""  # version 1 tells a group's own pages apart from its children's
            cached = re.findall(rf"^{whole}(?:in)?active_file (\d+)", statistics, re.MULTILINE)
            yield max(0, int(limit) - int(usage) + sum(map(int, cached)))
