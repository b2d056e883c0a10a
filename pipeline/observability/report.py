"""A run's report: ``<run_dir>/report.html``, and its figures in ``report.json``.

The page is made of the history, the resolved configuration and the last audit. It has no scripts
and no links. Training needs none of it; ``headrace report`` writes it again at any time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config import RESOLVED_NAME
from pipeline.ledger.types import Audit
from pipeline.observability.best import BestEvaluation
from pipeline.observability.charts import draw_critic, draw_updates
from pipeline.observability.drawing import can_draw
from pipeline.observability.history import (
    HISTORY_NAME,
    VALUE_HISTORY_NAME,
    EvaluationRow,
    UpdateRow,
    ValueRow,
    read_history,
)
from pipeline.observability.samples import SAMPLES_NAME, read_samples, spread
from protocol.printable import printable

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_MOST_UPDATES_SHOWN = 12
"""Most updates whose samples the page shows."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures on top of the report."""

    num_updates: int
    num_trained_tokens: int
    train_s: float
    """From the first claim to the last update, by the wall clock."""
    accuracy_before: float | None
    """Held-out accuracy of the first and the last evaluation; None when there was none."""
    accuracy_after: float | None
    num_held_out: int
    best_accuracy: float | None
    """Of the best evaluation of the main set, and its policy version."""
    best_version: int | None
    max_staleness: int
    learner_wait_share: float
    """Share of the training time in which the learner waited for ready units."""


@dataclass(frozen=True, slots=True)
class _Card:
    label: str
    value: str
    note: str = ""


def summarize(run_dir: Path) -> Summary:
    """Return the summary of a run's history; zeros for an empty one."""
    updates, every = _rows(run_dir)
    evaluations = [row for row in every if row.is_main]
    best = BestEvaluation(evaluations).row
    train_s = sum(r.wait_s + r.logprob_s + r.step_s + r.publish_s for r in updates)
    return Summary(
        num_updates=len(updates),
        num_trained_tokens=sum(r.num_trained_tokens for r in updates),
        train_s=train_s,
        accuracy_before=evaluations[0].accuracy if evaluations else None,
        accuracy_after=evaluations[-1].accuracy if len(evaluations) > 1 else None,
        num_held_out=evaluations[-1].num_responses if evaluations else 0,
        best_accuracy=best.accuracy if best else None,
        best_version=best.policy_version if best else None,
        max_staleness=max((r.staleness_max for r in updates), default=0),
        learner_wait_share=sum(r.wait_s for r in updates) / train_s if train_s else 0.0,
    )


def write_report(run_dir: Path, *, title: str, detail: str, audit: Audit | None) -> Path:
    """Write ``report.html`` and ``report.json`` into the run's folder; return the page's path."""
    # Deferred: only a finished run needs it.
    import jinja2

    updates, evaluations = _rows(run_dir)
    summary = summarize(run_dir)
    names = ("groups", "trajectories", "tokens") if audit else ()
    balances = [(name, getattr(audit, name)) for name in names]
    if audit and audit.finished.admitted:
        balances.append(("responses for the critic", audit.finished))
    config = run_dir / RESOLVED_NAME
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["printable"] = printable
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        detail=detail,
        cards=_cards(summary),
        can_draw=can_draw(),
        charts=draw_updates(updates, evaluations) | draw_critic(_value_rows(run_dir)) if can_draw() else {},
        samples=spread(list(read_samples(run_dir / SAMPLES_NAME)), _MOST_UPDATES_SHOWN),
        evaluations=evaluations,
        audit=audit,
        balances=balances,
        reasons=sorted({reason for _, balance in balances for reason in balance.dropped}),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )
    (run_dir / "report.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    path = run_dir / "report.html"
    partial = path.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    # A reader never sees half a page.
    partial.replace(path)
    return path


def _rows(run_dir: Path) -> tuple[list[UpdateRow], list[EvaluationRow]]:
    rows = list(read_history(run_dir / HISTORY_NAME))
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    return updates, [row for row in rows if isinstance(row, EvaluationRow)]


def _value_rows(run_dir: Path) -> list[ValueRow]:
    return [row for row in read_history(run_dir / VALUE_HISTORY_NAME) if isinstance(row, ValueRow)]


def _cards(summary: Summary) -> list[_Card]:
    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    held_out = f"{summary.num_held_out:,} held-out responses" if summary.num_held_out else "no evaluation"
    after = held_out if summary.accuracy_after is not None else "no evaluation at the end"
    return [
        _Card("accuracy before", percent(summary.accuracy_before), held_out),
        _Card("accuracy after", percent(summary.accuracy_after), after),
        _Card("updates", f"{summary.num_updates:,}", f"{summary.num_trained_tokens:,} tokens"),
        _Card("training time", _duration(summary.train_s), f"learner waited {100 * summary.learner_wait_share:.0f} %"),
        _Card("staleness", f"≤ {summary.max_staleness}", "versions, at most"),
    ]


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"
