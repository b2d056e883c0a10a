"""Names of the things that processes talk about: roles, incarnations, trajectories, chunks.

Ids are short, sortable by eye and the same everywhere: in messages, in ledger keys, in logs and on the command line.

    t.12.3      trajectory: training lane, group 12, member 3
    t.12.3.0    its first chunk
    e4.7.0      evaluation number 4, prompt 7, sample 0

A group's number is its place in the order of admission; also in the stream of prompts, until a dead letter's prompt is
admitted again (``Lease.prompt``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import msgspec

TRAIN_LANE = "t"


class Role(StrEnum):
    """What a process is for."""

    GENERATOR = "generator"
    REWARD = "reward"
    REFERENCE = "reference"
    VALUE = "value"
    LEARNER = "learner"
    SUPERVISOR = "supervisor"


class Incarnation(msgspec.Struct, frozen=True):
    """One life of one worker. Its epoch is handed out by the registry and only grows.

    A write that carries an older epoch than the registry knows for that worker has no effect.
    Example: ``Incarnation(role=Role.GENERATOR, worker="generator-0", epoch=7)``.
    """

    role: Role
    worker: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.worker}#{self.epoch}"


class TrajectoryId(msgspec.Struct, frozen=True, order=True):
    """A trajectory: lane, group (place in the order of admission) and member (0 .. group size - 1)."""

    lane: str
    group: int
    member: int

    def __str__(self) -> str:
        return f"{self.lane}.{self.group}.{self.member}"

    @property
    def is_evaluation(self) -> bool:
        """Whether this trajectory is evaluated and never trained on."""
        return self.lane != TRAIN_LANE

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``t.12.3``. Raises ValueError when the text is not a trajectory id."""
        lane, group, member = text.split(".")
        return cls(lane, int(group), int(member))


class ChunkId(msgspec.Struct, frozen=True, order=True):
    """A chunk: its trajectory and its index within it, from 0."""

    trajectory: TrajectoryId
    index: int

    def __str__(self) -> str:
        return f"{self.trajectory}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``t.12.3.0``. Raises ValueError when the text is not a chunk id."""
        trajectory, _, index = text.rpartition(".")
        return cls(TrajectoryId.parse(trajectory), int(index))
