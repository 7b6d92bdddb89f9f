"""The codec: what goes in comes out, and nothing hostile comes in."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataserve.protocol import checks, codec, limits, messages
from dataserve.protocol.errors import CODES, DataserveError, PeerError, from_code

BOOT = b"b" * 16
ids = st.integers(0, 2**63 - 1)
names = st.from_regex(limits.NAME, fullmatch=True)
plain = st.text(st.characters(blacklist_categories=["Cc", "Cs"]), max_size=60)
hashes = st.from_regex(limits.HEX256, fullmatch=True)
counts = st.integers(0, 2**63 - 1)
seconds = st.none() | st.floats(0, 1e9)
ranks = st.integers(0, 60000)

REQUESTS = st.one_of(
    st.builds(
        messages.Hello,
        versions=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
        pid=ranks,
        start_time=counts,
        host=plain,
        pid_namespace=counts,
    ),
    st.builds(messages.Describe, plain),
    st.builds(
        messages.Open,
        names,
        hashes,
        plain,
        st.binary(min_size=16, max_size=16),
        ranks,
        st.integers(1, 60000),
        st.integers(0, 255),
        st.integers(1, 256),
        st.integers(1, 2**31 - 1),
        st.sampled_from(["even", "drop", "short"]),
        st.fixed_dictionaries(
            {"kind": names.map(lambda text: text[:16]), "n": st.integers(1, 2**32), "seed": st.integers(0, 2**64 - 1)}
        ),
        hashes,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32),
    ),
    st.builds(messages.More, counts, ranks, ranks, st.integers(1, 256)),
    st.builds(messages.Done, counts, ranks, ranks, counts, seconds, seconds, st.booleans()),
    st.builds(messages.Beat, counts),
    st.builds(messages.Close, counts),
    st.builds(messages.AskStatus, ranks),
    st.just(messages.Stop()),
)
REPLIES = st.one_of(
    st.builds(messages.Welcome, ranks, plain),
    st.builds(
        messages.Described, names, plain, hashes, hashes, st.integers(1, 2**32), counts, st.just(("image", "label"))
    ),
    st.builds(messages.Preparing, names, st.sampled_from(messages.STATES), counts, st.none() | counts, seconds),
    st.builds(messages.Opened, counts),
    st.builds(
        messages.Ranges,
        counts,
        ranks,
        ranks,
        st.lists(st.tuples(ranks, ranks, ranks), max_size=256).map(tuple),
        st.booleans(),
    ),
    st.just(messages.Ok()),
    st.builds(messages.Error, st.sampled_from(list(CODES)), plain, plain, st.booleans()),
)


@given(ids, REQUESTS)
def test_requests_survive_the_wire(identifier: int, message: messages.Message) -> None:
    assert codec.decode_request(codec.encode_request(identifier, message)) == (identifier, message)


@given(ids, REPLIES)
def test_replies_survive_the_wire(identifier: int, message: messages.Message) -> None:
    assert codec.decode_reply(codec.encode_reply(identifier, BOOT, message)) == (identifier, BOOT, message)


@given(ids, REQUESTS)
def test_unknown_fields_are_ignored(identifier: int, message: messages.Message) -> None:
    envelope = msgpack.unpackb(codec.encode_request(identifier, message))
    envelope["a_later_field"] = [1, {"x": None}]
    assert codec.decode_request(msgpack.packb(envelope)) == (identifier, message)


@given(REQUESTS, st.data())
def test_each_missing_field_is_named_or_has_its_default(message: messages.Message, data: st.DataObject) -> None:
    fields = dataclasses.fields(message)
    if not fields:
        return
    item = data.draw(st.sampled_from(fields))
    envelope = msgpack.unpackb(codec.encode_request(1, message))
    del envelope[item.name]
    if item.default is not dataclasses.MISSING:
        assert getattr(codec.decode_request(msgpack.packb(envelope)).message, item.name) == item.default
        return
    with pytest.raises(PeerError, match=f"In {message.KIND}, {item.name} is missing"):
        codec.decode_request(msgpack.packb(envelope))


@given(REQUESTS, st.data())
def test_a_frame_with_one_wrong_byte_is_decoded_or_refused(message: messages.Message, data: st.DataObject) -> None:
    frame = bytearray(codec.encode_request(1, message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode_request(bytes(frame))
    except PeerError as error:
        assert error.code in ("bad_message", "unknown_kind")  # noqa: PT017 - any other exception fails the test


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_as_a_peers_fault(frame: bytes) -> None:
    with pytest.raises(PeerError):
        codec.decode_request(frame)


def envelope(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"kind": "beat", "id": 1, "stream": 1} | fields)
    return packed


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # a list that claims four thousand million items
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffab",
        b"\x91" * 60_000,
        b"\x81\xa1a" * 20_000,
        b"\xc0" * 60_000,
        b"\xdc\xff\xff" + b"\xc0" * 65_000,
        b"\xc1",
        envelope()[:-1],
        envelope() + b"\xc0",
        envelope(stream=msgpack.Timestamp(1)),
        envelope(stream=msgpack.ExtType(5, b"x")),
        msgpack.packb({1: 2}),
        msgpack.packb({f"k{index}": index for index in range(5000)}),
        b"\x83\xa4kind\xa4beat\xa2id\x01\xa6stream\xa2\xff\xfe",
        msgpack.packb([1, 2]),
        msgpack.packb(None),
        msgpack.packb({"kind": "beat", "stream": 1}),
    ],
    ids=lambda frame: frame[:8].hex() or "empty",
)
def test_hostile_frames_are_bad_messages(frame: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        codec.decode_request(frame)
    assert caught.value.code == "bad_message"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("id", -1, "id is -1, outside"),
        ("id", True, "id is True, not an integer"),
        ("id", 2**63, "outside"),
        ("stream", 1.0, "stream is 1.0, not an integer"),
        ("stream", "x" * 99, "and 59 more, not an integer"),
        ("stream", None, "stream is None"),
        ("kind", "beats", "kind 'beats' is unknown"),
        ("kind", None, "kind None is unknown"),
        ("kind", ["beat"], "is unknown"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: object, words: str) -> None:
    with pytest.raises(PeerError, match=words):
        codec.decode_request(envelope(**{field: value}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_seconds_that_are_no_time_are_refused(value: float) -> None:
    done = messages.Done(1, 0, 0, 0, 1.0, 1.0)
    raw = msgpack.unpackb(codec.encode_request(1, done)) | {"wait_s": value}
    with pytest.raises(PeerError, match="wait_s is"):
        codec.decode_request(msgpack.packb(raw))


def test_a_frame_over_the_cap_is_refused_both_ways() -> None:
    with pytest.raises(PeerError, match="too_large"):
        codec.decode_request(b"\x81" + b"\x00" * limits.FRAME_BYTES)
    with pytest.raises(PeerError, match="too_large"):
        codec.encode_request(1, messages.Describe("x" * limits.FRAME_BYTES))


def test_numpy_scalars_travel_as_plain_numbers() -> None:
    message = messages.More(np.int64(3), np.uint32(4), np.int64(5), np.int32(6))
    assert codec.decode_request(codec.encode_request(1, message)).message == messages.More(3, 4, 5, 6)


def test_a_path_that_is_no_utf8_travels() -> None:
    path = b"/data/\xff\xfe".decode(errors="surrogateescape")
    message = messages.Described("m", path, "a" * 64, "b" * 64, 1, 1, ("x",))
    assert codec.decode_reply(codec.encode_reply(1, BOOT, message)).message == message


def test_the_id_of_a_broken_request_is_found_for_its_error() -> None:
    assert codec.request_id(envelope(id=77, kind="nonsense")) == 77
    assert codec.request_id(b"\xff\xff") == 0


def test_the_greatest_messages_fit_a_frame() -> None:
    path = "/" + "p" * 4095
    columns = tuple(f"{index:064d}" for index in range(limits.COLUMNS))
    ranges = [(2**32, 2**32, 2**31 - 1)] * limits.WINDOW_BATCHES
    big = 2**63 - 1
    dataset: dict[str, object] = {"name": "n" * 64, "fingerprint": "f" * 64, "id": "f" * 64, "path": path}
    dataset |= dict.fromkeys(["rows", "size_bytes", "done", "total"], big)
    dataset |= {
        "state": "confirming",
        "eta_s": 1.5,
        "resident": 0.5,
        "locked": 0.5,
        "error": "\U0001f600" * limits.TEXT_CHARS,
    }
    consumer: dict[str, object] = {"job": "\U0001f600" * limits.JOB_CHARS, "dataset": "n" * 64, "pid": big}
    consumer |= {"world_size": 65536, "batch_size": 2**31 - 1, "seed": 2**64 - 1, "rank": 65535, "worker": 255}
    consumer |= {"epoch": 2**32 - 1, "position": 2**32, "samples_per_s": 1.5, "wait_share": 0.5}
    consumer |= {"bound": "compute", "last_seen_s": 1.5, "alone": True}
    status = messages.StatusPage(
        "9" * 64, big, "ipc://" + "a" * 107, path, 1.5, 0, 9,
        [dataset] * limits.STATUS_DATASETS, [consumer] * limits.STATUS_CONSUMERS,
    )  # fmt: skip
    for message in (
        messages.Described("n" * 64, path, "f" * 64, "f" * 64, 2**32, big, columns),
        messages.Ranges(big, 2**32 - 1, 2**32, ranges, True),
        messages.Error("internal", "\U0001f600" * limits.TEXT_CHARS, "\U0001f600" * limits.TEXT_CHARS, True),
        status,
    ):
        frame = codec.encode_reply(big, BOOT, message)
        assert len(frame) <= limits.FRAME_BYTES
        codec.decode_reply(frame)


@pytest.mark.parametrize("code", list(CODES))
def test_errors_survive_the_wire(code: str) -> None:
    error = from_code(code, "Text.", "Remedy.", True)
    sent = codec.decode_reply(codec.encode_reply(1, BOOT, messages.Error.of(error))).message
    assert isinstance(sent, messages.Error)
    back = sent.to_exception()
    assert (type(back), back.code, back.text, back.remedy, back.retryable) == (
        type(error), code, "Text.", "Remedy.", True,
    )  # fmt: skip


def test_an_error_of_a_later_version_keeps_its_words() -> None:
    error = from_code("from_the_future", "It rained.")
    assert error.code == "internal"
    assert "It rained." in str(error)
    assert "from_the_future" in str(error)


@given(st.text(max_size=50) | st.just("x" * 9000))
def test_an_error_of_any_text_can_be_sent(text: str) -> None:
    message = messages.Error.of(DataserveError.__subclasses__()[0]("bad_option", text, text))
    codec.decode_reply(codec.encode_reply(1, BOOT, message))


@given(
    st.lists(
        st.lists(st.integers(-1, 12) | st.sampled_from([True, 1.0, "1", None]), max_size=4) | st.none(), max_size=5
    )
)
def test_triples_are_what_a_check_for_each_says(value: list[Any]) -> None:
    def outcome(check: Any) -> Any:
        try:
            return check(value)
        except ValueError as error:
            return str(error)

    slow = checks.list_of(checks.list_of(checks.integer(0, 10), 3, 3), 4)
    assert outcome(checks.triples(10, 4)) == outcome(slow)


def test_triples_that_are_right_pass_quickly_and_as_tuples() -> None:
    assert checks.triples(10, 4)([[0, 10, 3], [1, 2, 3]]) == ((0, 10, 3), (1, 2, 3))
