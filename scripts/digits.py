"""Where the demo's digits come from: MNIST that lies here, MNIST downloaded, or scikit-learn's own small digits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOWNLOAD_TIMEOUT_S = 20
DOWNLOAD = "import sys; from torchvision.datasets import MNIST; MNIST(sys.argv[1], download=True)"

TRAIN, TEST = "digits-train", "digits-test"


@dataclass(frozen=True)
class Digits:
    """Two data sets to serve, and what two jobs need to learn them: `train_args` are options of train.py."""

    what: str
    train: dict[str, Any]
    test: dict[str, Any]
    train_args: tuple[str, ...]

    def config(self) -> str:
        """The TOML file for `dataserve start --config`."""
        return "\n".join(_table(name, fields) for name, fields in ((TRAIN, self.train), (TEST, self.test)))


def choose(data: Path | None, environ: Mapping[str, str], checkout: Path, keep: Path) -> Digits:
    """Digits from `--data`, `$DATASERVE_DATA`, `../shared/data`, a download into `keep`, or scikit-learn, in that order.

    Raises ValueError where `--data` holds no MNIST.
    """
    if data is not None:
        root = find_mnist(data)
        if root is None:
            raise ValueError(f"{data} holds no MNIST in torchvision's layout: {data}/MNIST/raw is not there.")
        return mnist(root)
    named = environ.get("DATASERVE_DATA")
    if named and (root := find_mnist(Path(named))):
        return mnist(root)
    if named:
        print(f"$DATASERVE_DATA is {named}, which holds no MNIST/raw.")
    root = find_mnist(checkout.parent / "shared" / "data") or find_mnist(keep) or download(keep)
    if root:
        return mnist(root)
    print("MNIST could not be downloaded: using scikit-learn's bundled handwritten digits.")
    return bundled(keep)


def find_mnist(folder: Path) -> Path | None:
    """torchvision's root for MNIST: the folder itself, or `mnist` in it."""
    for root in (folder, folder / "mnist"):
        if (root / "MNIST" / "raw").is_dir():
            return root.resolve()
    return None


def mnist(root: Path) -> Digits:
    """The whole of MNIST."""

    def half(train: bool) -> dict[str, Any]:
        return {"source": "torchvision:MNIST", "args": {"root": str(root), "train": train}}

    train_args = ("--epochs", "3", "--batch-size", "128", "--min-accuracy", "0.97")
    return Digits(f"MNIST in {root}", half(True), half(False), train_args)


def download(keep: Path) -> Path | None:
    """Torchvision's own download, in a process that can be ended. It appears by one rename, whole or not at all."""
    print(f"Downloading MNIST, for {DOWNLOAD_TIMEOUT_S} s at most.", flush=True)
    partial = keep / "mnist.partial"
    shutil.rmtree(partial, ignore_errors=True)
    command = [sys.executable, "-c", DOWNLOAD, str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        shutil.rmtree(partial, ignore_errors=True)
        return None
    partial.rename(keep / "mnist")
    return find_mnist(keep)


def bundled(keep: Path) -> Digits:
    """scikit-learn's 1,797 digits of 8x8 pixels, a fifth of them held out, as two `.npz` files made once."""
    files = {name: keep / f"{name}.npz" for name in (TRAIN, TEST)}
    if not all(path.exists() for path in files.values()):
        _write_bundled(files)
    train, test = ({"source": f"arrays:{files[name]}"} for name in (TRAIN, TEST))
    train_args = ("--epochs", "100", "--batch-size", "32", "--min-accuracy", "0.95")
    return Digits("scikit-learn's digits", train, test, train_args)


def _write_bundled(files: Mapping[str, Path]) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    source = load_digits()
    images = np.round(source.images * (255 / 16)).astype(np.uint8)[:, None]  # they are 0 to 16
    labels = source.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    cut = len(order) // 5
    for name, rows in ((TEST, order[:cut]), (TRAIN, order[cut:])):
        partial = files[name].with_suffix(".partial.npz")
        np.savez(partial, image=images[rows], label=labels[rows])
        os.replace(partial, files[name])


def _table(name: str, fields: Mapping[str, Any]) -> str:
    lines = ["[[dataset]]", f"name = {_toml(name)}", f"source = {_toml(fields['source'])}"]
    if args := fields.get("args"):
        lines.append("args = { " + ", ".join(f"{key} = {_toml(value)}" for key, value in args.items()) + " }")
    return "\n".join(lines) + "\n"


def _toml(value: str | bool) -> str:
    """A string or truth value of TOML, which JSON writes alike."""
    return json.dumps(value, ensure_ascii=False)
