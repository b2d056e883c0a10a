"""Repairs of workers and the steps taken: the records of ``<run_dir>/repairs.jsonl``, written by the
supervisor.

A repair covers the time from a worker's last progress to its successor's first; its parts add up to the
whole. A step is one decision about a repair, in words. The file is bounded: a full one keeps its newest
half, and its first record then holds the total times of the dropped repairs, so that totals never fall."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from pipeline.files.records import RecordFile, Schema

REPAIRS_NAME = "repairs.jsonl"
_MAX_BYTES = 1 << 20
PARTS = ("detect_s", "localise_s", "replace_s", "reload_s", "repeat_s")
"""The parts of a repair, in order."""


class RepairRow(msgspec.Struct, frozen=True, tag_field="kind", tag="repair"):
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


class StepRow(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
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


class RepairSums(msgspec.Struct, frozen=True, tag_field="kind", tag="sums"):
    """Seconds of each part, over all repairs that are no longer in the file."""

    detect_s: float = 0.0
    localise_s: float = 0.0
    replace_s: float = 0.0
    reload_s: float = 0.0
    repeat_s: float = 0.0


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


def part_sums(rows: Iterable[RepairRow | StepRow | RepairSums]) -> dict[str, float]:
    """Return the total seconds of each part of the repairs among ``rows``; empty if there are none."""
    own = [row for row in rows if not isinstance(row, StepRow)]
    return {part: float(sum(getattr(row, part) for row in own)) for part in PARTS} if own else {}


def role_repairs(rows: Sequence[RepairRow]) -> list[RoleRepairs]:
    """Return the repairs by role, sorted by name."""
    found = list[RoleRepairs]()
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role]
        whole = [row.whole_s for row in own]
        found.append(RoleRepairs(role, len(own), median(whole), max(whole), part_sums(own)))
    return found


# earlier releases gave repairs no kind
_SCHEMA: Final[Schema[RepairRow | StepRow | RepairSums]] = Schema(RepairRow | StepRow | RepairSums, untagged="repair")


def repair_records(run_dir: Path, *, max_bytes: int = _MAX_BYTES) -> RecordFile[RepairRow | StepRow | RepairSums]:
    return RecordFile(run_dir / REPAIRS_NAME, _SCHEMA, max_bytes=max_bytes, compact=_newest)


def _newest(rows: list[RepairRow | StepRow | RepairSums]) -> list[RepairRow | StepRow | RepairSums]:
    half = len(rows) // 2
    return [RepairSums(**part_sums(rows[:half])), *rows[half:]]


def read_repairs(run_dir: Path) -> tuple[list[RepairRow], int]:
    """Return a run's repairs, oldest first, and the number of skipped lines; empty if there is no file."""
    rows, num_skipped = repair_records(run_dir).read()
    return [row for row in rows if isinstance(row, RepairRow)], num_skipped


def read_repair_sums(run_dir: Path) -> dict[str, float]:
    """Return the seconds of each part over all repairs of a run; empty if there are none."""
    return part_sums(repair_records(run_dir).read()[0])


def read_steps(run_dir: Path) -> list[StepRow]:
    """Return a run's repair steps, oldest first; damaged lines are skipped."""
    return [row for row in repair_records(run_dir).read()[0] if isinstance(row, StepRow)]
