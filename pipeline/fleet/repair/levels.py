"""The vocabulary of repairs: levels, orders, steps, and the state of workers.

Each level but the last two has a deadline. If it does not bring the worker back by then, the next
level follows."""

from __future__ import annotations

from collections.abc import Mapping
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
