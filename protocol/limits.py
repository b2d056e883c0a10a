"""Limits of a message: bytes, frames, values, depth.

These limits bound the memory of decoding. An empty map takes some seventy bytes for its one, a map
within a map a hundred, text up to four times its own. Arrays take none: they are views. So the
values of a body over ``FREE_BODY_BYTES`` are counted first, each with the memory that it may take.
Decoding then takes at most four times the message's bytes and ten million, and a second for 64 MB.

The decoder itself keeps two more limits. A list that claims more elements than there are bytes is
refused before it is allocated. Nesting, in unknown fields too, ends at the interpreter's recursion
limit with an error."""

from __future__ import annotations

from protocol.errors import MessageTooLarge

NUM_FRAMES = 2
"""Envelope and body."""
MAX_FRAMES = 3
"""Bytes of weights may stand in a frame of their own, behind the body."""
MAX_DEPTH = 64
"""Nesting of ``Prompt.extra``, the only field whose depth its type does not fix."""
MAX_ENVELOPE_BYTES = 1024
FREE_BODY_BYTES = 1 << 15
"""A body up to this size is decoded without counting its values first."""
MAX_VALUES_BYTES = 7_500_000
"""Memory of a body's values without text and arrays: 180,000 numbers in a list, 30,000 in a map."""
MAX_TEXT_BYTES = 1 << 21
"""One text. A wide character briefly holds it twice, and may take four times its bytes."""

# The most bytes that a value takes in CPython 3.11, without its place in a list; a map by entry.
_LIST_BYTES, _MAP_BYTES, _CHECKED_BYTES = 64, 64, 90
_FIRST_ENTRY_BYTES, _ENTRY_BYTES, _PLACE_BYTES = 170, 120, 8
_NUMBER_BYTES, _TEXT_BYTES, _BINARY_BYTES, _EXTENSION_BYTES = 32, 80, 48, 170

_FIXED_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXTENSIONS = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""First byte of a value -> bytes that follow: numbers, and extensions with their type."""
_BINARY = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_COUNTED = _BINARY | {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""First byte of bytes, extensions and text -> bytes of the length that follows, bytes besides."""
_TEXTS = (0xD9, 0xDA, 0xDB)
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
"""First byte of a list or map -> bytes of the count that follows."""


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge when a message is over the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"message of {num_bytes} bytes is over the limit of {max_bytes}; raise wire.max_message_mb on every worker, "
            "or send less at once"
        )


def check_values(body: memoryview) -> None:
    """Raise MessageTooLarge for a text over MAX_TEXT_BYTES, or values over MAX_VALUES_BYTES.

    Nothing is allocated, and the count ends at the limit. A body that is cut off or is no
    MessagePack passes: the decoder reports it, and has allocated no more than passed here."""
    size = len(body)
    if size <= FREE_BODY_BYTES:
        return
    at, num_open, taken = 0, 1, 0
    while num_open and at < size:
        first = body[at]
        at += 1
        num_open -= 1
        if taken > MAX_VALUES_BYTES:
            raise MessageTooLarge(
                f"message of {size} bytes holds values of more than {MAX_VALUES_BYTES} bytes of memory, text and "
                "arrays aside; send extra columns as one text each"
            )
        # a small number
        if first <= 0x7F or first >= 0xE0:
            continue
        if first <= 0x8F:
            count = first & 0x0F
            taken += _map_bytes(count)
            num_open += 2 * count
        elif first <= 0x9F:
            count = first & 0x0F
            taken += _list_bytes(count)
            num_open += count
        elif first <= 0xBF:
            taken += _TEXT_BYTES
            at += first & 0x1F
        elif first in _FIXED_NUMBERS:
            taken += _NUMBER_BYTES
            at += _FIXED_NUMBERS[first]
        elif first in _FIXED_EXTENSIONS:
            taken += _EXTENSION_BYTES
            at += _FIXED_EXTENSIONS[first]
        elif first in _COUNTED:
            width, besides = _COUNTED[first]
            length = int.from_bytes(body[at : at + width], "big")
            at += width + besides + length
            if first not in _TEXTS:
                taken += _EXTENSION_BYTES if besides else _BINARY_BYTES
                continue
            taken += _TEXT_BYTES
            if MAX_TEXT_BYTES < length <= size:
                raise MessageTooLarge(
                    f"message holds a text of {length} bytes, at most {MAX_TEXT_BYTES} are read; shorten it"
                )
        elif first in _LISTS:
            width = _LISTS[first]
            count = int.from_bytes(body[at : at + width], "big")
            taken += _list_bytes(count)
            num_open += count
            at += width
        elif first in _MAPS:
            width = _MAPS[first]
            count = int.from_bytes(body[at : at + width], "big")
            taken += _map_bytes(count)
            num_open += 2 * count
            at += width


def _list_bytes(count: int) -> int:
    return _LIST_BYTES + (_CHECKED_BYTES + _PLACE_BYTES * count if count else 0)


def _map_bytes(count: int) -> int:
    return _MAP_BYTES + (_CHECKED_BYTES + _FIRST_ENTRY_BYTES + _ENTRY_BYTES * (count - 1) if count else 0)
