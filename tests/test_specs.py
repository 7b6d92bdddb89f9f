"""PROTOCOL.md and FORMAT.md say what the code does, table by table."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import MISSING
from pathlib import Path

import numpy as np
import pytest

from dataserve.protocol import codec, draws, errors, limits, manifest, messages, version
from dataserve.protocol.blocks import BlocksPlan
from dataserve.protocol.folds import fold_of_rows
from dataserve.protocol.kinds import KINDS, plan_of
from dataserve.protocol.partition import LASTS, Partition
from dataserve.protocol.plan import Plan
from dataserve.protocol.subset import SubsetPlan
from dataserve.protocol.weighted import WeightedPlan, exponential, quantised

FOLDER = Path(__file__).resolve().parent.parent / "protocol"
PROTOCOL = (FOLDER / "PROTOCOL.md").read_text()
FORMAT = (FOLDER / "FORMAT.md").read_text()


def tables(document: str) -> list[tuple[str, list[str], list[list[str]]]]:
    """(the last line of prose before it, header, rows) of each table."""
    found, before, block = [], "", []
    for line in [*document.splitlines(), ""]:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip())[1:-1]
            block.append([cell.strip().replace("\\|", "|") for cell in cells])
            continue
        if block:
            found.append((before, block[0], block[2:]))
            block = []
        before = line.strip() or before
    return found


def rows_under(document: str, *header: str) -> list[list[str]]:
    """Rows of all tables with that header."""
    rows = [row for _, found, rows in tables(document) if tuple(found) == header for row in rows]
    assert rows, f"no table with the header {header}"
    return rows


def test_versions_are_stated() -> None:
    assert f"Wire version: {version.WIRE_VERSIONS[0]}\n" in PROTOCOL
    assert f"State format: {version.STATE_FORMAT}\n" in PROTOCOL
    assert f"Store format: {version.STORE_FORMAT}\n" in FORMAT


def test_each_message_has_its_table_field_by_field() -> None:
    documented = {
        before.split("`")[1]: [row[0] for row in rows]
        for before, header, rows in tables(PROTOCOL)
        if header == ["field", "type", "meaning"] and re.fullmatch(r"`\w+`", before)
    }
    for name in re.findall(r"`(\w+)` has no fields", PROTOCOL):
        documented[name] = []
    assert documented == {kind: list(fields) for kind, fields in messages.FIELDS.items()}


def test_defaults_of_messages_are_stated() -> None:
    for before, header, rows in tables(PROTOCOL):
        if header != ["field", "type", "meaning"] or not re.fullmatch(r"`\w+`", before):
            continue
        for name, kind, _ in rows:
            default = messages.FIELDS[before.strip("`")][name][1]
            stated = re.search(r"\((.*)\)", kind)
            assert (stated.group(1) if stated else MISSING) == (
                MISSING if default is MISSING else str(default).lower()
            ), f"{before} {name}"


def test_every_error_code_is_listed_with_its_blame() -> None:
    rows = rows_under(PROTOCOL, "code", "at fault", "when")
    assert {row[0]: row[1] for row in rows} == errors.CODES


@pytest.mark.parametrize("document", [PROTOCOL, FORMAT], ids=["PROTOCOL", "FORMAT"])
def test_bounds_are_those_of_the_code(document: str) -> None:
    for name, value, _ in rows_under(document, "name", "value", "unit"):
        assert float(value) == getattr(limits, name), name


def test_every_wire_bound_is_listed() -> None:
    listed = {row[0] for row in rows_under(PROTOCOL, "name", "value", "unit")}
    listed |= {row[0] for row in rows_under(FORMAT, "name", "value", "unit")}
    bounds = {name for name, value in vars(limits).items() if name.isupper() and isinstance(value, int | float)}
    # Bounds of section 5's arithmetic stand in its prose; the others are no part of the contract.
    assert bounds - listed == {"SEED", "EPOCH", "U64", "FINGERPRINT_DIGITS", "ORDER_SHARED_ROWS"}


def test_the_frames_are_the_codecs() -> None:
    boot = bytes(range(16))
    frames = [
        codec.encode_request(1, messages.Describe("mnist")),
        codec.encode_reply(1, boot, messages.Opened(7)),
        codec.encode_request(2, messages.More(7, 0, 0, 2)),
        codec.encode_reply(2, boot, messages.Ranges(7, 0, 0, [(0, 32, 32), (64, 96, 32)], False)),
    ]
    assert [row[1].strip("`") for row in rows_under(PROTOCOL, "message", "frame")] == [frame.hex() for frame in frames]


def test_the_orders_are_those_of_the_plan() -> None:
    for n, seed, epoch, sequence in rows_under(PROTOCOL, "n", "seed", "epoch", "sequence"):
        order = Plan("shuffled", int(n), int(seed)).order(int(epoch))
        assert order is not None
        assert order.tolist() == list(map(int, sequence.split())), (n, seed, epoch)


def test_the_digests_of_long_orders_are_those_of_the_plan() -> None:
    for n, seed, epoch, digest in rows_under(PROTOCOL, "n", "seed", "epoch", "digest of the sequence"):
        order = Plan("shuffled", int(n), int(seed)).order(int(epoch))
        assert order is not None
        assert hashlib.sha256(order.astype("<u4").tobytes()).hexdigest() == digest


def test_the_digests_of_plans() -> None:
    for text, digest in rows_under(PROTOCOL, "plan", "digest of the plan"):
        assert plan_of(json.loads(text.strip("`"))).digest() == digest


def test_the_kinds_of_plans_have_the_fields_of_their_table() -> None:
    plans = (
        Plan("sequential", 4),
        Plan("shuffled", 4),
        BlocksPlan(4, block_rows=2, window_blocks=2),
        SubsetPlan.of(4, range(2), Plan("sequential", 2)),
        WeightedPlan.of(np.ones(4, np.uint32), 4, 0, replacement=True),
    )
    documented = {
        kind: further.split(", ") if further else [] for kind, further in rows_under(PROTOCOL, "kind", "further fields")
    }
    assert documented == {plan.kind: list(plan.to_map())[3:] for plan in plans}
    assert list(documented) == list(KINDS)


def test_the_orders_of_blocks() -> None:
    for *numbers, sequence in rows_under(PROTOCOL, "n", "seed", "epoch", "block_rows", "window_blocks", "sequence"):
        n, seed, epoch, block_rows, window_blocks = map(int, numbers)
        order = BlocksPlan(n, seed, block_rows=block_rows, window_blocks=window_blocks).order(epoch)
        assert order.tolist() == numbers_of(sequence), numbers


def test_the_orders_of_subsets() -> None:
    for listed, kind, seed, epoch, sequence in rows_under(PROTOCOL, "members", "inner", "seed", "epoch", "sequence"):
        members = np.array(numbers_of(listed), np.uint32)
        plan = SubsetPlan.of(100, members, Plan(kind, len(members), int(seed)))
        assert plan.order(int(epoch)).tolist() == numbers_of(sequence), listed


def test_the_orders_by_weight() -> None:
    header = ("weights", "n", "seed", "epoch", "replacement", "sequence")
    for weights, n, seed, epoch, replacement, sequence in rows_under(PROTOCOL, *header):
        integers = quantised(np.array([float(weight) for weight in weights.split()]))
        plan = WeightedPlan.of(integers, int(n), int(seed), replacement={"yes": True, "no": False}[replacement])
        assert plan.order(int(epoch)).tolist() == numbers_of(sequence), weights


def test_the_integers_of_weights_and_the_logarithm() -> None:
    for weights, integers in rows_under(PROTOCOL, "weights", "integers"):
        assert quantised(np.array([float(weight) for weight in weights.split()])).tolist() == numbers_of(integers)
    for drawn, expected in rows_under(PROTOCOL, "drawn", "-ln u as float64 in hexadecimal"):
        assert exponential(np.array([int(drawn, 16)], np.uint64))[0] == float.fromhex(expected)


def test_the_folds() -> None:
    for classes, of, seed, folds in rows_under(PROTOCOL, "classes", "K", "seed", "fold of each row"):
        values = np.array(numbers_of(classes))
        assert fold_of_rows(len(values), int(of), int(seed), values).tolist() == numbers_of(folds)


def test_the_digests_of_plans_over_a_larger_store() -> None:
    rows = np.arange(60000)
    members = np.flatnonzero(fold_of_rows(60000, 5, 0, rows % 7) != 0).astype(np.uint32)
    integers = quantised(rows % 10)
    for text, digest, of_order in rows_under(PROTOCOL, "plan", "digest of the plan", "digest of epoch 1"):
        plan = plan_of(json.loads(text.strip("`")))
        assert plan.digest() == digest
        if isinstance(plan, SubsetPlan) and isinstance(plan.members, str):
            made: Plan = SubsetPlan.of(60000, members, plan.inner)
        elif isinstance(plan, WeightedPlan):
            made = WeightedPlan.of(integers, plan.n, plan.seed, replacement=plan.replacement)
        else:
            made = plan
        assert made == plan
        assert hashlib.sha256(made.order(1).astype("<u4").tobytes()).hexdigest() == of_order  # type: ignore[union-attr]


def numbers_of(text: str) -> list[int]:
    """A cell's numbers."""
    return [int(word) for word in text.split()]


