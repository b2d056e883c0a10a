"""Encodes and decodes messages: typed MessagePack, checked before, during and after decoding.

Received frames may contain any bytes. Decoding returns a message whose fields all have their declared types,
or raises a WireError and nothing else.

On a link, a message is two frames: envelope and body, MessagePack maps with named fields. In the ledger it is
one blob: a map of version, type and checksum, with the body nested in it. The plain ``msgpack`` package reads
both, as ``protocol.peek`` does. Specification: ``protocol/README.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast, get_args

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from protocol.arrays import Buffer, pack_array, pack_large_array, unpack_array
from protocol.errors import ChecksumMismatch, MalformedMessage, UnknownMessage, UnknownVersion
from protocol.limits import (
    FREE_BODY_BYTES,
    MAX_ENVELOPE_BYTES,
    MAX_FRAMES,
    MAX_TEXT_BYTES,
    NUM_FRAMES,
    check_size,
    check_values,
)
from protocol.messages import SCHEMA_VERSION, FilePart, Message, WeightsPart
from protocol.trajectory import RewardScore, Score, TrajectoryChunk
from protocol.validate import check_consistency, check_vectors

T = TypeVar("T")

MAX_BLOB_BYTES = 512 * 1024 * 1024
"""Redis's limit for a value."""
MAX_TOLD_CHARS = 300
"""How much of the decoder's error, which quotes the unexpected value, is repeated."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Frame 0 of every message."""

    version: int
    """SCHEMA_VERSION of the writer."""
    type: str
    """Tag of the body's type."""
    sender: str
    sequence: int
    """Position on this link, from 0, without gaps."""
    checksum: int
    """xxh3-64 of the body."""
    sent_s: float
    """Sender's wall-clock time, seconds since 1970."""
    trace: str = ""
    """Context of its span, as W3C's ``traceparent``; absent without tracing. Unverified."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """The single-piece form, for the ledger."""

    version: int
    type: str
    checksum: int
    body: msgspec.Raw
    """The body, nested, so that any MessagePack reader shows all of it in one pass."""


class _VersionOnly(msgspec.Struct):
    """What all versions of envelope and blob have in common."""

    version: int


class Claims(msgspec.Struct, frozen=True):
    """The sender and sequence named by an unreadable message. Unverified."""

    sender: str = ""
    """Name of the sender; empty if unreadable."""
    sequence: int = -1


_ANY_VERSION = msgspec.msgpack.Decoder(_VersionOnly)
_CLAIMS = msgspec.msgpack.Decoder(Claims)


def _tag_of(cls: type) -> str:
    return cast("str", cast("Any", cls).__struct_config__.tag)


Storable: TypeAlias = Message | Score
_MESSAGE_TAGS: dict[type, str] = {cls: _tag_of(cls) for cls in get_args(Message)}
_TAGS: dict[type, str] = {cls: _tag_of(cls) for cls in (*get_args(Message), *get_args(Score))}
_LARGE = (WeightsPart, FilePart)
_NOTHING = np.empty(0, np.uint8)
_encode = msgspec.msgpack.Encoder(enc_hook=pack_array).encode
_encode_large = msgspec.msgpack.Encoder(enc_hook=pack_large_array).encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decode_blob = msgspec.msgpack.Decoder(Blob).decode
_Decoders: TypeAlias = dict[str, Callable[[Buffer | msgspec.Raw], Any]]
_DECODERS: _Decoders = {tag: msgspec.msgpack.Decoder(cls, dec_hook=unpack_array).decode for cls, tag in _TAGS.items()}
_MESSAGE_DECODERS: _Decoders = {tag: _DECODERS[tag] for tag in _MESSAGE_TAGS.values()}


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A message's body, encoded once for all its links and the ledger."""

    tag: str
    body: bytes
    checksum: int
    apart: memoryview | None = None
    """Bytes of a separate frame after the body; None if there is none."""
    trace: str = ""
    """Span context, for the envelope of each link."""


def encode_once(message: Message) -> Encoded:
    """Check and encode the body of ``message``. Raises like ``encode``."""
    tag = _MESSAGE_TAGS.get(type(message))
    if tag is None:
        raise UnknownMessage(
            f"a {type(message).__name__} is not a message; expected one of {', '.join(_MESSAGE_DECODERS)}"
        )
    if isinstance(message, WeightsPart) and message.apart:
        check_vectors(message)
        check_consistency(message)
        body = _encode(msgspec.structs.replace(message, data=_NOTHING))
        return Encoded(tag, body, xxh3_64_intdigest(body), pack_large_array(message.data))
    body = _encode_body(message)
    return Encoded(tag, body, xxh3_64_intdigest(body))


def encode(message: Message | Encoded, *, sender: str, sequence: int, sent_s: float) -> list[Buffer]:
    """Return the frames of ``message``: envelope, body, and bytes that travel in a separate frame.

    Raises MalformedMessage for contradictory fields, and for values that cannot be encoded."""
    encoded = message if isinstance(message, Encoded) else encode_once(message)
    envelope = Envelope(
        version=SCHEMA_VERSION,
        type=encoded.tag,
        sender=sender,
        sequence=sequence,
        checksum=encoded.checksum,
        sent_s=sent_s,
        trace=encoded.trace,
    )
    frames: list[Buffer] = [_encode(envelope), encoded.body]
    return frames if encoded.apart is None else [*frames, encoded.apart]


