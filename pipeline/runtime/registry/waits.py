"""What a worker's main loop can be doing or waiting for, and what each wait means to everybody else.

This table is the only place that sorts the waits. Whoever asks whether a worker is at work, idle or
leaving, what it may hold, or which limit applies, asks here.

    wait        stage      ended by  limit       besides
    starting    starting   itself    start       computing is a part of it
    input       idle       fleet     piece
    credit      idle       fleet     piece       may hold work
    compute     computing  itself    piece
    compile     computing  itself    start
    room        held up    fleet     send
    weights     held up    fleet     piece       may hold work
    quarantine  held up    fleet     piece
    endpoint    held up    outside   piece
    ledger      held up    outside   outage
    disk        storing    outside   checkpoint  computing is a part of it; writes are progress
    draining    leaving    itself    drain       computing is a part of it; writes are progress
    stopped     leaving    itself    drain       may hold work

The limits are seconds without progress (``pipeline.fleet.limits``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Stage(StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    """nothing to do"""
    COMPUTING = "computing"
    HELD_UP = "held up"
    """has work, and cannot go on with it"""
    STORING = "storing"
    LEAVING = "leaving"


class EndedBy(StrEnum):
    ITSELF = "itself"
    FLEET = "fleet"
    """other workers"""
    OUTSIDE = "outside"
    """a service or a disk"""


class LimitKind(StrEnum):
    """Which limit a worker has without progress."""

    START = "start"
    PIECE = "piece"
    """several times its slowest piece of work"""
    SEND = "send"
    OUTAGE = "outage"
    CHECKPOINT = "checkpoint"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class _Wait:
    stage: Stage
    ended_by: EndedBy
    limit: LimitKind
    may_hold: bool = False
    covers_computing: bool = False
    counts_writes: bool = False


class WaitingFor(StrEnum):
    """What a worker's main loop is doing or waiting for."""

    STARTING = "starting"
    INPUT = "input"
    """its mailbox, or work from the ledger"""
    ROOM = "room"
    """room in a scorer's mailbox"""
    CREDIT = "credit"
    COMPUTE = "compute"
    """not waiting: computing"""
    COMPILE = "compile"
    """a first computation in this process, which compiles kernels and maps files"""
    ENDPOINT = "endpoint"
    """an HTTP judge that is down or rate-limited"""
    LEDGER = "ledger"
    """the server's answer"""
    WEIGHTS = "weights"
    QUARANTINE = "quarantine"
    """a version with the right digest, after one with a wrong digest"""
    DISK = "disk"
    """the write of a checkpoint"""
    DRAINING = "draining"
    STOPPED = "stopped"

    @property
    def stage(self) -> Stage:
        return _TABLE[self].stage

    @property
    def ended_by(self) -> EndedBy:
        return _TABLE[self].ended_by

    @property
    def limit(self) -> LimitKind:
        return _TABLE[self].limit

    @property
    def may_hold(self) -> bool:
        """Whether a worker may hold work here without progress, since others end the wait, with deadlines."""
        return _TABLE[self].may_hold

    @property
    def covers_computing(self) -> bool:
        """Whether a computation is reported as a part of this wait, instead of as one of its own."""
        return _TABLE[self].covers_computing

    @property
    def counts_writes(self) -> bool:
        """Whether writes to the disk are progress; elsewhere they would hide a hang."""
        return _TABLE[self].counts_writes

    @property
    def is_in_service(self) -> bool:
        """Whether the worker has started and is not leaving."""
        return self.stage not in (Stage.STARTING, Stage.LEAVING)


_TABLE: Final = {
    WaitingFor.STARTING: _Wait(Stage.STARTING, EndedBy.ITSELF, LimitKind.START, covers_computing=True),
    WaitingFor.INPUT: _Wait(Stage.IDLE, EndedBy.FLEET, LimitKind.PIECE),
    WaitingFor.CREDIT: _Wait(Stage.IDLE, EndedBy.FLEET, LimitKind.PIECE, may_hold=True),
    WaitingFor.COMPUTE: _Wait(Stage.COMPUTING, EndedBy.ITSELF, LimitKind.PIECE),
    WaitingFor.COMPILE: _Wait(Stage.COMPUTING, EndedBy.ITSELF, LimitKind.START),
    WaitingFor.ROOM: _Wait(Stage.HELD_UP, EndedBy.FLEET, LimitKind.SEND),
    WaitingFor.WEIGHTS: _Wait(Stage.HELD_UP, EndedBy.FLEET, LimitKind.PIECE, may_hold=True),
    WaitingFor.QUARANTINE: _Wait(Stage.HELD_UP, EndedBy.FLEET, LimitKind.PIECE),
    WaitingFor.ENDPOINT: _Wait(Stage.HELD_UP, EndedBy.OUTSIDE, LimitKind.PIECE),
    WaitingFor.LEDGER: _Wait(Stage.HELD_UP, EndedBy.OUTSIDE, LimitKind.OUTAGE),
    WaitingFor.DISK: _Wait(
        Stage.STORING, EndedBy.OUTSIDE, LimitKind.CHECKPOINT, covers_computing=True, counts_writes=True
    ),
    WaitingFor.DRAINING: _Wait(
        Stage.LEAVING, EndedBy.ITSELF, LimitKind.DRAIN, covers_computing=True, counts_writes=True
    ),
    WaitingFor.STOPPED: _Wait(Stage.LEAVING, EndedBy.ITSELF, LimitKind.DRAIN, may_hold=True),
}
