"""Repairs of workers and the steps taken: ``<run_dir>/repairs.jsonl``, written by the supervisor.

A repair covers the time from a worker's last progress to its successor's first; its parts add up to the
whole. A step is one decision about a repair, in words. Lines are appended; ``kind`` is "step" for steps
and absent for repairs. The file is bounded: if there are very many lines, the newest are kept, and a first
line of kind "sums" then holds the total times of the dropped repairs, so that totals never fall."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from pipeline.files import write_private

REPAIRS_NAME = "repairs.jsonl"
_MAX_BYTES = 1 << 20
_STEP = "step"
_SUMS = "sums"
PARTS = ("detect_s", "localise_s", "replace_s", "reload_s", "repeat_s")
"""The parts of a repair, in order."""


@dataclass(frozen=True, slots=True)
class RepairRow:
    at_s: float
    """End of the repair, in seconds since 1970."""
    worker: str
    role: str
    cause: str
    """Why the process was lost, in words."""
    detect_s: float
    """From the last progress to the first sign: the supervisor noticed, or an incident was opened. 0 if
    the process exited, since that is the sign."""
    replace_s: float
    """From the decision to the start of a new process: fencing, ending, back-off."""
    reload_s: float
    """Until the new process is ready: imports, model, weights."""
    repeat_s: float
    """Until its first progress; for a learner, until it makes a version that is new."""
    num_losses: int = 1
    """Processes lost before one got to work."""
    localise_s: float = 0.0
    """From the sign to the decision to repair this worker. 0 if the sign is its own loss, and in lines of
    older versions."""
    standby: str = ""
    """The standby that took over; empty if a new process was started."""

    @property
    def whole_s(self) -> float:
        """From progress to progress."""
        return self.detect_s + self.localise_s + self.replace_s + self.reload_s + self.repeat_s

    def in_words(self) -> str:
        """Return ``after 7.9 s: detect 5.1 s, replace 0.8 s, reload 1.2 s, repeat 0.8 s``."""
        parts = [(part.removesuffix("_s"), getattr(self, part)) for part in PARTS]
        return f"after {self.whole_s:.1f} s: " + ", ".join(f"{part} {took_s:.1f} s" for part, took_s in parts if took_s)


@dataclass(frozen=True, slots=True)
class StepRow:
    at_s: float
    case: int
    """Number shared by the steps of one case; 0 for an incident that makes no case."""
    worker: str
    role: str
    rung: str
    outcome: str
    sentence: str
    limit_s: float | None = None
    """Seconds until its deadline; None if it has none."""


@dataclass(frozen=True, slots=True)
class RoleRepairs:
    """All repairs of a role, summed up."""

    role: str
    number: int
    median_s: float
    longest_s: float
    sums: dict[str, float]
    """Seconds of each part, over all repairs."""

    def in_words(self) -> str:
        """Return the shares of the parts: ``detect 71 %, reload 20 %``."""
        return parts_in_words(self.sums)


_Row = TypeVar("_Row", RepairRow, StepRow)


def parts_in_words(sums: Mapping[str, float]) -> str:
    """Return the shares of the parts of repairs: ``detect 71 %, reload 20 %``."""
    whole = sum(sums.values())
    shares = [(part.removesuffix("_s"), sums.get(part, 0.0) / whole) for part in PARTS] if whole else []
    return ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares if share >= 0.005) or "no time"


def part_sums(rows: Iterable[RepairRow]) -> dict[str, float]:
    """Return the total seconds of each part; empty if there are no repairs."""
    own = list(rows)
    return {part: float(sum(getattr(row, part) for row in own)) for part in PARTS} if own else {}


def role_repairs(rows: Sequence[RepairRow]) -> list[RoleRepairs]:
    """Return the repairs by role, sorted by name."""
    found = list[RoleRepairs]()
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role]
        whole = [row.whole_s for row in own]
        sums = part_sums(own)
        found.append(RoleRepairs(role, len(own), median(whole), max(whole), sums))
    return found


def add_repair(run_dir: Path, row: RepairRow) -> None:
    """Append a repair. Raises OSError."""
    _append(run_dir, [asdict(row)])


def add_steps(run_dir: Path, rows: Sequence[StepRow]) -> None:
    """Append steps. Raises OSError."""
    _append(run_dir, [{"kind": _STEP} | asdict(row) for row in rows])


def _append(run_dir: Path, rows: Sequence[dict[str, Any]]) -> None:
    path = run_dir / REPAIRS_NAME
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    size = path.stat().st_size if path.exists() else 0
    if size + len(lines) > _MAX_BYTES:
        present = path.read_bytes()
        kept = present[len(present) // 2 :].partition(b"\n")[2]
        sums = {"kind": _SUMS} | _sums(_values(present[: len(present) - len(kept)]))
        write_private(path, json.dumps(sums).encode() + b"\n" + kept + lines)
        return
    with path.open("ab") as file:
        file.write(lines)


def read_repairs(run_dir: Path) -> tuple[list[RepairRow], int]:
    """Return a run's repairs, oldest first, and the number of damaged lines; empty if there is no file."""
    rows = [_repair(line) for line in _lines(run_dir) if _kind(line) not in (_STEP, _SUMS)]
    return [row for row in rows if row is not None], sum(row is None for row in rows)


def read_repair_sums(run_dir: Path) -> dict[str, float]:
    """Return the seconds of each part over all repairs of a run; empty if there are none."""
    return _sums(_lines(run_dir))


def read_steps(run_dir: Path) -> list[StepRow]:
    """Return a run's repair steps, oldest first; damaged lines are skipped."""
    rows = (_row(StepRow, line, lambda row: row.at_s + row.case) for line in _lines(run_dir) if _kind(line) == _STEP)
    return [row for row in rows if row is not None]


def _kind(line: Any) -> Any:
    return line.get("kind") if isinstance(line, dict) else None  # pyright: ignore[reportUnknownMemberType]


def _repair(line: Any) -> RepairRow | None:
    return _row(RepairRow, line, lambda row: row.at_s + row.whole_s)


def _sums(lines: Iterable[Any]) -> dict[str, float]:
    """Sum repairs, including the sums of dropped lines."""
    found: dict[str, float] = {}
    for line in lines:
        if _kind(line) == _SUMS:
            parts = {part: took_s for part in PARTS if isinstance(took_s := line.get(part), float) and isfinite(took_s)}
        else:
            row = None if _kind(line) == _STEP else _repair(line)
            parts = part_sums([] if row is None else [row])
        for part, took_s in parts.items():
            found[part] = found.get(part, 0.0) + took_s
    return found


def _lines(run_dir: Path) -> Iterator[Any]:
    try:
        data = (run_dir / REPAIRS_NAME).read_bytes()
    except FileNotFoundError:
        return
    yield from _values(data)


def _values(data: bytes) -> Iterator[Any]:
    """Decode every line; None for a line that is not JSON."""
    for line in data.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


def _row(kind: type[_Row], line: Any, number: Callable[[_Row], float]) -> _Row | None:
    """Convert a decoded line; None if it is damaged, or if ``number`` of it is not finite."""
    names = {each.name for each in fields(kind)}
    try:
        row = kind(**{name: value for name, value in line.items() if name in names})
        return row if isfinite(number(row)) else None
    except (TypeError, AttributeError):
        return None
