"""The in-memory ledger's records of groups, trajectories, chunks, claims and evaluations.

The Redis ledger stores the same as hashes (``pipeline.ledger.redis.keys``)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from pipeline.ledger.inspection import MILLION
from pipeline.ledger.rules import GroupUnit, TrajectoryUnit, UnitName, UnitRecord
from pipeline.ledger.types import EvaluationRequest, EvaluationSample
from protocol.trajectory import Field

CHUNK_OVERHEAD_BYTES = 512
"""A stored chunk's cost beside its blobs, for the watermark."""


def millionths(accuracy: float) -> int:
    """Return an accuracy in millionths; one that is no number counts as wrong."""
    return 0 if math.isnan(accuracy) else math.floor(min(max(accuracy, 0.0), 1.0) * MILLION + 0.5)


@dataclass(slots=True)
class GroupRecord(GroupUnit):
    """A group that is not settled."""

    admitted_s: float = 0.0
    trained: bool = False
    judged_by: str = ""
    """Scorer that was given the whole group."""
    judged_until: float = 0.0
    """Until then no other is given it."""

    @property
    def difficulty(self) -> int:
        """1 less the mean accuracy of the scored members, in millionths. Raises ZeroDivisionError
        without one."""
        return math.floor(MILLION - sum(map(millionths, self.accuracies)) / len(self.accuracies) + 0.5)


@dataclass(slots=True)
class TrajectoryRecord(TrajectoryUnit):
    """A trajectory that is not settled."""

    holder: str | None = None
    num_tokens: int = 0
    newest: int = 0
    since_s: float = 0.0
    live: int = 0
    """Unit chunk: written chunks that are not settled."""
    trained: bool = False
    waits: bool = False
    """Its newest chunk waits for the environment's turn."""
    opened: bool = False
    """Its first chunk is an opening chunk, which has no tokens."""
    last: bytes = b""
    """Unit chunk: the newest chunk, if it was settled before the next was written."""
    last_turn: bytes = b""
    """Its turn, if it ended one."""
    num_leases: int = 0
    leases: list[str] = field(default_factory=list[str])
    """The last ones, by ``lives.event``."""
    past: dict[int, str] = field(default_factory=dict[int, str])
    """Unit chunk: rows of chunks that have left, by index."""
    spoiled: bool = False
    """Unit chunk: a dead or non-finite chunk was in it, so no critic may learn from it."""


@dataclass(slots=True)
class ChunkRecord(UnitRecord):
    """A stored chunk and its scores."""

    blob: bytes = b""
    num_tokens: int = 0
    final: bool = False
    written_s: float = 0.0
    rewarded_s: float = 0.0
    """Since then its guidance is due, if it needs any."""
    turned_s: float | None = None
    """Since then its reward is due, if its turn was the last."""
    by: str = ""
    """The incarnation that sampled it, and the versions."""
    events: dict[Field, str] = field(default_factory=dict[Field, str])
    """The scorers, by ``lives.event``."""
    scores: dict[Field, bytes] = field(default_factory=dict[Field, bytes])
    attempts: Counter[Field] = field(default_factory=Counter[Field])

    def lacking_since(self, field: Field) -> float:
        """Return when a field that it lacks could first be written."""
        if field is Field.REWARD and self.turned_s is not None:
            return self.turned_s
        return self.rewarded_s if field is Field.GUIDANCE else self.written_s

    @property
    def num_bytes(self) -> int:
        """Its bytes, as the watermark counts them."""
        return CHUNK_OVERHEAD_BYTES + len(self.blob) + sum(map(len, self.scores.values()))


@dataclass(slots=True)
class ClaimRecord:
    """A claim that is not settled."""

    policy_version: int
    units: list[UnitName]


@dataclass(slots=True)
class FinishedRecord:
    """A trajectory stored for the value worker."""

    num_chunks: int = 0
    """With tokens; 0 until the reward is written."""
    final: bytes = b""
    reward: bytes = b""
    values: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """By chunk index."""
    ready_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the final chunk, its reward and every chunk's values are stored."""
        return self.num_chunks > 0 and len(self.values) == self.num_chunks

    @property
    def num_bytes(self) -> int:
        """Its bytes, as the watermark counts them."""
        return CHUNK_OVERHEAD_BYTES + len(self.final) + len(self.reward) + sum(map(len, self.values.values()))


@dataclass(slots=True)
class EvaluationRecord:
    """An evaluation."""

    request: EvaluationRequest
    samples: list[EvaluationSample] = field(default_factory=list[EvaluationSample])
    num_failed: int = 0
