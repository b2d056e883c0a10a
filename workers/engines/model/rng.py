"""Random streams keyed by (run seed, trajectory, position), never by process.

The uniform for response position p of a trajectory is a function of (run seed, trajectory id, p): a
64-bit key is hashed from seed and id once, and SplitMix64 (Steele, Lea and Flood, OOPSLA 2014,
section 3) finalises key + (p + 1) * gamma. There is no state, so a trajectory continues identically
in any process, slot, batch or window."""

from __future__ import annotations

import hashlib

import numpy as np

from protocol.ids import TrajectoryId

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_UNIFORM_BITS = 40
_DROPPED_BITS = np.uint64(64 - _UNIFORM_BITS)


def stream_key(seed: int, trajectory: TrajectoryId, sequence: int = 0) -> int:
    """Return the 64-bit key of the random stream of a trajectory's sequence; the same on every machine."""
    name = f"{seed}/{trajectory}/{sequence}" if sequence else f"{seed}/{trajectory}"
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"headrace-rng").digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw one number per (stream, response position): float64 [n] in the open interval (0, 1).

    ``keys`` are uint64 [n] of :func:`stream_key`, ``positions`` integers [n] from 0. On the grid of
    2^-40, u * total is always below total, so an inverse lookup never runs off a cumulative sum."""
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    state = (state ^ (state >> _S30)) * _MIX_1
    state = (state ^ (state >> _S27)) * _MIX_2
    state ^= state >> _S31
    return ((state >> _DROPPED_BITS).astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
