"""Arrays on the wire: their bytes, little-endian, under a field name that ends in their dtype.

*Consumes* numpy vectors (sending) or their bytes (receiving). *Produces* bytes, or read-only
vectors. *Waits for* nothing.

A field of a message is declared as one of the vector types below, and its name on the wire ends in
the dtype. The type tells the decoder, the name tells everybody else: ``{"tokens:<i4": b"..."}``
needs no schema. Shapes do not travel, for all our arrays have one dimension; so there is no shape,
no length and no dtype that could be wrong, only bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

# a lookup less for each array
from numpy import frombuffer
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | memoryview
"""What a received frame may be. A memoryview is one of single bytes, so that its ``len`` counts
them.
"""

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
UINT8 = np.dtype("|u1")

if TYPE_CHECKING:
    Int32Vector: TypeAlias = NDArray[np.int32]
    Float32Vector: TypeAlias = NDArray[np.float32]
    Uint8Vector: TypeAlias = NDArray[np.uint8]
else:

    class _AnyArray(type):
        """Makes every numpy array pass for an instance: the declared type only carries the dtype to
        the decoder.
        """

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
"""Returns an array's bytes in C order, also of a strided one. Raises TypeError for anything but an
array.
"""


def pack_large_array(array: Any) -> memoryview:
    """Return an array's bytes in place: a call from Python, but a copy less. Raises TypeError for
    anything but an array.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a {type(array).__name__} cannot travel")
    return np.ascontiguousarray(cast("NDArray[Any]", array)).data


def unpack_array(declared: Any, wire: Any) -> NDArray[Any]:
    """Return a read-only vector over received bytes. ``declared`` is one of the vector types.

    Raises TypeError for anything but bytes, ValueError for a part of an element.
    """
    return frombuffer(wire, declared.dtype) if wire != b"" else declared.empty
