"""Arrays on the wire: their little-endian bytes, under a field name that ends in the dtype.

The decoder knows the dtype from the field's type. Readers without a schema take it from the name:
``{"tokens:<i4": b"..."}``. Every array has one dimension, so neither shape nor length is transmitted, and
they cannot be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

# imported by name to save an attribute lookup per array
from numpy import frombuffer
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | memoryview
"""A received frame. A memoryview must have single-byte items, so that ``len`` counts bytes."""

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
UINT8 = np.dtype("|u1")

if TYPE_CHECKING:
    Int32Vector: TypeAlias = NDArray[np.int32]
    Float32Vector: TypeAlias = NDArray[np.float32]
    Uint8Vector: TypeAlias = NDArray[np.uint8]
else:

    class _AnyArray(type):
        """Makes every numpy array an instance: the type only carries the dtype."""

        __instancecheck__ = np.ndarray.__instancecheck__

    class Int32Vector(metaclass=_AnyArray):
        """int32 [elements]."""

        dtype = INT32
        empty = frombuffer(b"", INT32)

    class Float32Vector(metaclass=_AnyArray):
        """float32 [elements]."""

        dtype = FLOAT32
        empty = frombuffer(b"", FLOAT32)

    class Uint8Vector(metaclass=_AnyArray):
        """uint8 [elements]."""

        dtype = UINT8
        empty = frombuffer(b"", UINT8)


pack_array = np.ndarray.tobytes
"""Return an array's bytes in C order, even if it is strided. Raises TypeError for a non-array."""


def pack_large_array(array: Any) -> memoryview:
    """Return an array's bytes without a copy. Raises TypeError for a non-array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"only arrays can be sent this way, got a {type(array).__name__}")
    return np.ascontiguousarray(cast("NDArray[Any]", array)).data


def unpack_array(declared: Any, wire: Any) -> NDArray[Any]:
    """Return a read-only vector over received bytes; ``declared`` is one of the vector types.

    Raises TypeError for anything but bytes, ValueError for an incomplete element."""
    return frombuffer(wire, declared.dtype) if wire != b"" else declared.empty
