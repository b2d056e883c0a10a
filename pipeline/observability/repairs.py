"""Repairs of workers and the steps to them: ``<run_dir>/repairs.jsonl``, by the supervisor.

A repair is the way of a worker's name from its last progress to its successor's first. Its parts
add up to its whole. A step is one decision about the repair of a worker, in words. Lines
are only appended, with ``kind`` "step" or without it. The file is bounded: of very many lines the
newest are kept. The first line, of kind "sums", then has the times of the repairs before them, so
that sums never fall."""

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
"""Of a repair, in their order."""


@dataclass(frozen=True, slots=True)
class RepairRow:
    """One repair."""

    at_s: float
    """Its end, in seconds since 1970."""
    worker: str
    role: str
    cause: str
    """Why the process was lost, in words."""
    detect_s: float
    """From the last progress to the first sign: the supervisor knew, or an incident was found. 0
    for a process that ended: its end is the sign."""
    replace_s: float
    """From the decision to the start of a new process: fence, end, back-off."""
    reload_s: float
    """To the end of its start: imports, model, weights."""
    repeat_s: float
    """To its first progress; of a learner, to a version that was not there before."""
    num_losses: int = 1
    """Processes that were lost before one came to work."""
    localise_s: float = 0.0
    """From the sign to the decision that this worker is to be repaired. 0 where the sign is its own
    loss, and in lines of earlier versions."""
    standby: str = ""
    """The standby that took over; empty: a new process was started."""

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
    """One step of a repair."""

    at_s: float
    """In seconds since 1970."""
    case: int
    """Steps of one case have one number; 0: of an incident that makes no case."""
    worker: str
    role: str
    rung: str
    outcome: str
    sentence: str
    limit_s: float | None = None
    """Until its deadline, in seconds; None without one."""


@dataclass(frozen=True, slots=True)
class RoleRepairs:
    """All repairs of a role."""

    role: str
    number: int
    median_s: float
    longest_s: float
    sums: dict[str, float]
    """Seconds of each part, over all repairs."""

    def in_words(self) -> str:
        """Return the parts' shares: ``detect 71 %, reload 20 %``."""
        return parts_in_words(self.sums)


_Row = TypeVar("_Row", RepairRow, StepRow)


def parts_in_words(sums: Mapping[str, float]) -> str:
    """Return the shares of the parts of repairs: ``detect 71 %, reload 20 %``."""
    whole = sum(sums.values())
    shares = [(part.removesuffix("_s"), sums.get(part, 0.0) / whole) for part in PARTS] if whole else []
    return ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares if share >= 0.005) or "no time"


def part_sums(rows: Iterable[RepairRow]) -> dict[str, float]:
    """Return the seconds of each part, over repairs; empty without any."""
    own = list(rows)
    return {part: float(sum(getattr(row, part) for row in own)) for part in PARTS} if own else {}


def role_repairs(rows: Sequence[RepairRow]) -> list[RoleRepairs]:
    """Return the repairs by role, in the order of names."""
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
    """Return a run's repairs, oldest first, and the number of damaged lines; nothing without a
    file."""
    rows = [_repair(line) for line in _lines(run_dir) if _kind(line) not in (_STEP, _SUMS)]
    return [row for row in rows if row is not None], sum(row is None for row in rows)


def read_repair_sums(run_dir: Path) -> dict[str, float]:
    """Return the seconds of each part of all a run's repairs; empty without any."""
    return _sums(_lines(run_dir))


def read_steps(run_dir: Path) -> list[StepRow]:
    """Return a run's repair steps, oldest first; damaged lines are left out."""
    rows = (_row(StepRow, line, lambda row: row.at_s + row.case) for line in _lines(run_dir) if _kind(line) == _STEP)
    return [row for row in rows if row is not None]


def _kind(line: Any) -> Any:
    return line.get("kind") if isinstance(line, dict) else None  # pyright: ignore[reportUnknownMemberType]


def _repair(line: Any) -> RepairRow | None:
    return _row(RepairRow, line, lambda row: row.at_s + row.whole_s)


def _sums(lines: Iterable[Any]) -> dict[str, float]:
    """Return the sums of repairs, those of earlier lines too."""
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
    """Yield the values of all lines; None for a line that is no JSON."""
    for line in data.splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield None


def _row(kind: type[_Row], line: Any, number: Callable[[_Row], float]) -> _Row | None:
    """Return a line's row; None for a damaged one, or one whose ``number`` is not finite."""
    names = {each.name for each in fields(kind)}
    try:
        row = kind(**{name: value for name, value in line.items() if name in names})
        return row if isfinite(number(row)) else None
    except (TypeError, AttributeError):
        return None
