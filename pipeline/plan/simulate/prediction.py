"""What a simulated run did, and what held it up."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from pipeline.plan.simulate.learner import Update

_BUSY = 0.9
"""Share of the time from which a role holds up the others."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the run at one time, in its steady part or before."""

    at_s: float
    live: int
    """Sequences that decode."""
    ready: int
    """Units."""
    mailboxes: dict[str, int]
    """Messages that wait, by role."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Figures of the steady part, without the first updates, in which every queue is empty."""

    update_s: float
    tokens_per_s: float
    """Response tokens that were trained on."""
    sampled_per_s: float
    wait_s: float
    """Mean time of an update in which the learner waited for units."""
    use: dict[str, float]
    """Share of the time at work, by role; of generators, of their slots."""
    staleness: dict[int, float]
    """Share of trained tokens by versions between sampling and training."""
    eta: int
    ready_mean: float
    needed: int
    """Units of an update, to compare with those that are ready."""
    mailboxes: dict[str, float]
    """Mean messages that wait, by role."""
    dropped: dict[str, int]
    """Units that were sampled and not trained on, by reason, over the whole run."""
    bottleneck: str
    advice: str
    num_updates: int
    warm_up: int
    """Updates that do not count."""
    num_generators: int
    slots: int
    most_in_flight: int
    """Most responses (or windows, if those are trained on) at once that were admitted and not trained on. The ledger admits
    eta + 1 updates, and the surplus of over-sampling."""
    updates: tuple[Update, ...] = ()
    moments: tuple[Moment, ...] = field(default=(), repr=False)

    @property
    def staleness_mean(self) -> float:
        return sum(age * share for age, share in self.staleness.items())

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)


def staleness_shares(updates: list[Update]) -> dict[int, float]:
    """Return the mean of the updates' shares of trained tokens by age."""
    ages = sorted({age for update in updates for age in update.staleness})
    return {age: fmean(update.staleness.get(age, 0) / max(1, update.num_tokens) for update in updates) for age in ages}


def find_bottleneck(use: dict[str, float], wait_share: float, eta: int, refused: str) -> tuple[str, str]:
    """Return what holds the run up, and what to do about it.

    Args:
        use: Share of the time at work, by role.
        wait_share: Share of the learner's time in which it waits for units.
        eta: The staleness bound.
        refused: Why free slots got no lease most of the time; empty if they always did."""
    role = max(use, key=lambda name: use[name])
    if use[role] >= _BUSY and (role != "learner" or wait_share < 1 - _BUSY):
        advice = {
            "learner": "more or faster devices for the learner; more generators do not help",
            "generator": "more generators, or more slots in each",
            "ledger": "fewer, longer windows (generation.window_tokens), or fewer generators with more slots",
        }
        return role, advice.get(role, f"more workers: fleet.{role}")
    if refused == "no_credit":
        more = f"a larger staleness.eta than {eta}" if eta else "staleness.eta above 0, so that both work at once"
        return "staleness", f"{more}: slots and learner wait for each other, and for the longest responses"
    if refused == "memory":
        return "ledger memory", "a larger ledger.max_memory_mb, or checkpoint.every_updates below what it is"
    return role, "nothing is busy all the time: longer responses than the others are waited for"
