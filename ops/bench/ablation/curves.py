"""The curves of a comparison as one SVG: accuracy by update and by sampled tokens.

Each row is a line, the mean over its seeds, and every seed is faint beside it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from ops.bench.ablation.runs import Outcome, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ops.bench.ablation.tables import Table

_COLOURS = ("#1c2b33", "#d9730d", "#0b6e99", "#8a63c7", "#1a7f5a", "#b3261e")


def as_svg(table: Table, outcomes: Sequence[Outcome]) -> str:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("svg")
    # the same outcomes, the same bytes
    matplotlib.rcParams["svg.hashsalt"] = table.name
    from matplotlib import pyplot

    figure, (by_update, by_tokens) = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    rows = [(v.name, [o for o in outcomes if o.variant == v.name]) for v in table.variants]
    for (name, of), colour in zip([row for row in rows if row[1]], _COLOURS, strict=False):
        _lines(by_update, name, of, colour, in_tokens=False)
        _lines(by_tokens, name, of, colour, in_tokens=True)
    by_update.set(xlabel="updates", ylabel="held-out accuracy, %", title="by update")
    by_tokens.set(xlabel="sampled tokens, millions", title="by sampled tokens")
    by_update.legend(fontsize="small", frameon=False)
    for axes in (by_update, by_tokens):
        axes.grid(alpha=0.25)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return file.getvalue()


def _lines(axes: Axes, name: str, of: Sequence[Outcome], colour: str, *, in_tokens: bool) -> None:
    def place(point: Point) -> float:
        return point.tokens / 1e6 if in_tokens else point.update

    for o in of:
        axes.plot([place(p) for p in o.curve], [100 * p.accuracy for p in o.curve], color=colour, lw=0.6, alpha=0.25)
    # seeds are examined after the same updates
    together = list(zip(*(o.curve for o in of), strict=False))
    at = [fmean(map(place, points)) for points in together]
    axes.plot(at, [100 * fmean(p.accuracy for p in points) for points in together], color=colour, lw=1.8, label=name)
