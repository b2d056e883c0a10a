"""Arrays on the wire: ``[dtype, shape, data]``, little-endian, from a short list of dtypes, never pickled.

*Consumes* numpy arrays (sending) or their wire form (receiving). *Produces* the wire form, or read-only arrays that look
straight into the received bytes. *Waits for* nothing.

``data`` is the array's bytes, or the index of the frame that holds them. Small arrays travel inside the body, larger ones
as frames of their own, which nobody copies. ``INLINE_MAX_BYTES`` is where the two cost the same: a frame of its own costs
about 1 us in ZeroMQ at each end whatever its size, the two copies of an inline array cost as much at about 16 KiB
(``python -m ops.bench.codec``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What a frame may be: anything whose bytes can be read in place."""

INLINE_MAX_BYTES = 16 * 1024
"""Arrays up to this size travel inside the body; the next byte gives them a frame of their own."""
MAX_DIMENSIONS = 8
"""More than any array of ours has; a longer shape is an attack or a bug."""

_NAMES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES}
"""Every dtype that may travel, by its wire name (numpy's own, little-endian). Objects and strings are not among them."""
_WIRE_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


def pack_array(array: np.ndarray, frames: list[Buffer] | None) -> tuple[str, tuple[int, ...], Buffer | int]:
    """Return the wire form of ``array``; a large one is appended to ``frames``, without a copy.

    With ``frames`` None everything stays inline. A strided or big-endian array is copied first. Raises TypeError for a dtype
    that may not travel.
    """
    dtype = array.dtype
    name = _WIRE_NAMES.get(dtype)
    if name is None or not array.flags.c_contiguous or sys.byteorder == "big":
        array, name = _normalise(array)
    if frames is None or array.nbytes <= INLINE_MAX_BYTES:
        return name, array.shape, array.data
    frames.append(array.data)
    return name, array.shape, len(frames) - 1


def unpack_array(wire: object, frames: Sequence[Buffer]) -> np.ndarray:
    """Return a read-only array over the bytes that ``wire`` holds or points to.

    Raises ValueError for anything but ``[known dtype, sane shape, bytes of that size or a frame's index]``.
    """
    if not isinstance(wire, list) or len(cast("list[object]", wire)) != 3:
        raise ValueError("an array is [dtype, shape, data]")
    name, shape, data = cast("list[Any]", wire)
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"array dtype {name!r:.40} is not one of {', '.join(DTYPES)}")
    if isinstance(data, int):
        if not 0 <= data < len(frames):
            raise ValueError(f"the array's data is frame {data}, but the message has {len(frames)} array frames")
        data = frames[data]
    elif not isinstance(data, bytes):
        raise ValueError(f"array data is {type(data).__name__}, expected bytes or a frame's index")
    if not isinstance(data, bytes):
        data = memoryview(data).toreadonly()
    num_bytes = len(data) if isinstance(data, bytes) else data.nbytes
    if type(shape) is list and len(cast("list[object]", shape)) == 1:
        (count,) = cast("list[object]", shape)
        if type(count) is int and count >= 0 and count * dtype.itemsize == num_bytes:
            return np.frombuffer(data, dtype) if count else _read_only_empty(dtype, (0,))
    return _unpack_shaped(dtype, cast("object", shape), data, num_bytes)


def _unpack_shaped(dtype: np.dtype[Any], shape: object, data: bytes | memoryview, num_bytes: int) -> np.ndarray:
    """Handle every shape but the common one, and name what is wrong with a bad one."""
    if not isinstance(shape, list):
        raise ValueError(f"array shape is {type(shape).__name__}, expected a list of lengths")
    lengths = cast("list[object]", shape)
    if len(lengths) > MAX_DIMENSIONS:
        raise ValueError(f"array has {len(lengths)} dimensions, at most {MAX_DIMENSIONS} may travel")
    sizes = [length for length in lengths if type(length) is int and 0 <= length < 2**62]
    if len(sizes) != len(lengths):
        raise ValueError(f"array shape {lengths!r:.80} holds something that is not a length")
    if prod(sizes) * dtype.itemsize != num_bytes:
        raise ValueError(f"array of shape {sizes!r:.80} and dtype {dtype.str} does not fill {num_bytes} bytes")
    if not num_bytes:
        return _read_only_empty(dtype, tuple(sizes))
    return np.frombuffer(data, dtype).reshape(sizes)


def _read_only_empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array without elements (numpy maps no view onto an empty buffer)."""
    array = np.empty(shape, dtype)
    array.setflags(write=False)
    return array


def _normalise(array: np.ndarray) -> tuple[np.ndarray, str]:
    """Copy an array into little-endian C order."""
    dtype = array.dtype.newbyteorder("<")
    name = _WIRE_NAMES.get(dtype)
    if name is None:
        raise TypeError(f"an array of dtype {array.dtype} cannot travel; convert it to one of {', '.join(DTYPES)}")
    return np.ascontiguousarray(array, dtype=dtype).reshape(array.shape), name
