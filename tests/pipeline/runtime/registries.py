"""Registries under test: their parts, a heartbeat, an announcement."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import (
    Heartbeat,
    HeartbeatWriter,
    LinkReport,
    Registry,
    Topic,
    WaitingFor,
    WeightsAnnouncement,
)
from protocol.ids import Incarnation, Role


@dataclass
class Subject:
    registry: Registry
    writer: HeartbeatWriter


def beat_of(who: Incarnation, **changes: object) -> Heartbeat:
    return Heartbeat(**_fields(who, changes))  # type: ignore[arg-type]


def worker_of(who: Incarnation, **changes: object) -> Worker:
    return Worker(**_fields(who, changes))  # type: ignore[arg-type]


def _fields(who: Incarnation, changes: dict[str, object]) -> dict[str, object]:
    fields = {
        "who": who,
        "pid": 42,
        "host": "somewhere",
        "at_s": 1_000.5,
        "started_s": 900.0,
        "progress": 7,
        "progress_at_s": 1_000.0,
        "waiting_for": WaitingFor.ROOM,
        "detail": "reward-0 has no room",
        "policy_version": 3,
        "rss_bytes": 123,
        "counters": {"chunks": 5.0},
        "links": (LinkReport(name="generator-0>reward-0", sent=9, refused=1),),
    }
    return {**fields, **changes}


async def heartbeats(registry: Registry, role: Role | None = None, **asked: int) -> list[Heartbeat]:
    """Return the heartbeats as they were written: without the registry's own additions."""
    found = await registry.heartbeats(role, **asked)
    return [msgspec.structs.replace(beat, silent_s=0.0, clock_ahead_s=0.0) for beat in found]


def announcement(version: int, digest: str = "xxh3-128:0") -> WeightsAnnouncement:
    return WeightsAnnouncement(policy_version=version, digest=digest, path="/w", num_bytes=1, host="h")


NOTHING_HEARD = dict.fromkeys(Topic, "")


async def caught_up(registry: Registry) -> dict[Topic, str]:
    """Return the newest notification of every topic."""
    return NOTHING_HEARD | await registry.notifications(NOTHING_HEARD, timeout_s=0.001)
