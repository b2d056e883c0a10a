"""A run's progress: how far it is, how well it learns, and when it will end."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from pipeline.fleet.status import in_minutes
from pipeline.observability.history import EvaluationRow, Row, UpdateRow

_BLOCKS = "▁▂▃▄▅▆▇█"
_PACE_UPDATES = 20
_KL = {"reference_kl": "to the reference", "behavior_kl": "sampling to learner"}
"""Metrics that may be shown as KL; the first one present is used."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    num_updates: int
    num_wanted: int
    accuracies: tuple[float, ...]
    """Mean raw accuracy of each update's batch, oldest first."""
    held_out: tuple[float, ...]
    """Held-out accuracy on the main set, oldest first."""
    last: UpdateRow | None = None
    update_s: float | None = None
    """Median seconds between recent updates; None before the second since the learner started or
    resumed."""
    tokens_per_update: float = 0.0
    """Mean trained tokens of the same updates."""
    evaluation: EvaluationRow | None = None
    """The newest evaluation of the main set."""
    others: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Accuracy on the other evaluation sets by name, oldest first."""

    @classmethod
    def of(cls, rows: Sequence[Row], num_wanted: int) -> Self:
        """Compute the progress from a run's history."""
        updates = [row for row in rows if isinstance(row, UpdateRow)]
        evaluations = [row for row in rows if isinstance(row, EvaluationRow)]
        others: dict[str, tuple[float, ...]] = {}
        for row in evaluations:
            if not row.is_main:
                others[row.set_name] = (*others.get(row.set_name, ()), row.accuracy)
        main = [row for row in evaluations if row.is_main]
        recent = _since_resume(updates[-_PACE_UPDATES - 1 :])
        gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(recent)]
        return cls(
            num_updates=updates[-1].update if updates else 0,
            num_wanted=num_wanted,
            accuracies=tuple(row.accuracy for row in updates),
            held_out=tuple(row.accuracy for row in main),
            evaluation=main[-1] if main else None,
            others=others,
            last=updates[-1] if updates else None,
            update_s=statistics.median(gaps) if gaps else None,
            tokens_per_update=statistics.fmean(row.num_trained_tokens for row in recent) if recent else 0.0,
        )

    @property
    def of_updates(self) -> str:
        """Updates done and wanted, plus the policy version if a resume made it differ."""
        if not self.num_wanted:
            return "no updates wanted"
        text = f"update {self.num_updates} of {self.num_wanted}"
        is_apart = self.last is not None and self.last.policy_version != self.num_updates
        return f"{text} (policy version {self.last.policy_version})" if self.last is not None and is_apart else text

    def learning(self) -> list[str]:
        """Return reward, loss and KL of the newest update; empty before the first."""
        if self.last is None:
            return []
        parts = [f"{name} {value + 0.0:+.2f}" for name, value in self.last.reward_parts.items()]
        words = [f"reward {self.last.reward:+.2f}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")]
        words.append(f"loss {self.last.loss:.3g}")
        name = next((name for name in _KL if name in self.last.metrics), None)
        return words + ([f"KL {self.last.metrics[name]:.2g} {_KL[name]}"] if name else [])

    def pace(self, now_s: float) -> list[str]:
        """Return tokens per second, update time and time left; empty before the second update."""
        if not self.update_s or self.last is None or self.update_s <= 0.0:
            return []
        words = [f"{self.tokens_per_update / self.update_s:,.0f} trained tokens/s", f"{self.update_s:.1f} s an update"]
        num_left = self.num_wanted - self.num_updates
        if num_left > 0:
            left_s = max(0.0, num_left * self.update_s - max(0.0, now_s - self.last.at_s))
            words.append(f"about {in_minutes(left_s)} left")
        return words

    def in_words(self, now_s: float | None) -> str:
        """Return everything on one line; without the pace if ``now_s`` is None, as of a run that has ended."""
        words = [self.of_updates, *self.learning()]
        if self.accuracies:
            words.append(f"batch accuracy {100 * self.accuracies[-1]:.0f} %")
        if self.held_out:
            words.append(f"held-out {course(self.held_out)}{interval(self.evaluation)}")
        words += [f"{name} {course(values)}" for name, values in self.others.items()]
        return ", ".join(words + ([] if now_s is None else self.pace(now_s)))


def _since_resume(updates: Sequence[UpdateRow]) -> Sequence[UpdateRow]:
    """Return the updates since the learner last resumed, when the policy version jumped. Earlier ones say
    nothing about the pace, and the run may have been down for days in between."""
    for at in range(len(updates) - 1, 0, -1):
        if updates[at].policy_version != updates[at - 1].policy_version + 1:
            return updates[at:]
    return updates


def interval(row: EvaluationRow | None) -> str:
    """Format an evaluation's 95 % interval with a leading space; empty if there is none."""
    if row is None or row.low is None or row.high is None:
        return ""
    return f" ({100 * row.low:.1f} to {100 * row.high:.1f})"


def sparkline(values: Sequence[float]) -> str:
    """Draw values from 0 to 1 as a row of blocks."""
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[max(0, min(top, round(value * top)))] for value in values)


def course(accuracies: Sequence[float]) -> str:
    """Format the first and the last accuracy."""
    first, last = (f"{100 * value:.1f} %" for value in (accuracies[0], accuracies[-1]))
    return f"{first} → {last}" if len(accuracies) > 1 else first
