"""Outcomes of a table side by side: its rows, and differences of the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ops.bench.ablation.runs import Outcome
from ops.bench.ablation.summary import Figures, figures

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Table


def rows_of(table: Table, outcomes: Sequence[Outcome]) -> list[tuple[str, str, list[Outcome]]]:
    """Return each row that was run: its name, the paper's figure, its outcomes."""
    found = [(v.name, v.paper, [o for o in outcomes if o.variant == v.name]) for v in table.variants]
    return [row for row in found if row[2]]


def paired(of: Sequence[Outcome], against: Sequence[Outcome], reading: Callable[[Outcome], float]) -> Figures | None:
    """Return the differences in points of the seeds that both have; None without one."""
    base = {o.seed: reading(o) for o in against}
    found = [100 * (reading(o) - base[o.seed]) for o in of if o.seed in base]
    return figures(found) if found else None


def interval(of: Figures) -> str:
    """Return a mean with half of its 95 % interval, as a cell of a page."""
    half = of.half_width
    mean = f"{of.mean:.1f}"
    return mean if half is None else f"{mean} ± {half:.1f}"


def late_accuracy_of(kind: str, outcome: Outcome) -> float:
    """Return an outcome's accuracy at the end on one kind of prompt."""
    return outcome.late_accuracy_of(kind)
