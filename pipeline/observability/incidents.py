"""A run's incidents: ends and restarts of workers, and other warnings of its supervisor.

They are in ``<run_dir>/logs/supervisor.jsonl``."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pipeline.observability.log_lines import LogLine, LogReader
from protocol.printable import printable_line

MAX_INCIDENTS = 100
_LEFT_OUT: Final = frozenset({"at", "worker", "role", "run", "level", "event", "exception", "policy_version"})
_MAX_WORDS_CHARS = 400
_MAX_ENDED = 1000


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that the supervisor logged as a warning or an error, or a restart after it."""

    at_s: float
    """Seconds since 1970."""
    level: str
    """``info``, ``warning`` or ``error``."""
    worker: str
    """The worker it is about, or ``supervisor``."""
    event: str
    """The log's name of it: ``worker_exited``, ``worker_replaced``, ``worker_started`` ..."""
    words: str
    """Its description, on one line."""


class IncidentReader:
    """Reads the supervisor's log as it grows, and keeps the newest incidents."""

    def __init__(self, run_dir: Path, *, max_incidents: int = MAX_INCIDENTS) -> None:
        self._log = LogReader(run_dir, workers=("supervisor",))
        self._found: deque[Incident] = deque(maxlen=max_incidents)
        self._ended: dict[str, float] = {}
        """When workers ended that have not started again, in seconds since 1970."""

    def read(self) -> tuple[Incident, ...]:
        """Return the newest incidents, the oldest of them first. A damaged line is skipped."""
        for line in self._log.new():
            incident = self._of(line)
            if incident is not None:
                self._found.append(incident)
        return tuple(self._found)

    def _of(self, line: LogLine) -> Incident | None:
        try:
            at_s = datetime.fromisoformat(line.at).astimezone(UTC).timestamp()
        except ValueError:
            return None
        fields: dict[str, Any] = json.loads(line.text)
        words = ""
        match line.event:
            case "worker_exited":
                self._end(line.worker, at_s)
                words = _exited(fields)
            case "worker_replaced":
                self._end(line.worker, at_s)
                words = f"was replaced: {fields.get('reason', 'frozen or stuck')}"
            case "worker_started":
                ended_s = self._ended.pop(line.worker, None)
                if ended_s is None:
                    return None
                words = f"was started again after {max(0.0, at_s - ended_s):.1f} s"
            case _:
                if line.level == "info":
                    return None
                words = _in_words(line.event, fields)
        worker = printable_line(line.worker)
        return Incident(at_s, line.level, worker, printable_line(line.event), printable_line(words)[:_MAX_WORDS_CHARS])

    def _end(self, worker: str, at_s: float) -> None:
        self._ended.setdefault(worker, at_s)
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]


def _exited(fields: Mapping[str, Any]) -> str:
    how = fields.get("meaning", fields.get("exit_code"))
    error = fields.get("error")
    return f"ended ({how})" + (f" by {error}" if error else "")


def _in_words(event: str, fields: Mapping[str, Any]) -> str:
    values = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _LEFT_OUT)
    return f"{event.replace('_', ' ')} {values}".rstrip()
