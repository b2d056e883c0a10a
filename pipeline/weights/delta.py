"""A lossless difference between two versions, short where few numbers changed.

After a reinforcement learning step most bf16 numbers are unchanged: a step of 1e-6 seldom moves a weight
to another rounded value, and then nearly always one of its two bytes changes by one. So the bodies of both
versions are compared in blocks, as *planes*: one for each byte of a number. A plane of a block is encoded as
nothing, as positions and values of its changed bytes, or whole, whichever is shortest.

    delta = length of prelude u32 | prelude (MessagePack, see ``Prelude``) | planes of block 0 | planes of block 1 | ...
    plane = number of gap bytes u32 | number of values u32 | gaps | values

A gap byte g below 255 skips g unchanged bytes of the plane, then one changed byte follows; 255 skips 255
unchanged bytes. Without gaps, and with as many values as the plane has bytes, it is the whole plane. All
numbers are little-endian.

The digests of base and result bind a delta to the one version that it was made from, and prove the result."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import numpy as np

from pipeline.weights.digest import Digest
from protocol.errors import WeightsDamaged

BLOCK_BYTES = 1 << 20
"""Part of the body that is compared at once: both versions and the result fit into a processor's cache."""
STRIDES = (1, 2, 4, 8)
_SAMPLED_BLOCKS = 8
"""Blocks from which a delta's size is estimated first, since encoding one that is too long wastes time."""

_FORMAT = 1
_U32 = struct.Struct("<I")
_PLANE = struct.Struct("<II")
_PASS = 255


