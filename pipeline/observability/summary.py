"""A run's summary: what people ask first, in ``report.json`` and at the top of the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.observability.estimates import BestEvaluation
from pipeline.observability.history import compute_share
from pipeline.observability.report_data import RunRecords, read_records


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures at the top of the report."""

    num_updates: int
    num_trained_tokens: int
    train_s: float
    """Wall-clock time of the learner's loop up to the last update."""
    accuracy_before: float | None
    """Held-out accuracy of the first and the last evaluation; None if there was none."""
    accuracy_after: float | None
    num_held_out: int
    num_left_out: int
    """Held-out responses of the last evaluation without a verdict, which its accuracy leaves out."""
    best_accuracy: float | None
    """Accuracy and policy version of the main set's best evaluation."""
    best_version: int | None
    max_staleness: int
    learner_wait_share: float
    """Share of the training time that the learner waited for ready units."""
    compute_share: float | None
    """Share of it in steps and log-probs."""


def summarize(run_dir: Path) -> Summary:
    """Summarise a run's history; an empty one gives zeros."""
    return summary_of(read_records(run_dir))


def summary_of(records: RunRecords) -> Summary:
    updates, evaluations = records.updates, records.main_evaluations
    best = BestEvaluation(evaluations).row
    train_s = sum(row.seconds for row in updates)
    return Summary(
        num_updates=len(updates),
        num_trained_tokens=sum(r.num_trained_tokens for r in updates),
        train_s=train_s,
        accuracy_before=evaluations[0].accuracy if evaluations else None,
        accuracy_after=evaluations[-1].accuracy if len(evaluations) > 1 else None,
        num_held_out=evaluations[-1].num_responses if evaluations else 0,
        num_left_out=evaluations[-1].num_failed if evaluations else 0,
        best_accuracy=best.accuracy if best else None,
        best_version=best.policy_version if best else None,
        max_staleness=max((r.staleness_max for r in updates), default=0),
        learner_wait_share=sum(r.wait_s for r in updates) / train_s if train_s else 0.0,
        compute_share=compute_share(updates),
    )
