"""From messages to bytes and back: typed MessagePack, checked before, while and after decoding.

*Consumes* messages, or frames that anybody may have written. *Produces* frames, or messages whose every field has its
declared type; else one of the WireErrors, and nothing but a WireError. *Waits for* nothing.

On a link a message is frames: the envelope, the body (a MessagePack map with named fields), then one frame for every large
array. In the ledger it is one blob: a map of the same version, type and checksum, with the body nested in it and every array
inline. The plain ``msgpack`` package reads either; ``protocol.peek`` does. ``protocol/README.md`` is the specification.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast, get_args

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from protocol.arrays import Buffer, pack_array, unpack_array
from protocol.errors import ChecksumMismatch, MalformedMessage, UnknownMessage, UnknownVersion
from protocol.limits import MAX_ENVELOPE_BYTES, MAX_FRAMES, check_size, check_structure
from protocol.messages import SCHEMA_VERSION, Message
from protocol.trajectory import Score
from protocol.validate import check_consistency

T = TypeVar("T")

MAX_BLOB_BYTES = 512 * 1024 * 1024
"""Redis stores no longer value."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Frame 0 of every message."""

    version: int
    """SCHEMA_VERSION of the writer."""
    type: str
    """Tag of the body's type."""
    sender: str
    """Name of the worker that sent it."""
    sequence: int
    """Position on this link, from 0, without holes."""
    checksum: int
    """xxh3-64 over the body, then over each array frame, each hash seeding the next."""
    sent_s: float
    """Sender's wall-clock time, seconds since 1970."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """The one-piece form, for the ledger."""

    version: int
    type: str
    checksum: int
    """As in Envelope."""
    body: msgspec.Raw
    """The body itself, nested, so that one pass of any MessagePack reader shows all of it."""
    arrays: list[bytes]
    """The array frames."""


class _VersionOnly(msgspec.Struct):
    """What every version of the envelope and of the blob has in common."""

    version: int


class Claims(msgspec.Struct, frozen=True):
    """What an unreadable message says of itself: enough to name the peer. Nothing in it is certain."""

    sender: str = ""
    """Empty when even that cannot be read."""
    sequence: int = -1


_ANY_VERSION = msgspec.msgpack.Decoder(_VersionOnly)
_CLAIMS = msgspec.msgpack.Decoder(Claims)


def _tag_of(cls: type) -> str:
    return cast("str", cast("Any", cls).__struct_config__.tag)


Storable: TypeAlias = Message | Score
_MESSAGE_TAGS: dict[type, str] = {cls: _tag_of(cls) for cls in get_args(Message)}
_TAGS: dict[type, str] = {cls: _tag_of(cls) for cls in (*get_args(Message), *get_args(Score))}
_MESSAGE_TYPES: dict[str, type] = {tag: cls for cls, tag in _MESSAGE_TAGS.items()}
_TYPES: dict[str, type] = {tag: cls for cls, tag in _TAGS.items()}


class _Codec:
    """One thread's encoder and decoders of bodies, with the array frames of the message at hand."""

    def __init__(self) -> None:
        self.frames: list[Buffer] = []
        self.received: Sequence[Buffer] = ()
        self.encode_body = msgspec.msgpack.Encoder(enc_hook=self._pack).encode
        self.decode_body: dict[str, Callable[[bytes], Any]] = {
            tag: msgspec.msgpack.Decoder(cls, dec_hook=self._unpack).decode for tag, cls in _TYPES.items()
        }

    def _pack(self, obj: Any) -> object:
        if obj.__class__ is np.ndarray:
            return pack_array(obj, self.frames)
        raise TypeError(f"a {type(obj).__name__} cannot travel; use numbers, text, lists, maps or numpy arrays")

    def _unpack(self, declared: type, wire: Any) -> object:
        if declared is np.ndarray:
            return unpack_array(wire, self.received)
        raise TypeError(f"no wire form for {declared.__name__}")


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.codec = _Codec()


_per_thread = _PerThread()
_encode_head = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decode_blob = msgspec.msgpack.Decoder(Blob).decode


def encode(message: Message, *, sender: str, sequence: int, sent_s: float) -> list[Buffer]:
    """Return the frames of ``message``: envelope, body, large arrays. Arrays are not copied: leave them unchanged.

    Raises MalformedMessage when the message contradicts itself or holds something that cannot travel.
    """
    tag = _MESSAGE_TAGS.get(type(message))
    if tag is None:
        raise UnknownMessage(
            f"a {type(message).__name__} is not a message; expected one of {', '.join(_MESSAGE_TYPES)}"
        )
    body, arrays, checksum = _encode_body(message)
    envelope = Envelope(
        version=SCHEMA_VERSION, type=tag, sender=sender, sequence=sequence, checksum=checksum, sent_s=sent_s
    )
    return [_encode_head(envelope), body, *arrays]


