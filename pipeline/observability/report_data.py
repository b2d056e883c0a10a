"""The records of a run that its report is made from, and what they lack, in words.

Every file may be missing, truncated or damaged: readable lines are used, damaged ones counted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.public import public_tree
from pipeline.files.records import skipped_words
from pipeline.fleet.repair.records import (
    REPAIRS_NAME,
    RepairRow,
    RoleRepairs,
    read_repair_sums,
    read_repairs,
    role_repairs,
)
from pipeline.observability.effective_reader import run_effective_time
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.fleet_history import FLEET_HISTORY_NAME, FleetRow, RoleUse, fleet_history, role_uses
from pipeline.observability.history import (
    HISTORY_NAME,
    VALUE_HISTORY_NAME,
    EvaluationRow,
    UpdateRow,
    ValueRow,
    run_history,
)
from pipeline.observability.incidents import IncidentReader, IncidentRow
from pipeline.observability.samples import ResponseSample, response_samples
from pipeline.observability.settings_changes import Effect, change_words, effect_words, read_effects
from pipeline.observability.start_record import STARTS_NAME, RunStart, read_starts

_MOST_INCIDENTS = 10_000
"""More than fit into the megabyte of the log that is read."""
_MOST_SHOWN = 60
_MOST_STARTS = 20
_CRITICS = frozenset({"ppo", "vapo", "tppo"})


@dataclass(frozen=True, slots=True)
class StartCells:
    """One start, as the page shows it."""

    began: str
    took: str
    ended: str
    differs: str
    """What was different from the newest start."""


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Everything that a run leaves in its folder for people."""

    settings: Mapping[str, Any]
    """The resolved configuration without secrets; empty if it cannot be read."""
    updates: Sequence[UpdateRow]
    evaluations: Sequence[EvaluationRow]
    value_rows: Sequence[ValueRow]
    fleet: Sequence[FleetRow]
    starts: Sequence[RunStart]
    incidents: Sequence[IncidentRow]
    repairs: Sequence[RepairRow]
    """The newest ones."""
    repair_sums: Mapping[str, float]
    """Total seconds of all repairs, by part."""
    effects: Sequence[Effect]
    """Settings changes during the run, each with the updates around it."""
    has_log: bool
    samples: list[ResponseSample]
    skipped: Mapping[str, int]
    """Number of skipped lines, for each file that has any."""

    @property
    def main_evaluations(self) -> list[EvaluationRow]:
        return [row for row in self.evaluations if row.is_main]

    @property
    def uses(self) -> list[RoleUse]:
        return role_uses(self.fleet)

    @property
    def effective_time(self) -> EffectiveTime | None:
        """How the time up was used; None before a few updates."""
        return run_effective_time(
            [row.at_s for row in self.updates], self.starts, self.fleet, self.repair_sums,
            num_response_tokens=sum(row.num_response_tokens for row in self.updates),
            num_trained_tokens=sum(row.num_trained_tokens for row in self.updates),
        )  # fmt: skip

    @property
    def repaired(self) -> list[RoleRepairs]:
        return role_repairs(self.repairs)

    @property
    def seed(self) -> int | None:
        return _whole(self.setting("run", "seed"))

    @property
    def num_wanted(self) -> int | None:
        return _whole(self.setting("run", "num_updates"))

    @property
    def num_incidents(self) -> int:
        """Incidents of the run, as ``headrace fleet incidents`` lists them."""
        return sum(one.is_finding for one in self.incidents)

    @property
    def num_ends(self) -> int:
        """Unrequested exits of workers. The exit of a worker that the supervisor replaced is part of
        its replacement, so it is not counted again."""
        number, replaced = 0, set[str]()
        for each in self.incidents:
            if each.event == "worker_replaced":
                number += 1
                replaced.add(each.worker)
            elif each.event == "worker_exited":
                number += each.worker not in replaced
                replaced.discard(each.worker)
            elif each.event == "worker_started":
                replaced.discard(each.worker)
        return number

    def setting(self, section: str, key: str) -> Any:
        """Return a setting, or None if it is unknown."""
        table = self.settings.get(section)
        return table.get(key) if isinstance(table, Mapping) else None

    def incident_rows(self) -> list[tuple[str, IncidentRow]]:
        """Return the newest incidents with their times (UTC), newest last."""
        return [(_moment(each.at_s), each) for each in self.incidents[-_MOST_SHOWN:]]

    def change_rows(self) -> list[tuple[str, str, str, str]]:
        """Return the newest settings changes: time, change, by whom and why, effect."""
        found = list[tuple[str, str, str, str]]()
        for effect in self.effects[-_MOST_SHOWN:]:
            change = effect.change
            by = f"{change.by}: {change.reason}" if change.reason else change.by
            found.append((_moment(change.at_s), change_words(change), by, "; ".join(effect_words(effect))))
        return found

    def start_rows(self) -> list[StartCells]:
        """Return the newest starts, newest last."""
        newest = self.starts[-1] if self.starts else None
        return [_start_line(each, newest) for each in self.starts[-_MOST_STARTS:] if newest is not None]

    def missing(self, *, has_audit: bool) -> list[str]:
        """Return a sentence about each thing that the page cannot show, and why."""
        return [words for words in self._missing(has_audit=has_audit) if words]

    def _missing(self, *, has_audit: bool) -> Iterable[str]:
        yield from self._missing_learning()
        if not self.fleet:
            yield (
                f"Throughput and use of time by role: there is no {FLEET_HISTORY_NAME}. Its first row is written after "
                "5 s of a running fleet; older versions wrote none."
            )
        if not self.starts:
            yield (
                f"Versions, host and commit: there is no {STARTS_NAME}, which a run writes at its start. The "
                "current ones are not shown, because they may differ."
            )
        elif self.starts[-1].end is None:
            yield "The end: none is recorded for the newest start, so the run is still going or its supervisor was killed."
        if not self.has_log:
            yield "Faults and restarts: there is no logs/supervisor.jsonl."
        if not has_audit:
            yield "The ledger's balance: it was not read for this page; `headrace run report` reads it."
        if not self.samples:
            yield "Samples: no update has kept any yet, or samples.per_update is 0."
        for name, number in self.skipped.items():
            yield f"{skipped_words(number, name)}."

    def _missing_learning(self) -> Iterable[str]:
        if not self.updates:
            yield "Learning curves: no update is done."
        elif self.num_wanted is not None and len(self.updates) < self.num_wanted:
            yield f"The rest of the run: {len(self.updates):,} of {self.num_wanted:,} updates are done."
        if not self.evaluations:
            is_set = self.setting("data", "evaluation") or self.setting("evaluation", "sets")
            yield "Held-out accuracy: " + ("no evaluation is finished." if is_set else "data.evaluation is not set.")
        elif len(self.main_evaluations) == 1:
            yield "Accuracy after training: there is one evaluation of the main set."
        if not self.value_rows and self.setting("algorithm", "name") in _CRITICS:
            yield "The critic's explained variance: no value step is done."


