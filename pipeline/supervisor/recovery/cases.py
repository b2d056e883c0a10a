"""A case: one worker with its present rung, from the first sign until it is repaired or out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.supervisor.recovery.rungs import FINAL, Rung
from protocol.ids import Role


@dataclass(slots=True)
class Case:
    """One worker under repair."""

    number: int
    worker: str
    role: Role
    rung: Rung
    deadline_s: float
    """Of the rung; infinite for a final one, and for advice until its incident ends."""
    reason: str
    is_own: bool = False
    """Whether the supervisor has seen the loss itself."""
    incidents: set[int] = field(default_factory=set[int])
    """Numbers of the open ones about it."""
    num_losses: int = 0
    is_down: bool = False
    """From a loss, or an ordered restart, to the next start."""
    worked_s: float | None = None
    """When it came back to work; None while it is not."""
    signed_s: float | None = None
    """When its first incident was read; None without one."""
    stood_s: float = 0.0
    """From that fault's begin, by the evidence, to the incident."""
    is_advised: bool = False
    """The policy allows words alone, or a person decides: nothing is ordered any more."""

    @property
    def is_final(self) -> bool:
        """Whether no rung follows."""
        return self.rung in FINAL

    @property
    def is_repairing(self) -> bool:
        """Whether a repair is under way, and no work is seen yet."""
        return self.rung is not Rung.TOLERATE and self.worked_s is None and self.waits

    @property
    def is_out(self) -> bool:
        """Whether its worker cannot be counted on now."""
        is_suspected_only = self.rung is Rung.TOLERATE or (self.is_advised and not self.is_own)
        return self.is_down or (self.worked_s is None and not is_suspected_only)

    @property
    def is_unmended(self) -> bool:
        """Whether an incident about it is open after a restart that it ordered."""
        return bool(self.incidents) and self.rung is not Rung.TOLERATE and not self.is_advised

    @property
    def waits(self) -> bool:
        """Whether it has a deadline."""
        return not math.isinf(self.deadline_s)
