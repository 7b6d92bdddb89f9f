"""Samples that cannot be stored: what is known of each, how many are too many, and how they are told.

`fail` finishes the scan, then refuses with all of them; `skip` leaves them out. Either way they are events, and a table
`<name>-<fingerprint, 16 digits>.bad.tsv` in the store root with the columns index, path, stage and cause.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataserve.protocol import limits
from dataserve.protocol.errors import DataError

from . import store
from .overheard import kind_of
from .report import Reporter
from .sources import Source, shown
from .spec import bad_limit

LISTED_EVENTS = 100
LISTED_IN_ERROR = 3  #: kinds of them, one example each

_REMEDY = "Mend or remove it, then prepare again, or leave such samples out with --on-error skip."


class Bad(NamedTuple):
    """One bad sample: its place (index) in the source, where it failed, the cause's type and sentence, the error's code."""

    place: int
    stage: str
    cause: str
    code: str = "bad_sample"
    remedy: str = ""


class Limit:
    """`max_bad`: N samples or P% of all. None is no limit. Raises `bad_option`."""

    def __init__(self, text: str | None, rows: int | None) -> None:
        self.text = text
        self._most: float = float("inf")
        self._share: float | None = None
        if text is None:
            return
        count, self._share = bad_limit(text)
        if count is not None:
            self._most = count
        elif self._share is not None and rows is not None:
            self._most = int(rows * self._share)

    def passed(self, bad: int, scanned: int | None = None) -> bool:
        """Whether so many are too many; `scanned` is all samples, once their number is known."""
        most = self._most if self._share is None or scanned is None else int(scanned * self._share)
        return bad > most


class BadSamples:
    """All bad samples of one build, in whatever order they come."""

    def __init__(self, source: Source, limit: Limit, reporter: Reporter, table: Path) -> None:
        self._source = source
        self._limit = limit
        self._reporter = reporter
        self._table = table
        self._found: list[Bad] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, found: Sequence[Bad]) -> None:
        """Tells of them. Raises `bad_sample` once there are more than `max_bad`."""
        for bad in found:
            if len(self._found) < LISTED_EVENTS:
                self._reporter.bad(bad.place, self._path(bad), bad.stage, bad.cause)
            self._found.append(bad)
        if found and self._limit.passed(len(self._found)):
            raise self.error(f"More than --max-bad {self._limit.text} samples are bad: the scan ended early.")

    def settle(self, scanned: int, on_error: str) -> None:
        """The end of the scan: writes the table, or removes an older one. Raises `bad_sample` or `bad_schema` under
        `fail`, where more than `max_bad` are bad, and where no sample is good."""
        self._found.sort()
        if not self._found:
            with contextlib.suppress(OSError):
                self._table.unlink(missing_ok=True)
            return
        if len(self._found) == scanned:
            raise self.error(f"All {scanned} samples are bad.")
        if self._limit.passed(len(self._found), scanned):
            raise self.error(
                f"{len(self._found)} of {scanned} samples are bad, more than --max-bad {self._limit.text}."
            )
        if on_error == "fail":
            raise self.error(f"{len(self._found)} of {scanned} samples are bad." if len(self._found) > 1 else "")
        unlike = [bad for bad in self._found if bad.code == "bad_schema"]  # not damaged: an option may keep them
        self._tell(f"{len(unlike)} of them do not fit the first sample. {unlike[0].remedy}" if unlike else None)

    def error(self, what: str) -> DataError:
        """The refusal, after the table is written: what, then the first of them and where the others are."""
        self._found.sort()
        self._tell()
        kinds: dict[tuple[str, str], Bad] = {}  # a hundred that fail alike are one example and a number
        for bad in self._found:
            kinds.setdefault((bad.stage, kind_of(bad.cause)), bad)
        listed = [self._line(bad) for bad in [*kinds.values()][:LISTED_IN_ERROR]]
        if len(self._found) > len(listed):
            listed.append(f"{len(self._found) - len(listed)} more are in {str(self._table)!r}.")
        first = self._found[0]
        code = first.code if all(bad.code == first.code for bad in self._found) else "bad_sample"
        return DataError(code, " ".join([what, *listed]).strip(), first.remedy or _REMEDY)

    def _line(self, bad: Bad) -> str:
        where = f"Sample {bad.place}" + (f" ({path})" if (path := self._path(bad)) is not None else "")
        return (
            f"{where} {bad.cause}" if bad.stage == "write" else f"{where} failed at the stage {bad.stage}: {bad.cause}"
        )

    def _path(self, bad: Bad) -> str | None:
        path = self._source.path(bad.place)
        return None if path is None else shown(path)

    def _tell(self, remedy: str | None = None) -> None:
        lines = ["index\tpath\tstage\tcause"]
        for bad in self._found:
            cause = bad.cause.encode("unicode_escape").decode()  # a table has one line a row
            lines.append(f"{bad.place}\t{self._path(bad) or ''}\t{bad.stage}\t{cause}")
        fresh = self._table.with_name(f".{self._table.name}.{os.getpid()}")
        try:
            fresh.write_text("\n".join(lines) + "\n", "utf-8")
            os.replace(fresh, self._table)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            self._reporter.bad_samples(len(self._found), None, remedy)
            raise store.machine_error(error, self._table, "The table of bad samples cannot be written") from None
        self._reporter.bad_samples(len(self._found), str(self._table), remedy)

    def skipped(self) -> tuple[dict[str, Any], ...]:
        """What the manifest says of them: at most `limits.SKIPPED`, then how many more."""
        listed: list[dict[str, Any]] = []
        for bad in self._found[: limits.SKIPPED]:
            path = self._source.path(bad.place)
            listed.append(
                {
                    "index": bad.place,
                    "path": None if path is None else os.fsdecode(path),
                    "stage": bad.stage,
                    "cause": bad.cause,
                }
            )
        if len(self._found) > limits.SKIPPED:
            listed.append({"more": len(self._found) - limits.SKIPPED})
        return tuple(listed)


def table_path(root: Path, name: str, fingerprint: str) -> Path:
    """Where the bad samples of that store are listed."""
    return root / f"{name}-{fingerprint[: limits.FINGERPRINT_DIGITS]}.bad.tsv"


def not_the_samples(error: OSError) -> bool:
    """Whether the machine and not the sample is to blame: another try elsewhere would read it."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS)
