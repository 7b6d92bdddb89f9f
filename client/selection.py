"""Which rows a job reads, how often and in which order: the options `subset`, `weights` and `shuffle`, made a plan.

What they name is looked up once, by the constructor: a predicate is never called again, whatever is pickled or forked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserve.protocol import limits
from dataserve.protocol.blocks import BlocksPlan
from dataserve.protocol.errors import UserError
from dataserve.protocol.folds import fold_of_rows
from dataserve.protocol.plan import Plan
from dataserve.protocol.subset import SubsetPlan
from dataserve.protocol.weighted import WeightedPlan, quantised

from .mapping import Store
from .options import integer

PARTS = ("train", "held_out")
WINDOW_BLOCKS = 64  #: scripts/order_quality shows what it buys


@dataclass(frozen=True, slots=True)
class Blocks:
    """`shuffle=Blocks(...)`: blocks of neighbouring rows in shuffled order, and the rows shuffled inside a window of blocks. For
    data larger than memory: no more than a window is read from at a time.

    `block_rows`: by default as many as the store's chunks have, some 4 MB. `window_blocks`: the more, the better the shuffle.
    """

    block_rows: int | None = None
    window_blocks: int = WINDOW_BLOCKS

    def __post_init__(self) -> None:
        if self.block_rows is not None:
            integer("Blocks: block_rows", self.block_rows, 1, limits.ROWS)
        integer("Blocks: window_blocks", self.window_blocks, 1, limits.ROWS)


@dataclass(frozen=True, slots=True)
class Fold:
    """`subset=Fold(k, of=K)`: fold k of K folds of equal size, `0 <= k < K`; as the part to `"train"` on (all other folds) or
    as what is `"held_out"` (fold k itself).

    `by`: a column of integers or bools, the label say, whose values are spread evenly over the folds. `seed`: of the division,
    apart from that of the order. The rule is published: the same folds everywhere and for ever.
    """

    k: int
    of: int
    by: str | None = None
    part: str = "train"
    seed: int = 0

    def __post_init__(self) -> None:
        integer("Fold: of", self.of, 2, limits.ROWS)
        integer("Fold: k", self.k, 0, self.of - 1)
        integer("Fold: seed", self.seed, 0, limits.SEED - 1)
        if self.part not in PARTS:
            raise UserError("bad_option", f"Fold: part={self.part!r} is unknown.", f"Known: {', '.join(PARTS)}.")


@dataclass(frozen=True, slots=True)
class Balanced:
    """`weights=Balanced("label")`: each value of that column of integers or bools comes equally often, however rare it is."""

    by: str


class Selection(NamedTuple):
    """The options as they were given."""

    shuffle: bool | Blocks
    subset: Any
    weights: Any
    replacement: bool
    samples: int | None


class Columns(Mapping[str, npt.NDArray[Any]]):
    """What a predicate looks at: the fixed columns by name, mapped and read-only, `(rows, *shape)`; bfloat16 as a float32
    copy. `lengths(name)` has the rows' lengths of a column whose rows differ in length."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kinds = {column.name: column.kind for column in store.manifest.columns}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if self._kind(name) != "fixed":
            text = f"The rows of the column {name!r} differ in length: it is no array."
            raise UserError("bad_option", text, f"columns.lengths({name!r}) has their lengths.")
        values = self._store.column(name)
        if self._store.manifest.column(name).dtype == "bfloat16":
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return values

    def lengths(self, name: str) -> npt.NDArray[np.int64]:
        """Elements of each row, int64 `(rows,)`; of text, bytes of its UTF-8."""
        if self._kind(name) == "fixed":
            raise UserError("bad_option", f"The rows of the column {name!r} are all of one length.")
        return np.diff(self._store.ragged(name).offsets)

    def scalars(self, name: str, kinds: str, what: str) -> npt.NDArray[Any]:
        """A column of one number a row, of numpy's `kinds`. Raises `bad_option` with what it was wanted for."""
        if self._kind(name) == "fixed" and (values := self[name]).ndim == 1 and values.dtype.kind in kinds:
            return values
        column = self._store.manifest.column(name)
        text = f"{what} names the column {name!r}, whose rows are {column.kind} {column.dtype} {column.shape}."
        one = "an integer or a bool" if "f" not in kinds else "a number"
        raise UserError("bad_option", text, f"Name one that has {one} a row.")

    def _kind(self, name: object) -> str:
        if name not in self._kinds:
            there = ", ".join(self._kinds)
            raise UserError("unknown_column", f"The data set has no column {name!r}.", f"There are: {there}.")
        return self._kinds[str(name)]

    def __contains__(self, name: object) -> bool:
        return self._kinds.get(str(name)) == "fixed"

    def __iter__(self) -> Iterator[str]:
        return (name for name, kind in self._kinds.items() if kind == "fixed")

    def __len__(self) -> int:
        return sum(1 for _ in self)


