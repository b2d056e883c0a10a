"""The verdict on a worker, from one heartbeat. Whoever asks whether a worker is well asks here.

Pure. A heartbeat carries its own durations, measured by the worker's monotonic clock, and the
registry adds how long ago it arrived. So a command that reads the registry once comes to the same
verdict as the supervisor that watches all the time, and wall clocks that jump change nothing.

    kind              seen                                       limit
    silent            no heartbeat                               SILENT_AFTER_S suspected, silent_after_s certain
    stopped           no heartbeat, and no thread has run        stopped_after_s
    not started       STARTING without progress                  start_timeout_s
    stuck             computes, or holds work at a wait that     the limit of its wait
                      may not hold any, without progress
    not turning       its main loop does not turn                the limit of its wait
    idle beside work  at INPUT without progress, while work of   stuck_after_s, or 60 s
                      its role is overdue

The limit of a wait is in ``pipeline.fleet.limits``. A piece is a reported step of long work: a
layer of a pass, a decode step, a verdict, a file (``pipeline.process.work``). Its limit is several
times the slowest piece so far of that kind of work, and at least a minute; ``stuck_after_s``, if
set, is the maximum.

An idle worker holds no work and may be idle for ever. A worker that waits for credit or weights may
hold any work. Time is counted separately for each kind of wait, since the last progress or start of
work (``Heartbeat.still_s``). So time at one wait never counts against another's limit, and a worker
that alternates between two without progress still reaches the limit of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pipeline.fleet.limits import Limits
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import Heartbeat
from pipeline.runtime.registry.waits import Stage, WaitingFor


class HealthKind(StrEnum):
    LIVE = "live"
    SILENT = "silent"
    STOPPED = "stopped"
    NOT_STARTED = "not started"
    STUCK = "stuck"
    NOT_TURNING = "not turning"
    IDLE_BESIDE_WORK = "idle beside work"


class Certainty(StrEnum):
    NONE = "none"
    SUSPECTED = "suspected"
    """shown to people, and left out of decisions; the worker is not touched"""
    CERTAIN = "certain"
    """its supervisor replaces it"""


@dataclass(frozen=True, slots=True)
class Health:
    kind: HealthKind
    since_s: float = 0.0
    """For how long, in seconds."""
    limit_s: float = 0.0
    evidence: str = ""
    """A clause for people: what was seen, for how long, and the limit or its setting."""
    certainty: Certainty = Certainty.NONE

    @property
    def is_well(self) -> bool:
        return self.kind is HealthKind.LIVE

    @property
    def is_silent(self) -> bool:
        return self.kind in (HealthKind.SILENT, HealthKind.STOPPED)

    @property
    def is_certain(self) -> bool:
        return self.certainty is Certainty.CERTAIN


WELL: Final = Health(HealthKind.LIVE)


def health(
    beat: Heartbeat,
    limits: Limits,
    *,
    silent_s: float | None = None,
    trusted_s: float = math.inf,
    overdue_s: float = 0.0,
) -> Health:
    """Judge a worker by its last heartbeat.

    Args:
        beat: As the registry returned it.
        limits: Of its run.
        silent_s: Seconds without a heartbeat as its reader trusts them (``FleetState``); None: as
            the registry says.
        trusted_s: For how long its reader could read heartbeats; no symptom counts for longer.
        overdue_s: How far work of its role is beyond its deadline."""
    silent_s = beat.silent_s if silent_s is None else silent_s
    if silent_s > limits.silent_after_s:
        return _certain(HealthKind.SILENT, silent_s, limits.silent_after_s, "no heartbeat", "supervisor.silent_after_s")
    at_work = _at_work(beat, limits, trusted_s, overdue_s)
    if at_work.is_well and is_silent(silent_s):
        seen = f"no heartbeat for {silent_s:.0f} s"
        return Health(HealthKind.SILENT, silent_s, limits.silent_after_s, seen, Certainty.SUSPECTED)
    return at_work


def of_stopped(found: Health, limits: Limits, silent_s: float, stopped_s: float) -> Health:
    """Return the verdict on a worker, ``found`` so far, of whose process no thread has run for
    ``stopped_s``; only the holder of the process knows that."""
    if stopped_s <= limits.stopped_after_s or (found.kind is HealthKind.SILENT and found.is_certain):
        return found
    seen = f"no heartbeat for {silent_s:.0f} s, and its process does not run (supervisor.stopped_after_s)"
    return Health(HealthKind.STOPPED, silent_s, limits.stopped_after_s, seen, Certainty.CERTAIN)


def _at_work(beat: Heartbeat, limits: Limits, trusted_s: float, overdue_s: float) -> Health:
    at, still_s = beat.waiting_for, min(beat.still_s, trusted_s)
    limit_s = limits.limit_s(at, beat.work.slowest_s)
    if at is WaitingFor.STARTING:
        if still_s > limit_s:
            return _certain(HealthKind.NOT_STARTED, still_s, limit_s, "not started", "supervisor.start_timeout_s")
        return WELL
    allowed = f"{limit_s:g} s are allowed"
    if at.stage is Stage.COMPUTING and still_s > limit_s:
        seen = f"at {at} without progress for {still_s:.0f} s, {allowed}"
        return Health(HealthKind.STUCK, still_s, limit_s, seen, Certainty.CERTAIN)
    unturned_s = min(beat.at_s - max(beat.turned_at_s, beat.moved_at_s), trusted_s) if beat.turned_at_s else 0.0
    if unturned_s > limit_s:
        seen = f"its loop has not turned for {unturned_s:.0f} s, last at {at}; {allowed}"
        return Health(HealthKind.NOT_TURNING, unturned_s, limit_s, seen, Certainty.CERTAIN)
    if beat.held > 0 and not at.may_hold and still_s > limit_s:
        seen = f"holds {beat.held} pieces of work without progress for {still_s:.0f} s, at {at}; {allowed}"
        return Health(HealthKind.STUCK, still_s, limit_s, seen, Certainty.CERTAIN)
    if at is WaitingFor.INPUT and min(overdue_s, still_s) > limits.least_s:
        seen = f"idle for {still_s:.0f} s although work of its role has been overdue for {overdue_s:.0f} s"
        return Health(HealthKind.IDLE_BESIDE_WORK, still_s, limits.least_s, seen, Certainty.CERTAIN)
    return WELL


def _certain(kind: HealthKind, since_s: float, limit_s: float, seen: str, setting: str) -> Health:
    words = f"{seen} {'after' if kind is HealthKind.NOT_STARTED else 'for'} {since_s:.0f} s ({setting})"
    return Health(kind, since_s, limit_s, words, Certainty.CERTAIN)
