"""Snapshots in parts over a requester: one part at a time, with a pause as long as it took. So
weights and files, on connections of their own, go first."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np

from protocol.channel import Requester
from protocol.errors import DataError
from protocol.messages import FilePart, FileRequest

PART_BYTES: Final = 1 << 22
_PART_S: Final = 10.0
"""Limit of one part."""
_UNREACHED_S: Final = 2.0
_LEAST_BYTES: Final = 1 << 20
"""Of a part but the last: no sender is configured for less. A sender of single bytes would hold its
receiver up without an end, each part within its limit."""
_MAX_TEXT_BYTES: Final = 64 << 20
"""A description is small; a peer that offers more is refused."""


async def fetch_text(requester: Requester, name: str) -> bytes:
    """Return a description; empty where there is none. Raises DataError and WireError."""
    text = b""
    while True:
        part = await _ask(requester, name, len(text))
        if part.total_bytes > _MAX_TEXT_BYTES or (text and not part.data.size):
            raise DataError(f"{name!r:.60} has {part.total_bytes} bytes, of which {len(text)} came")
        text += part.data.tobytes()
        if len(text) >= part.total_bytes:
            return text


async def fetch_bytes(
    requester: Requester,
    name: str,
    num_bytes: int,
    put: Callable[[int, np.ndarray], Awaitable[None]],
    *,
    pause: Callable[[float], Awaitable[None]] | None = None,
) -> None:
    """Give ``put`` every part of a snapshot, in order, with its first byte's number.

    ``pause``: awaited after each part, for as long as it took. Raises DataError when the sender has
    no longer all of it, or sends too little at once, and WireError."""
    offset = 0
    while offset < num_bytes:
        asked_s = time.monotonic()
        part = await _ask(requester, name, offset)
        rest = num_bytes - offset
        if part.offset != offset or not 0 < part.data.size <= rest or part.total_bytes != num_bytes:
            raise DataError(f"only {offset} of {num_bytes} bytes of a snapshot came: its sender has it no more")
        if part.data.size < min(_LEAST_BYTES, rest):
            raise DataError(
                f"a part of a snapshot has {part.data.size} bytes, expected {_LEAST_BYTES} or more; not taken"
            )
        await put(offset, part.data)
        offset += part.data.size
        if pause is not None:
            await pause(time.monotonic() - asked_s)


async def _ask(requester: Requester, name: str, offset: int) -> FilePart:
    request = FileRequest(digest=name, offset=offset, max_bytes=PART_BYTES)
    part = await requester.request(request, timeout_s=_PART_S, unreached_s=_UNREACHED_S)
    if not isinstance(part, FilePart) or part.digest != name:
        raise DataError(f"a request for a snapshot was answered by a {type(part).__name__}")
    return part
