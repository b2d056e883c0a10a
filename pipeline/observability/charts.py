"""Charts of a run's report and of a comparison, as inline SVG. Missing data is left out.

matplotlib draws them; it comes with the extra ``charts``."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.observability.fleet_history import IN_WORDS, FleetRow, RoleUse, at_most, in_order, role_uses
from pipeline.observability.history import UPDATE_PARTS, EvaluationRow, UpdateRow, ValueRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e99", "#d9730d", "#8a63c7", "#1a7f5a", "#b3261e", "#7a6a00")
"""Colours of lines. Pages override them in dark mode (``--c0`` ...)."""
WIDE = (
    "#1a7f5a", "#7fc8a9", "#0b6e99", "#d9730d", "#8a63c7", "#c2427a", "#9c6b30", "#4b8fd6", "#b8a100", "#6b7f8a", "#a8b6bd",
    "#c9a0dc", "#d5dde1", "#b3261e", "#6e2c1f",
)  # fmt: skip
"""Colours of adjacent areas, in light and dark mode."""
_INK, _SOFT, _GRID = "#1c2b33", "#5c6f7a", "#e6ecef"
_VARIABLES = {_INK: "--ink", _SOFT: "--soft", _GRID: "--grid"} | {
    colour: f"--c{number}" for number, colour in enumerate(COLOURS)
}
"""Colour -> the CSS variable that can override it in dark mode."""

_LARGEST = 1e100
"""Above this, matplotlib's arithmetic of axes overflows."""

Draw = Callable[["Axes"], None]


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_lines(
    axes: Axes, at: Sequence[float], found: Mapping[str, Sequence[float]], *, from_zero: bool = False
) -> None:
    """Draw one line for each name; ``from_zero`` starts the y axis at 0. Values too large for an axis
    leave a gap."""
    found = {name: [value if abs(value) < _LARGEST else math.nan for value in values] for name, values in found.items()}
    for (name, values), colour in zip(found.items(), COLOURS, strict=False):
        axes.plot(at, values, marker=marker_for(at), color=colour, lw=1.2, label=name)
    if from_zero:
        largest = max((value for values in found.values() for value in values if value == value), default=0.0)
        axes.set_ylim(0, 1.25 * largest or 1.0)


