"""Charts of a run's report: its history as inline SVG, by heading. Absent figures make no chart.

matplotlib draws them; it comes with the extra ``charts``."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pipeline.observability.history import EvaluationRow, UpdateRow, ValueRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0b6e99", "#d9730d", "#8a63c7", "#1a7f5a")
_INK, _SOFT = "#1c2b33", "#5c6f7a"

Draw = Callable[["Axes"], None]


def can_draw() -> bool:
    """Return whether matplotlib is installed. It comes with the extra ``charts``."""
    return find_spec("matplotlib") is not None


def draw_updates(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRow]) -> dict[str, list[str]]:
    """Return the charts of the policy's updates, by heading; none without an update."""
    if not updates:
        return {}
    numbers = [row.update for row in updates]
    only = numbers[0] if len(numbers) == 1 else None

    def metrics(*names: str) -> dict[str, list[float]]:
        return {_WORDS[n]: [r.metrics.get(n, float("nan")) for r in updates] for n in names if n in updates[-1].metrics}

    def lines(found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> Draw | None:
        return (lambda axes: _lines(axes, numbers, found, from_zero=from_zero)) if found else None

    def accuracy(axes: Axes) -> None:
        _lines(axes, numbers, {"batch": [100 * row.accuracy for row in updates]})
        held_out(axes, lambda row: 100 * row.accuracy)
        axes.set_ylim(0, 104)

    def held_out(axes: Axes, value: Callable[[EvaluationRow], float]) -> None:
        first_update = {row.policy_version: row.update for row in updates}
        for number, name in enumerate(dict.fromkeys(row.set_name for row in evaluations), start=1):
            of_set = [row for row in evaluations if row.set_name == name]
            at = [first_update.get(row.policy_version, 0) for row in of_set]
            colour = _COLOURS[number % len(_COLOURS)]
            axes.plot(at, [value(row) for row in of_set], "o-", color=colour, label=name)

    def length(axes: Axes) -> None:
        _lines(axes, numbers, {"batch": [row.response_length for row in updates]}, from_zero=True)
        held_out(axes, lambda row: row.response_length)
        if evaluations:
            axes.set_ylim(0, 1.25 * max(r.response_length for r in (*updates, *evaluations)) + 1e-9)

    def staleness(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        marker = _marker(numbers)
        oldest = [row.staleness_max for row in updates]
        axes.plot(numbers, oldest, marker=marker, color=_COLOURS[1], drawstyle="steps-mid", label="oldest token")
        axes.plot(numbers, [r.staleness_mean for r in updates], marker=marker, color=_COLOURS[0], label="mean")
        axes.set_ylim(0, 1.25 * max(1, *oldest, 1))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))

    named = dict.fromkeys(name for row in updates for name in row.reward_parts)
    # a single part is the reward itself
    parts = {name: [row.reward_parts.get(name, float("nan")) for row in updates] for name in named if len(named) > 1}
    clips = metrics("clip_fraction", "dual_clip_fraction", "importance_cut_fraction")
    clipped = {name: [100 * value for value in values] for name, values in clips.items()}
    charts: dict[str, dict[str, Draw | None]] = {
        "Learning": {
            "Accuracy, %": accuracy,
            "Reward, mean of the batch": lines({"reward": [row.reward for row in updates]} | parts),
            "Loss": lines({"loss": [row.loss for row in updates]}),
            "KL, nats per token": lines(metrics("reference_kl", "behavior_kl", "approx_kl")),
            "Entropy, nats per token": lines(metrics("entropy"), from_zero=True),
            "Gradient norm, before clipping": lines({"norm": [row.grad_norm for row in updates]}, from_zero=True),
            "Clipped tokens, %": lines(clipped, from_zero=True),
            "Learning rate": lines({"rate": [row.learning_rate for row in updates]}, from_zero=True),
        },
        "Sampling": {
            "Length of a response, tokens": length,
            "Staleness, versions": staleness,
            "Policy versions in one response, mean": lines({"versions": [row.num_segments_mean for row in updates]}),
        },
        "Time": {
            "Time of an update, seconds": lambda axes: _times(axes, updates),
            "Trained tokens a second": lines({"tokens": [_token_rate(row) for row in updates]}, from_zero=True),
        },
    }
    drawn = {heading: {name: draw for name, draw in found.items() if draw} for heading, found in charts.items()}
    return {heading: [_svg(name, draw, only=only) for name, draw in found.items()] for heading, found in drawn.items()}


