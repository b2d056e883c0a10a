"""A case follows one worker from the first symptom until it is repaired or removed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.fleet.repair.levels import FINAL, RepairLevel
from protocol.ids import Role


@dataclass(slots=True)
class Case:
    number: int
    worker: str
    role: Role
    level: RepairLevel
    deadline_s: float
    """Deadline of the level; infinite for a final one, and for advice until its incident ends."""
    reason: str
    is_own: bool = False
    """Whether the supervisor saw the loss itself."""
    incidents: set[int] = field(default_factory=set[int])
    """Numbers of its open incidents."""
    quiet: set[int] = field(default_factory=set[int])
    """Those of them with no finding at the moment."""
    num_losses: int = 0
    is_down: bool = False
    """From a loss or an ordered restart until the next start."""
    worked_s: float | None = None
    """When it resumed work; None before."""
    signed_s: float | None = None
    """When its first incident was read; None without one."""
    stood_s: float = 0.0
    """Time from that fault's start, according to the evidence, to the incident."""
    is_provable: bool = False
    is_advised: bool = False
    """The policy allows only advice, or a person decides: no more orders."""

    @property
    def is_quiet(self) -> bool:
        """Whether none of its incidents has a finding at the moment."""
        return bool(self.incidents) and self.incidents <= self.quiet

    @property
    def is_final(self) -> bool:
        return self.level in FINAL

    @property
    def is_suspicion(self) -> bool:
        """Whether nothing was done to the worker yet."""
        return self.level in (RepairLevel.TOLERATE, RepairLevel.SELF_CHECK)

    @property
    def is_repairing(self) -> bool:
        """Whether a repair is in progress and the worker is not seen working yet."""
        return not self.is_suspicion and self.worked_s is None and self.waits

    @property
    def is_out(self) -> bool:
        """Whether the worker cannot be counted on now."""
        is_suspected_only = self.is_suspicion or (self.is_advised and not self.is_own)
        return self.is_down or (self.worked_s is None and not is_suspected_only)

    @property
    def is_unmended(self) -> bool:
        """Whether an incident is still open after a restart that it caused."""
        return bool(self.incidents) and not self.is_suspicion and not self.is_advised

    @property
    def waits(self) -> bool:
        return not math.isinf(self.deadline_s)


def out(cases: Iterable[Case]) -> set[str]:
    """Return workers that cannot be counted on now."""
    return {case.worker for case in cases if case.is_out}


def sick(cases: Iterable[Case]) -> set[str]:
    """Return workers that cannot be counted on now, or that no restart has repaired so far."""
    return {case.worker for case in cases if case.is_out or case.is_unmended}


def taken_down(case: Case, cases: Iterable[Case]) -> tuple[str, ...]:
    """Mark the workers of a case's role that need repair as going down; return those that were not
    yet."""
    found = [one for one in cases if one is case or (one.role is case.role and one.is_out and not one.is_final)]
    workers = tuple(one.worker for one in found if not one.is_down)
    for one in found:
        one.is_down = True
    return workers
