"""Samples of a source by index, transformed, whether it knows its length or only its end; and who is to blame."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from dataserve.protocol.errors import DataError, DataserveError, MachineError

from . import badsamples, sources
from .badsamples import Bad
from .sources import BadSample, Source
from .spec import DatasetSpec


class Reader:
    """Reads the samples of one source.

    One of unknown length is read from front to back: a sample that lies before the last one read starts it again. It
    must give the same samples each time.

    `words`, whose first is set to the index of the sample that is being read, shows others where it hangs or dies;
    `condemned` samples, by index with the cause, are not touched: they end or hold up the process that reads them.
    """

    def __init__(self, source: Source, spec: DatasetSpec, words: memoryview | None = None) -> None:
        self.spec = spec
        self.condemned: dict[int, str] = {}
        self._words = memoryview(bytearray(8)).cast("q") if words is None else words
        self._source = source
        self._transform = None if spec.transform is None else sources.load_transform(spec.transform)
        self._stream: Iterator[Any] | None = None
        self._next = 0
        self.read: Callable[[int], Any] = self._read if source.length is not None else self._read_on

    @property
    def plain(self) -> bool:
        """Whether samples are what the source gives, so that it may give whole arrays."""
        return self._transform is None

    def _read(self, index: int) -> Any:
        """The sample at that index. Raises `BadSample`, or `StopIteration` where the source has ended before it."""
        self._words[0] = index
        if index in self.condemned:
            raise _CondemnedError("bad_sample", self.condemned[index], _CONDEMNED)
        return sources.read_sample(self._source, self._transform, index)

    def _read_on(self, index: int) -> Any:
        self._words[0] = index
        if self._stream is None or self._next > index:
            self._stream, self._next = self._source.samples(), 0
        while self._next < index:
            self._pull()
        if index in self.condemned:
            raise _CondemnedError("bad_sample", self.condemned[index], _CONDEMNED)
        return sources.finish_sample(self._source, self._transform, index, self._pull())

    def _pull(self) -> Any:
        assert self._stream is not None
        index = self._next
        if self._source.row_key is not None:
            from . import randomness

            randomness.seed_row(self._source.row_key, index)
        try:
            sample = next(self._stream)
        except (StopIteration, DataserveError):
            raise
        except Exception as error:  # noqa: BLE001 - data sets raise anything
            text = f"Sample {index}: the source itself failed and cannot go on: {sources.named(error)}"
            raise _EndedError("bad_sample", text, "An iterable that has raised is at its end: mend it.") from None
        self._next = index + 1
        return sample


class _CondemnedError(DataError):
    """A sample that was not read, because of what it did to those who did."""


_CONDEMNED = "See what that sample is, or leave such samples out with --on-error skip."


class _EndedError(DataError):
    """A stream that broke: none of its further samples can be had, so that leaving one out is no way on."""


def blame(error: DataError, index: int) -> Bad:
    """The bad sample that an error tells of. Raises the error where it tells of none, and `no_access`, `no_space` or
    `worker_died` where the machine is to blame for it."""
    cause = error.__context__
    if isinstance(cause, MemoryError):
        raise MachineError("worker_died", f"There was no memory left for sample {index}.", "Take fewer with --workers.")
    if isinstance(cause, OSError) and badsamples.not_the_samples(cause):
        from . import store

        where = os.fsdecode(cause.filename) if isinstance(cause.filename, str | bytes) else f"sample {index}"
        raise store.machine_error(cause, where, f"Sample {index} cannot be read") from None
    if isinstance(error, _EndedError):
        raise error
    if isinstance(error, _CondemnedError):
        return Bad(index, "worker", error.text, error.code, error.remedy)
    if isinstance(error, BadSample):
        return Bad(index, error.stage, error.cause, error.code, error.remedy)
    if error.code not in ("bad_sample", "bad_schema"):
        raise error
    text = error.text.removeprefix(f"Sample {index}").lstrip(": ")
    return Bad(index, "write", text, error.code, error.remedy)
