"""Repairs of workers and the steps taken: ``<run_dir>/repairs.jsonl``, written by the supervisor.

A repair covers the time from a worker's last progress to its successor's first; its parts add up to the
whole. A step is one decision about a repair, in words. Lines are appended; ``kind`` is "step" for steps
and absent for repairs. The file is bounded: if there are very many lines, the newest are kept, and a first
line of kind "sums" then holds the total times of the dropped repairs, so that totals never fall."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from pipeline.files import write_private

REPAIRS_NAME = "repairs.jsonl"
_MAX_BYTES = 1 << 20
_Row = TypeVar("_Row")
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


def parts_in_words(sums: Mapping[str, float]) -> str:
    """Return the shares of the parts of repairs: ``detect 71 %, reload 20 %``."""
    whole = sum(sums.values())
    shares = [(part.removesuffix("_s"), sums.get(part, 0.0) / whole) for part in PARTS] if whole else []
    return ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares if share >= 0.005) or "no time"


def part_sums(rows: Iterable[Any]) -> dict[str, float]:
    """Return the total seconds of each part, of rows that have the parts; empty if there are none."""
    own = list(rows)
    return {part: float(sum(getattr(row, part) for row in own)) for part in PARTS} if own else {}


def role_repairs(rows: Sequence[RepairRow]) -> list[RoleRepairs]:
    """Return the repairs by role, sorted by name."""
    found = list[RoleRepairs]()
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role]
        whole = [row.whole_s for row in own]
        found.append(RoleRepairs(role, len(own), median(whole), max(whole), part_sums(own)))
    return found


def add_repair(run_dir: Path, row: RepairRow) -> None:
    """Append a repair. Raises OSError."""
    _append(run_dir, [row])


def add_steps(run_dir: Path, rows: Sequence[StepRow]) -> None:
    """Append steps. Raises OSError."""
    _append(run_dir, [{"kind": _STEP} | msgspec.to_builtins(row) for row in rows])


def _append(run_dir: Path, rows: Sequence[Any]) -> None:
    path = run_dir / REPAIRS_NAME
    lines = msgspec.json.Encoder().encode_lines(rows)
    size = path.stat().st_size if path.exists() else 0
    if size + len(lines) <= _MAX_BYTES:
        with path.open("ab") as file:
            file.write(lines)
        return
    present = path.read_bytes()
    kept = present[len(present) // 2 :].partition(b"\n")[2]
    dropped = present[: len(present) - len(kept)].splitlines()
    sums = {"kind": _SUMS} | part_sums(row for row in map(_totals, dropped) if row is not None)
    write_private(path, msgspec.json.encode(sums) + b"\n" + kept + lines)


def read_repairs(run_dir: Path) -> tuple[list[RepairRow], int]:
    """Return a run's repairs, oldest first, and the number of damaged lines; empty if there is no file."""
    rows = [_decoded(RepairRow, line) for line in _lines(run_dir) if _kind(line) not in (_STEP, _SUMS)]
    return [row for row in rows if row is not None], sum(row is None for row in rows)


def read_repair_sums(run_dir: Path) -> dict[str, float]:
    """Return the seconds of each part over all repairs of a run; empty if there are none."""
    return part_sums(row for row in map(_totals, _lines(run_dir)) if row is not None)


def read_steps(run_dir: Path) -> list[StepRow]:
    """Return a run's repair steps, oldest first; damaged lines are skipped."""
    rows = (_decoded(StepRow, line) for line in _lines(run_dir) if _kind(line) == _STEP)
    return [row for row in rows if row is not None]


def _lines(run_dir: Path) -> Iterator[bytes]:
    try:
        yield from (run_dir / REPAIRS_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return


class _Sums(msgspec.Struct):
    kind: str = ""
    detect_s: float = 0.0
    localise_s: float = 0.0
    replace_s: float = 0.0
    reload_s: float = 0.0
    repeat_s: float = 0.0


def _kind(line: bytes) -> str:
    found = _decoded(_Sums, line)
    return "" if found is None else found.kind


def _totals(line: bytes) -> RepairRow | _Sums | None:
    """Return a repair, or the sums of dropped ones."""
    match _kind(line):
        case "step":
            return None
        case "sums":
            return _decoded(_Sums, line)
        case _:
            return _decoded(RepairRow, line)


def _decoded(kind: type[_Row], line: bytes) -> _Row | None:
    """Decode a line; None if it is damaged."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (ValueError, RecursionError):
        return None
