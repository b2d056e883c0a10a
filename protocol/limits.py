"""How large a message may be, how many frames and values it has, how deep it may nest.

*Consumes* sizes, and bodies before they are decoded. *Produces* nothing, or the WireError that says what is over which limit.
*Waits for* nothing.

What decoding may cost follows from these limits. Text may take four bytes for one of the message, an empty map takes some
ninety for its one byte, and arrays take none, for they are views. So a body of at most ``FREE_BODY_BYTES`` may do as it
likes, and a larger one may hold ``MAX_VALUES`` values: decoding then takes at most four times the message's bytes and a few
ten megabytes, whoever wrote it.

The decoder keeps two more limits by itself: a list that claims more elements than there are bytes is refused before it is
allocated, and nesting, also within fields that nobody reads, ends at the interpreter's recursion limit with an error.
"""

from __future__ import annotations

from protocol.errors import MessageTooLarge

NUM_FRAMES = 2
"""Envelope and body."""
MAX_DEPTH = 64
"""Nesting of ``Prompt.extra``, the only field whose depth its type does not fix."""
MAX_ENVELOPE_BYTES = 1024
FREE_BODY_BYTES = 1 << 18
"""A body up to this size is decoded without its values being counted first."""
MAX_VALUES = 1 << 17
"""Numbers, texts, arrays, lists, maps and their keys that a larger body may hold. A chunk without extra columns has some 60."""

_FIXED_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXTENSIONS = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SIMPLE = _FIXED_NUMBERS | _FIXED_EXTENSIONS
"""First byte of a value -> how many bytes follow it: numbers, and extensions of fixed length with their type."""
_BINARY = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_COUNTED = _BINARY | {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""First byte of bytes, extensions and text -> bytes of the length that follows, and of what comes besides."""
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte of a list or map -> bytes of the count that follows, and values for each counted one."""


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge when a message is over the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"message of {num_bytes} bytes is over the limit of {max_bytes}; raise wire.max_message_mb on every worker, "
            "or send less at once"
        )


def check_num_values(body: memoryview) -> None:
    """Raise MessageTooLarge when a large body of MessagePack holds more than MAX_VALUES values.

    Nothing is allocated, and no more than MAX_VALUES values are looked at. A body that is cut off or is no MessagePack passes:
    the decoder says what is wrong with it, and has allocated no more by then than what passed here.
    """
    size = len(body)
    if size <= FREE_BODY_BYTES:
        return
    at, num_open, num_values = 0, 1, 0
    while num_open and at < size:
        first = body[at]
        at += 1
        num_open -= 1
        num_values += 1
        if num_values > MAX_VALUES:
            raise MessageTooLarge(
                f"message of {size} bytes holds more than {MAX_VALUES} values, which would take far more memory than it has "
                "bytes; send extra columns as one text each"
            )
        if first <= 0x7F or first >= 0xE0:  # a small number
            continue
        if first <= 0x8F:
            num_open += 2 * (first & 0x0F)
        elif first <= 0x9F:
            num_open += first & 0x0F
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in _SIMPLE:
            at += _SIMPLE[first]
        elif first in _COUNTED:
            width, besides = _COUNTED[first]
            at += width + besides + int.from_bytes(body[at : at + width], "big")
        elif first in _CONTAINERS:
            width, per_item = _CONTAINERS[first]
            num_open += per_item * int.from_bytes(body[at : at + width], "big")
            at += width
