"""The plan kind `blocks`: blocks of rows in shuffled order, and the rows shuffled inside a window of blocks. A shuffle that
reads from few places of the store at a time. PROTOCOL.md section 5 has the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from . import draws, limits
from .plan import Plan, Rows, exactly, integer


class BlockOrder:
    """One epoch's order, a window at a time: what a range of positions costs is the windows that it touches.

    Making one costs a shuffle of the blocks' numbers, 4 bytes a block.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        epoch: int,
        block_rows: int,
        window_blocks: int,
        named: Callable[[Rows], Rows] | None = None,
    ) -> None:
        """`named`: what its rows are called outside, where they are members of a subset."""
        self._n = n
        self._named = named
        self._base = draws.epoch_base(seed, epoch)
        self._block_rows = block_rows
        self._window_blocks = window_blocks
        count = -(-n // block_rows)
        self._blocks = draws.shuffled(count, draws.epoch_base(seed, epoch, draws.SALT_BLOCK))
        self._windows = -(-count // window_blocks)
        # The last block may be short; all windows behind the one that holds it begin so many positions earlier.
        self._short = count * block_rows - n
        self._short_window = int(np.flatnonzero(self._blocks == count - 1)[0]) // window_blocks

    def start(self, window: int) -> int:
        """The first position of that window; n for the one behind the last."""
        before = window * self._window_blocks * self._block_rows
        return min(self._n, before - (self._short if window > self._short_window else 0))

    def window_of(self, position: int) -> int:
        """The window that holds that position, `0 <= position < n`."""
        window = position // (self._window_blocks * self._block_rows)
        return window + (position >= self.start(window + 1))

    def window(self, window: int) -> Rows:
        """The rows of that window by position, from `start(window)` on, uint32."""
        first = window * self._window_blocks
        blocks = self._blocks[first : first + self._window_blocks].astype(np.uint64)
        within = np.arange(self._block_rows, dtype=np.uint64)
        rows: npt.NDArray[np.uint64] = (blocks[:, None] * np.uint64(self._block_rows) + within).ravel()
        if window == self._short_window:
            rows = rows[rows < self._n]
        order = draws.in_key_order(len(rows), lambda start, stop: rows[start:stop], draws.row_bits(self._n), self._base)
        return order if self._named is None else self._named(order)

    def rows(self, start: int, stop: int) -> Rows:
        """The rows at the positions `[start, stop)`, uint32."""
        parts = [np.empty(0, np.uint32)]
        while start < stop:
            window = self.window_of(start)
            first, end = self.start(window), self.start(window + 1)
            parts.append(self.window(window)[start - first : stop - first])
            start = end
        return np.concatenate(parts)


@dataclass(frozen=True)
class BlocksPlan(Plan):
    """Blocks of `block_rows` neighbouring rows in shuffled order, and the rows shuffled inside windows of `window_blocks`."""

    KINDS: ClassVar[tuple[str, ...]] = ("blocks",)

    kind: str = field(default="blocks", init=False)
    block_rows: int = field(kw_only=True)
    window_blocks: int = field(kw_only=True)

    def __post_init__(self) -> None:
        Plan.__post_init__(self)
        object.__setattr__(self, "block_rows", integer(self.block_rows, 1, self.n + 1, "block_rows"))
        object.__setattr__(self, "window_blocks", integer(self.window_blocks, 1, limits.ROWS + 1, "window_blocks"))

    @classmethod
    def of_map(cls, fields: Mapping[str, Any]) -> Plan:
        """As `Plan.of_map`."""
        exactly(fields, "kind n seed block_rows window_blocks", "A blocks plan")
        return cls(
            fields["n"],
            fields["seed"],
            block_rows=fields["block_rows"],
            window_blocks=fields["window_blocks"],
        )

    def to_map(self) -> dict[str, Any]:
        """As `Plan.to_map`."""
        return {**Plan.to_map(self), "block_rows": self.block_rows, "window_blocks": self.window_blocks}

    @property
    def is_windowed(self) -> bool:
        """As `Plan.is_windowed`."""
        return True

    def order(self, epoch: int) -> Rows:
        """As `Plan.order`; it costs a sort a window."""
        return self.windows(epoch).rows(0, self.n)

    def _rows(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self.windows(epoch).rows(start, stop).astype(np.int64)

    def windows(self, epoch: int, named: Callable[[Rows], Rows] | None = None) -> BlockOrder:
        """As `Plan.windows`; `named` as in `BlockOrder`."""
        epoch = integer(epoch, 0, limits.EPOCH, "epoch")
        return BlockOrder(self.n, self.seed, epoch, self.block_rows, self.window_blocks, named)
