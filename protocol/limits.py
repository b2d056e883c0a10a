"""What is checked about bytes before anything is built from them: size and nesting.

*Consumes* received bytes. *Produces* nothing, or the WireError that says what is over which limit. *Waits for* nothing.

A few hundred bytes of MessagePack can nest as many lists. They are refused here, on the bytes, before a decoder recurses
into them. (A list that claims more elements than there are bytes is refused by the decoder, before it allocates.)
"""

from __future__ import annotations

from protocol.errors import MalformedMessage, MessageTooLarge

MAX_FRAMES = 64
"""Envelope, body and arrays of one message."""
MAX_DEPTH = 64
"""Nesting of a body. Our own messages nest 4 deep; ``Prompt.extra`` may add the rest."""
MAX_ENVELOPE_BYTES = 1024

_OPENERS = (*range(0x80, 0xA0), *range(0xDC, 0xE0))  # the bytes that can start a list or a map
_OTHERS = bytes(byte for byte in range(256) if byte not in _OPENERS)

_PREFIXED = {
    # binary, extension, text; each with a length of 1, 2 or 4 bytes
    **dict(zip((0xC4, 0xC5, 0xC6), ((1, 0), (2, 0), (4, 0)), strict=True)),
    **dict(zip((0xC7, 0xC8, 0xC9), ((1, 1), (2, 1), (4, 1)), strict=True)),
    **dict(zip((0xD9, 0xDA, 0xDB), ((1, 0), (2, 0), (4, 0)), strict=True)),
}
"""Marker -> width of the length that follows, bytes besides that length (an extension's type code)."""
_COUNTED = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Marker -> width of the count that follows, elements of one entry."""
_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),  # nil, false, true
    **dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True)),  # floats and integers
    **dict(zip(range(0xD4, 0xD9), (2, 3, 5, 9, 17), strict=True)),  # fixed extensions, with their type code
}
"""Marker -> bytes that follow."""


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge when a message is over the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"message of {num_bytes} bytes is over the limit of {max_bytes}; raise wire.max_message_mb on every worker, "
            "or send less at once"
        )


def check_structure(body: bytes) -> None:
    """Raise MalformedMessage when ``body`` nests deeper than MAX_DEPTH.

    A body cannot nest deeper than it has bytes that could open a list or a map: most are cleared by that count alone. The
    others (much text beyond ASCII, many segments) are walked, element by element.
    """
    if len(body.translate(None, _OTHERS)) > MAX_DEPTH:
        _walk(body)


def _walk(body: bytes) -> None:
    """Step over the elements of ``body`` without building any."""
    size = len(body)
    at = 0
    still_open: list[int] = []  # elements to come, by level
    while at < size:
        marker = body[at]
        at += 1
        num_elements = 0
        if marker < 0x80 or marker >= 0xE0:
            pass  # a small integer
        elif marker < 0xA0:
            num_elements = (marker & 0x0F) * (2 if marker < 0x90 else 1)
        elif marker < 0xC0:
            at += marker & 0x1F  # a short text
        elif marker in _PREFIXED:
            width, besides = _PREFIXED[marker]
            at += width + besides + int.from_bytes(body[at : at + width], "big")
        elif marker in _COUNTED:
            width, entry = _COUNTED[marker]
            num_elements = int.from_bytes(body[at : at + width], "big") * entry
            at += width
        elif marker in _FIXED:
            at += _FIXED[marker]
        else:
            raise MalformedMessage(f"byte {marker:#04x} starts nothing in MessagePack; the body is damaged")
        if still_open:
            still_open[-1] -= 1
        if num_elements:
            still_open.append(num_elements)
            if len(still_open) > MAX_DEPTH:
                raise MalformedMessage(f"the body nests more than {MAX_DEPTH} levels deep; send it flatter")
        while still_open and not still_open[-1]:
            still_open.pop()
        if not still_open:
            return  # anything after the first element is the decoder's to refuse
    raise MalformedMessage(f"the body ends in the middle of an element, after {size} bytes")
