"""Evictions by an operator: a worker or a joined host leaves at once, until it is readmitted.

They are entries in the desired fleet, which every supervisor of the run reads. The rules are in
``pipeline.supervisor.fleet_edits``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached
from pipeline.operator.steering import operator, replace_fleet, role_of, staying_guests
from protocol.errors import ConfigError
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.runtime.registry.contract import Eviction, Fleet, Heartbeat
    from protocol.ids import Role


async def evict(at: Attached, *, worker: str = "", host: str = "", reason: str = "") -> Fleet:
    """Take a worker, or all workers of a joined host, out of the run at once; return the fleet that
    is wanted. Their epochs are fenced, and others go on with what they held. A repeat changes
    nothing. Raises ConfigError: the run does not run, has no such worker or host, or needs it."""
    from pipeline.runtime.registry.contract import Eviction
    from pipeline.supervisor.fleet_edits import MAX_REASON_CHARS, evicted

    if len(reason) > MAX_REASON_CHARS:
        raise ConfigError(f"the reason has {len(reason)} characters; expected at most {MAX_REASON_CHARS}: shorten it")
    words = " ".join(reason.split()) or "by hand"
    one = Eviction(worker, host, words, operator(), time.time())
    beats = await at.registry.heartbeats()

    def change(present: Fleet) -> Fleet:
        if any((before.worker, before.host) == (worker, host) for before in present.evictions):
            return present
        if host:
            _check_host(present, beats, host)
            return evicted(present, one)
        role = role_of(at, present, beats, worker)
        _check_others(present, beats, worker, role)
        return evicted(present, one, role)

    return await replace_fleet(at, change)


async def readmit(at: Attached, *, worker: str = "", host: str = "") -> Fleet:
    """Let an evicted worker or joined host work again; return the fleet that is wanted. Raises
    ConfigError: it is not evicted."""
    from pipeline.supervisor.fleet_edits import readmitted
    from protocol.ids import Role

    def change(present: Fleet) -> Fleet:
        found = next((one for one in present.evictions if (one.worker, one.host) == (worker, host)), None)
        if found is None:
            raise ConfigError(f"{printable_line(worker or host)} is not evicted; {_evicted(present.evictions)}")
        follows_demand = found.worker.startswith(f"{Role.GENERATOR}-") and not present.is_by_hand
        return readmitted(present, found, most=at.config.fleet.max_generators if follows_demand else None)

    return await replace_fleet(at, change, needs_supervisor=False)


def _evicted(evictions: Sequence[Eviction]) -> str:
    names = ", ".join(one.worker or f"--host {one.host}" for one in evictions)
    return f"evicted are: {printable_line(names)}" if names else "none is"


def _check_others(present: Fleet, beats: Sequence[Heartbeat], worker: str, role: Role) -> None:
    """Raise ConfigError where a role would have no worker left, or none that works."""
    from pipeline.supervisor.fleet_plan import wanted_names
    from protocol.ids import ELASTIC_ROLES

    name = printable_line(worker)
    if role not in ELASTIC_ROLES:
        raise ConfigError(
            f"{name} is the run's only {role}, so it cannot be evicted. If it is stuck, it is replaced automatically; "
            "`headrace down` ends the run"
        )
    own = wanted_names(present.counts, present.left_out)
    guests = staying_guests(present, beats)
    others = sum(beat.who.role is role and beat.who.worker != worker for beat in guests)
    if present.counts.get(role, 0) - (worker in own) + others < 1:
        raise ConfigError(
            f"{name} is the run's last {role}, so it cannot be evicted; start another one first with `headrace "
            f"scale {role}=2`"
        )
    working = {beat.who.worker for beat in _at_work(present, beats) if beat.who.role is role}
    if working == {worker}:
        raise ConfigError(
            f"{name} is the only {role} that works, so it cannot be evicted: the others are absent, silent or starting. "
            "`headrace why` says why"
        )


def _check_host(present: Fleet, beats: Sequence[Heartbeat], host: str) -> None:
    """Raise ConfigError for an unknown host, the run's own, or one with the last working worker of
    a role."""
    from pipeline.supervisor.takeover import is_own

    there = [beat for beat in beats if beat.host == host]
    if not there:
        hosts = printable_line(", ".join(sorted({beat.host for beat in beats})) or "none")
        raise ConfigError(f"no worker of this run is on {printable_line(host)}; its hosts: {hosts}")
    own = [beat.who.worker for beat in there if is_own(beat.who.worker)]
    if own:
        names = printable_line(", ".join(own[:5]))
        raise ConfigError(
            f"{printable_line(host)} has workers of this run's own supervisor ({names}), so it is not a joined "
            f"host. Evict them one by one with `headrace fleet evict WORKER`; if a launcher chose the host, remove "
            f"it from [launch]"
        )
    working = _at_work(present, beats)
    for role in {beat.who.role for beat in working if beat.host == host}:
        if not any(beat.who.role is role and beat.host != host for beat in working):
            raise ConfigError(
                f"{printable_line(host)} has the run's last {role} that does its work: without it the role is empty, and the "
                f"host is not evicted; `headrace scale {role}=1` or another `headrace fleet join` first"
            )


def _at_work(present: Fleet, beats: Sequence[Heartbeat]) -> list[Heartbeat]:
    """Return the heartbeats of workers that stay, and have begun their work."""
    from pipeline.runtime.liveness import is_silent
    from pipeline.runtime.registry.contract import WaitingFor
    from pipeline.supervisor.fleet_plan import wanted_names

    unready = (WaitingFor.STARTING, WaitingFor.DRAINING, WaitingFor.STOPPED)
    own = wanted_names(present.counts, present.left_out)
    mine = [beat for beat in beats if beat.who.worker in own and not is_silent(beat.silent_s)]
    return [beat for beat in (*mine, *staying_guests(present, beats)) if beat.waiting_for not in unready]