_WORDS = {
    "reference_kl": "to the reference",
    "behavior_kl": "sampling to learner",
    "approx_kl": "within the update",
    "entropy": "entropy",
    "clip_fraction": "ratio",
    "dual_clip_fraction": "dual clip",
    "importance_cut_fraction": "importance weight",
}


def draw_critic(rows: Sequence[ValueRow]) -> dict[str, list[str]]:
    """Return the charts of the value model's steps, by heading; none without a step."""
    if not rows:
        return {}
    steps = [row.step for row in rows]
    marker = _marker(steps)
    opened = next((row.step for row in rows if row.gate_open), None)

    def explained(axes: Axes) -> None:
        each, mean = [r.explained_variance for r in rows], [r.mean_explained_variance for r in rows]
        axes.plot(steps, each, marker=marker, color=_COLOURS[0], lw=0.8, alpha=0.5, label="each step")
        axes.plot(steps, mean, marker=marker, color=_COLOURS[0], label="moving mean")
        if opened is not None:
            axes.axvline(opened, color=_COLOURS[1], ls=":", label="the policy may start")
        axes.set_ylim(max(-1.0, min(0.0, *each, *mean)) - 0.04, 1.04)

    def lines(found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> Draw:
        return lambda axes: _lines(axes, steps, found, from_zero=from_zero)

    charts = {
        "Critic: explained variance of returns": explained,
        "Critic: loss": lines({"loss": [row.loss for row in rows]}, from_zero=True),
        "Critic: values and their targets, means": lines(
            {"values": [row.value_mean for row in rows], "targets": [row.target_mean for row in rows]}
        ),
        "Critic: gradient norm, before clipping": lines({"norm": [row.grad_norm for row in rows]}, from_zero=True),
    }
    return {"The critic": [_svg(title, draw, x_label="value step") for title, draw in charts.items()]}


def _lines(axes: Axes, at: Sequence[int], found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> None:
    """Draw one line a name; ``from_zero`` begins the axis at 0."""
    for (name, values), colour in zip(found.items(), _COLOURS, strict=False):
        axes.plot(at, values, marker=_marker(at), color=colour, lw=1.2, label=name)
    if from_zero:
        largest = max((value for values in found.values() for value in values if value == value), default=0.0)
        axes.set_ylim(0, 1.25 * largest or 1.0)


def _marker(at: Sequence[int]) -> str | None:
    # A line of one point would be invisible.
    return "o" if len(at) == 1 else None


def _token_rate(row: UpdateRow) -> float:
    return row.num_trained_tokens / max(1e-9, row.wait_s + row.logprob_s + row.step_s + row.publish_s)


def _times(axes: Axes, updates: Sequence[UpdateRow]) -> None:
    numbers = [row.update for row in updates]
    parts = {
        "waiting for units": [r.wait_s for r in updates],
        "log-probs": [r.logprob_s for r in updates],
        "steps and publishing": [r.step_s + r.publish_s for r in updates],
    }
    sums = [sum(column) for column in zip(*parts.values(), strict=True)]
    if len(updates) == 1:
        for place, (name, value) in enumerate(parts.items()):
            below = sum(v[0] for v in list(parts.values())[:place])
            axes.bar(numbers, value, 0.3, bottom=below, label=name, color=_COLOURS[place])
        ceiling = sums[0]
    else:
        axes.stackplot(numbers, *parts.values(), labels=list(parts), colors=_COLOURS)
        # One stall does not flatten the rest.
        ceiling = statistics.quantiles(sums, n=50)[-1]
    axes.set_ylim(0, 1.35 * ceiling + 1e-9)


def _svg(title: str, draw: Draw, *, x_label: str = "update", only: int | None = None) -> str:
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