# --- what can be said without a store -------------------------------------------------------------------------------


def check(shuffle: object, subset: object, weights: object, replacement: object, samples: object) -> Selection:
    """The options, or a `UserError` that names the first that is wrong or contradicts another."""
    if not isinstance(shuffle, bool | Blocks):
        raise UserError("bad_option", f"shuffle={shuffle!r} is neither True nor False nor Blocks(...).")
    if not isinstance(replacement, bool):
        raise UserError("bad_option", f"replacement={replacement!r} is neither True nor False.")
    count = None if samples is None else integer("samples", samples, 1, limits.ROWS)
    if weights is None:
        if count is not None or not replacement:
            given = f"samples={count}" if count is not None else "replacement=False"
            raise UserError(
                "bad_option", f"{given} says how rows are drawn by weight, and there are no weights.", "Give weights=."
            )
        return Selection(shuffle, subset, None, True, None)
    if shuffle is not True:
        text = f"shuffle={shuffle!r} contradicts weights: rows that are drawn by weight come in no other order."
        raise UserError("bad_option", text, "Leave one of them out.")
    if not replacement and count is None:
        text = "Without replacement each row comes once: all rows of an epoch would be all rows there are, whatever their weights."
        raise UserError("bad_option", text, "Give samples=, how many rows an epoch has.")
    return Selection(True, subset, weights, replacement, count)


# --- to a plan ------------------------------------------------------------------------------------------------------


def plan(chosen: Selection, store: Store, seed: int) -> Plan:
    """The plan over that store. Raises `bad_option`, `unknown_column`."""
    rows, columns = store.manifest.rows, Columns(store)
    members = None if chosen.subset is None else _members(chosen.subset, rows, columns)
    if chosen.weights is not None:
        integers = quantised(_weights(chosen.weights, members, rows, columns))
        n = chosen.samples or (rows if members is None else len(members))
        return _drawn(integers, n, seed, chosen.replacement)
    inner = _ordered(chosen.shuffle, rows if members is None else len(members), seed, store.manifest.chunk_rows)
    return inner if members is None else SubsetPlan.of(rows, members, inner)


def _ordered(shuffle: bool | Blocks, n: int, seed: int, chunk_rows: int) -> Plan:
    if isinstance(shuffle, Blocks):
        block_rows = min(n, shuffle.block_rows or chunk_rows)
        return BlocksPlan(n, seed, block_rows=block_rows, window_blocks=shuffle.window_blocks)
    return Plan("shuffled", n, seed) if shuffle else Plan("sequential", n)


def _drawn(integers: npt.NDArray[np.uint32], n: int, seed: int, replacement: bool) -> Plan:
    some = int(np.count_nonzero(integers))
    if not replacement and n > some:
        text = f"samples={n}, and {some} rows have a weight: without replacement none comes twice."
        raise UserError("bad_option", text, "Ask for fewer, or leave replacement=False out.")
    return WeightedPlan.of(_kept(integers), n, seed, replacement=replacement)


