"""Frames of messages, right and forged, for tests of the codec."""

from __future__ import annotations

from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from protocol.arrays import Buffer
from protocol.codec import encode
from protocol.messages import Message
from tests.protocol.samples import packed

LIMIT = 1 << 22


def wire(message: Message) -> list[Buffer]:
    return encode(message, sender="generator-0", sequence=7, sent_s=2.5)


def forged(body: object, *, type_: str = "chunk", **changes: Any) -> list[bytes]:
    """Frames with a right checksum over any body."""
    data = body if isinstance(body, bytes) else packed(body)
    checksum = xxh3_64_intdigest(data)
    head = {"version": 1, "type": type_, "sender": "mallory", "sequence": 0, "checksum": checksum, "sent_s": 0.0}
    return [packed(head | changes), data]


def to_blob_of(body: bytes) -> bytes:
    head = {"version": 1, "type": "chunk", "checksum": xxh3_64_intdigest(body)}
    return b"\x84" + b"".join(packed(part) for pair in head.items() for part in pair) + packed("body") + body


def body_of(message: Message) -> dict[str, Any]:
    return msgpack.unpackb(wire(message)[1])