class Prelude(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    base_digest: str
    """Digest of the version to which the delta applies."""
    digest: str
    """Digest of the resulting version."""
    num_bytes: int
    """Size of either version's body."""
    stride: int
    """Number of planes: the bytes of a number."""
    base_head_bytes: int
    head: bytes
    """All bytes before the result's body."""
    tail: bytes
    """The last bytes of the body, if its size is not a multiple of the stride."""


def encode(
    base: np.ndarray, new: np.ndarray, *, heads: tuple[int, int], stride: int, digests: tuple[str, str], max_bytes: int
) -> bytes | None:
    """Return the delta from ``base`` to ``new``, uint8 [bytes]; None when it is longer than ``max_bytes`` or
    the bodies differ in size.

    ``heads`` are the offsets of the bodies, ``digests`` the digests of both versions, and ``stride`` the
    bytes of a number: 2 for bf16, 4 for fp32."""
    base_body, new_body = base[heads[0] :], new[heads[1] :]
    if base_body.size != new_body.size:
        return None
    num_tail = new_body.size % stride
    end = new_body.size - num_tail
    if _estimate(base_body[:end], new_body[:end], stride) > max_bytes:
        return None
    prelude = msgspec.msgpack.encode(
        Prelude(
            format=_FORMAT,
            base_digest=digests[0],
            digest=digests[1],
            num_bytes=new_body.size,
            stride=stride,
            base_head_bytes=heads[0],
            head=new[: heads[1]].tobytes(),
            tail=new_body[end:].tobytes(),
        )
    )
    parts: list[bytes] = [_U32.pack(len(prelude)), prelude]
    size = _U32.size + len(prelude)
    for start in range(0, end, BLOCK_BYTES):
        stop = min(start + BLOCK_BYTES, end)
        for part in _planes(base_body[start:stop], new_body[start:stop], stride):
            parts.append(part)
            size += len(part)
        if size > max_bytes:
            return None
    return b"".join(parts)


def read_prelude(delta: memoryview, *, head_bytes: int, num_bytes: int) -> tuple[Prelude, int]:
    """Return a delta's prelude and the offset of its planes. Raises WeightsDamaged unless it leads from a
    body at ``head_bytes`` to a version of ``num_bytes``."""
    if len(delta) < _U32.size:
        raise WeightsDamaged(f"a delta of {len(delta)} bytes has no prelude; fetch the whole version")
    start = _U32.size + _U32.unpack_from(delta)[0]
    if start > len(delta):
        raise WeightsDamaged(f"a delta of {len(delta)} bytes claims a prelude of {start}; fetch the whole version")
    try:
        prelude = msgspec.msgpack.decode(delta[_U32.size : start], type=Prelude)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightsDamaged(f"a delta's prelude cannot be read: {error}; fetch the whole version") from error
    is_whole = (
        prelude.format == _FORMAT
        and prelude.stride in STRIDES
        and prelude.base_head_bytes == head_bytes
        and len(prelude.head) + prelude.num_bytes == num_bytes
        and prelude.num_bytes >= 0
        and len(prelude.tail) == prelude.num_bytes % prelude.stride
    )
    if not is_whole:
        raise WeightsDamaged(
            f"a delta of format {prelude.format} from bodies at {prelude.base_head_bytes} to {len(prelude.head)} + "
            f"{prelude.num_bytes} bytes is not one from {head_bytes} to {num_bytes} bytes; fetch the whole version"
        )
    return prelude, start


def apply(delta: memoryview, base: np.ndarray, out: np.ndarray, *, head_bytes: int) -> tuple[Prelude, str]:
    """Write a delta's result into ``out``; return the prelude and the digest of ``out``.

    The caller checks ``base``, whose body is at ``head_bytes``, against ``base_digest``. Raises
    WeightsDamaged if the bytes are not such a delta; ``out`` is then garbage."""
    prelude, place = read_prelude(delta, head_bytes=head_bytes, num_bytes=out.size)
    base_body = base[head_bytes:]
    if base_body.size != prelude.num_bytes:
        raise WeightsDamaged(
            f"a delta for a base of {prelude.num_bytes} bytes was applied to one of {base_body.size}; fetch the whole version"
        )
    digest = Digest()
    out[: len(prelude.head)] = np.frombuffer(prelude.head, np.uint8)
    digest.update(prelude.head)
    body = out[len(prelude.head) :]
    end = prelude.num_bytes - len(prelude.tail)
    for start in range(0, end, BLOCK_BYTES):
        block = body[start : min(start + BLOCK_BYTES, end)]
        block[:] = base_body[start : start + block.size]
        for plane in block.reshape(-1, prelude.stride).T:
            place = _put_plane(delta, place, plane)
        digest.update(block)
    if place != len(delta):
        raise WeightsDamaged(f"a delta has {len(delta) - place} bytes too many; fetch the whole version")
    body[end:] = np.frombuffer(prelude.tail, np.uint8)
    digest.update(prelude.tail)
    return prelude, str(digest)


def _estimate(base: np.ndarray, new: np.ndarray, stride: int) -> float:
    """Estimate the size of the planes in bytes from some blocks; 0 when there are few blocks."""
    starts = range(0, new.size, BLOCK_BYTES)
    if len(starts) < 2 * _SAMPLED_BLOCKS:
        return 0.0
    chosen = starts[:: len(starts) // _SAMPLED_BLOCKS]
    taken = sum(
        len(part)
        for start in chosen
        for part in _planes(base[start : start + BLOCK_BYTES], new[start : start + BLOCK_BYTES], stride)
    )
    return taken * len(starts) / len(chosen)


def _planes(base: np.ndarray, new: np.ndarray, stride: int) -> Iterator[bytes]:
    kind = np.dtype(f"<u{stride}")
    changed = np.flatnonzero(base.view(kind) != new.view(kind))
    before = base.reshape(-1, stride)[changed]
    after = new.reshape(-1, stride)[changed]
    differs = before != after
    for plane in range(stride):
        mask = differs[:, plane]
        places = changed[mask]
        gaps = _gaps(places)
        if gaps.size + places.size < new.size // stride:
            yield _PLANE.pack(gaps.size, places.size)
            yield gaps.tobytes()
            yield after[mask, plane].tobytes()
        else:
            yield _PLANE.pack(0, new.size // stride)
            yield new[plane::stride].tobytes()


def _gaps(places: np.ndarray) -> np.ndarray:
    """Return the gap bytes of ascending ``places``, as uint8."""
    passed = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(passed // _PASS + 1)
    gaps = np.full(ends[-1] if ends.size else 0, _PASS, np.uint8)
    gaps[ends - 1] = passed % _PASS
    return gaps


def _put_plane(delta: memoryview, place: int, plane: np.ndarray) -> int:
    """Apply one plane of a delta; return the offset of the next."""
    if len(delta) - place < _PLANE.size:
        raise WeightsDamaged("a delta ends before its last plane; fetch the whole version")
    num_gaps, num_values = _PLANE.unpack_from(delta, place)
    place += _PLANE.size
    stop = place + num_gaps + num_values
    if stop > len(delta) or num_values > plane.size or num_gaps > num_values + plane.size // _PASS:
        raise WeightsDamaged(
            f"a delta's plane claims {num_gaps} gaps and {num_values} values, with {len(delta) - place} bytes left, for "
            f"{plane.size} places; fetch the whole version"
        )
    gaps = np.frombuffer(delta, np.uint8, num_gaps, place)
    values = np.frombuffer(delta, np.uint8, num_values, place + num_gaps)
    if num_gaps == 0 and num_values == plane.size:
        plane[:] = values
        return stop
    is_change = gaps != _PASS
    places = np.cumsum(gaps + is_change.astype(np.int64))[is_change] - 1
    if places.size != num_values or (places.size and places[-1] >= plane.size):
        raise WeightsDamaged(
            f"a delta's plane has {num_values} values for {places.size} places among {plane.size}; fetch the whole version"
        )
    plane[places] = values
    return stop
