"""Budgets of repairs that earlier supervisors have used, by their record. Pure.

A supervisor that is started again must not give a flapping worker all its repairs once more. The
restarts that incidents ordered, the evictions, and the losses in a row are counted in the steps of
``repairs.jsonl``. Steps older than the window count for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.observability.repairs import StepRow
from pipeline.supervisor.recovery.levels import RepairLevel, StepOutcome


@dataclass(frozen=True, slots=True)
class PastRepairs:
    """Repairs before this supervisor."""

    restarts: dict[str, tuple[float, ...]]
    """Ages in seconds of the restarts that incidents ordered, by worker, oldest first."""
    evictions: tuple[float, ...]
    """Ages in seconds, oldest first."""
    losses: dict[str, int]
    """Losses in a row of workers that were not repaired after them."""


@dataclass(slots=True)
class _PastCase:
    worker: str
    num_losses: int = 0
    is_own: bool = False
    is_closed: bool = False


def past_repairs(rows: Iterable[StepRow], at_s: float, window_s: float) -> PastRepairs:
    """Return what steps, oldest first, leave at a time.

    A case is over once its last step is a level that is done, without a further deadline or past it.

    Args:
        rows: Steps of all earlier supervisors.
        at_s: Now, in seconds since 1970. A step of a later time, by another clock, has just been.
        window_s: Older steps are left out."""
    restarts: dict[str, list[float]] = {}
    evictions = list[float]()
    cases: dict[int, _PastCase] = {}
    for row in rows:
        age_s = max(0.0, at_s - row.at_s)
        if row.case == 0 or age_s >= window_s:
            continue
        case = cases.setdefault(row.case, _PastCase(row.worker))
        has_begun = row.outcome == StepOutcome.BEGUN
        if row.rung == RepairLevel.ISOLATE and row.outcome == StepOutcome.DONE:
            # the supervisor has seen the loss itself
            case.is_own = True
            case.num_losses += 1
        elif has_begun and (
            row.rung == RepairLevel.ISOLATE or (row.rung == RepairLevel.ROLE_RESTART and not case.is_own)
        ):
            restarts.setdefault(row.worker, []).append(age_s)
        elif has_begun and row.rung == RepairLevel.EVICT:
            evictions.append(age_s)
        case.is_closed = (
            row.outcome == StepOutcome.DONE and (row.limit_s or 0.0) <= age_s and row.rung != RepairLevel.ISOLATE
        )
    losses = dict[str, int]()
    for case in cases.values():
        losses[case.worker] = 0 if case.is_closed else case.num_losses
    return PastRepairs(
        {worker: tuple(sorted(ages, reverse=True)) for worker, ages in restarts.items()},
        tuple(sorted(evictions, reverse=True)),
        {worker: number for worker, number in losses.items() if number},
    )
