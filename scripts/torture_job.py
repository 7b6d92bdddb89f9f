"""One job of scripts/torture_jobs: draws batches as told in JSON, and writes down each before it takes the next.

    python scripts/torture_job.py '{"job": "a", "out": "/tmp/a", "batch_size": 64}'

A record is `HEADER` (when it was asked for and given, its epoch and start, the cursor behind it, rows) and the rows as uint32: one
`write`, so that a kill leaves whole records. What a batch holds is compared with the rows that it says it has.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = struct.Struct("<2d5I")
NAME = "rows"  #: the data set's, for all jobs of the harness


@dataclass
class Wanted:
    """What a job does. Everything but `out`, `job` and `batch_size` has the value of an undisturbed lone run."""

    out: str  #: the records; beside it `.state` (its last cursor), `.ready` (it has had its first batch), `.worker-0` (a pid)
    job: str
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    last: str = "even"
    workers: int = 0
    method: str = "fork"
    prefetch: int | None = None
    epochs: int = 1
    batches: int | None = None  #: it ends after so many
    pace_s: float = 0.0  #: it computes for so long between two
    idle: tuple[int, float] = (0, 0.0)  #: after so many batches it sits for so many seconds
    timeout_s: float = 60.0
    state: dict[str, Any] | None = None
    stop: str = field(default="/nonexistent")  #: it ends where that file is there


def main(wanted: Wanted) -> None:
    """Run the job to its end."""
    # A shell that starts the harness in the background has its children ignore Ctrl-C, which a user's job does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from torch.utils.data import DataLoader

    from dataserve.client import ServedDataset

    train = ServedDataset(
        NAME,
        batch_size=wanted.batch_size,
        job=wanted.job,
        seed=wanted.seed,
        rank=wanted.rank,
        world_size=wanted.world_size,
        last=wanted.last,
        prefetch=wanted.prefetch,
        info=True,
        timeout_s=wanted.timeout_s,
    )
    if wanted.state is not None:
        train.load_state_dict(wanted.state)
    loader: Iterable[Any] = train
    if wanted.workers:
        note = functools.partial(note_worker, wanted.out)
        loader = DataLoader(
            train, None, num_workers=wanted.workers, multiprocessing_context=wanted.method, worker_init_fn=note
        )
    out = os.open(wanted.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    done = 0
    for _ in range(wanted.epochs):
        asked_s, given = time.monotonic(), 0
        for batch, info in loader:
            given_s, given, done = time.monotonic(), given + 1, done + 1
            compare(batch, info.rows)
            state = train.state_dict(given) if wanted.workers else train.state_dict()
            rows = info.rows.numpy().astype("<u4")
            cursor = state["epoch"], state["position"]
            os.write(out, HEADER.pack(asked_s, given_s, info.epoch, info.start, *cursor, len(rows)) + rows.tobytes())
            if done == 1:
                Path(wanted.out + ".ready").touch()
            Path(wanted.out + ".new").write_text(json.dumps(state))
            os.replace(wanted.out + ".new", wanted.out + ".state")
            if done == wanted.batches or os.path.exists(wanted.stop):
                return
            if done == wanted.idle[0]:
                time.sleep(wanted.idle[1])
            time.sleep(wanted.pace_s)
            asked_s = time.monotonic()


def note_worker(out: str, worker: int) -> None:
    """Tell the harness which process a loader worker is."""
    Path(f"{out}.worker-{worker}").write_text(str(os.getpid()))


def compare(batch: Any, rows: Any) -> None:
    """The label is the row's number, and so are the first four bytes of its image."""
    pixels = batch["image"].reshape(len(rows), -1)[:, :4].contiguous().numpy().view("<u4").ravel()
    if not (batch["label"] == rows).all() or not (pixels == rows.numpy()).all():
        raise AssertionError(f"the batch of rows {rows[:5].tolist()}... holds other rows")


if __name__ == "__main__":
    main(Wanted(**json.loads(sys.argv[1])))
