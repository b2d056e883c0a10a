"""Drawing of charts as inline SVG, for the pages of runs.

matplotlib draws them; it comes with the extra ``charts``."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e99", "#d9730d", "#8a63c7", "#1a7f5a", "#b3261e", "#7a6a00")
"""Of lines. A page names each anew for a dark screen (``--c0`` ...)."""
WIDE = (
    "#1a7f5a", "#7fc8a9", "#0b6e99", "#d9730d", "#8a63c7", "#c2427a", "#9c6b30", "#4b8fd6", "#b8a100", "#6b7f8a", "#a8b6bd",
    "#c9a0dc", "#d5dde1", "#b3261e", "#6e2c1f",
)  # fmt: skip
"""Of many areas beside one another; they stay as they are on a dark screen."""
_INK, _SOFT, _GRID = "#1c2b33", "#5c6f7a", "#e6ecef"
_VARIABLES = {_INK: "--ink", _SOFT: "--soft", _GRID: "--grid"} | {
    colour: f"--c{number}" for number, colour in enumerate(COLOURS)
}
"""A colour's name on a page, which gives it another value on a dark screen."""

_LARGEST = 1e100
"""Above, matplotlib's arithmetic of an axis overflows."""

Draw = Callable[["Axes"], None]


def can_draw() -> bool:
    """Return whether matplotlib is installed. It comes with the extra ``charts``."""
    return find_spec("matplotlib") is not None


def lines(axes: Axes, at: Sequence[float], found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> None:
    """Draw one line a name; ``from_zero`` begins the axis at 0. Numbers that an axis cannot hold leave
    a gap."""
    found = {name: [value if abs(value) < _LARGEST else math.nan for value in values] for name, values in found.items()}
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        axes.plot(at, values, marker=marker(at), color=colour, lw=1.2, label=name)
    if from_zero:
        largest = max((value for values in found.values() for value in values if value == value), default=0.0)
        axes.set_ylim(0, 1.25 * largest or 1.0)


def marker(at: Sequence[float]) -> str | None:
    """Return the marker of a line."""
    # A line of one point would be invisible.
    return "o" if len(at) == 1 else None


def svg(
    title: str,
    draw: Draw,
    *,
    x_label: str = "update",
    only: int | None = None,
    is_bars: bool = False,
    whole: bool = True,
) -> str:
    """Return one chart as inline SVG with text as text. ``only``: the single update's number.
    ``is_bars``: bars that lie. ``whole``: the x axis has whole numbers."""
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
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=whole, steps=[1, 2, 5, 10]))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if is_bars else "y", color=_GRID)
        axes.margins(x=0.02)
        if only is not None:
            axes.set_xlim(only - 1, only + 1)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            figure.legend(loc="outside upper right", frameon=False, fontsize=9, ncols=3, labelcolor=_INK)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return _with_variables(text[text.index("<svg") :])


def _with_variables(text: str) -> str:
    for colour, name in _VARIABLES.items():
        text = text.replace(f": {colour}", f": var({name}, {colour})")
    return text
