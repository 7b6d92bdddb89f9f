"""What every test gets: an environment of its own, a check for leaks, and the real data where it is there."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
LEAK_GRACE_S = 5.0

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU. Torch is imported only if such a test is there: it takes seconds."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for this test alone, holding its runtime folder, store and caches; no user's daemon or launcher is seen.

    It lies in /tmp, not in `tmp_path`: a socket's path has 107 bytes at most.
    """
    base = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))
    for name in [name for name in os.environ if name.startswith("DATASERVE_") and name != "DATASERVE_DATA"]:
        monkeypatch.delenv(name)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (base / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    # The address stands alone where it is named; without it a client would also try the user's own in /tmp.
    monkeypatch.setenv("DATASERVE_ADDRESS", f"ipc://{base}/run/d.sock")
    monkeypatch.setenv("DATASERVE_STORE", str(base / "store"))
    yield base
    shutil.rmtree(base)


@pytest.fixture(autouse=True)
def no_leaks(isolated: Path) -> Iterator[None]:
    """After the test there are the descriptors, threads and processes of before it, some seconds' grace given.

    What a fixture of a wider scope holds was there before.
    """
    before = _held()
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    while leaked := (_held() - before) | _detached(isolated):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail(f"The test left behind: {', '.join(sorted(leaked))}")
        time.sleep(0.02)


def _detached(base: Path) -> set[str]:
    """Processes that live in the test's folder, a daemon's among them, whoever their parent is by now."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or another user's
                if str(base).encode() in (entry / "environ").read_bytes():
                    found.add(f"process {entry.name}")
    return found


def _held() -> set[str]:
    """Descriptors, threads and children of this process, each by a name that says what it is."""
    # multiprocessing keeps one tracker a process until it ends, and the GPU's driver its devices.
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    held = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is gone by now
            target = os.readlink(f"/proc/self/fd/{number}")
            if int(number) != getattr(tracker, "_fd", None) and not target.startswith("/dev/nvidia"):
                held.add(f"descriptor {number} ({target})")
    held |= {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/self/task/{task}/children").read_text().split()
            held |= {f"child {pid}" for pid in children if int(pid) != getattr(tracker, "_pid", None)}
    return held


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder that holds `mnist/`, `photos/` and more: `$DATASERVE_DATA`, else `../shared/data`."""
    folder = Path(os.environ.get("DATASERVE_DATA") or CHECKOUT.parent / "shared" / "data").resolve()
    if (folder / "MNIST" / "raw").is_dir():  # the variable may also point at MNIST itself, as scripts/demo takes it
        folder = folder.parent
    if not folder.is_dir():
        pytest.skip(f"no data in {folder}: set DATASERVE_DATA")
    return folder


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """torchvision's root for MNIST, wherever `$DATASERVE_DATA`, else `../shared/data`, has it."""
    folder = Path(os.environ.get("DATASERVE_DATA") or CHECKOUT.parent / "shared" / "data").resolve()
    for root in (folder, folder / "mnist"):
        if (root / "MNIST" / "raw").is_dir():
            return root
    pytest.skip(f"no MNIST/raw in {folder}: set DATASERVE_DATA")
