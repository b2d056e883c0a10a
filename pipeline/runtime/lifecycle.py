"""A worker's life as a pure state machine with a two-phase stop.

    starting ──ready──> running ──stop──> draining ──ended──> stopped
        └────────────────stop────────────────┘

The first stop request begins the drain and sets its deadline. Progress moves the deadline, up to a
ceiling. A second signal, or the deadline, makes the stop immediate. Another request for another
reason, such as the run's end during a drain, never shortens the drain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.process.exit_codes import ExitCode


class LifecyclePhase(StrEnum):
    """State of a worker's life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """A worker's life at one moment. Every transition returns a new one."""

    drain_timeout_s: float
    """Limit of a drain without progress."""
    drain_ceiling_s: float = math.inf
    """Limit of a whole drain."""
    phase: LifecyclePhase = LifecyclePhase.STARTING
    deadline_s: float | None = None
    """By the caller's monotonic clock; set while draining."""
    ceiling_s: float = math.inf
    """Latest possible deadline."""
    reason: str = ""
    """Why it stops, in words."""
    code: ExitCode = ExitCode.OK
    """Exit code after a drain in time."""
    num_signals: int = 0

    def ready(self) -> Lifecycle:
        """Return the life after set-up."""
        return replace(self, phase=LifecyclePhase.RUNNING) if self.phase is LifecyclePhase.STARTING else self

    def stop(self, now_s: float, reason: str, *, code: ExitCode = ExitCode.OK) -> Lifecycle:
        """Begin to drain. The first reason stays, and the first code other than OK."""
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
        """Record progress at ``at_s``; the next step may take ``patience_s``."""
        if self.phase is not LifecyclePhase.DRAINING or self.deadline_s is None:
            return self
        return replace(self, deadline_s=min(max(self.deadline_s, at_s + patience_s), self.ceiling_s))

    def signal(self, now_s: float, name: str) -> Lifecycle:
        """Record a SIGTERM or SIGINT: the first drains, the second is immediate."""
        stopped = self.stop(now_s, f"received {name}")
        return replace(stopped, num_signals=self.num_signals + 1)

    def ended(self) -> Lifecycle:
        """Return the life after its end."""
        return replace(self, phase=LifecyclePhase.STOPPED)

    @property
    def is_draining(self) -> bool:
        """Whether the main loop should end."""
        return self.phase is LifecyclePhase.DRAINING

    @property
    def is_immediate(self) -> bool:
        """Whether to end without further draining."""
        return self.num_signals >= 2 and self.phase is not LifecyclePhase.STOPPED

    def is_overdue(self, now_s: float) -> bool:
        """Whether the drain has passed its deadline."""
        return self.is_draining and self.deadline_s is not None and now_s >= self.deadline_s
