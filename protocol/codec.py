"""Messages to bytes and back: msgpack maps with caps, typed checks and no extension types. The one door to msgpack.

A frame is one map: `kind`, `id`, in replies `boot`, and the message's fields beside them. Unknown fields are ignored,
an unknown kind is answered with `unknown_kind`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import msgpack

from . import limits
from .checks import blob, integer
from .errors import PeerError
from .messages import FIELDS, REPLIES, REQUESTS, Message

_id = integer(0, 2**63 - 1)
_boot = blob(limits.BOOT_BYTES)


class Request(NamedTuple):
    """A decoded request."""

    id: int
    message: Message


class Reply(NamedTuple):
    """A decoded reply: the id of its request and the boot id of the daemon that gave it."""

    id: int
    boot: bytes
    message: Message


def encode_request(identifier: int, message: Message) -> bytes:
    """One frame. Raises `too_large`."""
    return _pack({"kind": message.KIND, "id": identifier, **_fields(message)})


def encode_reply(identifier: int, boot: bytes, message: Message) -> bytes:
    """One frame. Raises `too_large`."""
    return _pack({"kind": message.KIND, "id": identifier, "boot": boot, **_fields(message)})


def decode_request(frame: bytes) -> Request:
    """The request of a frame that anybody may have sent. Raises `too_large`, `bad_message`, `unknown_kind`."""
    envelope = _unpack(frame)
    return Request(_checked(_id, envelope, "id"), _message(envelope, REQUESTS))


def decode_reply(frame: bytes) -> Reply:
    """The reply of a frame. Raises as `decode_request`."""
    envelope = _unpack(frame)
    return Reply(_checked(_id, envelope, "id"), _checked(_boot, envelope, "boot"), _message(envelope, REPLIES))


def request_id(frame: bytes) -> int:
    """The id of a frame that may be broken otherwise, so that its error finds its way back; 0 where there is none."""
    try:
        return int(_checked(_id, _unpack(frame), "id"))
    except PeerError:
        return 0


def _fields(message: Message) -> dict[str, Any]:
    return {item.name: getattr(message, item.name) for item in fields(message)}


def _pack(envelope: dict[str, Any]) -> bytes:
    frame: bytes = msgpack.packb(envelope, use_bin_type=True, default=_plain, unicode_errors="surrogateescape")
    if len(frame) > limits.FRAME_BYTES:
        raise PeerError("too_large", f"A {envelope['kind']} of {len(frame)} bytes exceeds {limits.FRAME_BYTES}.")
    return frame


def _plain(value: Any) -> Any:
    """numpy's scalars become Python's: they have `item`, and nothing else that we send does."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not travel")


def _no_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"holds the extension type {code}")


def _unpack(frame: bytes) -> dict[str, Any]:
    if len(frame) > limits.FRAME_BYTES:
        raise PeerError("too_large", f"A frame of {len(frame)} bytes exceeds {limits.FRAME_BYTES}.")
    try:
        envelope = msgpack.unpackb(
            frame,
            raw=False,
            unicode_errors="surrogateescape",
            strict_map_key=True,
            ext_hook=_no_extension,
            timestamp=0,
            max_str_len=limits.FRAME_BYTES,
            max_bin_len=limits.FRAME_BYTES,
            max_array_len=4 * limits.WINDOW_BATCHES,
            max_map_len=64,
            max_ext_len=0,
        )
    except Exception as error:  # noqa: BLE001 - msgpack raises a dozen kinds, StackError and UnicodeDecodeError among them
        raise PeerError("bad_message", f"A frame of {len(frame)} bytes is no message: {error}.") from None
    if type(envelope) is not dict:
        raise PeerError("bad_message", f"A frame holds a {type(envelope).__name__}, not a map.")
    return envelope


def _checked(check: Any, envelope: dict[str, Any], key: str) -> Any:
    if key not in envelope:
        raise PeerError("bad_message", f"A frame lacks {key}.")
    try:
        return check(envelope[key])
    except ValueError as error:
        raise PeerError("bad_message", f"A frame's {key} {error}.") from None


def _message(envelope: dict[str, Any], kinds: dict[str, type[Message]]) -> Message:
    name = envelope.get("kind")
    kind = kinds.get(name) if type(name) is str else None
    if kind is None:
        shown = repr(name)[:60]
        raise PeerError("unknown_kind", f"The kind {shown} is unknown.", f"Known: {', '.join(kinds)}.")
    values = {}
    for key, (check, default) in FIELDS[kind.KIND].items():
        if key not in envelope and default is not MISSING:
            values[key] = default
            continue
        try:
            if key not in envelope:
                raise ValueError("is missing")
            values[key] = check(envelope[key])
        except ValueError as error:
            joint = "" if str(error)[:1] in ".[" else " "
            raise PeerError("bad_message", f"In {name}, {key}{joint}{error}.") from None
    return kind(**values)
