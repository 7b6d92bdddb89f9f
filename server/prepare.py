"""Prepares one data set and ends: `python -m dataserve.server.prepare`, a child of the daemon or of the command line.

One JSON line comes in on stdin, JSON lines go out on stdout (`Reporter`); the end of stdin means that the parent is
gone, and this process ends with its workers. What is half made stays below `.building`, where no client looks.

    request   {"spec": {...}, "store": ROOT, "workers": N | null, "build": bool, "sample_timeout_s": s | null}
              and maybe "confirm": true, or "rows": [n, ...] and "row_key": text | null
    verdict   {"hit": bool, "fingerprint": hex | null, "reasons": [...]}
    waiting   {"pid": n}                                       another process builds the same; its progress follows
    scanned   {"pictures": n, "classes": n, "extensions": {".jpg": n}, "unlike": {".gif": n}, "left_out": {why: n},
              "listed": [[path, why]]}
    space     {"need_bytes": n | null, "free_bytes": n}        null: the source does not say how many samples it has
    iterated  {}                                               the source says no length: one process reads it to its end
    resuming  {"done": n, "total": n | null}                   an interrupted build goes on
    progress  {"stage": "open" | "prepare" | "seal", "done": n, "total": n | null, "rate": rows/s | null, "eta_s": s | null}
    bad       {"index": n, "path": text | null, "stage", "cause"}      a sample that cannot be stored: the first 100
    bad_samples  {"count": n, "table": path | null, "remedy": text | null}     all of them, and the file that lists them
    uniform   {"column", "count": n, "rows": [n, ...], "of": n}     rows that are nearly one value: a warning, with the first
    sealed    {"path", "id", "fingerprint", "rows", "size_bytes", "hit"}
    confirming {}                                              some rows of what is there are prepared again
    confirmed {"rows": n}                                      and are as they are stored; a row that is not fails
    rows      {"digests": {index: hex}}                        what was asked for by "rows" (randomness.py), and nothing else
    failed    {"code", "text", "remedy"}

Exit status: 0 done, 1 failed, 4 bad samples. With `build` false the answer comes from the record of the last
preparation, without importing the source's libraries; a miss is no failure then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from dataserve.protocol.errors import DataserveError, ServerError, UserError

from . import build, confirm, fingerprint, leftovers, randomness, store
from .report import Reporter
from .spec import DatasetSpec

REQUEST_BYTES = 1024 * 1024
BAD_SAMPLES = 4
_BAD_SAMPLE_CODES = ("bad_sample", "bad_schema")


def main() -> int:
    """Reads the request, answers it, returns the exit status."""
    requests, answers = _take_streams()
    reporter = Reporter(answers)
    try:
        request = _read_request(requests)
        threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
        _answer(request, reporter)
    except DataserveError as error:
        return _failed(reporter, error)
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - a fault of ours: the trace goes to stderr, a sentence to the parent
        traceback.print_exc()
        return _failed(
            reporter, ServerError("internal", f"{type(error).__name__}: {error}", "Report this, with the log.")
        )
    finally:
        reporter.close()
    return 0


def _answer(request: dict[str, Any], reporter: Reporter) -> None:
    spec = DatasetSpec.from_map(request["spec"])
    if "rows" in request:
        reporter.rows(randomness.second_look(spec, request["rows"], request["row_key"]))
        return
    root = store.make_root(request["store"])
    verdict = fingerprint.recall(root, spec)
    if verdict.hit:
        assert verdict.path is not None
        reporter.verdict(verdict)
        if request["build"]:
            leftovers.clean(root, spec.name)
        sealed = store.open_sealed(verdict.path)
        reporter.sealed(sealed, hit=True)
        if request.get("confirm"):
            reporter.confirming()
            reporter.confirmed(confirm.confirm(spec, sealed))
    elif not request["build"]:
        reporter.verdict(verdict)
    else:
        timeout_s = request.get("sample_timeout_s")
        build.Build(spec, root, request["workers"], reporter, timeout_s).run(verdict)


def _failed(reporter: Reporter, error: DataserveError) -> int:
    reporter.failed(error)
    return BAD_SAMPLES if error.code in _BAD_SAMPLE_CODES else 1


def _take_streams() -> tuple[int, int]:
    """stdin and stdout under private descriptors: what user code prints goes to stderr, and it reads nothing."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read_request(handle: int) -> dict[str, Any]:
    """The one line. Raises `bad_option`."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(handle, 65536)
        data += piece
        if not piece or len(data) > REQUEST_BYTES:
            break
    try:
        raw = json.loads(data)
        workers = raw["workers"]
        fine = isinstance(raw["build"], bool) and isinstance(raw["store"], str)
        fine = fine and (workers is None or type(workers) is int and workers >= 1)
        timeout_s = raw.get("sample_timeout_s")
        if not fine or not (timeout_s is None or type(timeout_s) in (int, float) and timeout_s > 0):
            raise ValueError("a field has the wrong type")
    except (ValueError, KeyError, TypeError) as error:
        text = f"The request of {len(data)} bytes is none: {error}."
        raise UserError("bad_option", text, "Start this program through `dataserve prepare`.") from None
    request: dict[str, Any] = raw
    return request


def _end_with_parent(handle: int, end: Callable[[int], Any] = os._exit) -> None:
    """Waits for the parent's end of the pipe to close. Without a time-out: it is what bounds this process's life."""
    while os.read(handle, 65536):
        pass
    end(1)  # the workers see their own pipes close


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # all is said and durable: taking torch down in order would cost a second