def _members(subset: Any, rows: int, columns: Columns) -> range | npt.NDArray[np.uint32]:
    """The rows of the subset, each once: a range, or a list in the order given."""
    if callable(subset):
        try:
            subset = subset(columns)
        except Exception as error:
            error.add_note("in the predicate that was given as subset=")
            raise
    if isinstance(subset, slice):
        subset = _sliced(subset, rows)
    if isinstance(subset, range) and subset.step > 0 and len(subset) and subset[0] >= 0 and subset[-1] < rows:
        return subset
    found = _fold(subset, rows, columns) if isinstance(subset, Fold) else _listed(subset, rows)
    if not len(found):
        raise UserError("bad_option", f"The subset {_shown(subset)} has none of the {rows} rows.")
    return _kept(found.astype(np.uint32))


def _sliced(subset: slice, rows: int) -> range:
    try:
        return range(*subset.indices(rows))
    except (TypeError, ValueError) as error:
        raise UserError("bad_option", f"subset={subset!r}: {error}.") from None


def _fold(fold: Fold, rows: int, columns: Columns) -> npt.NDArray[np.intp]:
    classes = None if fold.by is None else columns.scalars(fold.by, "iub", "Fold: by")
    held_out = fold_of_rows(rows, fold.of, fold.seed, classes) == fold.k
    return np.flatnonzero(held_out if fold.part == "held_out" else ~held_out)


def _listed(subset: Any, rows: int) -> npt.NDArray[Any]:
    """Row numbers, or those where a mask is true."""
    listed = _array(subset, "subset")
    if listed.dtype == bool:
        if len(listed) != rows:
            raise UserError("bad_option", f"The mask in subset= has {len(listed)} values, the store {rows} rows.")
        return np.flatnonzero(listed)
    if not len(listed):
        return listed
    if listed.dtype.kind not in "iu":
        text = f"subset={_shown(subset)} are {listed.dtype}, neither row numbers nor a mask."
        raise UserError("bad_option", text, "Give integers, or bools, one a row.")
    outside = (listed < 0) | (listed >= rows)
    if outside.any():
        first = listed[outside][0]
        text = f"subset= names the row {first}, and {int(outside.sum())} in all that are not in [0, {rows})."
        raise UserError("bad_option", text, "Rows count from 0, and not from behind.")
    seen = np.zeros(rows, bool)
    seen[listed] = True
    if (twice := len(listed) - int(np.count_nonzero(seen))) > 0:
        values, counts = np.unique(listed, return_counts=True)
        text = (
            f"subset= names the row {values[counts > 1][0]} more than once; {twice} of its {len(listed)} are repeats."
        )
        raise UserError("bad_option", text, "Name each once; weights= makes some come more often.")
    return listed


def _weights(
    weights: Any, members: range | npt.NDArray[np.uint32] | None, rows: int, columns: Columns
) -> npt.NDArray[np.float64]:
    """A weight a row of the store, float64; 0 for those that are no members."""
    chosen: Any = slice(None) if members is None else np.asarray(members)
    if isinstance(weights, Balanced):
        values = columns.scalars(weights.by, "iub", "Balanced: by")[chosen]
        _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
        given = 1.0 / counts[numbers]
    elif isinstance(weights, str):
        given = columns.scalars(weights, "iufb", "weights=")[chosen]
    else:
        array = _array(weights, "weights")
        if array.dtype.kind not in "iufb":
            raise UserError("bad_option", f"weights={_shown(weights)} are {array.dtype}, which are no numbers.")
        if len(array) != rows:
            text = f"weights= has {len(array)} numbers, the store {rows} rows."
            raise UserError(
                "bad_option", text, "Give one a row of the store; those outside of subset= count for nothing."
            )
        given = array[chosen]
    found = np.zeros(rows)
    found[chosen] = given
    return found


def _array(value: Any, what: str) -> npt.NDArray[Any]:
    """An array, a tensor or a list as an array of one dimension."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError("bad_option", f"{what}={_shown(value)} is no array: {error}.") from None
    if array.ndim != 1:
        raise UserError("bad_option", f"{what}={_shown(value)} has {array.ndim} dimensions, not one.")
    return array


def _kept(array: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Ours from here on: nobody else's hand changes an order."""
    array.flags.writeable = False
    return array


def _shown(value: Any) -> str:
    """A value in a line, however long it is."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:76]} ..."
