"""A run's incidents as rows: what was found wrong, and what the supervisor did about it or warned of.

Findings are in ``<run_dir>/incidents.jsonl`` (``pipeline.fleet.incidents``); exits and restarts of workers in
``<run_dir>/logs/supervisor.jsonl``."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pipeline.fleet.incidents.records import Incident, RunIncidents
from pipeline.observability.log_lines import LogLine, LogReader
from protocol.printable import printable_line

MAX_INCIDENTS = 100
_LEFT_OUT: Final = frozenset({"at", "worker", "role", "run", "level", "event", "exception", "policy_version"})
_MAX_WORDS_CHARS = 400
_MAX_ENDED = 1000


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """A finding, a warning or error logged by the supervisor, or a restart that followed."""

    at_s: float
    """Seconds since 1970."""
    level: str
    """``info``, ``warning`` or ``error``."""
    worker: str
    """The component concerned, or ``supervisor``."""
    event: str
    """The finding's kind, or the log event: ``worker_exited``, ``worker_replaced`` ..."""
    words: str
    """Description, on one line."""
    is_finding: bool = False
    """Whether it is one of the run's incidents, instead of a line of the log."""


class IncidentReader:
    """Follows findings and the supervisor's log, and keeps the newest."""

    def __init__(self, run_dir: Path, *, max_incidents: int = MAX_INCIDENTS) -> None:
        self._supervised = SupervisorLogReader(run_dir, max_rows=max_incidents)
        self._findings = RunIncidents(run_dir)
        self._max_incidents = max_incidents

    def read(self) -> tuple[IncidentRow, ...]:
        """Return the newest incidents, oldest first. Damaged lines are skipped."""
        findings = self._findings.read()[-self._max_incidents :]
        rows = sorted([*map(_finding, findings), *self._supervised.read()], key=lambda row: row.at_s)
        return tuple(rows[-self._max_incidents :])


class SupervisorLogReader:
    """Follows the supervisor's log, and keeps the newest rows that matter."""

    def __init__(self, run_dir: Path, *, max_rows: int = MAX_INCIDENTS) -> None:
        self._log = LogReader(run_dir, workers=("supervisor",))
        self._found: deque[IncidentRow] = deque(maxlen=max_rows)
        self._ended: dict[str, float] = {}
        """When each worker ended that has not started again, in seconds since 1970."""

    def read(self) -> tuple[IncidentRow, ...]:
        """Return the newest rows, oldest first. Damaged lines are skipped."""
        for line in self._log.new():
            row = self._row(line)
            if row is not None:
                self._found.append(row)
        return tuple(self._found)

    def _row(self, line: LogLine) -> IncidentRow | None:
        try:
            at_s = datetime.fromisoformat(line.at).astimezone(UTC).timestamp()
        except ValueError:
            return None
        fields: dict[str, Any] = json.loads(line.text)
        words = ""
        match line.event:
            case "worker_exited":
                self._end(line.worker, at_s)
                words = _exit_words(fields)
            case "worker_replaced":
                self._end(line.worker, at_s)
                words = f"was replaced: {fields.get('reason', 'frozen or stuck')}{_stack_words(fields)}"
            case "worker_started":
                ended_s = self._ended.pop(line.worker, None)
                if ended_s is None:
                    return None
                words = f"was started again after {max(0.0, at_s - ended_s):.1f} s"
            case "settings_changed":
                words = _change_words(fields)
            case _:
                if line.level == "info":
                    return None
                words = _in_words(line.event, fields)
        worker = printable_line(line.worker)
        return IncidentRow(
            at_s, line.level, worker, printable_line(line.event), printable_line(words)[:_MAX_WORDS_CHARS]
        )

    def _end(self, worker: str, at_s: float) -> None:
        self._ended.setdefault(worker, at_s)
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]


def _finding(incident: Incident) -> IncidentRow:
    number = f"incident {incident.number}"
    words = incident.sentence.removeprefix(f"{incident.component} ")
    if incident.stacks:
        words = f"{words}; {incident.stacks[0]}"
    if incident.ended_s is not None:
        words = f"{words} (ended after {incident.ended_s - incident.since_s:.0f} s)"
    worker, kind = printable_line(incident.component), printable_line(incident.kind)
    level = "warning" if incident.is_open else "info"
    words = printable_line(f"{number}: {words}")[:_MAX_WORDS_CHARS]
    return IncidentRow(incident.opened_s, level, worker, kind, words, is_finding=True)


def _change_words(fields: Mapping[str, Any]) -> str:
    sets = fields.get("sets")
    given = ", ".join(f"{key} {value}" for key, value in sets.items()) if isinstance(sets, dict) else "settings"
    why = f": {reason}" if (reason := fields.get("reason")) else ""
    return f"change {fields.get('number')} of the settings: {given}, by {fields.get('by')}{why}"


def _exit_words(fields: Mapping[str, Any]) -> str:
    how = fields.get("meaning", fields.get("exit_code"))
    error = fields.get("error")
    return f"ended ({how})" + (f" by {error}" if error else "")


def _stack_words(fields: Mapping[str, Any]) -> str:
    stands = fields.get("stands")
    return f"; {stands[0]}" if isinstance(stands, list) and stands else ""


def _in_words(event: str, fields: Mapping[str, Any]) -> str:
    values = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
    return f"{event.replace('_', ' ')} {values}".rstrip()
