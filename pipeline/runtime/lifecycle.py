"""A worker's life as a pure state machine: two-phase stop without sockets, tasks or clocks.

    starting ──ready──> running ──stop──> draining ──ended──> stopped
        └────────────────stop────────────────┘

*Consumes* what happened and when. *Produces* the next state. *Waits for* nothing. The first request
to stop begins the drain and sets its deadline, which moves on while work is brought to its end, up
to a ceiling; a second one by signal, or the deadline, makes the stop immediate. A request that
repeats the first for another reason (the run ended while a signal was being obeyed) never shortens
the drain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.process.exit_codes import ExitCode


class LifecyclePhase(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """One moment of a worker's life. Every transition returns a new one."""

    drain_timeout_s: float
    """Without anything done."""
    drain_ceiling_s: float = math.inf
    """In all."""
    phase: LifecyclePhase = LifecyclePhase.STARTING
    deadline_s: float | None = None
    """On the caller's monotonic clock; set while draining."""
    ceiling_s: float = math.inf
    """Likewise; the deadline never moves beyond it."""
    reason: str = ""
    """Why it stops, in words."""
    code: ExitCode = ExitCode.OK
    """How the process ends if it drains in time."""
    num_signals: int = 0

    def ready(self) -> Lifecycle:
        """Set-up is complete."""
        return replace(self, phase=LifecyclePhase.RUNNING) if self.phase is LifecyclePhase.STARTING else self

    def stop(self, now_s: float, reason: str, *, code: ExitCode = ExitCode.OK) -> Lifecycle:
        """Begin to drain; the first reason and the first code that is not OK stay."""
        if self.phase is LifecyclePhase.STOPPED:
            return self
        code = code if self.code is ExitCode.OK else self.code
        if self.phase is LifecyclePhase.DRAINING:
            return replace(self, code=code)
        ceiling_s = now_s + self.drain_ceiling_s
        deadline_s = min(now_s + self.drain_timeout_s, ceiling_s)
        return replace(
            self, phase=LifecyclePhase.DRAINING, deadline_s=deadline_s, ceiling_s=ceiling_s, reason=reason, code=code
        )

    def moved(self, at_s: float, patience_s: float) -> Lifecycle:
        """Something was done at ``at_s``: what comes next may take ``patience_s``."""
        if self.phase is not LifecyclePhase.DRAINING or self.deadline_s is None:
            return self
        return replace(self, deadline_s=min(max(self.deadline_s, at_s + patience_s), self.ceiling_s))

    def signal(self, now_s: float, name: str) -> Lifecycle:
        """A SIGTERM or SIGINT came: the first drains, the second is immediate."""
        stopped = self.stop(now_s, f"received {name}")
        return replace(stopped, num_signals=self.num_signals + 1)

    def ended(self) -> Lifecycle:
        """Nothing runs any more."""
        return replace(self, phase=LifecyclePhase.STOPPED)

    @property
    def is_draining(self) -> bool:
        """Whether the main loop should come to its end."""
        return self.phase is LifecyclePhase.DRAINING

    @property
    def is_immediate(self) -> bool:
        """Whether to end without draining any further."""
        return self.num_signals >= 2 and self.phase is not LifecyclePhase.STOPPED

    def is_overdue(self, now_s: float) -> bool:
        """Whether the drain has passed its deadline."""
        return self.is_draining and self.deadline_s is not None and now_s >= self.deadline_s
