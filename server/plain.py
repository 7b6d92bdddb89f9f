"""The one text of a value or of a piece of code: equal wherever the value is, in any process and on any machine."""

from __future__ import annotations

import dis
import enum
import hashlib
import os
import re
import sys
import types
from typing import Any


def plain(value: Any) -> str | None:
    """The one text of a plain value, or of a container of such; None for anything else."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes, range, slice) or value is Ellipsis:
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name} = {plain(value.value) or '?'}"
    if isinstance(value, re.Pattern):
        return f"re {value.pattern!r} {value.flags}"
    if isinstance(value, os.PathLike):
        return f"path {os.fspath(value)!r}"
    if isinstance(value, list | tuple | set | frozenset | dict):
        return _container(value)
    return _array(value)


def _container(value: Any) -> str | None:
    """A container of plain values: a set has no order, so its texts are sorted; a dict has its own."""
    if isinstance(value, dict):
        texts = [
            None if key is None or item is None else f"{key}: {item}"
            for key, item in ((plain(key), plain(item)) for key, item in value.items())
        ]
    else:
        texts = [plain(item) for item in value]
    found = [text for text in texts if text is not None]
    if len(found) < len(value):
        return None
    return f"{type(value).__name__}({', '.join(sorted(found) if isinstance(value, set | frozenset) else found)})"


def _array(value: Any) -> str | None:
    """Arrays and tensors by type, shape and bytes; what names an element type by its own name."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        return str(value)
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            return f"tensor {value.dtype} {_array(value.detach().cpu().contiguous().view(torch.uint8).numpy())}"
        except (RuntimeError, TypeError):  # sparse, meta, or without dimensions
            return f"tensor {value.dtype} {tuple(value.shape)} {value.tolist()!r}" if value.numel() < 1000 else None
    if numpy is not None and isinstance(value, numpy.dtype):
        return f"dtype {value.str}"
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
        digest = hashlib.sha256(numpy.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array {value.dtype.str} {value.shape} {digest}"
    return None


def code_text(code: types.CodeType) -> str:
    """All of a code object that changes what it does, and no line numbers, file names or docstrings."""
    constants = []
    for place, constant in enumerate(code.co_consts):
        if isinstance(constant, types.CodeType):
            constants.append(code_text(constant))
        elif place or not isinstance(constant, str):  # the first one may be a docstring; one that is used is in a step
            constants.append(plain(constant) or repr(constant))
    used = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_CONST", "RETURN_CONST")]
    texts = [plain(value) for value in used if not isinstance(value, types.CodeType)]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    table = getattr(code, "co_exceptiontable", b"").hex()
    return repr((code.co_code.hex(), constants, texts, names, counts, table))