def read_records(run_dir: Path) -> RunRecords:
    """Read a run's records. Raises only for a folder that this user may not read."""
    skipped: dict[str, int] = {}
    history, skipped[HISTORY_NAME] = run_history(run_dir / HISTORY_NAME).read()
    values, skipped[VALUE_HISTORY_NAME] = run_history(run_dir / VALUE_HISTORY_NAME).read()
    fleet, skipped[FLEET_HISTORY_NAME] = fleet_history(run_dir).read()
    starts, skipped[STARTS_NAME] = read_starts(run_dir)
    repairs, skipped[REPAIRS_NAME] = read_repairs(run_dir)
    return RunRecords(
        settings=_settings(run_dir),
        updates=[row for row in history if isinstance(row, UpdateRow)],
        evaluations=[row for row in history if isinstance(row, EvaluationRow)],
        value_rows=[row for row in values if isinstance(row, ValueRow)],
        fleet=fleet,
        starts=starts,
        incidents=IncidentReader(run_dir, max_incidents=_MOST_INCIDENTS).read(),
        repairs=repairs,
        repair_sums=read_repair_sums(run_dir),
        effects=read_effects(run_dir),
        has_log=(run_dir / "logs" / "supervisor.jsonl").is_file(),
        samples=response_samples(run_dir).read()[0],
        skipped={name: number for name, number in sorted(skipped.items()) if number},
    )


def _settings(run_dir: Path) -> Mapping[str, Any]:
    try:
        return public_tree(run_dir)
    except (OSError, ValueError):
        return {}


def _start_line(each: RunStart, newest: RunStart) -> StartCells:
    end = each.end
    took = "" if end is None else f"{(end.at_s - each.start.at_s) / 60:.1f} min"
    ended = "no end is recorded" if end is None else f"{end.state}: {end.detail}" if end.detail else end.state
    return StartCells(_moment(each.start.at_s), took, ended, "" if each is newest else _differs(each, newest))


def _differs(each: RunStart, newest: RunStart) -> str:
    """Return what was different in an earlier start."""
    found: list[str] = []
    for name in ("seed", "num_updates", "headrace", "commit", "python", "host", "cpu", "gpus", "driver", "server"):
        before, now = getattr(each.start, name), getattr(newest.start, name)
        if before != now:
            found.append(f"{name} {before if isinstance(before, str | int) else json.dumps(before)}")
    names = sorted({*each.start.packages, *newest.start.packages})
    for name in names:
        before = each.start.packages.get(name, "absent")
        if before != newest.start.packages.get(name, "absent"):
            found.append(f"{name} {before}")
    return ", ".join(found) or "nothing"


def _moment(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_s))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
