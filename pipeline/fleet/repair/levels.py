"""Repairs: levels, orders, steps, the state of workers, and which workers fail together. Pure.

Each level but the last two has a deadline. If it does not bring the worker back by then, the next
level follows.

An incident about a link leaves open which end is at fault. The end that most recent incidents share
is blamed, and of two the receiver. A device or joined host is evicted as a whole if nearly all of
its workers are sick and each of their roles works elsewhere. Devices are the GPUs in heartbeats;
without GPUs, workers share no device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from protocol.ids import Role


class RepairLevel(StrEnum):
    """One kind of repair, in the order of the escalation."""

    TOLERATE = "tolerate"
    """Wait: it may pass by itself."""
    SELF_CHECK = "self_check"
    """Have all generators compute the same prompts, to prove which of them is faulty."""
    ISOLATE = "isolate"
    """Fence the epoch: its leases are released, and others continue its work and its prefixes."""
    RESTART = "restart"
    """Kill the process and start a new one."""
    REPLACE = "replace"
    """Let a standby take over."""
    EVICT = "evict"
    """Take the worker out until a person readmits it. Final; only if others of its role work."""
    ROLE_RESTART = "role_restart"
    """Restart all sick workers of the role at once; a learner from its newest checkpoint."""
    ROLLBACK = "rollback"
    """Go back to the code or settings before their last update."""
    WHOLE_RUN = "whole_run"
    """End the run and say why."""


LEVELS: Final = tuple(RepairLevel)
FINAL: Final = frozenset({RepairLevel.EVICT, RepairLevel.WHOLE_RUN})


class StepOutcome(StrEnum):
    """How far a level got."""

    BEGUN = "begun"
    DONE = "done"
    """It brought the worker back, or the symptom passed."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not possible here."""
    REFUSED = "refused"
    """Possible, but it would do harm."""
    ADVISED = "advised"
    """The policy allows only advice."""
    LEFT = "left"
    """Left to a person."""


@dataclass(frozen=True, slots=True)
class Member:
    role: Role
    host: str = ""
    is_guest: bool = False
    """Belongs to a joined host, which has its own supervisor."""
    is_at_work: bool = False
    """Has a fresh heartbeat, has started, and has done work."""
    devices: frozenset[str] = frozenset()
    """Devices of ``host`` that it computes on; empty if unknown."""
    is_away: bool = False
    """On a joined host and fenced; its own supervisor has to restart it."""


@dataclass(frozen=True, slots=True)
class IncidentSign:
    number: int
    component: str
    """A worker, a link ``sender>receiver``, or ``ledger``."""
    kind: str
    sentence: str
    stood_s: float = 0.0
    """Time from the fault's start, according to the evidence, to the incident."""
    is_quiet: bool = False
    """Whether there is no finding at the moment."""
    found_s: float = 0.0
    """How long there were findings, not counting those since it was last quiet."""


@dataclass(frozen=True, slots=True)
class Abilities:
    standby_roles: frozenset[Role] = frozenset()
    """Roles that a ready standby can take."""
    rollback_roles: frozenset[Role] = frozenset()
    """Roles affected by a change of settings or code that can be rolled back."""
    no_self_check: str = "no self-check is available"
    """Why no self-check can be made; empty if one can."""


@dataclass(frozen=True, slots=True)
class RepairOrder:
    level: RepairLevel
    case: int
    worker: str
    reason: str
    deadline_s: float
    """On the clock of ``tick``; infinite for a final level."""
    workers: tuple[str, ...] = ()
    """Workers to carry it out on."""
    host: str = ""
    """For an eviction: evict all workers of this host."""
    detect_s: float = 0.0
    """For a restart because of an incident: time from the fault's start, according to the evidence,
    to the incident."""
    localise_s: float = 0.0
    """Time from the incident to this order."""


RESTART_MENDS: Final = frozenset({"silent", "hung", "stuck", "slow", "leak", "stale", "errors", "mismatch"})
"""Kinds of incidents about a worker that a new process may repair."""
PROVABLE: Final = frozenset({"mismatch"})
"""Kinds that a self-check can prove."""
OF_LINKS: Final = frozenset(
    {"undelivered", "sender_blocked", "unacknowledged", "never_started", "slow_link", "refused", "silent", "errors"}
)
"""Kinds of incidents about a link that a new process at one end may repair."""
_NO_REPAIR: Final[Mapping[str, str]] = {
    "clock": "set the clock of its host (NTP); no decision depends on it",
    "deadlock": "workers wait for one another in a circle: `headrace fleet stacks` shows where",
    "disk": "make room or grant rights on its disk; a restart does neither",
    "endpoint": "start the external service, or send it fewer requests",
    "failed": "it is started again, and `headrace run logs` shows its error",
    "ledger": "the supervisor keeps the ledger's server alive; an external one must be repaired by hand",
    "machine": "the supervisor starts it again in its place; a second time within a day ends the run: test that host",
    "numeric": "its units are dead letters: `headrace ledger dead-letters list`; the step was not committed",
    "odd": "it differs from others of its role, which is not a fault by itself",
    "order": "counters of a link contradict one another; the ledger decides what is true",
    "quarantine": "the learner publishes the version again",
    "replaced": "the supervisor has replaced it already",
    "reward": "look at the verifier and at samples of responses",
    "verdicts": "`headrace ledger dead-letters list` shows what the verifier said; fix it or the service it calls, or raise "
    "reward.timeout_s",
}
"""Kinds that need a person or another part of the system, and what to do."""


def left_to(kind: str) -> str:
    """Return what to do about a kind of incident that no level repairs."""
    return _NO_REPAIR.get(kind, "no level repairs this kind: look at the incident's evidence")


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
