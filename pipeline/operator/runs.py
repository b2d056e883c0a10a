"""All runs of a folder, one row each: state, updates, accuracy, start time and duration.

Only a few files of each run are read, so hundreds of runs take a moment. Listing again reads only what
is new in each history. No server is needed: the state comes from the supervisor's lock, its pulse and
``starts.jsonl``."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from pipeline.config import RESOLVED_NAME
from pipeline.files.records import RecordFile, Schema
from pipeline.observability.history import HISTORY_NAME
from pipeline.observability.start_record import RunStart, read_starts
from pipeline.supervisor.pulse import NAME as PULSE_NAME
from pipeline.supervisor.pulse import trouble
from pipeline.supervisor.run_folder import LOCK_NAME, supervisor_pid
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunCourse:
    """What a row shows of a run's history."""

    accuracies: Sequence[float]
    """From the main set's evaluations."""
    num_updates: int
    first_s: float | None
    last_s: float | None
    """Times of the first and the last row."""
    num_skipped: int


class _CourseRow(msgspec.Struct, frozen=True):
    """The few fields that a course needs of a row, of any kind."""

    kind: str
    at_s: float
    update: int = 0
    accuracy: float = 0.0
    is_main: bool = True


_SCHEMA: Final[Schema[_CourseRow]] = Schema(_CourseRow)


class CourseReader:
    """Reads one history incrementally; starts over if the file was replaced or cut short."""

    def __init__(self, path: Path) -> None:
        self._rows = RecordFile(path, _SCHEMA).tail(self._forget)
        self._forget()

    def read(self) -> RunCourse:
        """Read what is new and return the totals so far. Raises OSError."""
        for row in self._rows:
            self._first_s = row.at_s if self._first_s is None else min(self._first_s, row.at_s)
            self._last_s = row.at_s if self._last_s is None else max(self._last_s, row.at_s)
            if row.kind == "update":
                self._num_updates = row.update
            elif row.kind == "evaluation" and row.is_main:
                self._accuracies.append(row.accuracy)
        return RunCourse(
            accuracies=tuple(self._accuracies),
            num_updates=self._num_updates,
            first_s=self._first_s,
            last_s=self._last_s,
            num_skipped=self._rows.num_skipped,
        )

    def _forget(self) -> None:
        self._accuracies = list[float]()
        self._num_updates = 0
        self._first_s: float | None = None
        self._last_s: float | None = None


_MOST_NAMED = 8

_T = TypeVar("_T")


class ListedState(StrEnum):
    """A run's state as far as its folder shows it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    """drained by an operator; ``headrace up --resume`` continues it"""
    FAILED = "failed"
    ENDED = "ended"
    """ended, by a version that did not record how"""
    DIED = "died"
    """no supervisor and no recorded end: it was killed, or its host went down"""
    NEW = "new"
    """configured but never run"""
    UNREADABLE = "unreadable"
    """its configuration cannot be read; ``detail`` says why"""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run of a folder. None means unknown or none yet."""

    run: Path
    state: ListedState
    detail: str = ""
    algorithm: str = ""
    model: str = ""
    """The model's folder or its name on the Hub."""
    seed: int | None = None
    num_updates: int = 0
    num_wanted: int | None = None
    accuracy_first: float | None = None
    """Held-out accuracy in the main set's first, last and best evaluation."""
    accuracy_last: float | None = None
    accuracy_best: float | None = None
    started_s: float | None = None
    """First start, in seconds since 1970."""
    ended_s: float | None = None
    """None while it runs."""
    took_s: float | None = None
    """Total time of all starts, without the pauses between them."""
    num_starts: int = 0
    num_skipped: int = 0
    """Lines of the history and of ``starts.jsonl`` that are damaged or of a newer release."""


class KeptFiles:
    """Caches file contents between listings. Not safe for concurrent calls."""

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[tuple[int, int, int], Any]] = {}
        self._courses: dict[Path, CourseReader] = {}

    def of(self, path: Path, read: Callable[[Path], _T]) -> _T:
        """Return ``read(path)``, cached until the file's inode, size or modification time changes.
        Raises what ``read`` raises."""
        stamp = _stamp(path)
        kept = self._kept.get(path)
        if kept is None or kept[0] != stamp:
            # The stamp is taken first, so a row written meanwhile is read the next time.
            kept = self._kept[path] = stamp, read(path)
        return kept[1]

    def course(self, path: Path) -> RunCourse:
        """Return what a history shows, reading only what is new. Raises OSError."""
        return self._courses.setdefault(path, CourseReader(path)).read()

    def keep_only(self, run_dirs: list[Path]) -> None:
        """Forget all other runs' files."""
        present = set(run_dirs)
        self._kept = {path: kept for path, kept in self._kept.items() if path.parent in present}
        self._courses = {path: reader for path, reader in self._courses.items() if path.parent in present}


def list_runs(folder: Path, now_s: float | None = None, kept: KeptFiles | None = None) -> list[ListedRun]:
    """Return the runs of a folder, newest first; a run's own folder counts as one run.

    ``kept`` caches files between calls. Raises ConfigError if there is no run, naming what is there."""
    found = run_folders(folder)
    if not found:
        raise ConfigError(no_runs_words(folder))
    now_s = time.time() if now_s is None else now_s
    kept = KeptFiles() if kept is None else kept
    kept.keep_only(found)
    rows = [_listed(run_dir, now_s, kept) for run_dir in found]
    return sorted(rows, key=lambda row: (row.started_s or 0.0, row.run.name), reverse=True)


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder, by name, or the folder itself if it is a run's."""
    if (folder / RESOLVED_NAME).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{RESOLVED_NAME}"))


