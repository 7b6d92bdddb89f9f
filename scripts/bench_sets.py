"""The data sets of bench_client and bench_jobs: a daemon of their own that serves them, and where all lies."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("DATASERVE_DATA") or ROOT.parent / "shared" / "data")
DATASERVE = (sys.executable, "-P", "-m", "dataserve.server.cli")
LIMIT_S = 600.0
PHOTOS_TIMES = 4  #: the photographs, so many times over: an epoch of 370 rows is over in milliseconds


class Bench(NamedTuple):
    """One row of the table's sets: a served data set, a batch size, and (mean, std) on the 0 to 1 scale or None."""

    name: str
    dataset: str
    batch: int
    normalize: tuple[float, float] | None


BENCHES = (
    Bench("mnist-64", "mnist", 64, (0.1307, 0.3081)),
    Bench("mnist-256", "mnist", 256, (0.1307, 0.3081)),
    Bench("cifar10-512", "cifar10", 512, None),
    Bench("photos-64", "photos", 64, None),
)


class Served(NamedTuple):
    """A data set that is being served: the folder of its store and of its source."""

    store: str
    source: str


@contextlib.contextmanager
def serving(names: set[str]) -> Iterator[tuple[dict[str, Served], dict[str, str], Path]]:
    """A daemon with those data sets, prepared: (by name, the environment of its clients, a scratch folder); all gone at the end."""
    place = Path(tempfile.mkdtemp(prefix="ds-bench-", dir="/tmp"))  # a socket's path has 107 bytes at most
    environ = client_environ(place)
    try:
        sources = {name: _SOURCES[name](place) for name in sorted(names)}
        (place / "data.toml").write_text("".join(toml for _, toml in sources.values()))
        try:
            dataserve("start", "--config", str(place / "data.toml"), "--detach", environ=environ)
            status = json.loads(dataserve("status", "--json", environ=environ))
            stores = {row["name"]: row["path"] for row in status["datasets"]}
            yield {name: Served(stores[name], sources[name][0]) for name in names}, environ, place
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                dataserve("stop", environ=environ)
    finally:
        shutil.rmtree(place)


def client_environ(place: Path) -> dict[str, str]:
    """The environment without a user's daemon, launcher or store, and with those in that folder."""
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONSAFEPATH")
    kept = {key: value for key, value in os.environ.items() if key not in foreign and not key.startswith("DATASERVE_")}
    own = {"XDG_RUNTIME_DIR": place, "DATASERVE_ADDRESS": f"ipc://{place}/d.sock", "DATASERVE_STORE": place / "store"}
    return kept | {key: str(value) for key, value in own.items()}


def dataserve(*arguments: str, environ: dict[str, str]) -> str:
    """What a command says. Raises `CalledProcessError`; the command's own words are on stderr."""
    return subprocess.run(
        (*DATASERVE, *arguments), env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    ).stdout


def _mnist(_place: Path) -> tuple[str, str]:
    root = DATA / "mnist"
    return str(root), _dataset("mnist", "torchvision:MNIST", f'args = {{ root = "{root}", train = true }}\n')


def _cifar10(place: Path) -> tuple[str, str]:
    with tarfile.open(DATA / "cifar10" / "cifar10_jpg.tar.gz") as archive:
        archive.extractall(place, (member for member in archive if "/train/" in member.name), filter="data")
    folder = place / "cifar10" / "train"
    return str(folder), _dataset("cifar10", f"imagefolder:{folder}")


def _photos(place: Path) -> tuple[str, str]:
    for item in sorted((DATA / "photos" / "images").glob("*/*")):
        for number in range(PHOTOS_TIMES):
            target = place / "photos" / item.parent.name / f"{item.stem}_{number}{item.suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(item)
    return str(place / "photos"), _dataset("photos", f"imagefolder:{place}/photos", 'resize = "256"\ncrop = "224"\n')


def _dataset(name: str, source: str, more: str = "") -> str:
    return f'[[dataset]]\nname = "{name}"\nsource = "{source}"\n{more}\n'


_SOURCES: dict[str, Any] = {"mnist": _mnist, "cifar10": _cifar10, "photos": _photos}
