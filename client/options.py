"""The options of `ServedDataset`, checked once, each refused with a sentence."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataserve.protocol import limits
from dataserve.protocol.address import normalise
from dataserve.protocol.errors import UserError
from dataserve.protocol.partition import LASTS

from . import device as devices


class _Unsaid(str):
    """A default that looks as what it stands for."""

    __slots__ = ()


PREFETCH = 64  #: batches ahead, at most
SMALL_BATCH_BYTES = 1 << 20  #: below this, a thread that works ahead costs more than it saves
EVEN = _Unsaid("even")  #: the default of `last`, told apart from an "even" that was given
_NAMED = re.compile(rf"{limits.NAME.pattern}(@[0-9a-f]{{1,64}})?")


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose; the world and what depends on the data are resolved elsewhere."""

    name: str
    batch_size: int
    seed: int
    last: str
    rank: int | None
    world_size: int | None
    device: torch.device
    memory_format: torch.memory_format | None
    resident: bool
    dtype: torch.dtype | None
    normalize: Any
    transform: Callable[..., Any] | None
    columns: str | tuple[str, ...] | None
    ragged: Any
    prefetch: int | None
    info: bool
    address: str | None
    store: str | None
    timeout_s: float


def check(
    *,
    name: object,
    batch_size: object,
    seed: object,
    last: object,
    drop_last: object,
    rank: int | None,
    world_size: int | None,
    device: object,
    memory_format: object,
    resident: object,
    dtype: object,
    normalize: object,
    transform: object,
    columns: object,
    ragged: object,
    prefetch: object,
    info: object,
    address: object,
    store: object,
    timeout_s: object,
) -> Options:
    """The options, or a `UserError` that names the first wrong one."""
    if not isinstance(name, str) or not _NAMED.fullmatch(name):
        raise UserError("bad_name", f"{name!r} is no data set's name.", "Names look like mnist, or mnist@1a2b.")
    where, layout = devices.check(device), _memory_format(memory_format)
    _on_device(where, "memory_format", layout is not None)
    _on_device(where, "resident=True", _flag("resident", resident))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise UserError("bad_option", f"dtype={dtype!r} is no torch.dtype.", "Give torch.float32, for instance.")
    if transform is not None and not callable(transform):
        raise UserError("bad_option", f"transform={transform!r} cannot be called.")
    return Options(
        name,
        integer("batch_size", batch_size, 1, limits.BATCH_SIZE, "bad_batch"),
        integer("seed", seed, 0, limits.SEED - 1),
        _last(last, drop_last),
        rank,
        world_size,
        where,
        layout,
        _flag("resident", resident),
        dtype,
        normalize,
        transform,
        _columns(columns),
        ragged,
        None if prefetch is None else integer("prefetch", prefetch, 0, PREFETCH),
        _flag("info", info),
        None if address is None else normalise(_text("address", address)),
        None if store is None else _text("store", store),
        _timeout_s(timeout_s),
    )


def signature(transform: Callable[..., Any]) -> tuple[bool, bool]:
    """Whether a transform takes `info` (a second parameter without a default, or one of that name), and `generator`."""
    try:
        parameters = list(inspect.signature(transform).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return False, False
    positional = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    needed = [item for item in positional[1:] if item.default is item.empty and item.name != "generator"]
    names = {item.name for item in parameters}
    return bool(needed) or "info" in names, "generator" in names


def _on_device(where: torch.device, what: str, wanted: bool) -> None:
    """Refuses an option that has a meaning only on a device."""
    if wanted and where.type == "cpu":
        raise UserError(
            "bad_option",
            f"{what} is for batches on a GPU, and device is 'cpu'.",
            "Leave it out, or give device='cuda'.",
        )


def _memory_format(value: object) -> torch.memory_format | None:
    if value is None or value in (torch.contiguous_format, torch.channels_last):
        return None if value is torch.contiguous_format else value
    raise UserError("bad_option", f"memory_format={value!r} is not built.", "Give torch.channels_last.")


def _last(last: object, drop_last: object) -> str:
    if last not in LASTS:
        raise UserError("bad_option", f"last={last!r} is unknown.", f"Known: {', '.join(LASTS)}.")
    if drop_last is None:
        return str(last)
    if not isinstance(last, _Unsaid):
        raise UserError("bad_option", f"last={last!r} and drop_last={drop_last!r} both say it.", "Give one of them.")
    return "drop" if _flag("drop_last", drop_last) else "even"


def integer(what: str, value: Any, low: int, high: int, code: str = "bad_option") -> int:
    """The value as an int in `[low, high]`; a bool is none, numpy's integers are. Raises that code."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError(code, f"{what}={value!r} is no integer.")
    number = int(value.__index__())
    if not low <= number <= high:
        raise UserError(code, f"{what} is {number}; it must lie in [{low}, {high}].")
    return number


def _flag(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UserError("bad_option", f"{what}={value!r} is neither True nor False.")
    return value


def _text(what: str, value: Any) -> str:
    text = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(text, str):
        raise UserError("bad_option", f"{what}={value!r} is no text.")
    return text


def _columns(columns: object) -> str | tuple[str, ...] | None:
    if columns is None or isinstance(columns, str):
        return columns
    if not isinstance(columns, Sequence) or not all(isinstance(name, str) for name in columns):
        raise UserError("bad_option", f"columns={columns!r} is no list of names.")
    return tuple(columns)


def _timeout_s(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UserError("bad_option", f"timeout_s={value!r} is no time.", "Give seconds, more than 0.")
    return float(value)
