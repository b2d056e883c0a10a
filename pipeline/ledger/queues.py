"""The ledger's queues by name, with the role that empties each."""

from __future__ import annotations

from typing import Final

from pipeline.ledger.types import QueueStat

EMPTIED_BY: Final[dict[str, str]] = {
    "credit": "learner",
    "evaluation_open": "generator",
    "open": "generator",
    "parked": "learner",
    "leased": "generator",
    "again": "generator",
    "reward": "reward",
    "reference": "reference",
    "value": "value",
    "guidance": "reference",
    "finished": "value",
    "finished_claimed": "value",
    "ready": "learner",
    "claimed": "learner",
    "dead": "you",
    "bytes": "learner",
}
"""``parked`` windows wait for credit, which the learner returns. ``claimed`` units wait for the
learner's next checkpoint, ``finished_claimed`` trajectories for the value worker's. ``again`` holds
the prompts of retried dead letters. ``finished`` is listed for a run with a critic."""


def queue_stat(name: str, depth: int, limit: int | None, oldest_age_s: float | None) -> QueueStat:
    """Return the stat of one of the ledger's queues."""
    return QueueStat(name, depth, limit, oldest_age_s, EMPTIED_BY[name])
