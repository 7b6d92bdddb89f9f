"""Stored values to what leaves: another type, `(x - mean) / std`, in as few passes over the memory as torch has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .outputs import Output

BLOCK_BYTES = 1 << 20  #: converted at a time, so that a second pass finds the values in the cache
FUSED_CHANNELS = 4  #: so many are gone through one by one

Convert = Callable[[torch.Tensor, torch.Tensor], object]
InPlace = Callable[[torch.Tensor], object]


def converter(output: Output) -> Convert:
    """`convert(stored, result)` writes the stored values, `(items, *shape)`, as they leave into `result` of the same shape.

    Bytes become `x * scale + bias`, all else `(x - mean) * scale`: a bias would cancel where the mean is large. Either is within two
    units in the last place of the largest value of what torchvision's ToTensor and Normalize give, and the same in any batch.
    """
    if output.mean is None or output.scale is None:
        return _copy
    compute = torch.float64 if output.column.dtype == "float64" else torch.float32
    fits = output.column.dtype == "uint8" and max(output.mean.numel(), output.scale.numel()) <= FUSED_CHANNELS
    normalize = (_fused if fits else _plain)(output.mean, output.scale, compute)
    if output.dtype == compute:
        return lambda stored, result: normalize(result.copy_(stored))

    def by_way_of_float(stored: torch.Tensor, result: torch.Tensor) -> None:
        # Half precision is reached at the end: its mantissa would not hold what lies between.
        values = stored.to(compute)
        normalize(values)
        result.copy_(values)

    return by_way_of_float


def _copy(stored: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(stored)


def _plain(mean: torch.Tensor, scale: torch.Tensor, compute: torch.dtype) -> InPlace:
    mean, scale = mean.to(compute), scale.to(compute)
    return lambda values: values.sub_(mean).mul_(scale)


def _fused(mean: torch.Tensor, scale: torch.Tensor, compute: torch.dtype) -> InPlace:
    """A channel at a time. A bias without dimensions is a constant to torch's kernel, and multiply and add are one pass."""
    pairs = torch.broadcast_tensors(-mean * scale, scale)
    biases, factors = list(pairs[0].reshape(-1).to(compute)), pairs[1].reshape(-1).tolist()
    if len(factors) == 1:
        bias, factor = biases[0], factors[0]
        return lambda values: torch.add(bias, values, alpha=factor, out=values)

    def channels(values: torch.Tensor) -> None:
        for channel, (bias, factor) in enumerate(zip(biases, factors, strict=True)):
            part = values.select(1, channel)
            torch.add(bias, part, alpha=factor, out=part)

    return channels


class Blockwise:
    """A converter over the whole of a large batch, so much at a time that its passes find the values in the cache."""

    def __init__(self, output: Output) -> None:
        self._convert = converter(output)
        self._step = max(1, BLOCK_BYTES // max(1, output.item_bytes))

    def __call__(self, stored: torch.Tensor, result: torch.Tensor) -> None:
        """Writes all items of `stored`, `(items, *shape)`, as they leave into `result`."""
        for start in range(0, len(stored), self._step):
            self._convert(stored[start : start + self._step], result[start : start + self._step])


class MovedConverter:
    """The same for tensors that lie on a device, which may be written: the result is new, or the tensor itself."""

    def __init__(self, output: Output, layout: torch.memory_format | None) -> None:
        """`layout`: of batches of pictures, `(count, channels, height, width)`; other columns keep theirs."""
        self._output = output
        pictures = layout is not None and len(output.column.shape) == 3
        self._layout = layout if pictures and layout is not None else torch.preserve_format
        self._bytes = output.column.dtype == "uint8"
        self._compute = torch.float64 if output.column.dtype == "float64" else torch.float32
        self._constants: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        """The stored values, `(items, *shape)`, as they leave."""
        output = self._output
        if output.mean is None or output.scale is None:
            return stored.to(output.dtype, memory_format=self._layout)
        values = stored.to(self._compute, memory_format=self._layout)
        if self._constants is None or self._constants[0].device != values.device:
            first = -output.mean * output.scale if self._bytes else output.mean
            self._constants = first.to(values.device, self._compute), output.scale.to(values.device, self._compute)
        first, scale = self._constants
        if self._bytes:
            torch.addcmul(first, values, scale, out=values)
        else:
            values.sub_(first).mul_(scale)
        return values.to(output.dtype)