def decode(frames: Sequence[Buffer], *, max_bytes: int) -> tuple[Message, Envelope]:
    """Return the message in ``frames`` and its envelope. Its arrays are read-only views of the frames.

    Raises a WireError, and nothing else, whatever the frames hold.
    """
    num_bytes = 0
    for frame in frames:
        num_bytes += len(frame) if isinstance(frame, bytes) else frame.nbytes
    check_size(num_bytes, max_bytes)
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise MalformedMessage(
            f"message of {len(frames)} frames, expected envelope, body and up to {MAX_FRAMES - 2} arrays"
        )
    envelope = read_envelope(frames[0])
    return _decode_body(envelope.type, _MESSAGE_TYPES, bytes(frames[1]), frames[2:], envelope.checksum), envelope


def read_envelope(frame: Buffer) -> Envelope:
    """Return frame 0, of our version. Raises UnknownVersion, MalformedMessage."""
    if _size(frame) > MAX_ENVELOPE_BYTES:
        raise MalformedMessage(f"envelope of {_size(frame)} bytes, at most {MAX_ENVELOPE_BYTES} are read")
    try:
        envelope = _decode_envelope(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse_other_version(frame)
        raise MalformedMessage(f"the envelope cannot be read: {error}; is the peer a Headrace worker?") from error
    if envelope.version != SCHEMA_VERSION:
        _refuse_other_version(frame)
    return envelope


def read_claims(frames: Sequence[Buffer]) -> Claims:
    """Return who an unreadable message claims to be from. Never raises."""
    if not frames or _size(frames[0]) > MAX_ENVELOPE_BYTES:
        return Claims()
    try:
        return _CLAIMS.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Claims()


def to_blob(obj: Storable) -> bytes:
    """Return ``obj``, a message or a score, as one blob for the ledger.

    Raises MalformedMessage when it contradicts itself or holds something that cannot travel.
    """
    tag = _TAGS.get(type(obj))
    if tag is None:
        raise UnknownMessage(f"a {type(obj).__name__} has no blob form; expected one of {', '.join(_TYPES)}")
    body, arrays, checksum = _encode_body(obj)
    blob = Blob(
        version=SCHEMA_VERSION, type=tag, checksum=checksum, body=msgspec.Raw(body), arrays=cast("list[bytes]", arrays)
    )
    return _encode_head(blob)


def from_blob(data: Buffer, type_: type[T]) -> T:
    """Return what ``to_blob`` wrote. ``type_`` is a message or score type, or a union of them.

    Raises a WireError: UnknownMessage when the blob holds another type.
    """
    check_size(_size(data), MAX_BLOB_BYTES)
    try:
        blob = _decode_blob(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        _refuse_other_version(data)
        raise MalformedMessage(f"the blob cannot be read: {error}; was it written by to_blob?") from error
    if blob.version != SCHEMA_VERSION:
        _refuse_other_version(data)
    return _decode_body(blob.type, _types_in(type_), bytes(blob.body), blob.arrays, blob.checksum)


@cache
def _types_in(type_: Any) -> dict[str, type]:
    """Return tag -> type for a type or a union of types."""
    wanted = get_args(type_) or (type_,)
    return {tag: cls for tag, cls in _TYPES.items() if cls in wanted}


def _encode_body(obj: Storable) -> tuple[bytes, list[Buffer], int]:
    """Return body, array frames and their checksum."""
    check_consistency(obj)
    arrays: list[Buffer] = []
    codec = _per_thread.codec
    codec.frames = arrays
    try:
        body = codec.encode_body(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"a {type(obj).__name__} cannot be encoded: {error}") from error
    checksum = xxh3_64_intdigest(body)
    for array in arrays:
        checksum = xxh3_64_intdigest(array, checksum)
    return body, arrays, checksum


def _decode_body(tag: str, known: dict[str, type], body: bytes, arrays: Sequence[Buffer], checksum: int) -> Any:
    """Check, decode, check again; the cheapest refusal first."""
    computed = xxh3_64_intdigest(body)
    for array in arrays:
        computed = xxh3_64_intdigest(array, computed)
    if computed != checksum:
        raise ChecksumMismatch(
            f"checksum is {computed:#018x}, the sender wrote {checksum:#018x}; bytes changed on the way"
        )
    if tag not in known:
        raise UnknownMessage(
            f"message type {tag!r:.60} is not one of {', '.join(known)}; is a peer of another release?"
        )
    check_structure(body)
    codec = _per_thread.codec
    codec.received = arrays
    try:
        obj: Any = codec.decode_body[tag](body)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MalformedMessage(f"the body of a {tag} cannot be read: {error}") from error
    finally:
        codec.received = ()
    check_consistency(obj)
    return obj


def _size(frame: Buffer) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def _refuse_other_version(data: Buffer) -> None:
    """Raise UnknownVersion when ``data`` is a map that names another version."""
    try:
        version = _ANY_VERSION.decode(data).version
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    if version != SCHEMA_VERSION:
        raise UnknownVersion(
            f"message of schema version {version}, this worker reads {SCHEMA_VERSION}; run the same release everywhere"
        )
