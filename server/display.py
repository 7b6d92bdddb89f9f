"""What people see: lines, progress and tables; drawn by rich on a terminal, plain text elsewhere. rich is imported only
when something is drawn on a terminal; it respects NO_COLOR.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from dataserve.protocol.messages import printable

from .builders import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

LINE_EACH_S = 5.0  #: progress of one data set where there is no terminal
DRAW_EACH_S = 0.1

Cell = str | int | float | None


class Display:
    """Lines and the progress of several data sets on one stream. `stamped` puts the time before each line of a log, without
    `bars` progress is not shown. `lasting`: that the stream takes no more, as on a full file system, is no error."""

    def __init__(self, stream: TextIO, *, stamped: bool = False, bars: bool = True, lasting: bool = False) -> None:
        self._stream = stream
        self._kept: tuple[type[Exception], ...] = (OSError, ValueError) if lasting else ()  # ValueError: it is closed
        self._terminal = stream.isatty()
        self._stamped = stamped and not self._terminal
        self._shows_progress = bars
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, float] = {}

    def line(self, text: str) -> None:
        """One line, above the bars."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ") if self._stamped else ""
        text = f"{stamp}{printable(text)}"
        with contextlib.suppress(*self._kept):
            if self._bars is not None:
                self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream, flush=True)

    def progress(self, name: str, told: Progress, text: str | None = None) -> None:
        """How far a data set is: a bar that moves, or a line now and then; in the words of `text`, else as it is told."""
        if not self._shows_progress:
            return
        now = time.monotonic()
        each_s = DRAW_EACH_S if self._terminal else LINE_EACH_S
        finished = told.done == told.total and self._terminal
        if now - self._last.get(name, -math.inf) < each_s and not finished:
            return
        self._last[name] = now
        if self._terminal:
            with contextlib.suppress(*self._kept):
                self._draw(name, told, text or describe_progress(told))
        else:
            self.line(f"{name}: {text or describe_progress(told)}")

    def close(self) -> None:
        """Leave the bars; they are gone from the terminal."""
        if self._bars is not None:
            bars, self._bars = self._bars, None
            with contextlib.suppress(*self._kept):
                bars.stop()

    def _draw(self, name: str, told: Progress, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        if self._bars is None:
            columns = (TextColumn("{task.fields[name]}"), BarColumn(), TextColumn("{task.fields[how]}", markup=False))
            # No thread of its own (the daemon has one), and no hand on the streams that children write to.
            self._bars = Bars(
                *columns,
                console=Console(file=self._stream),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bars.start()
            self._tasks = {}
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task("", name=name, how="")
        self._bars.update(self._tasks[name], completed=told.done, total=told.total, how=text, refresh=True)


def describe_progress(told: Progress) -> str:
    """`37 %, 22,200 of 60,000 rows, 8,100 rows/s, 5 s left`, as far as it is known."""
    words = [] if told.stage in ("", "prepare") else [told.stage]
    if told.total:
        words += [f"{100 * told.done // told.total} %", f"{told.done:,} of {told.total:,} rows"]
    elif told.done:
        words.append(f"{told.done:,} rows")
    if told.rate is not None:
        words.append(f"{told.rate:,.0f} rows/s")
    if told.eta_s is not None:
        words.append(f"{duration(told.eta_s)} left")
    return ", ".join(words) or told.stage


def duration(seconds: float) -> str:
    """`12 s`, `7 min`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(size_bytes: int) -> str:
    """`47.0 MB`, with steps of 1000."""
    amount = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], stream: TextIO) -> None:
    """A table; numbers stand to the right, None is a dash."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    right = [any(isinstance(row[at], int | float) for row in rows) for at in range(len(headers))]
    if stream.isatty():
        _rich_table(headers, texts, right, stream)
        return
    widths = [max(len(line[at]) for line in [headers, *texts]) for at in range(len(headers))]
    for line in [headers, *texts]:
        cells = [
            text.rjust(width) if to else text.ljust(width) for text, width, to in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip(), file=stream)


def _rich_table(headers: Sequence[str], texts: Sequence[Sequence[str]], right: Sequence[bool], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for header, to in zip(headers, right, strict=True):
        drawn.add_column(header, justify="right" if to else "left", overflow="fold")
    for line in texts:
        drawn.add_row(*(Text(text) for text in line))  # Text: a job's name is no markup
    Console(file=stream).print(drawn)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return printable(cell).replace("\n", " ")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.0f}"
