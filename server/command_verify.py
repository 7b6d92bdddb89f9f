"""`dataserve verify`: every checksum of a sealed store, with progress and rate, and each chunk that is damaged."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from . import store
from .builders import Progress
from .command import EXIT_FAILED, EXIT_OK, Command, add_json, add_stored, positive, root
from .display import Display, duration, size
from .offsets import Mismatch
from .verify import spans, verify

QUIET_S = 0.5  #: what is over so soon needs no progress

EXAMPLE = "dataserve verify mnist"


def add(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    add_stored(parser)
    parser.add_argument("--workers", type=positive, metavar="N", help="threads that read (else one a core)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read all of it. Raises `unknown_dataset`, `ambiguous_dataset`, and `bad_store` where it cannot even be opened."""
    sealed = store.find(root(args), args.name)
    name = store.label(sealed.path)
    display = Display(sys.stderr if args.json else sys.stdout)
    began = time.monotonic()

    def progress(done: int, total: int) -> None:
        took_s = time.monotonic() - began
        if took_s < QUIET_S:
            return
        rate = done / took_s
        left_s = (total - done) / rate
        text = f"{size(done)} of {size(total)}, {size(round(rate))}/s, {duration(left_s)} left"
        display.progress(name, Progress("verify", done, total, rate, left_s), text)

    try:
        found = verify(sealed, args.workers or len(os.sched_getaffinity(0)), progress)
    finally:
        display.close()
    took_s = time.monotonic() - began
    (_tell_json if args.json else _tell)(sealed, found, took_s)
    return EXIT_FAILED if found else EXIT_OK


def _tell(sealed: store.Sealed, found: list[Mismatch], took_s: float) -> None:
    chunks, files, size_bytes = _measures(sealed)
    name = store.label(sealed.path)
    rate = f"{size(size_bytes)} in {took_s:.1f} s, {size(round(size_bytes / took_s))}/s"
    if not found:
        print(f"{name}: all {chunks:,} chunks of {files} files are as they were written. {rate}")
        return
    for mismatch in found:
        print(f"{name}: {mismatch}")
    remedy = f"Remove it (dataserve remove {name}) and prepare the data again; if files change by themselves, test disk and memory."
    text = f"{len(found):,} of {chunks:,} chunks of {sealed.path} are not as they were written. {rate}"
    print(f"dataserve: {text}. {remedy} [bad_store]", file=sys.stderr)


def _tell_json(sealed: store.Sealed, found: list[Mismatch], took_s: float) -> None:
    chunks, files, size_bytes = _measures(sealed)
    head = {"name": sealed.manifest.name, "fingerprint": sealed.manifest.fingerprint, "id": sealed.id}
    work = {"path": sealed.path, "files": files, "chunks": chunks, "size_bytes": size_bytes, "took_s": round(took_s, 3)}
    print(json.dumps({**head, **work, "mismatches": [mismatch._asdict() for mismatch in found]}))


def _measures(sealed: store.Sealed) -> tuple[int, int, int]:
    """Chunks, files, bytes that have a checksum."""
    wanted = list(spans(sealed))
    return len(wanted), len(list(sealed.manifest.files())), sum(span.stop - span.start for span in wanted)


COMMANDS = (Command("verify", "compare all checksums of a store", add, run, EXAMPLE),)
