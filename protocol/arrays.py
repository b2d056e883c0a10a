"""Arrays on the wire: ``[dtype, shape, data]``, little-endian, from a short list of dtypes, never pickled.

*Consumes* numpy arrays (sending) or their wire form (receiving). *Produces* the wire form, or read-only arrays that look
straight into the received bytes. *Waits for* nothing.

``data`` is the array's bytes, or the index of the frame that holds them. Arrays up to ``INLINE_MAX_BYTES`` travel inside the
body, larger ones as frames of their own that nobody copies. The threshold is small on purpose: a body without bulk data is
short, so that its structure can be checked at the cost of one scan before anything is decoded (``protocol.limits``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np

Buffer: TypeAlias = bytes | memoryview
"""What a frame may be: anything whose bytes can be read in place."""

INLINE_MAX_BYTES = 256
"""Arrays up to this size travel inside the body; the next byte gives them a frame of their own."""
MAX_DIMENSIONS = 8
"""More than any array of ours has; a longer shape is an attack or a bug."""

_NAMES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NAMES}
"""Every dtype that may travel, by its wire name (numpy's own, little-endian). Objects and strings are not among them."""
_WIRE_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}


def _read_only_empty(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array without elements (numpy maps no view onto an empty buffer)."""
    array = np.empty(shape, dtype)
    array.setflags(write=False)
    return array


_EMPTY: dict[str, np.ndarray] = {name: _read_only_empty(dtype, (0,)) for name, dtype in DTYPES.items()}


def pack_array(array: np.ndarray, frames: list[Buffer]) -> tuple[str, tuple[int, ...], Buffer | int]:
    """Return the wire form of ``array``; a large one is appended to ``frames``, without a copy.

    A strided or big-endian array is copied first. Raises TypeError for a dtype that may not travel.
    """
    name = _WIRE_NAMES.get(array.dtype)
    if name is None or not array.flags.c_contiguous:
        array, name = _normalise(array)
    if array.nbytes <= INLINE_MAX_BYTES:
        return name, array.shape, array.data
    frames.append(array.data)
    return name, array.shape, len(frames) - 1


def unpack_array(wire: Any, frames: Sequence[Any]) -> np.ndarray:
    """Return a read-only array over the bytes that ``wire`` holds or points to.

    ``frames`` are bytes or memoryviews. Raises ValueError
    for anything but ``[known dtype, sane shape, bytes of that size or a frame's index]``.
    """
    if wire.__class__ is not list or len(wire) != 3:
        raise ValueError("an array is [dtype, shape, data]")
    name: Any
    shape: Any
    data: Any
    name, shape, data = wire
    if name.__class__ is not str or name not in DTYPES:
        raise ValueError(f"array dtype {name!r:.40} is not one of {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    if data.__class__ is int:
        if not 0 <= data < len(frames):
            raise ValueError(f"the array's data is frame {data}, but the message has {len(frames)} array frames")
        data = frames[data]
        if data.__class__ is not bytes:
            data = data.toreadonly()
    elif data.__class__ is not bytes:
        raise ValueError(f"array data is a {type(data).__name__}, expected bytes or a frame's index")
    if shape.__class__ is list and len(shape) == 1 and shape[0].__class__ is int:
        if not data and shape[0] == 0:
            return _EMPTY[name]
        try:
            array = np.frombuffer(data, dtype)
        except ValueError:  # not a whole number of elements; named below
            return _unpack_shaped(dtype, shape, data)
        if array.size == shape[0]:
            return array
    return _unpack_shaped(dtype, shape, data)


def _unpack_shaped(dtype: np.dtype[Any], shape: object, data: Buffer) -> np.ndarray:
    """Handle every shape but the common one, and name what is wrong with a bad one."""
    num_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if not isinstance(shape, list):
        raise ValueError(  # noqa: TRY004 -- bad input, not a caller's mistake
            f"array shape is {type(shape).__name__}, expected a list of lengths"
        )
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


def _normalise(array: np.ndarray) -> tuple[np.ndarray, str]:
    """Copy an array into little-endian C order."""
    dtype = array.dtype.newbyteorder("<")
    name = _WIRE_NAMES.get(dtype)
    if name is None:
        raise TypeError(f"an array of dtype {array.dtype} cannot travel; convert it to one of {', '.join(DTYPES)}")
    return np.ascontiguousarray(array, dtype=dtype).reshape(array.shape), name
