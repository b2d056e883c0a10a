"""Limits of a message: bytes, frames, values, depth.

They bound the memory of decoding. One byte of an empty map takes some seventy bytes of memory, a map within a
map a hundred, text up to four times its size; arrays take none, since they are views. So the values in a body
over ``FREE_BODY_BYTES`` are counted first, each with the memory that it may take. Decoding then takes at most
four times the message's bytes plus ten million, and a second for 64 MB.

The decoder itself has two more limits. It refuses a list that claims more elements than there are bytes
before allocating it, and ends deep nesting, even in unknown fields, with an error at the interpreter's
recursion limit."""

from __future__ import annotations

from protocol.errors import MessageTooLarge

NUM_FRAMES = 2
"""Envelope and body."""
MAX_FRAMES = 3
"""Weights may be in a separate frame after the body."""
MAX_DEPTH = 64
"""Nesting of ``Prompt.extra``, the only field whose type does not fix its depth."""
MAX_ENVELOPE_BYTES = 1024
FREE_BODY_BYTES = 1 << 15
"""Bodies up to this size are decoded without counting their values first."""
MAX_VALUES_BYTES = 7_500_000
"""Memory of a body's values except text and arrays: 180,000 numbers in a list, or 30,000 in a map."""
MAX_TEXT_BYTES = 1 << 21
"""Size of one text. With wide characters it briefly exists twice, and may take four times its bytes."""

# The most bytes that a value takes in CPython 3.11, without its slot in a list; for maps, by entry.
_LIST_BYTES, _MAP_BYTES, _CHECKED_BYTES = 64, 64, 90
_FIRST_ENTRY_BYTES, _ENTRY_BYTES, _PLACE_BYTES = 170, 120, 8
_NUMBER_BYTES, _TEXT_BYTES, _BINARY_BYTES, _EXTENSION_BYTES = 32, 80, 48, 170

_FIXED_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_FIXED_EXTENSIONS = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""First byte of a value -> number of bytes that follow, for numbers, and extensions with their type."""
_BINARY = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_COUNTED = _BINARY | {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""First byte of bytes, extensions and text -> width of the length that follows, and number of further bytes."""
_TEXTS = (0xD9, 0xDA, 0xDB)
_LISTS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
"""First byte of a list or map -> width of the count that follows."""


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raise MessageTooLarge when a message exceeds the limit."""
    if num_bytes > max_bytes:
        raise MessageTooLarge(
            f"message of {num_bytes} bytes is over the limit of {max_bytes}; raise wire.max_message_mb on every worker, "
            "or send less at once"
        )


def check_values(body: memoryview) -> None:
    """Raise MessageTooLarge for a text over MAX_TEXT_BYTES, or values over MAX_VALUES_BYTES.

    Allocates nothing, and stops counting at the limit. A body that is truncated or not MessagePack passes:
    the decoder reports it, and allocates no more than was counted here."""
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
                f"the values in a message of {size} bytes need more than {MAX_VALUES_BYTES} bytes of memory, without text "
                "and arrays; send extra columns as one text each"
            )
        if first <= 0x7F or first >= 0xE0:  # a small number
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
                    f"message contains a text of {length} bytes, expected at most {MAX_TEXT_BYTES}; shorten it"
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
