"""Drawing of charts as inline SVG, for the pages of runs.

matplotlib draws them; it comes with the extra ``charts``."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e99", "#d9730d", "#8a63c7", "#1a7f5a")
_INK, _SOFT = "#1c2b33", "#5c6f7a"

Draw = Callable[["Axes"], None]


def can_draw() -> bool:
    """Return whether matplotlib is installed. It comes with the extra ``charts``."""
    return find_spec("matplotlib") is not None


def lines(axes: Axes, at: Sequence[int], found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> None:
    """Draw one line a name; ``from_zero`` begins the axis at 0."""
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        axes.plot(at, values, marker=marker(at), color=colour, lw=1.2, label=name)
    if from_zero:
        largest = max((value for values in found.values() for value in values if value == value), default=0.0)
        axes.set_ylim(0, 1.25 * largest or 1.0)


def marker(at: Sequence[int]) -> str | None:
    """Return the marker of a line."""
    # A line of one point would be invisible.
    return "o" if len(at) == 1 else None


def svg(title: str, draw: Draw, *, x_label: str = "update", only: int | None = None) -> str:
    """Return one chart as inline SVG with text as text; ``only``: the single update's number."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        # Equal runs give equal pages; ids differ between charts.
        "svg.hashsalt": title,
        "font.size": 10,
        "font.family": "sans-serif",
        "axes.axisbelow": True,
        "axes.edgecolor": _SOFT,
        "xtick.color": _SOFT,
        "ytick.color": _SOFT,
    }
    with rc_context(settings):
        figure = Figure(figsize=(6, 3.2), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.set_facecolor("none")
        draw(axes)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
        axes.set_xlabel(x_label, color=_SOFT)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6ecef")
        axes.margins(x=0.02)
        if only is not None:
            axes.set_xlim(only - 1, only + 1)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            figure.legend(loc="outside upper right", frameon=False, fontsize=9, ncols=3, labelcolor=_INK)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
