"""The vocabulary of repairs: levels, orders and steps, and the state of workers.

Each level but the last two has a deadline. A level that does not bring the worker back by then
hands the case on to the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from protocol.ids import Role


class RepairLevel(StrEnum):
    """One repair. The order is that of the escalation."""

    TOLERATE = "tolerate"
    """Wait: it may pass."""
    SELF_CHECK = "self_check"
    """Let all generators compute the same, to prove which of them is faulty."""
    ISOLATE = "isolate"
    """Fence the epoch: leases open, and others go on with the work and its prefix."""
    RESTART = "restart"
    """End the process, and start a new one in its place."""
    REPLACE = "replace"
    """Let a standby take over."""
    EVICT = "evict"
    """Take it out until a person readmits it. Final, where others of its role work."""
    ROLE_RESTART = "role_restart"
    """Restart all sick workers of the role at once; a learner from its newest checkpoint."""
    ROLLBACK = "rollback"
    """Go back to the code or configuration before the last update of it."""
    WHOLE_RUN = "whole_run"
    """End the run with a sentence; the last level."""


LEVELS: Final = tuple(RepairLevel)
FINAL: Final = frozenset({RepairLevel.EVICT, RepairLevel.WHOLE_RUN})


class StepOutcome(StrEnum):
    """The outcome of a level, in the record."""

    BEGUN = "begun"
    DONE = "done"
    """It brought the worker back, or the sign has passed."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """There is nothing to do it with."""
    REFUSED = "refused"
    """It would do harm."""
    ADVISED = "advised"
    """The policy allows words alone."""
    LEFT = "left"
    """It is left to a person."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the supervisor sees it at one moment."""

    role: Role
    host: str = ""
    is_guest: bool = False
    """Of a joined host, which has its own supervisor."""
    is_at_work: bool = False
    """A fresh heartbeat, past its start, and with work done."""
    devices: frozenset[str] = frozenset()
    """Of that host, on which it computes; empty where that is not known."""
    is_away: bool = False
    """Of a joined host, and fenced: its own supervisor is to start it again."""


@dataclass(frozen=True, slots=True)
class IncidentSign:
    """An open incident, as far as repairs need it."""

    number: int
    component: str
    """A worker, a link ``sender>receiver``, or ``ledger``."""
    kind: str
    sentence: str
    stood_s: float = 0.0
    """From the fault's begin, by the evidence, to the incident."""
    is_quiet: bool = False
    """Whether it is not found at this moment."""
    found_s: float = 0.0
    """For how long it was found, without the time since it was found again."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Means of the higher levels."""

    standby_roles: frozenset[Role] = frozenset()
    """Roles that a ready standby may take on."""
    rollback_roles: frozenset[Role] = frozenset()
    """Roles that take a change of settings or code that can be rolled back."""
    no_self_check: str = "no self-check is at hand"
    """Why no self-check can be made; empty where one can."""


@dataclass(frozen=True, slots=True)
class RepairOrder:
    """One repair to carry out now."""

    level: RepairLevel
    case: int
    worker: str
    reason: str
    deadline_s: float
    """By the clock of ``tick``; infinite for a final level."""
    workers: tuple[str, ...] = ()
    """Those that it is carried out on."""
    host: str = ""
    """An eviction of all workers of this host."""
    detect_s: float = 0.0
    """Of a restart for an incident: from the fault's begin, by the evidence, to the incident."""
    localise_s: float = 0.0
    """From that to this order."""


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One line of the record."""

    case: int
    worker: str
    role: str
    """Empty for a link and for the ledger, which have no case."""
    level: RepairLevel
    outcome: StepOutcome
    sentence: str
    limit_s: float | None = None
    """Until its deadline, in seconds; None for none."""


RESTART_MENDS: Final = frozenset({"silent", "hung", "stuck", "slow", "leak", "stale", "errors", "mismatch"})
"""Kinds of incidents about a worker that a new process may mend."""
PROVABLE: Final = frozenset({"mismatch"})
"""Those of them that a self-check can prove."""
OF_LINKS: Final = frozenset(
    {"undelivered", "sender_blocked", "unacknowledged", "never_started", "slow_link", "refused", "silent", "errors"}
)
"""Kinds of incidents about a link that a new process at one end may mend."""
_NO_REPAIR: Final[Mapping[str, str]] = {
    "clock": "set the clock of its host (NTP); no decision depends on it",
    "deadlock": "workers wait for one another in a circle: `headrace fleet stacks` shows where",
    "disk": "make room or grant rights on its disk; a restart does neither",
    "endpoint": "start the outside service, or ask less of it",
    "failed": "the supervisor starts it again, and `headrace run logs` has its error",
    "ledger": "the supervisor keeps the ledger's server alive; a person mends an external one",
    "machine": "the supervisor starts it again in its place; a second time within a day ends the run: test that host",
    "numeric": "its units are dead letters: `headrace ledger dead-letters list`; the step was not committed",
    "odd": "it differs from its role, which is not a fault by itself",
    "order": "counters of a link contradict one another, and the ledger decides what is true",
    "quarantine": "the learner publishes the version again",
    "replaced": "the supervisor has replaced it already",
    "reward": "look at the verifier and at samples of responses",
    "verdicts": "`headrace ledger dead-letters list` has what the verifier said; mend it or what it asks, or raise "
    "reward.timeout_s",
}
"""Kinds that a person or another part mends, and how."""


def left_to(kind: str) -> str:
    """Return what helps against a kind of incident that no level repairs."""
    return _NO_REPAIR.get(kind, "no level repairs this kind: look at the incident's evidence")


def within(deadline_s: float, now_s: float) -> float | None:
    """Return the seconds until a deadline; None for an infinite one."""
    return None if math.isinf(deadline_s) else deadline_s - now_s
