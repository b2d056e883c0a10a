"""Where a worker stands, beside the others of its role: lines for a log and for an incident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.process.stacks.alike import MOVES, StackGroup

MAX_LINES: Final = 6
"""Its own group, and the largest others of its role."""
_MAX_NAMES = 4
_MAX_CALLS = 6


def stand_lines(worker: str, groups: Sequence[StackGroup]) -> tuple[str, ...]:
    """Return a worker's group first, then the others of its role; nothing where no group has it."""
    own = next((group for group in groups if worker in group.workers), None)
    if own is None:
        return ()
    others = [group for group in groups if group.role == own.role and group is not own]
    mates = tuple(name for name in own.workers if name != worker)
    beside = f", as {_named(mates)}" if mates else ", alone in its role" if others else ""
    lines = [_line((worker,), own, beside), *(_line(group.workers, group) for group in others)]
    return tuple(lines[:MAX_LINES])


def _line(workers: Sequence[str], group: StackGroup, beside: str = "") -> str:
    s = "s" if len(workers) == 1 else ""
    where = f"move{s}, or wait{s} for work" if group.where == MOVES else f"stand{s} in {group.where}"
    calls = " < ".join(group.calls[:_MAX_CALLS])
    return f"{_named(workers)} {where}{beside}" + (f": {calls}" if calls else "")


def _named(workers: Sequence[str]) -> str:
    more = len(workers) - _MAX_NAMES
    return " and ".join(workers[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
