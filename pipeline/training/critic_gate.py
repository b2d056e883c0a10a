"""The critic gate: when the policy may start to learn from its critic.

An untrained critic gives truncated windows advantages that are noise around zero, and pulls whole
responses towards its own bias (VC-PPO). So the learner trains on nothing until the gate opens,
after ``value.pretrain_steps`` (T-PPO's port: 10, VAPO: 50). With ``value.min_explained_variance``,
our addition, it may open earlier: once the critic's explained variance, averaged over
``value.explained_variance_steps`` steps, reaches that. Each step is measured on responses that the
critic has not been trained on yet. The gate never closes again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.config.learning import ValueSection
    from pipeline.config.schema import RunConfig
    from pipeline.runtime.registry.contract import Heartbeat

# counters of the value worker's heartbeat: 1 or 0; number of value steps; moving mean
GATE_OPEN = "gate_open"
VALUE_STEPS = "value_steps"
EXPLAINED_VARIANCE = "explained_variance"


def opens(explained_variances: Sequence[float], *, num_steps: int, settings: ValueSection) -> bool:
    """Return whether the gate opens after ``num_steps`` value steps. Explained variances come oldest first."""
    if num_steps >= settings.pretrain_steps:
        return True
    wanted = settings.explained_variance_steps
    last = explained_variances[-wanted:]
    least = settings.min_explained_variance
    return least is not None and len(last) == wanted and sum(last) / wanted >= least


def describe_gate(counters: Mapping[str, float], min_explained_variance: float | None, pretrain_steps: int) -> str:
    wanted = "" if min_explained_variance is None else f" of {min_explained_variance:g}"
    return (
        f"explained variance {counters.get(EXPLAINED_VARIANCE, 0.0):.2f}{wanted}, "
        f"step {counters.get(VALUE_STEPS, 0.0):.0f} of {pretrain_steps}"
    )


class CriticGate:
    """The value worker's gate. Once open it stays open."""

    def __init__(
        self,
        settings: ValueSection,
        *,
        is_open: bool = False,
        explained_variances: Iterable[float] = (),
        num_steps: int = 0,
    ) -> None:
        self._settings = settings
        self._last = deque(explained_variances, maxlen=settings.explained_variance_steps)
        self.is_open = is_open or opens(tuple(self._last), num_steps=num_steps, settings=settings)

    @property
    def explained_variances(self) -> tuple[float, ...]:
        """Explained variances of the last steps, oldest first, for a checkpoint."""
        return tuple(self._last)

    @property
    def mean(self) -> float:
        """Mean explained variance of the last steps; 0 before the first."""
        return sum(self._last) / len(self._last) if self._last else 0.0

    def observe(self, explained_variance: float, *, num_steps: int) -> bool:
        """Add a step's explained variance; return whether it opened the gate."""
        self._last.append(explained_variance)
        was_open = self.is_open
        self.is_open = was_open or opens(tuple(self._last), num_steps=num_steps, settings=self._settings)
        return self.is_open and not was_open


@dataclass(frozen=True, slots=True)
class CriticView:
    """What the learner knows about its critic."""

    is_open: bool
    is_live: bool
    detail: str
    """What the learner is waiting for, in words."""


def view_critic(heartbeats: Iterable[Heartbeat], config: RunConfig) -> CriticView:
    """Read the value worker's heartbeat. If the worker is silent, its gate is as last reported."""
    beat = next((beat for beat in heartbeats if beat.who.role is Role.VALUE), None)
    if beat is None:
        return CriticView(False, False, "the value worker: it has no heartbeat")
    settings = config.value
    counters = beat.counters
    is_open = counters.get(GATE_OPEN, 0.0) >= 1.0
    if beat.is_silent:
        return CriticView(is_open, False, f"the value worker: silent for {beat.silent_s:.0f} s")
    if GATE_OPEN not in counters:
        return CriticView(False, True, "the value worker to start")
    words = describe_gate(counters, settings.min_explained_variance, settings.pretrain_steps)
    return CriticView(is_open, True, f"critic: {words}")