def decode(frames: Sequence[Buffer], *, max_bytes: int) -> tuple[Message, Envelope]:
    """Return the message in ``frames`` and its envelope. Its arrays are read-only.

    Whatever the content, raises only WireErrors."""
    if not NUM_FRAMES <= len(frames) <= MAX_FRAMES:
        raise MalformedMessage(f"message of {len(frames)} frames, expected {NUM_FRAMES}: envelope and body")
    head, body, *apart = frames
    check_size(sum(map(len, frames)), max_bytes)
    envelope = read_envelope(head)
    message: Message = _decode_body(envelope.type, _MESSAGE_DECODERS, body, envelope.checksum)
    if apart or (isinstance(message, WeightsPart) and message.apart):
        return _put_together(message, apart), envelope
    return message, envelope


def read_envelope(frame: Buffer) -> Envelope:
    """Decode frame 0. Raises UnknownVersion, MalformedMessage."""
    if len(frame) > MAX_ENVELOPE_BYTES:
        raise MalformedMessage(f"envelope of {len(frame)} bytes, at most {MAX_ENVELOPE_BYTES} are read")
    try:
        envelope = _decode_envelope(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse_other_version(frame)
        raise MalformedMessage(
            f"the envelope cannot be read: {_told(error)}; is the peer a Headrace worker?"
        ) from error
    if envelope.version != SCHEMA_VERSION:
        _refuse_other_version(frame)
    return envelope


def read_claims(frames: Sequence[Buffer]) -> Claims:
    """Return the sender named by an unreadable message. Never raises."""
    if not frames or len(frames[0]) > MAX_ENVELOPE_BYTES:
        return Claims()
    try:
        return _CLAIMS.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Claims()


def to_blob(obj: Storable | Encoded) -> bytes:
    """Encode a message or score as one blob for the ledger.

    Raises MalformedMessage like ``encode``."""
    if isinstance(obj, Encoded):
        tag, body, checksum = obj.tag, obj.body, obj.checksum
    else:
        tag = _TAGS.get(type(obj), "")
        if not tag:
            raise UnknownMessage(f"a {type(obj).__name__} has no blob form; expected one of {', '.join(_DECODERS)}")
        body = _encode_body(obj)
        checksum = xxh3_64_intdigest(body)
    return _encode(Blob(version=SCHEMA_VERSION, type=tag, checksum=checksum, body=msgspec.Raw(body)))


def from_blob(data: Buffer, type_: type[T]) -> T:
    """Decode the object encoded by ``to_blob``. ``type_`` is a message or score type, or a union.

    Raises a WireError: UnknownMessage when the blob contains another type."""
    check_size(len(data), MAX_BLOB_BYTES)
    try:
        blob = _decode_blob(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse_other_version(data)
        raise MalformedMessage(f"the blob cannot be read: {_told(error)}; was it written by to_blob?") from error
    if blob.version != SCHEMA_VERSION:
        _refuse_other_version(data)
    return _decode_body(blob.type, _decoders_of(type_), blob.body, blob.checksum)


@cache
def _decoders_of(type_: Any) -> _Decoders:
    wanted = get_args(type_) or (type_,)
    return {tag: _DECODERS[tag] for cls, tag in _TAGS.items() if cls in wanted}


def _encode_body(obj: Storable) -> bytes:
    check_vectors(obj)
    check_consistency(obj)
    if isinstance(obj, RewardScore) and obj.guidance is None:
        # unset fields are left out
        obj = msgspec.structs.replace(obj, guidance=msgspec.UNSET)
    try:
        body = _encode_large(obj) if obj.__class__ in _LARGE else _encode(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"a {type(obj).__name__} cannot be encoded: {_told(error)}") from error
    if (
        isinstance(obj, TrajectoryChunk)
        and len(body) > FREE_BODY_BYTES
        and (obj.prompt.extra or len(body) > MAX_TEXT_BYTES)
    ):
        # every receiver would refuse this; without extra columns a body has few values
        check_values(memoryview(body))
    return body


def _decode_body(tag: str, decoders: _Decoders, body: Buffer | msgspec.Raw, checksum: int) -> Any:
    """Check, decode, and check again. The cheapest check comes first."""
    computed = xxh3_64_intdigest(body)
    if computed != checksum:
        raise ChecksumMismatch(
            f"checksum is {computed:#018x}, the sender wrote {checksum:#018x}; bytes changed on the way"
        )
    decode_body = decoders.get(tag)
    if decode_body is None:
        raise UnknownMessage(
            f"message type {tag!r:.60} is not one of {', '.join(decoders)}; is a peer of another release?"
        )
    if len(body) > FREE_BODY_BYTES:
        check_values(memoryview(body))
    try:
        obj: Any = decode_body(body)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"the body of a {tag} cannot be read: {_told(error)}") from error
    check_consistency(obj)
    return obj


def _put_together(message: Message, apart: Sequence[Buffer]) -> WeightsPart:
    """Return a part with the data from a separate frame. Raises MalformedMessage."""
    if not isinstance(message, WeightsPart):
        raise MalformedMessage(f"message of {MAX_FRAMES} frames, expected {NUM_FRAMES}: envelope and body")
    num_apart = sum(map(len, apart))
    if message.data.size or message.apart != num_apart or not apart:
        raise MalformedMessage(
            f"a part with {message.data.size} bytes in its body and {num_apart} in a separate frame, expected 0 and "
            f"{message.apart}"
        )
    whole = msgspec.structs.replace(message, data=np.frombuffer(apart[0], np.uint8))
    check_consistency(whole)
    return whole


def _told(error: Exception) -> str:
    """Return an error's text, shortened, since it may quote any amount of the message."""
    return str(error)[:MAX_TOLD_CHARS]


def _refuse_other_version(data: Buffer) -> None:
    """Raise UnknownVersion when ``data`` is a map that names another version."""
    try:
        version = _ANY_VERSION.decode(data).version
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    if version != SCHEMA_VERSION:
        raise UnknownVersion(
            f"message of schema version {version}, this worker reads {SCHEMA_VERSION}; run the same release on all hosts"
        )
