"""Evictions: workers and joined hosts that are not started until they are readmitted. Pure.

An eviction is an entry in the desired fleet. So it outlives supervisors, and joined hosts read it.

    the run's own worker    its name is not wanted, and its role has one worker fewer
    a joined host's         that host has one fewer, for as long as the entry is there
    a joined host           none of its workers is started; the next `headrace fleet join` there ends at once

A role that is scaled up gets other names. ``readmitted`` gives the name and the number back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pipeline.runtime.registry.contract import Eviction, Fleet
from pipeline.supervisor.fleet_plan import wanted_names
from protocol.ids import Role

BY_SUPERVISOR = "supervisor"
MAX_REASON_CHARS = 300


def evicted(fleet: Fleet, one: Eviction, role: Role | None = None) -> Fleet:
    """Return the fleet with one more eviction. A repeat changes nothing. ``role``: the worker's."""
    if any((before.worker, before.host) == (one.worker, one.host) for before in fleet.evictions):
        return fleet
    is_counted = role is not None and one.worker in wanted_names(fleet.counts, fleet.left_out)
    fewer = {role: fleet.counts[role] - 1} if role is not None and is_counted else {}
    drains = tuple(drain for drain in fleet.drains if drain.worker != one.worker or not one.worker)
    entry = replace(one, reason=one.reason[:MAX_REASON_CHARS], is_counted=is_counted)
    return replace(fleet, counts={**fleet.counts, **fewer}, drains=drains, evictions=(*fleet.evictions, entry))


def readmitted(fleet: Fleet, one: Eviction, *, most: int | None = None) -> Fleet:
    """Return the fleet without an eviction. ``most``: bound of the role's number, where it follows
    demand."""
    counts = fleet.counts
    if one.is_counted:
        role = Role(one.worker.rpartition("-")[0])
        number = counts.get(role, 0) + 1
        counts = {**counts, role: number if most is None else min(number, most)}
    return replace(fleet, counts=counts, evictions=tuple(each for each in fleet.evictions if each != one))


def carried_over(fresh: Fleet, earlier: Iterable[Eviction]) -> Fleet:
    """Return a fleet as it is configured, with the evictions of the run so far. Each role keeps one
    worker at least, under another name."""
    for one in earlier:
        role = Role(one.worker.rpartition("-")[0]) if one.is_counted else None
        after = evicted(fresh, replace(one, is_counted=False), role)
        if role is not None and after.counts.get(role, 0) < 1:
            kept = (*after.evictions[:-1], replace(after.evictions[-1], is_counted=False))
            after = replace(after, counts=fresh.counts, evictions=kept)
        fresh = after
    return fresh
