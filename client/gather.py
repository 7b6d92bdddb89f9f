"""Assembles batches: rows of the columns, each as fixed.py or ragged.py gives them, in the source's structure."""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dataserve.protocol import manifest
from dataserve.protocol.errors import DataError, UserError
from dataserve.protocol.manifest import Manifest, Structure

from .fixed import FixedColumn
from .mapping import Store
from .moved import Courier, MovedColumn, MovedRagged, Request, ResidentColumn
from .options import Options
from .outputs import Output, outputs
from .ragged import RaggedColumn

Assemble = Callable[[npt.NDArray[np.intp] | slice], Any]
Column = FixedColumn | RaggedColumn | MovedColumn | MovedRagged | ResidentColumn


def select(structure: Structure, columns: str | Sequence[str] | None, known: Manifest) -> Structure:
    """The structure with only the named columns in it; one name as text gives that column bare, None gives all.

    Raises `unknown_column`, which lists those there are, and `bad_option`.
    """
    there = [column.name for column in known.columns]
    wanted = manifest.leaves(structure) if columns is None else [columns] if isinstance(columns, str) else list(columns)
    for name in wanted:
        if name not in there:
            raise UserError(
                "unknown_column", f"The data set has no column {name!r}.", f"There are: {', '.join(there)}."
            )
    if not wanted or len(set(wanted)) != len(wanted):
        raise UserError("bad_option", f"columns={columns!r} must name at least one column, and each once.")
    if isinstance(columns, str):
        return {"column": columns}
    kept = _keep(structure, set(wanted))
    if kept is None:
        raise UserError("bad_option", f"columns={columns!r} names nothing of a sample.")
    return kept


def _keep(structure: Structure, wanted: set[str]) -> Structure | None:
    ((kind, inner),) = structure.items()
    if kind == "column":
        return structure if inner in wanted else None
    if kind in ("tuple", "list"):
        items = [kept for item in inner if (kept := _keep(item, wanted)) is not None]
        return {kind: items} if items else None
    pairs = inner if kind == "dict" else inner["fields"]
    left = [[key, kept] for key, item in pairs if (kept := _keep(item, wanted)) is not None]
    if not left:
        return None
    return {"dict": left} if kind == "dict" else {"namedtuple": {"name": inner["name"], "fields": left}}


class Target(NamedTuple):
    """A device that batches go to, and how: `layout` of pictures, and whether fixed columns stay there whole."""

    courier: Courier
    layout: torch.memory_format | None = None
    resident: bool = False


def _column(store: Store, output: Output, batch_size: int, target: Target | None) -> Column:
    fixed = output.column.kind == "fixed"
    if target is None:
        return FixedColumn(store, output, batch_size) if fixed else RaggedColumn(store, output)
    if not fixed:
        return MovedRagged(store, output, target.courier)
    kind = ResidentColumn if target.resident else MovedColumn
    return kind(store, output, batch_size, target.courier, target.layout)


class Gatherer:
    """Batches of at most `batch_size` rows, from any thread; what it gives belongs to the caller."""

    def __init__(
        self,
        store: Store,
        structure: Structure,
        leaving: Mapping[str, Output],
        batch_size: int,
        target: Target | None = None,
    ) -> None:
        """Maps the columns of `leaving`, those of the structure. Raises `bad_store`, `no_access`.

        With a target `assemble` gives a `Sent`, for `target.courier.receive`.
        """
        self._rows = store.manifest.rows
        self._columns: dict[str, Column] = {
            name: _column(store, output, batch_size, target) for name, output in leaving.items()
        }
        assemble = _assembly(structure, self._columns)
        #: The batch of rows that have been checked: `gather` without a look at each.
        self.assemble: Assemble = assemble
        if target is not None:
            send = target.courier.send
            self.assemble = lambda rows: send(lambda copy: assemble(Request(rows, copy)))

    def check(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        """The same rows as numpy indexes with them, if all are there. Raises `bad_store`: an order can come from a file."""
        if len(rows):
            self._require(int(rows.min()), int(rows.max()))
        return rows.astype(np.intp)

    def gather(self, rows: npt.NDArray[Any] | slice) -> Any:
        """The batch of those rows (indices, or a slice of the store), in the sample's structure. Raises what `check` does."""
        if isinstance(rows, slice):
            self._require(rows.start, rows.stop - 1)
            return self.assemble(rows)
        return self.assemble(self.check(rows))

    def _require(self, low: int, high: int) -> None:
        if low < 0 or high >= self._rows:
            raise DataError("bad_store", f"The order names the rows {low} to {high}; the store has {self._rows}.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names, in the order of the structure."""
        return tuple(self._columns)

    def size_bytes(self, count: int) -> int:
        """Bytes of a batch of so many rows; of ragged ones by their mean length."""
        return sum(column.size_bytes(count) for column in self._columns.values())


def _assembly(structure: Structure, columns: Mapping[str, Column]) -> Callable[[Any], Any]:
    """A structure as a function of rows (of a `Request`, for a device), so that no batch walks through it again.
    Columns are gathered in its order."""
    ((kind, inner),) = structure.items()
    if kind == "column":
        return columns[inner].gather
    if kind in ("tuple", "list"):
        parts = [_assembly(item, columns) for item in inner]
        if kind == "list":
            return lambda rows: [part(rows) for part in parts]
        if len(parts) == 2:  # a picture and its label: nearly all there are
            first, second = parts
            return lambda rows: (first(rows), second(rows))
        return lambda rows: tuple([part(rows) for part in parts])
    if kind == "dict":
        pairs = [(key, _assembly(item, columns)) for key, item in inner]
        return lambda rows: {key: part(rows) for key, part in pairs}
    fields = [_assembly(item, columns) for _, item in inner["fields"]]
    made = _tuple_type((inner["name"], *(key for key, _ in inner["fields"])))
    return lambda rows: made(*[part(rows) for part in fields])


def make(store: Store, chosen: Options, courier: Courier | None = None) -> Gatherer:
    """The gatherer that the options ask for, `courier` the way to the device if that is not the CPU.
    Raises what `select`, `outputs` and the store do."""
    known = store.manifest
    structure = select(known.structure, chosen.columns, known)
    used = [known.column(name) for name in manifest.leaves(structure)]
    leaving = outputs(used, chosen.dtype, chosen.normalize, chosen.ragged)
    target = None if courier is None else Target(courier, chosen.memory_format, chosen.resident)
    return Gatherer(store, structure, leaving, min(chosen.batch_size, known.rows), target)


@functools.cache
def _tuple_type(signature: tuple[str, ...]) -> Any:
    """The named tuple of that name and fields. Its pickle names them, for a loader worker that has made no such type."""
    name, *words = signature
    base = namedtuple(name, words)  # type: ignore[misc]  # noqa: PYI024 - the fields are known only now
    return type(name, (base,), {"__slots__": (), "__reduce__": lambda batch: (_tuple_again, (signature, tuple(batch)))})


def _tuple_again(signature: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _tuple_type(signature)(*values)