def marker_for(at: Sequence[float]) -> str | None:
    # A line through a single point would be invisible.
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
    """Return a chart as inline SVG whose text stays text.

    Args:
        title: Title above the chart.
        draw: Draws into the axes.
        x_label: Label of the x axis.
        only: Number of the only update, if there is just one.
        is_bars: Whether the chart has horizontal bars.
        whole: Whether the x axis has whole numbers only."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        # Equal runs give equal pages, but ids must differ between charts.
        "svg.hashsalt": title,
        "font.size": 10,
        "font.family": "sans-serif",
        "axes.axisbelow": True,
        "axes.edgecolor": _SOFT,
        "axes.labelcolor": _SOFT,
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
        axes.set_xlabel(x_label)
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


def draw_updates(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRow]) -> dict[str, list[str]]:
    """Return the charts of the policy's updates, by heading; empty if there are none."""
    if not updates:
        return {}
    numbers = [row.update for row in updates]
    only = numbers[0] if len(numbers) == 1 else None

    def metrics(*names: str) -> dict[str, list[float]]:
        return {_WORDS[n]: [r.metrics.get(n, float("nan")) for r in updates] for n in names if n in updates[-1].metrics}

    def lines(found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> Draw | None:
        return (lambda axes: draw_lines(axes, numbers, found, from_zero=from_zero)) if found else None

    def accuracy(axes: Axes) -> None:
        draw_lines(axes, numbers, {"batch": [100 * row.accuracy for row in updates]})
        held_out(axes, lambda row: 100 * row.accuracy)
        axes.set_ylim(0, 104)

    def held_out(axes: Axes, value: Callable[[EvaluationRow], float]) -> None:
        first_update = {row.policy_version: row.update for row in updates}
        for number, name in enumerate(dict.fromkeys(row.set_name for row in evaluations), start=1):
            of_set = [row for row in evaluations if row.set_name == name]
            at = [first_update.get(row.policy_version, 0) for row in of_set]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(at, [value(row) for row in of_set], "o-", color=colour, label=name)

    def length(axes: Axes) -> None:
        draw_lines(axes, numbers, {"batch": [row.response_length for row in updates]}, from_zero=True)
        held_out(axes, lambda row: row.response_length)
        if evaluations:
            axes.set_ylim(0, 1.25 * max(r.response_length for r in (*updates, *evaluations)) + 1e-9)

    def staleness(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        marker = marker_for(numbers)
        oldest = [row.staleness_max for row in updates]
        axes.plot(numbers, oldest, marker=marker, color=COLOURS[1], drawstyle="steps-mid", label="oldest token")
        axes.plot(numbers, [r.staleness_mean for r in updates], marker=marker, color=COLOURS[0], label="mean")
        axes.set_ylim(0, 1.25 * max(1, *oldest, 1))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))

    named = dict.fromkeys(name for row in updates for name in row.reward_parts)
    # a single part is the reward itself
    parts = {name: [row.reward_parts.get(name, float("nan")) for row in updates] for name in named if len(named) > 1}
    clips = metrics("clip_fraction", "dual_clip_fraction", "importance_cut_fraction", "rejected_fraction")
    clipped = {name: [100 * value for value in values] for name, values in clips.items()}
    charts: dict[str, dict[str, Draw | None]] = {
        "Learning": {
            "Accuracy, %": accuracy,
            "Reward, mean of the batch": lines({"reward": [row.reward for row in updates]} | parts),
            "Loss": lines({"loss": [row.loss for row in updates]}),
            "KL, nats per token": lines(metrics("reference_kl", "behavior_kl", "approx_kl")),
            "Entropy, nats per token": lines(metrics("entropy"), from_zero=True),
            "Gradient norm, before clipping": lines({"norm": [row.grad_norm for row in updates]}, from_zero=True),
            "Learning rate": lines({"rate": [row.learning_rate for row in updates]}, from_zero=True),
        },
        "Ratios and clipping": {
            "Policy ratio, present to old, mean": lines(metrics("policy_ratio")),
            "Policy ratio, largest": lines(metrics("policy_ratio_max")),
            "Importance weight, learner to sampler": lines(metrics("importance_ratio", "importance_weight")),
            "Clipped tokens, %": lines(clipped, from_zero=True),
        },
        "Sampling": {
            "Length of a response, tokens": length,
            "Staleness, versions": staleness,
            "Policy versions in one response, mean": lines({"versions": [row.num_segments_mean for row in updates]}),
        },
        "Time": {
            "Time of an update, seconds": lambda axes: _draw_times(axes, updates),
            "Trained tokens per second": lines({"tokens": [_token_rate(row) for row in updates]}, from_zero=True),
        },
    }
    drawn = {heading: {name: draw for name, draw in found.items() if draw} for heading, found in charts.items()}
    return {
        heading: [svg(name, draw, only=only) for name, draw in found.items()]
        for heading, found in drawn.items()
        if found
    }


_WORDS = {
    "reference_kl": "to the reference",
    "behavior_kl": "sampling to learner",
    "approx_kl": "within the update",
    "entropy": "entropy",
    "clip_fraction": "ratio",
    "dual_clip_fraction": "dual clip",
    "importance_cut_fraction": "importance weight",
    "rejected_fraction": "left out",
    "policy_ratio": "ratio",
    "policy_ratio_max": "ratio",
    "importance_ratio": "ratio, mean",
    "importance_weight": "weight after its bounds, mean",
}


