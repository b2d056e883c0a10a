"""Changes of the desired fleet: evictions, drains of single workers, other numbers. Pure.

Evictions: workers and joined hosts that are not started until they are readmitted.

An eviction is an entry in the desired fleet. So it outlives supervisors, and joined hosts read it.

    the run's own worker    its name is not wanted, and its role has one worker fewer
    a joined host's         that host has one fewer, for as long as the entry is there
    a joined host           none of its workers is started; the next `headrace fleet join` there ends at once

A role that is scaled up gets other names. ``readmitted`` gives the name and the number back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pipeline.runtime.registry.contract import Drain, Eviction, Fleet, Heartbeat
from pipeline.supervisor.fleet_plan import wanted_names, worker_name
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


# Drains of single workers, as an operator requests them. Pure.
#
# A drain names a worker and its newest incarnation. It is an entry in the desired fleet, so each
# reader may read it again and again, before and after a restart:
#
#     left out    the run's own worker: its name is not wanted; the role has one fewer
#     left out    a joined host's: that host has one fewer, for as long as its join lives
#     replaced    incarnations up to the named one drain; a newer one is started in their place
#
# A role that grows again takes its left-out names first. Entries without an effect are forgotten.


def resized(fleet: Fleet, numbers: Mapping[Role, int]) -> Fleet:
    """Return the fleet with other numbers of some roles."""
    drains = fleet.drains
    for role, number in numbers.items():
        more = max(0, number - fleet.counts.get(role, 0))
        back = sorted(one for drain in drains if (one := left_out_number(drain, role)) is not None)[:more]
        drains = tuple(drain for drain in drains if left_out_number(drain, role) not in back)
    return _without_idle(replace(fleet, counts={**fleet.counts, **numbers}, drains=drains))


def drained(fleet: Fleet, drain: Drain, role: Role, beats: Iterable[Heartbeat]) -> Fleet:
    """Return the fleet with one more drain. The role of the run's own worker has one fewer, unless
    it is replaced. ``beats``: of all workers; drains of workers that are gone are forgotten."""
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
    """Return the number of a left-out worker of the run's own, of ``role`` if given; else None."""
    name, _, number = drain.worker.rpartition("-")
    is_own = name in list(Role) and number.isdecimal() and worker_name(Role(name), int(number)) == drain.worker
    return int(number) if is_own and not drain.is_replaced and role in (None, Role(name)) else None


def _without_idle(fleet: Fleet) -> Fleet:
    """Forget left-out names above all wanted ones."""
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
