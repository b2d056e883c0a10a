"""Repairs of workers: ``<run_dir>/repairs.jsonl``, a line each, by the supervisor.

A repair is the way of a worker's name from its last progress to its successor's first. Its parts
add up to its whole. The file is bounded: of very many repairs the newest are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from pipeline.files import write_private

REPAIRS_NAME = "repairs.jsonl"
_MAX_BYTES = 1 << 20
PARTS = ("detect_s", "replace_s", "reload_s", "repeat_s")


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
    """From the last progress to the moment when the supervisor knew."""
    replace_s: float
    """To the start of a new process: fence, end, back-off."""
    reload_s: float
    """To the end of its start: imports, model, weights."""
    repeat_s: float
    """To its first progress; of a learner, to a version that was not there before."""
    num_losses: int = 1
    """Processes that were lost before one came to work."""

    @property
    def whole_s(self) -> float:
        """From progress to progress."""
        return self.detect_s + self.replace_s + self.reload_s + self.repeat_s


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
        whole = sum(self.sums.values())
        shares = [(part.removesuffix("_s"), self.sums[part] / whole) for part in PARTS] if whole else []
        return ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares if share >= 0.005) or "no time"


def role_repairs(rows: Sequence[RepairRow]) -> list[RoleRepairs]:
    """Return the repairs by role, in the order of names."""
    found = list[RoleRepairs]()
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role]
        whole = [row.whole_s for row in own]
        sums = {part: float(sum(getattr(row, part) for row in own)) for part in PARTS}
        found.append(RoleRepairs(role, len(own), median(whole), max(whole), sums))
    return found


def add_repair(run_dir: Path, row: RepairRow) -> None:
    """Append a row. Raises OSError."""
    path = run_dir / REPAIRS_NAME
    line = json.dumps(asdict(row)).encode() + b"\n"
    kept = path.read_bytes() if path.exists() else b""
    if len(kept) + len(line) > _MAX_BYTES:
        kept = kept[len(kept) // 2 :].partition(b"\n")[2]
    write_private(path, kept + line)


def read_repairs(run_dir: Path) -> tuple[list[RepairRow], int]:
    """Return a run's repairs, oldest first, and the number of damaged lines; nothing without a
    file."""
    try:
        data = (run_dir / REPAIRS_NAME).read_bytes()
    except FileNotFoundError:
        return [], 0
    names = {each.name for each in fields(RepairRow)}
    rows, num_skipped = list[RepairRow](), 0
    for line in data.splitlines():
        try:
            row = RepairRow(**{name: value for name, value in json.loads(line).items() if name in names})
            if not math.isfinite(row.at_s + row.whole_s):
                raise ValueError("a time that is no number")
        except (ValueError, TypeError, AttributeError):
            num_skipped += 1
        else:
            rows.append(row)
    return rows, num_skipped
