"""Fault domains beyond one worker: its links, its device and its host. Pure.

An incident about a link leaves open which end is at fault. The end that most recent incidents share
is blamed, and of two the receiver. A device or joined host is evicted as a whole if nearly all of
its workers are sick and each of their roles works elsewhere. Devices are the GPUs in heartbeats;
without GPUs, workers share no device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.fleet.repair.levels import (
    OF_LINKS,
    RESTART_MENDS,
    Abilities,
    IncidentSign,
    Member,
    RepairLevel,
    left_to,
)
from protocol.ids import Role

MOST_HEALTHY: Final = 1
"""Healthy workers that may be evicted along with a sick host or device."""
_LEAST_SICK: Final = 2


class Blame:
    """Which worker an incident blames. Of links, ``tolerated`` incidents within ``window_s`` blame none."""

    def __init__(self, tolerated: int, window_s: float) -> None:
        self._tolerated, self._window_s = tolerated, window_s
        self._alarms: deque[tuple[float, str]] = deque()
        """Times and names of links with incidents."""

    def worker(self, now_s: float, sign: IncidentSign, roster: Mapping[str, Member]) -> tuple[str, str]:
        """Return the worker to repair and why, or "" and what helps instead."""
        component, kind = sign.component, sign.kind
        reason = f"incident {sign.number}: {component} is {kind}: {sign.sentence}"
        if ">" not in component:
            return (component, reason) if kind in RESTART_MENDS and component in roster else ("", left_to(kind))
        self._alarms.append((now_s, component))
        while self._alarms[0][0] <= now_s - self._window_s:
            self._alarms.popleft()
        counts = Counter(end for _, name in self._alarms for end in {*name.split(">")} & roster.keys())
        sender, _, receiver = component.partition(">")
        end = max((one for one in (receiver, sender) if one in roster), key=lambda one: counts[one], default="")
        if kind not in OF_LINKS:
            return "", left_to(kind)
        if not end:
            return "", "neither end is a worker of this run"
        words = (
            f"{counts[end]} incidents of links at {end}; {self._tolerated} within {self._window_s:g} s are tolerated"
        )
        return ("", words) if counts[end] <= self._tolerated else (end, f"{reason}; {words}")


def is_absent(sign: IncidentSign, roster: Mapping[str, Member]) -> bool:
    """Return whether a restart might repair an incident, but none of its workers is running now."""
    return sign.kind in RESTART_MENDS and not {*sign.component.split(">")} & roster.keys()


def others_at_work(worker: str, role: Role, roster: Mapping[str, Member], left_out: Collection[str]) -> list[str]:
    """Return the role's other workers that are at work, except those of ``left_out``."""
    return [
        name
        for name, member in roster.items()
        if member.role is role and name != worker and member.is_at_work and name not in left_out
    ]


def one_missing(role: Role) -> str:
    return f"no other {role} is at work, and without one the run would stop"


@dataclass(frozen=True, slots=True)
class FaultDomain:
    """Workers that are evicted together as one fault."""

    workers: tuple[str, ...]
    words: str = ""
    """What the domain is; empty for a single worker."""
    host: str = ""
    """The joined host that is evicted as a whole, if it is one."""


def domain_to_evict(worker: str, roster: Mapping[str, Member], sick: Collection[str]) -> FaultDomain:
    """Return what is evicted with a worker: its joined host, all workers of its device, or nothing
    else.

    At most one healthy worker is included, and each of the roles works elsewhere."""
    member = roster.get(worker)
    if member is None or not member.host:
        return FaultDomain((worker,))
    of_host = {name: one for name, one in roster.items() if one.host == member.host}
    if all(one.is_guest for one in of_host.values()) and _goes_as_a_whole(of_host, roster, sick):
        return FaultDomain(tuple(of_host), f"its host {member.host}", member.host)
    of_device = {name: one for name, one in of_host.items() if one.devices & member.devices}
    if _goes_as_a_whole(of_device, roster, sick):
        names = ", ".join(sorted(member.devices))
        return FaultDomain(tuple(of_device), f"all workers of its device ({names} of {member.host})")
    return FaultDomain((worker,))


def _goes_as_a_whole(mates: Mapping[str, Member], roster: Mapping[str, Member], sick: Collection[str]) -> bool:
    num_sick = sum(name in sick for name in mates)
    if num_sick < _LEAST_SICK or len(mates) - num_sick > MOST_HEALTHY:
        return False
    roles = {member.role for member in mates.values()}
    return all(others_at_work("", role, roster, {*mates, *sick}) for role in roles)


def lack_of(level: RepairLevel, worker: str, roster: Mapping[str, Member], abilities: Abilities) -> str:
    """Say why a level is not possible for a worker, or "". Standbys serve only the run's own host."""
    member = roster.get(worker)
    has_standby = member is not None and not member.is_guest and member.role in abilities.standby_roles
    means = {
        RepairLevel.REPLACE: (has_standby, "no standby is ready"),
        RepairLevel.ROLLBACK: (
            member is not None and member.role in abilities.rollback_roles,
            "there is no recent update of its code or settings to roll back",
        ),
    }
    is_possible, lack = means.get(level, (True, ""))
    return "" if is_possible else lack
