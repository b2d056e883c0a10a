"""Runs side by side on one page: ``headrace run compare --html``. The page is complete in itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.observability import comparison_rows as rows
from pipeline.observability.compared_run import CurvePoint, RunFigures
from pipeline.observability.comparison import Comparison
from pipeline.observability.drawing import COLOURS, Draw, can_draw, svg
from pipeline.observability.history import UpdateRow
from pipeline.observability.pages import render_page, write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")
Place = Callable[[RunFigures], Sequence[float]]


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page; return its path. Raises OSError."""
    title = (
        " and ".join(run.name for run in comparison.runs)
        if len(comparison.runs) < 4
        else f"{len(comparison.runs)} runs"
    )
    page = render_page(
        "comparison.html.j2",
        title=f"Compared: {title}",
        comparison=comparison,
        can_draw=can_draw(),
        charts=draw_comparison(comparison) if can_draw() else {},
        rows=rows,
    )
    write_whole(path, page)
    return path


def draw_comparison(comparison: Comparison) -> dict[str, list[str]]:
    """Return the charts by heading: accuracy at equal cost, and what updates show of each run. A
    configuration has one colour, and each of its runs a style of its line."""
    looks = _looks(comparison)
    found: dict[str, list[str]] = {}
    if any(run.curve for run in comparison.runs):
        places: tuple[tuple[str, str, Callable[[CurvePoint], float]], ...] = (
            ("Held-out accuracy at equal updates, %", "update", lambda point: point.update),
            ("Held-out accuracy at equal trained tokens, %", "thousand tokens", lambda point: point.num_tokens / 1e3),
            ("Held-out accuracy at equal time, %", "seconds of the learner", lambda point: point.train_s),
        )
        found["Held-out accuracy"] = [
            svg(name, _curves(comparison.runs, looks, place), x_label=label, whole=False)
            for name, label, place in places
        ]
    values: dict[str, Callable[[UpdateRow], float]] = {
        "Reward, mean of the batch": lambda row: row.reward,
        "Accuracy of the batch, %": lambda row: 100 * row.accuracy,
        "Length of a response, tokens": lambda row: row.response_length,
        "Staleness, mean, versions": lambda row: row.staleness_mean,
        "Entropy, nats per token": lambda row: row.metrics.get("entropy", float("nan")),
        "Clipped tokens, %": lambda row: 100 * row.metrics.get("clip_fraction", float("nan")),
    }
    if any(run.records.updates for run in comparison.runs):
        drawn = [svg(name, _updates(comparison.runs, looks, value)) for name, value in values.items()]
        rate = svg(
            "Trained tokens, thousands, by time of the learner",
            _tokens(comparison.runs, looks),
            x_label="seconds",
            whole=False,
        )
        found["Updates"] = [*drawn, rate]
    return found


def _looks(comparison: Comparison) -> list[tuple[str, str]]:
    """Return each run's colour and style."""
    looks = [(COLOURS[0], _STYLES[0])] * len(comparison.runs)
    for number, one in enumerate(comparison.configurations):
        for index, place in enumerate(one.runs):
            looks[place] = (COLOURS[number % len(COLOURS)], _STYLES[index % len(_STYLES)])
    return looks


def _curves(runs: Sequence[RunFigures], looks: Sequence[tuple[str, str]], place: Callable[[CurvePoint], float]) -> Draw:
    def draw(axes: Axes) -> None:
        for run, (colour, style) in zip(runs, looks, strict=True):
            at = [place(point) for point in run.curve]
            axes.plot(
                at,
                [100 * point.accuracy.value for point in run.curve],
                style,
                marker="o",
                ms=3.5,
                color=colour,
                label=run.name,
            )
            if all(point.has_interval for point in run.curve) and len(at) > 1:
                low, high = ([100 * getattr(point.accuracy, side) for point in run.curve] for side in ("low", "high"))
                axes.fill_between(at, low, high, color=colour, alpha=0.12, lw=0)
        axes.set_ylim(0, 104)

    return draw


def _updates(runs: Sequence[RunFigures], looks: Sequence[tuple[str, str]], value: Callable[[UpdateRow], float]) -> Draw:
    def draw(axes: Axes) -> None:
        for run, (colour, style) in zip(runs, looks, strict=True):
            updates = run.records.updates
            axes.plot(
                [row.update for row in updates],
                [value(row) for row in updates],
                style,
                lw=1.2,
                color=colour,
                label=run.name,
            )

    return draw


def _tokens(runs: Sequence[RunFigures], looks: Sequence[tuple[str, str]]) -> Draw:
    def draw(axes: Axes) -> None:
        for run, (colour, style) in zip(runs, looks, strict=True):
            updates = run.records.updates
            times = list(accumulate(row.wait_s + row.logprob_s + row.step_s + row.publish_s for row in updates))
            tokens = accumulate(row.num_trained_tokens / 1e3 for row in updates)
            axes.plot(times, list(tokens), style, lw=1.2, color=colour, label=run.name)

    return draw
