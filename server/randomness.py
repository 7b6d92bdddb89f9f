"""Random transforms are refused: what is stored is frozen, and the same augmentation would come in every epoch.

Two signs, each looked for where the operator's code touches rows:

- some samples, spread over the source, come out differently under two seeds here, or in a second process with a seed
  and a hash seed of its own (before the build, `check`);
- preparing a row moves a global generator: torch's, numpy's or Python's (before the build, and around every chunk of
  it, `refuse_moved`), whether or not the outcome differs this time.

With `allow_random` the global generators start anew for each row from (fingerprint, source index), so that the rows are
the same however often, wherever and in whatever order they are made. A generator of the operator's own is out of reach
of that; if rows still differ they are refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dataserve.protocol.errors import DataError, MachineError, UserError, from_code

from . import sources
from .reading import Reader
from .schema import Schema
from .sources import Source
from .spec import DatasetSpec

ROWS = 8  #: samples that are looked at
SECOND_S = 300.0  #: what the second process may take, its imports included
_END_S = 5.0
_NAMES = ("Python's random", "numpy.random", "torch")
_REMEDY = (
    "What is stored is the same in every epoch: put random augmentation into the client's transform=, which sees each "
    "batch anew. Or keep one draw a row with --allow-random."
)

States = tuple[object, ...]


def states() -> States:
    """Where the global generators stand: Python's, numpy's, torch's where torch is loaded."""
    kind, keys, place, *gauss = np.random.get_state(legacy=True)
    torch = sys.modules.get("torch")
    return (
        random.getstate(),
        (kind, np.asarray(keys).tobytes(), place, *gauss),
        None if torch is None else torch.random.default_generator.get_state().numpy().tobytes(),
    )


def seed_row(key: str, index: int) -> None:
    """Starts the global generators for the sample at that index, under that key; torch is loaded for it where it is
    installed, for the row itself may load it and then draw."""
    _load_torch()
    _seed(int.from_bytes(hashlib.sha256(f"{key}:{index}".encode()).digest()[:8], "little"))


def check(source: Source, reader: Reader) -> None:
    """Looks for both signs on `ROWS` samples. Raises `bad_transform` or `bad_source` with the sample and the remedy.

    Costs those samples twice here and once in a process of its own, which imports at the same time.
    """
    spec = reader.spec
    if spec.transform is None and not spec.is_factory:
        return  # nothing of the operator's touches a row
    rows = [row for row in probes(source.length, ROWS) if row not in reader.condemned]
    second = _start_second(spec, rows, source.row_key)
    before = _Saved()
    try:
        once = _digests(reader, source, rows, 1, watch=source.row_key is None)
        again = _digests(reader, source, rows, 2, watch=False)
        _compare(reader, source, once, again, "under another seed")
        _compare(reader, source, once, _hear_second(second), "in another process")
    finally:
        before.restore()
        second.kill()
        second.communicate()


def refuse_moved(before: States, source: Source, reader: Reader, rows: range) -> None:
    """Raises where a global generator has moved since then, while these rows were made: the row is looked for. None that
    moves one again is no reason: a library or a model that a first row loads may draw once."""
    if source.row_key is not None or states() == before:
        return
    for index in rows:
        here = states()
        try:
            reader.read(index)
        except StopIteration:
            return
        except DataError:  # a bad sample, and told as one
            continue
        if moved := _moved(here):
            raise _refusal(reader, source, index, f"moved the global generator of {moved}")


def second_look(spec: DatasetSpec, rows: Sequence[int], row_key: str | None) -> dict[int, str]:
    """What the second process says: a hash of each of these samples that can be read. Raises what opening raises."""
    from . import pool

    source = sources.open_source(spec)
    try:
        source.row_key = row_key
        pool.one_native_thread()
        return _digests(Reader(source, spec), source, rows, 3, watch=False)
    finally:
        source.close()