def draw_critic(rows: Sequence[ValueRow]) -> dict[str, list[str]]:
    """Return the charts of the value model's steps, by heading; empty if there are none."""
    if not rows:
        return {}
    steps = [row.step for row in rows]
    marker = marker_for(steps)
    opened = next((row.step for row in rows if row.gate_open), None)

    def explained(axes: Axes) -> None:
        each, mean = [r.explained_variance for r in rows], [r.mean_explained_variance for r in rows]
        axes.plot(steps, each, marker=marker, color=COLOURS[0], lw=0.8, alpha=0.5, label="each step")
        axes.plot(steps, mean, marker=marker, color=COLOURS[0], label="moving mean")
        if opened is not None:
            axes.axvline(opened, color=COLOURS[1], ls=":", label="the policy may start")
        axes.set_ylim(max(-1.0, min(0.0, *each, *mean)) - 0.04, 1.04)

    def lines(found: Mapping[str, Sequence[float]], *, from_zero: bool = False) -> Draw:
        return lambda axes: draw_lines(axes, steps, found, from_zero=from_zero)

    charts = {
        "Critic: explained variance of returns": explained,
        "Critic: loss": lines({"loss": [row.loss for row in rows]}, from_zero=True),
        "Critic: values and their targets, means": lines(
            {"values": [row.value_mean for row in rows], "targets": [row.target_mean for row in rows]}
        ),
        "Critic: gradient norm, before clipping": lines({"norm": [row.grad_norm for row in rows]}, from_zero=True),
    }
    return {"The critic": [svg(title, draw, x_label="value step") for title, draw in charts.items()]}


def _token_rate(row: UpdateRow) -> float:
    return row.num_trained_tokens / max(1e-9, row.seconds)


def _draw_times(axes: Axes, updates: Sequence[UpdateRow]) -> None:
    numbers = [row.update for row in updates]
    parts = {name: [getattr(row, part) for row in updates] for part, name in UPDATE_PARTS.items()}
    sums = [row.seconds for row in updates]
    if len(updates) == 1:
        for place, (name, value) in enumerate(parts.items()):
            below = sum(v[0] for v in list(parts.values())[:place])
            axes.bar(numbers, value, 0.3, bottom=below, label=name, color=WIDE[place])
        ceiling = sums[0]
    else:
        axes.stackplot(numbers, *parts.values(), labels=list(parts), colors=WIDE)
        # A single stall must not flatten the rest.
        ceiling = statistics.quantiles(sums, n=50)[-1]
    axes.set_ylim(0, 1.35 * ceiling + 1e-9)


_MOST_ROWS = 240
_WAIT_COLOURS = dict(zip(IN_WORDS, WIDE, strict=True))


def draw_fleet(rows: Sequence[FleetRow]) -> dict[str, list[str]]:
    """Return the charts of the fleet, by heading; empty if there are no rows."""
    if not rows:
        return {}
    few = at_most(rows, _MOST_ROWS)
    ends_s = list(accumulate(row.span_s for row in few))
    unit_s, unit = (3600.0, "hours") if ends_s[-1] > 3 * 3600 else (60.0, "minutes")
    at = [(end - row.span_s / 2) / unit_s for end, row in zip(ends_s, few, strict=True)]
    roles = in_order({name for row in few for name in row.roles})

    def each(value: str) -> dict[str, list[float]]:
        return {name: [_role_value(row, name, value) for row in few] for name in roles}

    label = f"{unit} of running"
    tokens = {name: values for name, values in each("tokens").items() if any(values)}
    charts: dict[str, Draw] = {
        "Tokens per second: written, scored, trained": lambda axes: draw_lines(axes, at, tokens, from_zero=True),
        "Groups dropped, by reason": lambda axes: _draw_dropped(axes, at, few),
        "Ready units, at the learner's claim": lambda axes: draw_lines(
            axes, at, {"ready": [float(row.num_ready_units) for row in few]}, from_zero=True
        ),
        "Resident memory, GB": lambda axes: draw_lines(axes, at, each("memory"), from_zero=True),
        "Workers": lambda axes: draw_lines(axes, at, each("workers"), from_zero=True),
    }
    if all(len(set(values)) == 1 for values in each("workers").values()):
        del charts["Workers"]
    if not tokens:
        del charts["Tokens per second: written, scored, trained"]
    if not any(row.num_groups_dropped for row in few):
        del charts["Groups dropped, by reason"]
    uses = role_uses(rows)
    drawn = [svg("Share of time, by role", lambda axes: _draw_uses(axes, uses), x_label="%", is_bars=True)]
    drawn += [
        svg(f"{name}: share of time, %", _use_over_time(at, few, name), x_label=label, whole=False) for name in roles
    ]
    return {
        "Where the time went": drawn,
        "The fleet": [svg(name, draw, x_label=label, whole=False) for name, draw in charts.items()],
    }


