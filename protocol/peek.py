"""Shows any message as readable text, using only the plain ``msgpack`` package.

Reads frames and blobs of any version and type, even truncated ones. It knows no message types, so none can be
unknown to it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs] -- it ships none
from xxhash import xxh3_64_intdigest

from protocol.arrays import Buffer
from protocol.limits import check_values
from protocol.printable import json_safe

_unpackb: Callable[..., Any] = msgpack.unpackb  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
MAX_SHOWN = 8
"""Elements shown from the start of an array."""
MAX_SHOWN_CHARS = 100_000
"""Characters shown from the start of a text."""
_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
_FORMATS: dict[str, str] = {dtype: code for dtype, code in zip(_DTYPES, "?bBhHiIqQefd", strict=True)}  # noqa: C416
"""Wire dtype -> format character of the ``struct`` module."""


def peek(frames: Sequence[Buffer]) -> dict[str, Any]:
    """Return envelope and body as plain data; arrays as dtype, size and their first elements.

    A single frame is read as a blob. Unreadable parts are shown as ``{"unreadable": reason, "hex": first
    bytes}``. Adds ``checksum_ok``. Never raises."""
    if not frames:
        return {"unreadable": "no frames"}
    if len(frames) == 1:
        return _peek_blob(bytes(frames[0]))
    parts = [bytes(frame) for frame in frames]
    envelope = _unpack(parts[0])
    shown: dict[str, Any] = {"envelope": _plain(envelope), "body": _plain(_unpack(parts[1]))}
    if isinstance(envelope, dict) and "checksum" in envelope:
        shown["checksum_ok"] = xxh3_64_intdigest(parts[1]) == envelope["checksum"]
    return shown


def render(frames: Sequence[Buffer]) -> str:
    """Return ``peek`` as indented text."""
    return json_safe(json.dumps(peek(frames), indent=2, ensure_ascii=False, default=repr))


def _peek_blob(blob: bytes) -> dict[str, Any]:
    whole = _unpack(blob)
    if not isinstance(whole, dict) or "body" not in whole:
        return {"body": _plain(whole)}
    head = cast("dict[str, Any]", whole)
    body: object = head.pop("body")
    return {"envelope": _plain(head), "body": _plain(body)}


def _unpack(data: bytes) -> Any:
    try:
        check_values(memoryview(data))
        return _unpackb(data, strict_map_key=False, unicode_errors="replace", object_pairs_hook=_pairs, timestamp=0)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        return {"unreadable": f"{type(error).__name__}: {error}", "hex": data[:32].hex(" ")}


def _pairs(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a map with text keys.

    Keys that are maps or lists are named by their type, since nested ``repr`` doubles backslashes at each
    level: a thousand bytes would take gigabytes."""
    return {key if isinstance(key, str) else _key(key): value for key, value in pairs}


def _key(key: object) -> str:
    if isinstance(key, bytes):
        key = key[:80]
    return repr(key)[:80] if isinstance(key, int | float | bytes | None) else f"({type(key).__name__})"


def _plain(value: Any, key: str = "", depth: int = 0) -> Any:
    """Return plain data: arrays described, other bytes as hex, deep nesting cut off."""
    if depth > 64:
        return "..."
    if isinstance(value, dict):
        return {
            name[:MAX_SHOWN_CHARS]: _plain(item, name, depth + 1)
            for name, item in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [_plain(item, "", depth + 1) for item in cast("list[Any]", value)]
    if isinstance(value, bytes):
        dtype = key.rpartition(":")[2]
        return _array(dtype, value) if dtype in _FORMATS else {"num_bytes": len(value), "hex": value[:32].hex(" ")}
    if isinstance(value, str) and len(value) > MAX_SHOWN_CHARS:
        return f"{value[:MAX_SHOWN_CHARS]}... ({len(value)} characters)"
    if isinstance(value, msgpack.ExtType):
        code, data = cast("tuple[int, bytes]", value)
        return {"extension": code, "num_bytes": len(data), "hex": data[:32].hex(" ")}
    if isinstance(value, msgpack.Timestamp):
        return repr(value)
    return value


def _array(dtype: str, data: bytes) -> dict[str, Any]:
    code = _FORMATS[dtype]
    size, rest = divmod(len(data), struct.calcsize(code))
    shown = {"dtype": dtype, "size": size, "first": list(struct.unpack_from(f"<{min(size, MAX_SHOWN)}{code}", data))}
    return shown | {"bytes_left_over": rest} if rest else shown
