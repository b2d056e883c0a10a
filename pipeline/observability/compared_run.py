"""A run as a comparison sees it: its settings, its curve, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipeline.observability.estimates import Estimate
from pipeline.observability.fleet_use import RoleUse
from pipeline.observability.history import EvaluationRow
from pipeline.observability.prompt_accuracies import (
    EVALUATIONS_NAME,
    PromptAccuracies,
    newest_of,
    read_accuracies,
)
from pipeline.observability.report_data import RunRecords, read_records

_OF_THE_RUN = frozenset({"run.name", "run.dir", "run.seed", "ledger.url", "supervisor.metrics_port"})
"""Settings in which runs of one configuration differ."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation of the main set, and the place in the training at which it was made."""

    update: int
    num_tokens: int
    """Trained until then."""
    train_s: float
    """Time of the learner until then, without the time between starts."""
    accuracy: Estimate
    """Without an interval, as of an earlier version: all three are equal."""
    has_interval: bool
    num_responses: int
    prompts: PromptAccuracies | None
    """Accuracy of each prompt, where it is on record."""
    digest: str
    """Of the held-out prompts: its own, else the newest on record; empty where none is."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of a comparison."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    """By section and key, flat, without those of the run alone."""
    seed: int | None
    algorithm: str
    records: RunRecords
    curve: Sequence[CurvePoint]
    num_tokens: int
    train_s: float

    @property
    def num_updates(self) -> int:
        """Updates done."""
        return len(self.records.updates)

    @property
    def tokens_per_s(self) -> float | None:
        """Trained tokens a second of the learner's time."""
        return self.num_tokens / self.train_s if self.train_s else None

    @property
    def staleness_mean(self) -> float | None:
        """Mean over the updates, in versions."""
        updates = self.records.updates
        return sum(row.staleness_mean for row in updates) / len(updates) if updates else None

    @property
    def staleness_max(self) -> int | None:
        """Of all updates, in versions."""
        return max((row.staleness_max for row in self.records.updates), default=None)

    @property
    def wait_share(self) -> float | None:
        """Share of the learner's time in which it waited for units."""
        return sum(row.wait_s for row in self.records.updates) / self.train_s if self.train_s else None

    @property
    def dropped(self) -> Mapping[str, float]:
        """Share of the admitted groups that was dropped, by reason; empty without a record."""
        last = self.records.fleet[-1] if self.records.fleet else None
        if last is None or not last.num_groups_admitted:
            return {}
        return {reason: number / last.num_groups_admitted for reason, number in last.num_groups_dropped.items()}

    @property
    def uses(self) -> list[RoleUse]:
        """Each role's use of its time."""
        return self.records.uses

    def notes(self) -> Iterator[str]:
        """Yield what the comparison lacks of this run."""
        if not self.curve:
            yield "no evaluation of held-out prompts"
        elif self.records.num_wanted is not None and self.num_updates < self.records.num_wanted:
            yield f"{self.num_updates:,} of {self.records.num_wanted:,} updates"
        if self.curve and not self.curve[-1].has_interval:
            yield "its accuracies have no interval, as of an earlier version: no difference with it alone is called"
        if not self.records.fleet:
            yield "no record of drops and of the time of each role"
        if self.curve and all(point.prompts is None for point in self.curve):
            yield "no accuracy of each prompt on record, so none of its differences is paired"
        for name, number in self.records.skipped.items():
            yield f"{number} damaged lines of {name} skipped"


def read_run(folder: Path, name: str) -> RunFigures:
    """Read a run's folder; ``name`` is how it is shown."""
    records = read_records(folder)
    prompts, num_skipped = read_accuracies(folder)
    if num_skipped:
        records = replace(records, skipped={**records.skipped, EVALUATIONS_NAME: num_skipped})
    times = list(accumulate(row.wait_s + row.logprob_s + row.step_s + row.publish_s for row in records.updates))
    tokens = list(accumulate(row.num_trained_tokens for row in records.updates))
    return RunFigures(
        folder=folder,
        name=name,
        settings={key: value for key, value in flat(records.settings) if key not in _OF_THE_RUN},
        seed=records.seed,
        algorithm=str(records.setting("algorithm", "name") or ""),
        records=records,
        curve=_curve(records, tokens, times, prompts),
        num_tokens=tokens[-1] if tokens else 0,
        train_s=times[-1] if times else 0.0,
    )


def _curve(
    records: RunRecords, tokens: Sequence[int], times: Sequence[float], prompts: Sequence[PromptAccuracies]
) -> list[CurvePoint]:
    places = {row.policy_version: place for place, row in enumerate(records.updates)}
    found: list[CurvePoint] = []
    rows = [(row, newest_of(prompts, row.number, row.policy_version)) for row in records.main_evaluations]
    digest = next((each.digest for _, each in reversed(rows) if each is not None), "")
    for row, of_prompts in rows:
        place = places.get(row.policy_version)
        if place is None and row.policy_version > min(places, default=0):
            # Its update is not in the history: a damaged line.
            continue
        found.append(
            CurvePoint(
                update=0 if place is None else records.updates[place].update,
                num_tokens=0 if place is None else tokens[place],
                train_s=0.0 if place is None else times[place],
                accuracy=_estimate(row),
                has_interval=row.low is not None and row.high is not None,
                num_responses=row.num_responses,
                prompts=of_prompts,
                digest=digest if of_prompts is None else of_prompts.digest,
            )
        )
    return found


def _estimate(row: EvaluationRow) -> Estimate:
    low, high = row.low, row.high
    return Estimate(row.accuracy, row.accuracy if low is None else low, row.accuracy if high is None else high)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by section and key."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.")
        else:
            yield name, value
