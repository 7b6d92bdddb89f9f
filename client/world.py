"""Which rank of how many this process is, which loader worker, and the name of its job."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from dataserve.protocol import limits
from dataserve.protocol.errors import UserError

_objects = itertools.count()


class World(NamedTuple):
    """A rank, and the number of ranks that share an epoch."""

    rank: int
    size: int


def resolve(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> World:
    """The arguments, else `torch.distributed` where it is initialised, else RANK and WORLD_SIZE, else 0 of 1.

    Raises `no_world` where only one of two is given, `bad_batch` for numbers that do not go together.
    """
    if rank is not None or world_size is not None:
        return _checked(rank, world_size, "The argument")
    if distributed_is_initialised():
        from torch import distributed

        return World(distributed.get_rank(), distributed.get_world_size())
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _checked(_integer(environ, "RANK"), _integer(environ, "WORLD_SIZE"), "The environment's")
    return World(0, 1)


def distributed_is_initialised() -> bool:
    """Whether a process group is there; without importing what nobody has imported."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


class Loading(NamedTuple):
    """This process as a loader worker. `seed` is the same for all workers of one `DataLoader` iteration."""

    worker: int
    workers: int
    seed: int


def loading() -> Loading | None:
    """None in a process that is no loader worker. Raises `bad_option` for more workers than a rank can have."""
    from torch.utils.data import get_worker_info

    found = get_worker_info()
    if found is None:
        return None
    if found.num_workers > limits.WORKERS:
        raise UserError("bad_option", f"num_workers={found.num_workers} is more than {limits.WORKERS}.")
    return Loading(found.id, found.num_workers, found.seed - found.id)


def refuse_in_worker(what: str) -> None:
    """Raises `bad_state` in a loader worker: the cursor of all is moved in the main process."""
    if loading() is not None:
        raise UserError("bad_state", f"{what}() was called in a loader worker.", "Call it in the main process.")


def job_name(job: Any, environ: Mapping[str, str]) -> tuple[str, bool]:
    """The job's name, and whether somebody chose it; else one that no other object on any machine has."""
    named = job if job is not None else environ.get("DATASERVE_JOB") or None
    if named is None:
        return f"{os.uname().nodename}-{os.getpid()}-{next(_objects)}"[-limits.JOB_CHARS :], False
    if not isinstance(named, str) or not 1 <= len(named) <= limits.JOB_CHARS or not named.isprintable():
        raise UserError("bad_name", f"job={named!r} is no name.", f"Give 1 to {limits.JOB_CHARS} printable characters.")
    return named, True


def require_job(world: World, chosen: bool) -> None:
    """Raises `no_job` where ranks have no name by which to find each other."""
    if world.size > 1 and not chosen:
        raise UserError(
            "no_job",
            f"This is rank {world.rank} of {world.size}, and the job has no name.",
            "Give all ranks the same job=..., or set $DATASERVE_JOB.",
        )


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError("no_world", f"${name} is {text!r}, which is no integer.") from None


def _checked(rank: int | None, size: int | None, whose: str) -> World:
    if rank is None or size is None:
        given, missing = ("rank", "world size") if size is None else ("world size", "rank")
        raise UserError("no_world", f"{whose} {given} is given, the {missing} is not.", "Give both or neither.")
    for what, value in (("rank", rank), ("world size", size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError("bad_batch", f"{whose} {what} is {value!r}, which is no integer.")
    if not 1 <= size <= limits.WORLD_SIZE or not 0 <= rank < size:
        raise UserError(
            "bad_batch", f"{whose} rank is {rank} and its world size {size}.", "Ranks are 0 to world size - 1."
        )
    return World(rank, size)
