"""What the daemon keeps: the table in server/README.md against the classes that hold it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

from dataserve.server.catalog import Catalog, Dataset
from dataserve.server.engine import About, Engine, Peer, _Deferred
from dataserve.server.metrics import Rates
from dataserve.server.registry import Consumer, Registry

README = Path(__file__).resolve().parent.parent / "server" / "README.md"


def kept() -> dict[str, set[str]]:
    """The fields of each class that holds state of the daemon, as the code has them."""
    plain: list[Any] = [Engine([], About("", 0, "", "", "", 0)), Catalog([]), Registry()]
    found = {type(item).__name__: set(vars(item)) for item in plain}
    for made in (Peer, Dataset, Consumer, Rates):
        found[made.__name__] = {field.name for field in dataclasses.fields(made)}
    found["_Deferred"] = set(_Deferred._fields)
    return found


def told() -> list[tuple[str, str, str]]:
    """(class, field, who gives it back) of each field in the table."""
    section = README.read_text().split("## What the daemon keeps\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return [(owner, name, how) for owner, fields, how in rows for name in re.findall(r"`(\w+)`", fields)]


def test_every_field_that_is_kept_is_told_once_and_no_other() -> None:
    fields = Counter((owner, name) for owner, name, _ in told())
    assert fields == Counter((owner, name) for owner, names in kept().items() for name in names)


def test_each_has_somebody_who_gives_it_back_or_is_needed_by_nobody() -> None:
    whose = re.compile(r"(the (client|operator|children|kernel|new process)|computed from|nobody|below)\b")
    assert [(owner, name) for owner, name, how in told() if not whose.match(how)] == []