def no_runs_words(folder: Path) -> str:
    """Return a sentence about a folder without runs, naming where there are some."""
    if not folder.is_dir():
        parent = next((path for path in folder.absolute().parents if path.is_dir()), Path("/"))
        near = run_folders(parent)
        instead = f"; {parent} has the runs {_names_of_newest(near)}" if near else ""
        return f"{folder} does not exist{instead}; expected a folder of runs, as `headrace up` makes under ./runs"
    deeper = sorted({path.parent.parent for path in folder.glob(f"*/*/{RESOLVED_NAME}")})
    instead = f"; there are runs in {', '.join(map(str, deeper[:_MOST_NAMED]))}" if deeper else ""
    return f"{folder} holds no run{instead}; `headrace up` makes one under ./runs"


def unknown_run_words(given: Path) -> str:
    """Return a sentence saying that a path is not a run, naming runs next to it."""
    for place in (given.parent, Path("runs")):
        if near := run_folders(place):
            return f"{given} is not a run; {place} has the runs {_names_of_newest(near)}"
    return f"{given} is not a run: it has no {RESOLVED_NAME}; give a folder that `headrace up` made"


def _names_of_newest(runs: list[Path]) -> str:
    newest = sorted(runs, key=lambda path: (path / RESOLVED_NAME).stat().st_mtime, reverse=True)
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    return ", ".join(path.name for path in newest[:_MOST_NAMED]) + more


def _listed(run_dir: Path, now_s: float, kept: KeptFiles) -> ListedRun:
    try:
        settings = kept.of(run_dir / RESOLVED_NAME, lambda path: tomllib.loads(path.read_text(encoding="utf-8")))
        history = kept.course(run_dir / HISTORY_NAME)
        starts, num_broken = read_starts(run_dir)
    except (OSError, ValueError) as error:
        return ListedRun(run_dir, ListedState.UNREADABLE, detail=str(error))
    state, detail = _state(run_dir, starts, history)
    is_alive = state in (ListedState.STARTING, ListedState.RUNNING, ListedState.STOPPING)
    first_s = starts[0].start.at_s if starts else history.first_s
    last_s = _last_sign_s(run_dir, starts, history)
    ended_s = None if is_alive or first_s is None else last_s
    took_s = None if first_s is None else _took_s(starts, first_s, now_s if is_alive else last_s)
    return ListedRun(
        run=run_dir,
        state=state,
        detail=detail,
        algorithm=str(_setting(settings, "algorithm", "name") or ""),
        model=str(_setting(settings, "model", "path") or ""),
        seed=_whole(_setting(settings, "run", "seed")),
        num_updates=history.num_updates,
        num_wanted=_whole(_setting(settings, "run", "num_updates")),
        accuracy_first=history.accuracies[0] if history.accuracies else None,
        accuracy_last=history.accuracies[-1] if history.accuracies else None,
        accuracy_best=max(history.accuracies, default=None),
        started_s=first_s,
        ended_s=ended_s,
        took_s=took_s,
        num_starts=len(starts),
        num_skipped=history.num_skipped + num_broken,
    )


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


def _state(run_dir: Path, starts: list[RunStart], history: RunCourse) -> tuple[ListedState, str]:
    newest = starts[-1] if starts else None
    if supervisor_pid(run_dir) is not None:
        if not trouble(run_dir, needs_ready=True):
            return ListedState.RUNNING, ""
        locked_s = (run_dir / LOCK_NAME).stat().st_mtime
        seen_s = newest.end.at_s if newest is not None and newest.end is not None else history.last_s or 0.0
        state = ListedState.STARTING if seen_s < locked_s else ListedState.STOPPING
        return state, trouble(run_dir, needs_ready=False)
    if newest is None:
        return (ListedState.NEW if history.last_s is None else ListedState.ENDED), ""
    if newest.end is None:
        return ListedState.DIED, f"no supervisor and no recorded end; `headrace up --resume {run_dir}` continues it"
    states = {"finished": ListedState.FINISHED, "failed": ListedState.FAILED, "stopping": ListedState.STOPPED}
    return states.get(newest.end.state, ListedState.ENDED), newest.end.detail


def _last_sign_s(run_dir: Path, starts: list[RunStart], history: RunCourse) -> float:
    """Return when the run ended, or else its last sign of life."""
    if starts and starts[-1].end is not None:
        return starts[-1].end.at_s
    signs = [history.last_s or 0.0, *(each.start.at_s for each in starts[-1:])]
    with suppress(OSError):
        signs.append((run_dir / PULSE_NAME).stat().st_mtime)
    return max(signs)


def _took_s(starts: list[RunStart], first_s: float, until_s: float) -> float:
    """Return the total time of all starts, except those whose end was not recorded."""
    if not starts:
        return max(0.0, until_s - first_s)
    whole = sum(max(0.0, each.end.at_s - each.start.at_s) for each in starts if each.end is not None)
    return whole + (max(0.0, until_s - starts[-1].start.at_s) if starts[-1].end is None else 0.0)


def _setting(settings: dict[str, Any], section: str, key: str) -> Any:
    table = settings.get(section)
    return table.get(key) if isinstance(table, dict) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
