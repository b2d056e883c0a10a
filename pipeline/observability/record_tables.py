"""What a run leaves for people, as the page's views "Time" and "Record" show it: a summary, what is
missing, how each role used its time, evaluations, faults, changes and how the run was made.

A table is a list of rows of text; the first is its head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import tomli_w

from pipeline.config import RESOLVED_NAME
from pipeline.config.public import without_secrets
from pipeline.observability.fleet_history import IN_WORDS, FleetRow, at_most, in_order
from pipeline.observability.history import UPDATE_PARTS, EvaluationRow, UpdateRow
from pipeline.observability.page.figures import evenly
from pipeline.observability.report_data import RunRecords
from pipeline.observability.start_record import in_words
from pipeline.observability.summary import Summary, summary_of
from protocol.printable import printable, printable_line

Table = list[Sequence[str]]
_MOST_EVALUATIONS = 200
_MOST_FLEET_ROWS = 240


def record_figures(run_dir: Path, records: RunRecords, *, has_audit: bool = True) -> dict[str, Any]:
    """Return everything that the two views show. Texts are printable."""
    newest = records.starts[-1].start if records.starts else None
    made = [("seed", "not known" if records.seed is None else str(records.seed)), *(in_words(newest) if newest else [])]
    packages = sorted(newest.packages.items()) if newest else []
    tables: dict[str, Table] = {
        "uses": _uses(records),
        "evaluations": _evaluations(evenly(records.evaluations, _MOST_EVALUATIONS)),
        "repairs": _repairs(records),
        "incidents": [
            ("when", "worker", "what"),
            *((at, row.worker, row.words) for at, row in records.incident_rows()),
        ],
        "changes": [("when", "what", "by", "effect"), *records.change_rows()],
        "starts": _starts(records),
        "made": [("of", "what"), *made],
        "packages": [("library", "version"), *packages],
    }
    return {
        "cards": cards(summary_of(records), records),
        "missing": records.missing(has_audit=has_audit),
        "tables": {name: _printable(rows) for name, rows in tables.items() if len(rows) > 1},
        "num_evaluations": len(records.evaluations),
        "num_incidents": len(records.incidents),
        "shares": {use.role: {"compute": use.compute_share} | use.waits for use in records.uses},
        "fleet": fleet_figures(records.fleet),
        "settings": printable(_settings_text(run_dir, records)),
    }


def _printable(rows: Table) -> list[list[str]]:
    return [[printable_line(cell) for cell in row] for row in rows]


def _uses(records: RunRecords) -> Table:
    head = ("role", "workers, mean", "computing", "tokens per second", "tokens", "waits for")
    return [head, *(
        (use.role, f"{use.workers:.1f}", f"{100 * use.compute_share:.0f} %", f"{use.tokens_per_s:,.0f}", f"{use.num_tokens:,}",
         use.waits_in_words())
        for use in records.uses
    )]  # fmt: skip


def _evaluations(rows: Sequence[EvaluationRow]) -> Table:
    head = ("evaluation", "set", "policy version", "sampled by versions", "responses", "failed", "accuracy (avg@k)",
            "95 % interval", "pass@k", "its 95 % interval", "mean length")  # fmt: skip
    return [head, *map(_evaluation, rows)]


def _evaluation(row: EvaluationRow) -> Sequence[str]:
    versions = str(row.oldest_version) + (f"–{row.newest_version}" if row.newest_version != row.oldest_version else "")
    has_pass = row.pass_at_k is not None
    return (
        str(row.number), row.set_name, str(row.policy_version), versions, f"{row.num_responses:,}", f"{row.num_failed:,}",
        _percent(row.accuracy), _between(row.low, row.high), f"pass@{row.pass_k} {_percent(row.pass_at_k)}" if has_pass else "",
        _between(row.pass_low, row.pass_high) if has_pass else "", f"{row.response_length:.1f}",
    )  # fmt: skip


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{100 * low:.1f}–{100 * high:.1f}"


def _repairs(records: RunRecords) -> Table:
    rows = [
        (of.role, str(of.number), f"{of.median_s:.1f}", f"{of.longest_s:.1f}", of.in_words()) for of in records.repaired
    ]
    return [("role", "repairs", "median, s", "longest, s", "of their time"), *rows]


def _starts(records: RunRecords) -> Table:
    rows = [(row.began, row.took, row.ended, row.differs) for row in records.start_rows()]
    return [("began", "took", "ended", "different from the last"), *(rows if len(rows) > 1 else [])]


def _settings_text(run_dir: Path, records: RunRecords) -> str:
    """Return all settings as TOML without secrets, or the file's text if it cannot be parsed."""
    if records.settings:
        return tomli_w.dumps(records.settings)
    try:
        return without_secrets((run_dir / RESOLVED_NAME).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def fleet_figures(rows: Sequence[FleetRow]) -> dict[str, Any] | None:
    """Return the fleet's curves, by role; None if nothing was recorded."""
    if not rows:
        return None
    few = at_most(rows, _MOST_FLEET_ROWS)
    ends_s = list(accumulate(row.span_s for row in few))
    unit_s, unit = (3600.0, "hours") if ends_s[-1] > 3 * 3600 else (60.0, "minutes")
    reasons = dict.fromkeys(reason for row in few for reason in row.num_groups_dropped)
    return {
        "unit": unit,
        "x": [round((end_s - row.span_s / 2) / unit_s, 3) for end_s, row in zip(ends_s, few, strict=True)],
        "waits": {wait: _wait_words(wait) for wait in IN_WORDS},
        "roles": {name: _role_columns(few, name) for name in in_order({name for row in few for name in row.roles})},
        "ready": [row.num_ready_units for row in few],
        "dropped": {name.replace("_", " "): [row.num_groups_dropped.get(name, 0) for row in few] for name in reasons},
    }


def _role_columns(rows: Sequence[FleetRow], name: str) -> dict[str, Any]:
    spans = [row.roles.get(name) for row in rows]
    return {
        "workers": [span.workers if span else 0.0 for span in spans],
        "tokens": [span.tokens / row.span_s if span else 0.0 for row, span in zip(rows, spans, strict=True)],
        "memory": [span.rss_bytes / 1e9 if span else 0.0 for span in spans],
        "shares": {
            wait: shares
            for wait in IN_WORDS
            if any(shares := [span.shares.get(wait, 0.0) if span else 0.0 for span in spans])
        },
    }


def _wait_words(wait: str) -> str:
    words = IN_WORDS[wait]
    return words if wait in ("compute", "compile", "stopped", "silent") else f"waits for {words}"


def cards(summary: Summary, records: RunRecords) -> list[dict[str, str]]:
    """Return the figures at the top of the report: label, value and note."""

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
    hour = f"lowest hour {_percent(time.lowest_hour)}, " if time and time.lowest_hour is not None else ""
    device = f"{_percent(time.by_device)} by device, " if time and time.by_device is not None else ""
    number = records.num_ends
    ends = f"{number or 'no'} {'end' if number == 1 else 'ends'} of workers" if records.has_log else "no log"
    found = [
        ("accuracy before", _percent(summary.accuracy_before), held_out),
        ("accuracy after", _percent(summary.accuracy_after), after),
        ("updates", f"{summary.num_updates:,}{of_wanted}", f"{summary.num_trained_tokens:,} tokens"),
        ("training time", duration(summary.train_s), f"learner waited {100 * summary.learner_wait_share:.0f} %"),
        ("steps and log-probs", _percent(summary.compute_share), f"of an update; {_rest(records.updates)}"),
        (
            "effective time",
            _percent(time.by_steps if time else None),
            f"{hour}{device}an update takes {time.usual_s:.1f} s as a rule" if time else "too few updates",
        ),
        ("staleness", f"≤ {summary.max_staleness}", "versions, at most"),
        ("reward, last update", "–" if last is None else f"{last.reward:+.2f}", "mean of the batch"),
        ("incidents", f"{records.num_incidents:,}" if records.has_log else "–", ends),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in found]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _rest(updates: Sequence[UpdateRow]) -> str:
    """Return the other parts of an update's time, largest first."""
    whole_s = sum(row.seconds for row in updates)
    shares = {
        words: sum(getattr(row, part) for row in updates) / whole_s if whole_s else 0.0
        for part, words in UPDATE_PARTS.items()
        if part not in ("logprob_s", "step_s")
    }
    largest = sorted(shares.items(), key=lambda one: -one[1])
    return ", ".join(f"{words} {100 * share:.0f} %" for words, share in largest if share >= 0.005) or "nothing else"


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"
