"""Names of roles, incarnations, trajectories and chunks.

Ids are short, easy to sort by eye, and the same in messages, ledger keys, logs and commands.

    t.12.3      trajectory: training lane, group 12, member 3
    t.12.3.0    its first chunk
    e4.7.0      evaluation number 4, prompt 7, sample 0

A group's number is its position in the order of admission, and also in the prompt stream until a dead
letter's prompt is admitted again (``Lease.prompt``).

Ids become parts of ledger keys and file names, so every received id is checked: a lane is ``t`` or ``e`` and a
number, and numbers fit the ledger's arithmetic."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Self

import msgspec

TRAIN_LANE = "t"
MAX_NUMBER = 2**53 - 1
"""The ledger counts in double precision."""
_LANE = re.compile(r"t|e[0-9]{1,15}")
_TRAJECTORY = re.compile(r"(t|e[0-9]{1,15})\.([0-9]{1,15})\.([0-9]{1,15})")
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Role(StrEnum):
    GENERATOR = "generator"
    REWARD = "reward"
    REFERENCE = "reference"
    VALUE = "value"
    ENVIRONMENT = "environment"
    LEARNER = "learner"
    OBSERVER = "observer"
    SUPERVISOR = "supervisor"


ELASTIC_ROLES: Final = (Role.GENERATOR, Role.REWARD, Role.REFERENCE, Role.ENVIRONMENT)
"""Roles of which a running run may have any number of workers; the others have one."""


class Incarnation(msgspec.Struct, frozen=True):
    """One life of one worker. The registry assigns its epoch, which only grows.

    A write with an older epoch than the registry's for that worker has no effect. Example:
    ``Incarnation(role=Role.GENERATOR, worker="generator-0", epoch=7)``."""

    role: Role
    worker: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.worker}#{self.epoch}"


class TrajectoryId(msgspec.Struct, frozen=True, order=True):
    """A trajectory: lane, group (position in admission order), member (0 .. group size - 1)."""

    lane: str
    group: int
    member: int

    def __str__(self) -> str:
        return f"{self.lane}.{self.group}.{self.member}"

    @property
    def is_evaluation(self) -> bool:
        """Whether this trajectory is evaluated, never trained on."""
        return self.lane != TRAIN_LANE

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``t.12.3``. Raises ValueError when the text is not a trajectory id."""
        found = _TRAJECTORY.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a trajectory id; expected LANE.GROUP.MEMBER, for example t.12.3")
        return cls(found[1], int(found[2]), int(found[3]))


class ChunkId(msgspec.Struct, frozen=True, order=True):
    """A chunk: its trajectory and its index within it, from 0."""

    trajectory: TrajectoryId
    index: int

    def __str__(self) -> str:
        return f"{self.trajectory}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``t.12.3.0``. Raises ValueError when the text is not a chunk id."""
        trajectory, _, index = text.rpartition(".")
        if not (index.isascii() and index.isdecimal() and len(index) <= 15):
            raise ValueError(f"{text!r} is not a chunk id; expected LANE.GROUP.MEMBER.CHUNK, for example t.12.3.0")
        return cls(TrajectoryId.parse(trajectory), int(index))

    @property
    def is_well_formed(self) -> bool:
        """Whether a ledger could have made this id, which may come from any peer."""
        trajectory = self.trajectory
        lane = trajectory.lane
        return (
            0 <= self.index <= MAX_NUMBER
            and 0 <= trajectory.member <= MAX_NUMBER
            and 0 <= trajectory.group <= MAX_NUMBER
            and (lane == TRAIN_LANE or _LANE.fullmatch(lane) is not None)
        )


def is_worker_name(name: str) -> bool:
    """Return whether ``name`` is safe in file names, ledger keys and log lines."""
    return _WORKER.fullmatch(name) is not None
