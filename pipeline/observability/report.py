"""A run's report: ``<run_dir>/report.html``, and its figures in ``report.json``.

The report is the dashboard's page as one file, made from the run's records (``report_data``) and the
last audit. It loads nothing, and says what the records lack. Training does not need it; ``headrace run
report`` rewrites it at any time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from pipeline.ledger.types import Audit
from pipeline.observability.page.document import document, run_address, write_whole
from pipeline.observability.page.figures import MAX_ROWS, balance_figures, evenly, history_figures, shown_samples
from pipeline.observability.progress import RunProgress
from pipeline.observability.record_tables import record_figures
from pipeline.observability.report_data import RunRecords, read_records
from pipeline.observability.samples import spread
from pipeline.observability.settings_changes import effect_figures
from pipeline.observability.summary import summary_of
from protocol.printable import printable_line

_MOST_UPDATES_SHOWN = 12
"""Maximum number of updates whose samples the page shows."""
_MOST_INCIDENTS = 20


def write_report(run_dir: Path, *, title: str, detail: str, audit: Audit | None) -> Path:
    """Write ``report.html`` and ``report.json`` to the run's folder; return the path of the page."""
    records = read_records(run_dir)
    answers = run_answers(run_dir, title, records, detail=detail, audit=audit)
    abilities = ["audit"] if audit else []
    page = document(
        title,
        {
            "session": {"abilities": abilities, "elastic": []},
            "runs": {"folder": run_dir.parent.name, "runs": [run_row(title, records, detail)]},
            **answers,
        },
    )
    missing = records.missing(has_audit=audit is not None)
    write_whole(run_dir / "report.json", json.dumps(_figures(records, missing), indent=2) + "\n")
    path = run_dir / "report.html"
    write_whole(path, page)
    return path


def run_answers(
    run_dir: Path,
    name: str,
    records: RunRecords,
    *,
    detail: str = "",
    audit: Audit | None = None,
    most_rows: int = MAX_ROWS,
    num_sampled: int = _MOST_UPDATES_SHOWN,
) -> dict[str, object]:
    """Return what the page asks about a run that is over, by address."""
    samples = shown_samples(run_dir, reversed(spread(records.samples, num_sampled)))
    found: dict[str, object] = {
        "events": {
            "overview": _overview(name, records, detail, audit),
            "trouble": "",
            "facts": _facts(records),
            "stamp": [],
        },
        "history": history_figures(records.updates, records.evaluations, records.value_rows, most=most_rows),
        "record": record_figures(run_dir, records, has_audit=audit is not None),
        "samples": {"samples": samples, "oldest": None, "num_older": 0},
    }
    if audit is not None:
        found["audit"] = balance_figures(audit) | {"at_s": _ended_s(records)}
    return {run_address(name, what): answer for what, answer in found.items()}


def run_row(name: str, records: RunRecords, detail: str = "") -> dict[str, object]:
    """Return a run as a row of the page's list."""
    accuracies = [row.accuracy for row in records.main_evaluations]
    spans = [each.end.at_s - each.start.at_s for each in records.starts if each.end is not None]
    return {
        "name": name,
        "state": _state(records),
        "detail": printable_line(detail),
        "algorithm": printable_line(str(records.setting("algorithm", "name") or "")),
        "seed": records.seed,
        "num_updates": len(records.updates),
        "num_wanted": records.num_wanted,
        "accuracy_last": accuracies[-1] if accuracies else None,
        "accuracy_best": max(accuracies, default=None),
        "started_s": records.starts[0].start.at_s if records.starts else None,
        "took_s": sum(spans) if spans else None,
    }


def _state(records: RunRecords) -> str:
    end = records.starts[-1].end if records.starts else None
    return printable_line(end.state) if end is not None else "no end recorded"


def _ended_s(records: RunRecords) -> float | None:
    end = records.starts[-1].end if records.starts else None
    return end.at_s if end is not None else records.updates[-1].at_s if records.updates else None


def _overview(name: str, records: RunRecords, detail: str, audit: Audit | None) -> dict[str, object]:
    """Return the parts of a ``RunOverview`` that files can tell."""
    last = records.updates[-1] if records.updates else None
    fleet = records.fleet[-1] if records.fleet else None
    totals = None
    if audit is not None:
        totals = {"num_groups_admitted": audit.groups.admitted, "num_groups_dropped": audit.groups.dropped}
    elif fleet is not None:
        totals = {"num_groups_admitted": fleet.num_groups_admitted, "num_groups_dropped": fleet.num_groups_dropped}
    rows = [*evenly(records.evaluations, _MOST_UPDATES_SHOWN), *records.updates[-_MOST_UPDATES_SHOWN:]]
    return {
        "name": name,
        "at_s": _ended_s(records),
        "state": _state(records),
        "detail": printable_line(detail),
        "supervisor_pid": None,
        "is_over": True,
        "progress": RunProgress.of(rows, records.num_wanted or 0),
        "versions": {
            "published": last.policy_version if last else 0,
            "staleness_mean": last.staleness_mean if last else None,
            "staleness_max": last.staleness_max if last else None,
            "max_staleness": records.setting("staleness", "eta"),
        },
        "totals": totals,
        "incidents": records.incidents[-_MOST_INCIDENTS:],
    }


def _facts(records: RunRecords) -> dict[str, str]:
    found = {
        "algorithm": records.setting("algorithm", "name"),
        "model": Path(str(records.setting("model", "path") or "")).name,
    }
    return {name: printable_line(str(value)) for name, value in found.items() if value}


def _figures(records: RunRecords, missing: list[str]) -> dict[str, Any]:
    """Return the contents of ``report.json``."""
    return asdict(summary_of(records)) | {
        "num_wanted": records.num_wanted,
        "seed": records.seed,
        "repairs": [asdict(of) for of in records.repaired],
        "effective_time": asdict(time) if (time := records.effective_time) else None,
        "roles": [asdict(use) for use in records.uses],
        "num_incidents": records.num_incidents,
        "settings_changes": effect_figures(records.effects),
        "start": msgspec.structs.asdict(records.starts[-1].start) if records.starts else None,
        "num_starts": len(records.starts),
        "num_skipped_lines": sum(records.skipped.values()),
        "missing": missing,
    }
