"""server/display.py: the same words on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from dataserve.server import display
from dataserve.server.builders import Progress
from dataserve.server.display import Display, describe_progress, duration, size, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")


HALF = Progress("prepare", 30_000, 60_000, 8_100.4, 3.7)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (HALF, "50 %, 30,000 of 60,000 rows, 8,100 rows/s, 4 s left"),
        (Progress("prepare", 5, None, None, None), "5 rows"),
        (Progress("seal", 0, None, None, None), "seal"),
        (Progress("prepare", 0, None, None, None), "prepare"),
        (Progress("", 1, 3, None, 200.0), "33 %, 1 of 3 rows, 3 min left"),
    ],
)
def test_progress_is_told_as_far_as_it_is_known(told: Progress, text: str) -> None:
    assert describe_progress(told) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (119, "119 s"), (150, "2 min"), (7199, "2 h 0 min"), (12_000, "3 h 20 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [(0, "0 B"), (999, "999 B"), (47_528_192, "47.5 MB"), (10**12, "1.0 TB"), (10**16, "10000.0 TB")],
)
def test_sizes(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


def test_a_plain_table_is_aligned_with_numbers_to_the_right() -> None:
    out = io.StringIO()
    table(("NAME", "ROWS"), [("a", 60_000), ("longer", None), ("\x1b[31m\nx", 1.6)], out)
    assert out.getvalue().splitlines() == [
        "NAME       ROWS",
        "a        60,000",
        "longer        -",
        "�[31m x       2",
    ]


def test_an_empty_table_is_its_headers() -> None:
    out = io.StringIO()
    table(("NAME", "ROWS"), [], out)
    assert out.getvalue() == "NAME  ROWS\n"


@pytest.mark.parametrize("colour", [True, False])
def test_a_table_on_a_terminal_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    table(("NAME", "ROWS"), [("[red]job[/red]", 5)], out)
    assert "[red]job[/red]" in out.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", out.getvalue())


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 101.0, 104.9, 105.1, 105.2])
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: next(now)))
    out = io.StringIO()
    shown = Display(out)
    for done in range(5):
        shown.progress("digits", Progress("prepare", done, 4, None, None))
    shown.close()
    assert out.getvalue().splitlines() == ["digits: 0 %, 0 of 4 rows", "digits: 75 %, 3 of 4 rows"]


def test_progress_on_a_terminal_is_a_bar_below_the_lines_and_goes() -> None:
    out = Terminal()
    shown = Display(out)
    shown.progress("digits", HALF)
    shown.line("a [bold]line[/bold]")
    shown.progress("digits", HALF._replace(done=60_000))
    shown.close()
    shown.line("the end")
    assert "digits" in out.getvalue()
    assert "50 %, 30,000 of 60,000 rows" in out.getvalue()
    assert "a [bold]line[/bold]" in out.getvalue()
    assert out.getvalue().endswith("the end\n")


def test_without_progress_there_are_lines_only() -> None:
    out = Terminal()
    shown = Display(out, bars=False)
    shown.progress("digits", HALF)
    shown.line("a line")
    assert out.getvalue() == "a line\n"


def test_a_daemons_log_that_cannot_be_written_is_no_error() -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "No space left on device")

    lasting = Display(Full(), stamped=True, lasting=True)
    lasting.line("a line")
    lasting.progress("mnist", Progress("prepare", 1, 2, None, None))
    with pytest.raises(OSError, match="No space left"):
        Display(Full()).line("a line")


def test_a_log_is_stamped_and_a_terminal_is_not() -> None:
    log, terminal = io.StringIO(), Terminal()
    Display(log, stamped=True).line("word\x07")
    Display(terminal, stamped=True).line("word")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d word�\n", log.getvalue())
    assert terminal.getvalue() == "word\n"
