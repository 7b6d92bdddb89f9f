"""The scenario files in tests/scenarios: what the engine and a client's session do, as text.

`REWRITE_SCENARIOS=1 pytest tests/test_scenarios.py` writes the outputs anew: read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .stage import Engines, Talks, run, scenarios
from .stage_systems import Systems

FOLDER = Path(__file__).parent / "scenarios"
STAGES: dict[str, type] = {"engine": Engines, "session": Talks, "system": Systems}


@pytest.mark.parametrize("path", scenarios(FOLDER), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    written = path.read_text()
    found = run(STAGES[path.stem.partition("_")[0]](), written)
    if os.environ.get("REWRITE_SCENARIOS"):
        path.write_text(found)
        return
    assert found == written


def test_there_are_scenarios_of_each_kind() -> None:
    assert {path.stem.partition("_")[0] for path in scenarios(FOLDER)} == set(STAGES)


def test_an_output_that_is_not_so_is_found() -> None:
    path = FOLDER / "engine_plain_job.txt"
    wrong = path.read_text().replace("opened stream=1", "opened stream=2", 1)
    assert run(Engines(), wrong) != wrong