def _role_value(row: FleetRow, name: str, value: str) -> float:
    span = row.roles.get(name)
    if span is None:
        return 0.0
    return {"tokens": span.tokens / row.span_s, "memory": span.rss_bytes / 1e9, "workers": span.workers}[value]


def _draw_uses(axes: Axes, uses: Sequence[RoleUse]) -> None:
    """Draw one bar for each role, divided by what its time was spent on."""
    names = [use.role for use in uses]
    shares = [{"compute": use.compute_share} | use.waits for use in uses]
    left = [0.0] * len(uses)
    for wait in IN_WORDS:
        values = [100 * of_role.get(wait, 0.0) for of_role in shares]
        if any(value >= 0.05 for value in values):
            axes.barh(names, values, 0.62, left=left, color=_WAIT_COLOURS[wait], label=_word(wait))
            left = [begin + value for begin, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)


def _use_over_time(at: Sequence[float], rows: Sequence[FleetRow], name: str) -> Draw:
    shares = [row.roles[name].shares if name in row.roles else {} for row in rows]
    parts = {wait: [100 * each.get(wait, 0.0) for each in shares] for wait in IN_WORDS}
    return lambda axes: _draw_stack(axes, at, {wait: values for wait, values in parts.items() if any(values)})


def _draw_stack(axes: Axes, at: Sequence[float], parts: Mapping[str, Sequence[float]]) -> None:
    colours = [_WAIT_COLOURS[wait] for wait in parts]
    names = [_word(wait) for wait in parts]
    if len(at) == 1:
        below = 0.0
        for name, colour, values in zip(names, colours, parts.values(), strict=True):
            axes.bar(at, values[0], 0.1, bottom=below, label=name, color=colour)
            below += values[0]
    else:
        axes.stackplot(at, *parts.values(), labels=names, colors=colours)
    axes.set_ylim(0, 100)


def _word(wait: str) -> str:
    word = IN_WORDS.get(wait, wait)
    return word if wait in ("compute", "compile", "stopped", "silent") else f"waits for {word}"


def _draw_dropped(axes: Axes, at: Sequence[float], rows: Sequence[FleetRow]) -> None:
    reasons = dict.fromkeys(reason for row in rows for reason in row.num_groups_dropped)
    found = {
        reason.replace("_", " "): [float(row.num_groups_dropped.get(reason, 0)) for row in rows] for reason in reasons
    }
    for (name, values), colour in zip(found.items(), COLOURS * 4, strict=False):
        axes.plot(at, values, color=colour, lw=1.4, label=name, marker="o" if len(at) == 1 else None)
    axes.set_ylim(0, 1.25 * max(max(values) for values in found.values()) + 1e-9)


def render_page(template: str, **values: Any) -> str:
    """Render a page from a template; a missing value is an error."""
    # Deferred, because only a finished run needs it.
    import jinja2

    from protocol.printable import printable

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.filters["printable"] = printable
    return environment.get_template(template).render(values)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a reader never sees half a page."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
