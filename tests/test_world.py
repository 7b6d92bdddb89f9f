"""client/world: which rank of how many, and the job's name."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dataserve.client import world
from dataserve.client.world import World, job_name, require_job, resolve
from dataserve.protocol.errors import UserError


def test_arguments_beat_the_environment_and_that_beats_nothing() -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "5"}
    assert resolve(1, 3, environ) == World(1, 3)
    assert resolve(None, None, environ) == World(2, 5)
    assert resolve(None, None, {}) == World(0, 1)


def test_an_initialised_process_group_beats_the_environment(tmp_path: Any) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)
    try:
        assert world.distributed_is_initialised()
        assert resolve(None, None, {"RANK": "2", "WORLD_SIZE": "5"}) == World(0, 1)
    finally:
        distributed.destroy_process_group()
    assert not world.distributed_is_initialised()


@pytest.mark.parametrize(
    ("rank", "size", "environ", "code", "text"),
    [
        (1, None, {}, "no_world", "rank is given, the world size is not"),
        (None, 4, {}, "no_world", "world size is given, the rank is not"),
        (None, None, {"RANK": "1"}, "no_world", "rank is given"),
        (None, None, {"RANK": "one", "WORLD_SIZE": "2"}, "no_world", "'one'"),
        (2, 2, {}, "bad_batch", "rank is 2 and its world size 2"),
        (-1, 2, {}, "bad_batch", "rank is -1"),
        (0, 0, {}, "bad_batch", "world size 0"),
        (True, 2, {}, "bad_batch", "no integer"),
    ],
)
def test_what_does_not_go_together_is_refused(
    rank: Any, size: Any, environ: dict[str, str], code: str, text: str
) -> None:
    with pytest.raises(UserError, match=text) as caught:
        resolve(rank, size, environ)
    assert caught.value.code == code


def test_a_job_is_named_by_the_argument_the_environment_or_the_process() -> None:
    assert job_name("a", {"DATASERVE_JOB": "b"}) == ("a", True)
    assert job_name(None, {"DATASERVE_JOB": "b"}) == ("b", True)
    first, second = job_name(None, {}), job_name(None, {})
    assert first[0] != second[0]
    assert f"-{os.getpid()}-" in first[0]
    assert not first[1]


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", 7])
def test_a_job_has_a_printable_name_of_bounded_length(name: Any) -> None:
    with pytest.raises(UserError, match="printable") as caught:
        job_name(name, {})
    assert caught.value.code == "bad_name"


def test_several_ranks_need_a_chosen_name() -> None:
    require_job(World(0, 1), chosen=False)
    require_job(World(1, 2), chosen=True)
    with pytest.raises(UserError, match="rank 1 of 2") as caught:
        require_job(World(1, 2), chosen=False)
    assert caught.value.code == "no_job"