def test_the_seeds() -> None:
    for seed, epoch, what, value in rows_under(PROTOCOL, "seed", "epoch", "what", "value"):
        kind, argument = what.split()
        if kind == "row_seed":
            found = int(draws.row_seeds(int(seed), int(epoch), np.array([int(argument)]))[0])
        elif kind == "place_seed":
            found = int(draws.place_seeds(int(seed), int(epoch), int(argument), int(argument) + 1)[0])
        else:
            found = draws.batch_seed(int(seed), int(epoch), int(argument))
        assert found == int(value), what


def test_the_partitions() -> None:
    header = (
        "n",
        "batch_size",
        "world_size",
        "last",
        "origin",
        "rank",
        "worker",
        "workers",
        "ranges (start-stop/valid)",
    )
    for *numbers, ranges in rows_under(PROTOCOL, *header):
        last = numbers.pop(3)
        n, batch, world, origin, rank, worker, workers = map(int, numbers)
        window = Partition(n, batch, world, last, origin).window(rank, worker, workers, 0, 99)
        assert ranges == " ".join(f"{start}-{stop}/{valid}" for start, stop, valid in window)


def test_each_way_to_end_an_epoch_is_stated() -> None:
    assert set(re.findall(r"^  - `(\w+)`:", PROTOCOL, re.MULTILINE)) == set(LASTS)


def test_types_of_columns_are_those_of_the_code() -> None:
    rows = rows_under(FORMAT, "dtype", "stored as", "bytes")
    assert [tuple(row[:2]) for row in rows] == list(manifest.DTYPES.items())
    assert [int(row[2]) for row in rows] == [manifest.row_bytes(name, ()) for name in manifest.DTYPES]


def test_the_manifest_has_the_fields_of_its_tables() -> None:
    part = manifest.Part("image.npy", 3, limits.HEADER_BYTES + 12, (1, 2))
    column = manifest.Column("image", "fixed", "uint8", (1, 2, 2), (part,), "image")
    data = json.loads(
        manifest.Manifest("m", "f" * 64, {}, 3, 2, {"column": "image"}, (column,), uniform=({},)).to_bytes()
    )
    documented = {before: {row[0] for row in rows} for before, _, rows in tables(FORMAT) if rows}
    assert documented["A column:"] == set(data["columns"][0])
    assert documented["A part:"] == set(data["columns"][0]["parts"][0])
    fields = next(rows for _, _, rows in tables(FORMAT) if rows[0][0] == "format")
    assert {row[0] for row in fields} == set(data)