def probes(length: int | None, count: int) -> list[int]:
    """So many places spread over a source, the first and the last among them; the first ones of an unknown length."""
    if length is None or length <= count:
        return list(range(count if length is None else length))
    return sorted({place * (length - 1) // (count - 1) for place in range(count)})


class _Saved:
    """The global generators as they stand, to be put back."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=True)
        self._torch = None if torch is None else torch.random.default_generator.get_state()

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._torch is not None:
            sys.modules["torch"].random.default_generator.set_state(self._torch)


@functools.cache
def _load_torch() -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.random.default_generator.manual_seed(seed & (2**63 - 1))


def _moved(before: States) -> str:
    """Names of the generators that stand elsewhere than before. One whose library was loaded meanwhile is new."""
    pairs = zip(_NAMES, before, states(), strict=True)
    return " and ".join(name for name, one, other in pairs if one is not None and one != other)


def _digests(reader: Reader, source: Source, rows: Sequence[int], seed: int, *, watch: bool) -> dict[int, str]:
    """A hash of each sample, all under that seed; bad ones are left out, and told when their turn comes."""
    found = {}
    _seed(seed)
    with contextlib.suppress(DataError, StopIteration):  # what the first row loads may draw once, and is no sign
        reader.read(rows[0] if rows else 0)
    for index in rows:
        before = states()
        try:
            sample = reader.read(index)
            if watch and (moved := _moved(before)):
                raise _refusal(reader, source, index, f"moved the global generator of {moved}")
            found[index] = _digest(sample, index)
        except StopIteration:
            break
        except DataError:
            continue
    return found


def _digest(sample: Any, index: int) -> str:
    """Of a sample's structure, and its values as they would be stored."""
    schema = Schema.of(sample, index)
    total = hashlib.sha256(json.dumps(schema.structure).encode())
    for values in schema.values(sample, index):
        total.update(f"{values.dtype.str} {values.shape};".encode() + np.ascontiguousarray(values).tobytes())
    return total.hexdigest()


def _compare(reader: Reader, source: Source, once: dict[int, str], again: dict[int, str], where: str) -> None:
    for index in sorted(once.keys() | again.keys()):
        if once.get(index) != again.get(index):
            raise _refusal(reader, source, index, f"comes out differently {where}")


def _refusal(reader: Reader, source: Source, index: int, sign: str) -> UserError:
    spec = reader.spec
    what = f"The transform {spec.transform!r}" if spec.transform is not None else f"The source {spec.source!r}"
    remedy = _REMEDY
    if source.row_key is not None:
        remedy = "--allow-random seeds Python's, numpy's and torch's global generators: draw from these alone."
    code = "bad_source" if spec.transform is None else "bad_transform"
    return UserError(code, f"{what} is random: sample {index} {sign}.", remedy)


def _start_second(spec: DatasetSpec, rows: Sequence[int], row_key: str | None) -> subprocess.Popen[bytes]:
    """`prepare` once more, asked for these samples' hashes. It ends when its stdin does."""
    request: dict[str, Any] = {"spec": spec.to_map(), "rows": list(rows), "row_key": row_key}
    request |= {"store": "", "workers": None, "build": False}
    environ = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "dataserve.server.prepare"], stdin=pipe, stdout=pipe, env=environ
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    except OSError as error:
        text = f"The process that tries the samples a second time cannot be started: {error.strerror}."
        raise MachineError("worker_died", text, "Raise the limits on memory or processes.") from None
    return process


def _hear_second(process: subprocess.Popen[bytes]) -> dict[int, str]:
    """Its hashes. Raises what it raised, `worker_died` or `stuck`."""
    for line in _lines(process):
        words = json.loads(line)
        if words["event"] == "rows":
            return {int(index): digest for index, digest in words["digests"].items()}
        if words["event"] == "failed":
            raise from_code(words["code"], words["text"], words["remedy"])
    process.wait(_END_S)
    text = f"The process that tries some samples a second time ended with status {process.returncode} without a word."
    raise MachineError("worker_died", text, "Prepare again; see the log, and the kernel's (dmesg).")


def _lines(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What it says, line by line, until it has ended. Raises `stuck`. Its stdin stays open: its end would end it."""
    assert process.stdout is not None
    deadline, rest = time.monotonic() + SECOND_S, b""
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN | select.POLLHUP)
    while True:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            text = f"The process that tries some samples a second time (pid {process.pid}) took {SECOND_S:.0f} s."
            raise MachineError("stuck", text, "See what the source or the transform waits for.")
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            return
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
