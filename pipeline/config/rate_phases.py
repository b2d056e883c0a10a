"""The phases of a learning-rate schedule, in updates: warm-up, stable part, fall."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.learning import LearnerSection


@dataclass(frozen=True, slots=True)
class RatePhases:
    """Lengths of a schedule's phases, in updates. A constant rate has no fall."""

    warmup: int
    stable: int
    decay: int


def rate_phases(learner: LearnerSection, num_updates: int) -> RatePhases:
    """Return the phases of a run of ``num_updates``. Raises ValueError when they do not fit in."""
    if learner.schedule == "constant" or not num_updates:
        return RatePhases(learner.warmup_updates, 0, 0)
    total = learner.schedule_updates or num_updates
    if total > num_updates:
        raise ValueError(
            f"learner.schedule_updates is {total}, but run.num_updates is {num_updates}, so the rate would never reach its "
            "end; expected at most the run's updates: lower it, or leave it out"
        )
    after_warmup = total - learner.warmup_updates
    decay = after_warmup
    if learner.schedule == "warmup-stable-decay":
        decay = learner.decay_updates or max(1, total // 10)
    if after_warmup < 1 or decay > after_warmup:
        raise ValueError(
            f"learner.schedule {learner.schedule} has {total} updates, but its warm-up takes {learner.warmup_updates} and its "
            f"fall {max(decay, 1)}; expected both to fit: lower learner.warmup_updates or learner.decay_updates, or make the "
            "schedule longer"
        )
    return RatePhases(learner.warmup_updates, after_warmup - decay, decay)
