"""Drains of single workers, as an operator requests them. Pure.

A drain names a worker and its newest incarnation. It is an entry in the desired fleet, so each
reader may read it again and again, before and after a restart:

    left out    the run's own worker: its name is not wanted; the role has one fewer
    left out    a joined host's: that host has one fewer, for as long as its join lives
    replaced    incarnations up to the named one drain; a newer one is started in their place

A role that grows again takes its left-out names first. Entries without an effect are forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pipeline.runtime.registry.contract import Drain, Fleet, Heartbeat
from pipeline.supervisor.fleet_plan import wanted_names, worker_name
from protocol.ids import Role


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
