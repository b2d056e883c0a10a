"""What is checked about bytes before anything is built from them: size, nesting, and counts that are lies.

*Consumes* received bytes. *Produces* nothing, or the WireError that says what is over which limit. *Waits for* nothing.

A few bytes of MessagePack may claim four thousand million elements, or nest a thousand lists. Both are refused here, on the
bytes, so that the decoder only ever builds what is small enough to build.
"""

from __future__ import annotations

from protocol.arrays import Buffer
from protocol.errors import MalformedMessage, MessageTooLarge

MAX_FRAMES = 64
"""Envelope, body and arrays of one message."""
MAX_DEPTH = 32
"""Nesting of a body; our own messages nest 4 deep, ``Prompt.extra`` may add the rest."""
MAX_ENVELOPE_BYTES = 1024

_CONTAINERS = (*range(0x80, 0xA0), *range(0xDC, 0xE0))
_OTHERS = bytes(byte for byte in range(256) if byte not in _CONTAINERS)
_TO_ASCII = bytes(byte if 0xDC <= byte <= 0xDF else 0 for byte in range(256))

# marker -> bytes of length field, and bytes of type code that follow it
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = (0xC7, 0xC8, 0xC9)
_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **{0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
    **{0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
}
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge when a message is over the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"message of {num_bytes} bytes is over the limit of {max_bytes}; raise wire.max_message_mb on every worker, "
            "or send less at once"
        )


def check_structure(body: bytes) -> None:
    """Raise MalformedMessage when ``body`` nests deeper than MAX_DEPTH or claims more elements than it has bytes.

    Most bodies are cleared by a count alone: a body cannot nest deeper than it has bytes that could open a list or a map, and
    without a long form (0xDC to 0xDF) no list can claim more than 15 elements. The rest are walked, element by element.
    """
    openers = body.translate(_TO_ASCII, _OTHERS)
    if len(openers) > MAX_DEPTH or not openers.isascii():
        _walk(body)


def _walk(body: bytes) -> None:
    """Step over every element without building it."""
    size = len(body)
    at = 0
    open_counts: list[int] = []  # elements still to come, by level
    while at < size:
        marker = body[at]
        at += 1
        opened = 0
        if marker < 0x80 or marker >= 0xE0:
            pass
        elif marker < 0xA0:
            opened = (marker & 0x0F) * (2 if marker < 0x90 else 1)
        elif marker < 0xC0:
            at += marker & 0x1F
        elif marker in _SIZED:
            width = _SIZED[marker]
            at += width + int.from_bytes(body[at : at + width], "big") + (marker in _EXTENSIONS)
        elif marker in _COUNTED:
            width, per_entry = _COUNTED[marker]
            opened = int.from_bytes(body[at : at + width], "big") * per_entry
            at += width
            if opened > size - at:
                raise MalformedMessage(
                    f"a list claims {opened} elements in the {max(size - at, 0)} bytes that are left"
                )
        elif marker in _FIXED:
            at += _FIXED[marker]
        else:
            raise MalformedMessage(f"byte {marker:#04x} starts nothing in MessagePack")
        if open_counts:
            open_counts[-1] -= 1
        if opened:
            open_counts.append(opened)
            if len(open_counts) > MAX_DEPTH:
                raise MalformedMessage(f"the body nests more than {MAX_DEPTH} levels deep; send it flatter")
        while open_counts and not open_counts[-1]:
            open_counts.pop()
        if not open_counts:
            break
    if at > size or open_counts:
        raise MalformedMessage(f"the body ends in the middle of an element, after {size} bytes")
