"""Reads the value worker's claimed trajectories from Redis."""

from __future__ import annotations

from typing import Any

from pipeline.ledger.types import FinishedTrajectory
from protocol.codec import from_blob
from protocol.trajectory import RewardScore, TrajectoryChunk, ValueScore


def finished_from(flat: list[bytes] | dict[bytes, bytes]) -> FinishedTrajectory | None:
    """Return the trajectory of a ``finished:<id>`` hash; None when it was discarded meanwhile."""
    kept: dict[bytes, Any] = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    if not kept:
        return None
    return FinishedTrajectory(
        from_blob(kept[b"final"], TrajectoryChunk),
        from_blob(kept[b"reward"], RewardScore),
        tuple(from_blob(kept[b"value:%d" % index], ValueScore) for index in range(int(kept[b"num_chunks"]))),
    )
