"""A run's report: ``<run_dir>/report.html``, and its figures in ``report.json``.

The page is made from the run's records (``report_data``) and the last audit. It has no scripts, loads
nothing, and says what the records lack. Training does not need it; ``headrace run report`` rewrites it at
any time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from pipeline.config import RESOLVED_NAME
from pipeline.config.public import without_secrets
from pipeline.ledger.types import Audit
from pipeline.observability.charts import can_draw, draw_critic, draw_fleet, draw_updates, render_page, write_whole
from pipeline.observability.estimates import BestEvaluation
from pipeline.observability.history import UPDATE_PARTS, EvaluationRow, UpdateRow, compute_share
from pipeline.observability.report_data import RunRecords, read_records
from pipeline.observability.samples import spread
from pipeline.observability.settings_changes import effect_figures
from pipeline.observability.start_record import in_words

_MOST_UPDATES_SHOWN = 12
"""Maximum number of updates whose samples the page shows."""


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


@dataclass(frozen=True, slots=True)
class _Card:
    label: str
    value: str
    note: str = ""


def summarize(run_dir: Path) -> Summary:
    """Summarise a run's history; an empty one gives zeros."""
    return _summary(read_records(run_dir))


def _summary(records: RunRecords) -> Summary:
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


def write_report(run_dir: Path, *, title: str, detail: str, audit: Audit | None) -> Path:
    """Write ``report.html`` and ``report.json`` to the run's folder; return the path of the page."""
    records = read_records(run_dir)
    summary = _summary(records)
    names = ("groups", "trajectories", "tokens") if audit else ()
    balances = [(name, getattr(audit, name)) for name in names]
    if audit and audit.finished.admitted:
        balances.append(("responses for the critic", audit.finished))
    missing = records.missing(has_audit=audit is not None, can_draw=can_draw())
    page = render_page(
        "report.html.j2",
        title=title,
        detail=detail,
        cards=_cards(summary, records),
        missing=missing,
        can_draw=can_draw(),
        charts=_charts(records) if can_draw() else {},
        uses=records.uses,
        samples=spread(records.samples, _MOST_UPDATES_SHOWN),
        evaluations=records.evaluations,
        audit=audit,
        balances=balances,
        reasons=sorted({reason for _, balance in balances for reason in balance.dropped}),
        has_log=records.has_log,
        repaired=records.repaired,
        changes=records.change_rows(),
        incidents=records.incident_rows(),
        num_rows=len(records.incidents),
        starts=records.start_rows(),
        facts=in_words(records.starts[-1].start) if records.starts else [],
        packages=sorted(records.starts[-1].start.packages.items()) if records.starts else [],
        seed=records.seed,
        config=_settings_text(run_dir, records),
    )
    write_whole(run_dir / "report.json", json.dumps(_figures(summary, records, missing), indent=2) + "\n")
    path = run_dir / "report.html"
    write_whole(path, page)
    return path


def _settings_text(run_dir: Path, records: RunRecords) -> str:
    """Return all settings as TOML without secrets, or the file's text if it cannot be parsed."""
    if records.settings:
        return tomli_w.dumps(records.settings)
    try:
        return without_secrets((run_dir / RESOLVED_NAME).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _charts(records: RunRecords) -> dict[str, list[str]]:
    of_updates = draw_updates(records.updates, records.evaluations)
    return of_updates | draw_critic(records.value_rows) | draw_fleet(records.fleet)


def _figures(summary: Summary, records: RunRecords, missing: list[str]) -> dict[str, Any]:
    """Return the contents of ``report.json``."""
    return asdict(summary) | {
        "num_wanted": records.num_wanted,
        "seed": records.seed,
        "repairs": [asdict(of) for of in records.repaired],
        "effective_time": asdict(time) if (time := records.effective_time) else None,
        "roles": [asdict(use) for use in records.uses],
        "num_incidents": records.num_incidents,
        "settings_changes": effect_figures(records.effects),
        "start": asdict(records.starts[-1].start) if records.starts else None,
        "num_starts": len(records.starts),
        "num_skipped_lines": sum(records.skipped.values()),
        "missing": missing,
    }


def _cards(summary: Summary, records: RunRecords) -> list[_Card]:
    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    def around(row: EvaluationRow) -> str:
        return "" if row.low is None or row.high is None else f", 95 %: {100 * row.low:.1f} to {100 * row.high:.1f}"

    main = records.main_evaluations
    held_out = f"{summary.num_held_out:,} held-out responses" if summary.num_held_out else "no evaluation"
    if summary.num_left_out:
        held_out += f"; {summary.num_left_out:,} without a verdict are left out"
    after = held_out + (around(main[-1]) if main else "")
    after = after if summary.accuracy_after is not None else "no evaluation at the end"
    wanted = records.num_wanted
    of_wanted = f" of {wanted:,}" if wanted is not None and wanted != summary.num_updates else ""
    last: UpdateRow | None = records.updates[-1] if records.updates else None
    time = records.effective_time
    hour = f"lowest hour {percent(time.lowest_hour)}, " if time and time.lowest_hour is not None else ""
    device = f"{percent(time.by_device)} by device, " if time and time.by_device is not None else ""
    number = records.num_ends
    ends = f"{number or 'no'} {'end' if number == 1 else 'ends'} of workers" if records.has_log else "no log"
    return [
        _Card("accuracy before", percent(summary.accuracy_before), held_out),
        _Card("accuracy after", percent(summary.accuracy_after), after),
        _Card("updates", f"{summary.num_updates:,}{of_wanted}", f"{summary.num_trained_tokens:,} tokens"),
        _Card("training time", duration(summary.train_s), f"learner waited {100 * summary.learner_wait_share:.0f} %"),
        _Card("steps and log-probs", percent(summary.compute_share), f"of an update; {_rest(records.updates)}"),
        _Card(
            "effective time",
            percent(time.by_steps if time else None),
            f"{hour}{device}an update takes {time.usual_s:.1f} s as a rule" if time else "too few updates",
        ),
        _Card("staleness", f"≤ {summary.max_staleness}", "versions, at most"),
        _Card("reward, last update", "–" if last is None else f"{last.reward:+.2f}", "mean of the batch"),
        _Card("incidents", f"{records.num_incidents:,}" if records.has_log else "–", ends),
    ]


def _rest(updates: Sequence[UpdateRow]) -> str:
    """Return the other parts of an update's time, largest first."""
    whole_s = sum(row.seconds for row in updates)
    shares = {
        words: sum(getattr(row, part) for row in updates) / whole_s if whole_s else 0.0
        for part, words in UPDATE_PARTS.items()
        if part not in ("logprob_s", "step_s")
    }
    return ", ".join(f"{words} {100 * share:.0f} %" for words, share in sorted(shares.items(), key=lambda one: -one[1]))


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"
