"""Edits of the desired fleet: evictions, drains of single workers, other worker counts.

An evicted worker or joined host is not started until it is readmitted. The eviction is an entry in
the desired fleet, so it outlives supervisors, and joined hosts read it.

    a worker of the run     its name is excluded, and its role has one worker fewer
    one of a joined host    that host has one fewer while the entry exists
    a joined host           none of its workers is started; the next `headrace fleet join` there ends at once

If the role is scaled up, other names are used. ``readmitted`` gives the name and the count back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import Drain, Eviction, Fleet, Registry
from pipeline.supervisor.fleet_plan import wanted_names, worker_name
from protocol.ids import Role

BY_SUPERVISOR = "supervisor"
MAX_REASON_CHARS = 300
_MAX_TRIES = 10


async def edit_fleet(registry: Registry, change: Callable[[Fleet], Fleet]) -> Fleet | None:
    """Apply ``change`` to the desired fleet; return the result, or None if there is none or others
    kept changing it. Raises LedgerUnavailable, and what ``change`` raises."""
    for _ in range(_MAX_TRIES):
        present = await registry.fleet()
        if present is None:
            break
        fleet = change(present)
        if fleet == present or await registry.replace_fleet(present, fleet):
            return fleet
    return None


def evicted(fleet: Fleet, one: Eviction, role: Role | None = None) -> Fleet:
    """Add an eviction; adding the same one again changes nothing. ``role``: the evicted worker's."""
    if any((before.worker, before.host) == (one.worker, one.host) for before in fleet.evictions):
        return fleet
    is_counted = role is not None and one.worker in wanted_names(fleet.counts, fleet.left_out)
    fewer = {role: fleet.counts[role] - 1} if role is not None and is_counted else {}
    drains = tuple(drain for drain in fleet.drains if drain.worker != one.worker or not one.worker)
    entry = replace(one, reason=one.reason[:MAX_REASON_CHARS], is_counted=is_counted)
    return replace(fleet, counts={**fleet.counts, **fewer}, drains=drains, evictions=(*fleet.evictions, entry))


def readmitted(fleet: Fleet, one: Eviction, *, most: int | None = None) -> Fleet:
    """Remove an eviction. ``most``: upper limit on the role's count, for an autoscaled role."""
    counts = fleet.counts
    if one.is_counted:
        role = Role(one.worker.rpartition("-")[0])
        number = counts.get(role, 0) + 1
        counts = {**counts, role: number if most is None else min(number, most)}
    return replace(fleet, counts=counts, evictions=tuple(each for each in fleet.evictions if each != one))


def carried_over(fresh: Fleet, earlier: Iterable[Eviction]) -> Fleet:
    """Apply the run's earlier evictions to a newly configured fleet. Each role keeps at least one
    worker, under another name."""
    for one in earlier:
        role = Role(one.worker.rpartition("-")[0]) if one.is_counted else None
        after = evicted(fresh, replace(one, is_counted=False), role)
        if role is not None and after.counts.get(role, 0) < 1:
            kept = (*after.evictions[:-1], replace(after.evictions[-1], is_counted=False))
            after = replace(after, counts=fresh.counts, evictions=kept)
        fresh = after
    return fresh


# Drains of single workers, requested by an operator.
#
# A drain names a worker and its newest incarnation. It is an idempotent entry in the desired fleet:
#
#     left out    a worker of the run: its name is excluded; the role has one fewer
#     left out    one of a joined host: that host has one fewer, for as long as its join lives
#     replaced    incarnations up to the named one drain; a newer one is started in their place
#
# A role that grows again takes its left-out names first. Entries without effect are removed.


def resized(fleet: Fleet, numbers: Mapping[Role, int]) -> Fleet:
    """Return a copy of the fleet with these worker counts."""
    drains = fleet.drains
    for role, number in numbers.items():
        more = max(0, number - fleet.counts.get(role, 0))
        back = sorted(one for drain in drains if (one := left_out_number(drain, role)) is not None)[:more]
        drains = tuple(drain for drain in drains if left_out_number(drain, role) not in back)
    return _without_idle(replace(fleet, counts={**fleet.counts, **numbers}, drains=drains))


def drained(fleet: Fleet, drain: Drain, role: Role, beats: Iterable[Worker]) -> Fleet:
    """Add a drain, and forget drains of workers that are gone.

    Unless the worker is to be replaced, its role has one fewer. ``beats``: heartbeats of all
    workers."""
    there = {beat.who.worker: beat.who.epoch for beat in beats}
    is_own = drain.worker in wanted_names(fleet.counts, fleet.left_out)
    kept = tuple(
        one
        for one in fleet.drains
        if one.worker != drain.worker
        and (left_out_number(one, None) is not None or there.get(one.worker, one.epoch + 1) <= one.epoch)
    )
    fewer = {role: fleet.counts[role] - 1} if is_own and not drain.is_replaced else {}
    return _without_idle(replace(fleet, counts={**fleet.counts, **fewer}, drains=(*kept, drain)))


def left_out_number(drain: Drain, role: Role | None) -> int | None:
    """Return the number in the name of a left-out worker of the run (of ``role``, if given); else
    None."""
    name, _, number = drain.worker.rpartition("-")
    is_own = name in list(Role) and number.isdecimal() and worker_name(Role(name), int(number)) == drain.worker
    return int(number) if is_own and not drain.is_replaced and role in (None, Role(name)) else None


def _without_idle(fleet: Fleet) -> Fleet:
    """Remove drains of names beyond all wanted ones."""
    highest: dict[str, int] = {}
    for name in wanted_names(fleet.counts, fleet.left_out):
        role, _, number = name.rpartition("-")
        highest[role] = max(highest.get(role, 0), int(number)) if number.isdecimal() else 0
    drains = tuple(
        drain
        for drain in fleet.drains
        if (number := left_out_number(drain, None)) is None or number < highest.get(drain.worker.rpartition("-")[0], 0)
    )
    return replace(fleet, drains=drains)
