"""Reading the value worker's claims from Redis.

*Consumes* names of trajectories that a claim holds. *Produces* them whole, with rewards and values.
*Waits for* the server.
"""

from __future__ import annotations

from typing import Any

from pipeline.ledger.contract import FinishedTrajectory
from protocol.codec import from_blob
from protocol.trajectory import RewardScore, TrajectoryChunk, ValueScore


def finished_from(flat: list[bytes] | dict[bytes, bytes]) -> FinishedTrajectory | None:
    """Return the trajectory that a ``finished:<id>`` hash holds; None when it was discarded
    meanwhile.
    """
    kept: dict[bytes, Any] = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
    if not kept:
        return None
    return FinishedTrajectory(
        from_blob(kept[b"final"], TrajectoryChunk),
        from_blob(kept[b"reward"], RewardScore),
        tuple(from_blob(kept[b"value:%d" % index], ValueScore) for index in range(int(kept[b"num_chunks"]))),
    )
