"""The page that a run leaves behind: ``<run_dir>/report.html`` and the same figures in ``report.json``.

*Consumes* the run's history, its resolved configuration and the last audit. *Produces* one self-contained page (no scripts, no
links to anywhere) with figures and charts. *Waits for* nothing.
Nothing here is needed for training; ``headrace report`` makes it again at any time.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.resolved import RESOLVED_NAME
from pipeline.history import (
    HISTORY_NAME,
    VALUE_HISTORY_NAME,
    EvaluationRow,
    UpdateRow,
    ValueRow,
    read_history,
)
from pipeline.replay.buffer import Audit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_COLOURS = ("#0b6e99", "#d9730d", "#8a63c7")
_INK, _SOFT = "#1c2b33", "#5c6f7a"


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures that people ask for first."""

    num_updates: int
    num_trained_tokens: int
    train_s: float
    """From the first claim to the last update, by the wall clock."""
    accuracy_before: float | None
    """Held-out accuracy of the first and the last evaluation; None when there was none."""
    accuracy_after: float | None
    num_held_out: int
    max_staleness: int
    learner_wait_share: float
    """Share of the training time in which the learner waited for ready units."""


@dataclass(frozen=True, slots=True)
class _Card:
    label: str
    value: str
    note: str = ""


def summarize(run_dir: Path) -> Summary:
    """Read the history and return its summary. An empty history gives zeros."""
    updates, evaluations = _rows(run_dir)
    train_s = sum(r.wait_s + r.logprob_s + r.step_s + r.publish_s for r in updates)
    return Summary(
        num_updates=len(updates),
        num_trained_tokens=sum(r.num_trained_tokens for r in updates),
        train_s=train_s,
        accuracy_before=evaluations[0].accuracy if evaluations else None,
        accuracy_after=evaluations[-1].accuracy if len(evaluations) > 1 else None,
        num_held_out=evaluations[-1].num_responses if evaluations else 0,
        max_staleness=max((r.staleness_max for r in updates), default=0),
        learner_wait_share=sum(r.wait_s for r in updates) / train_s if train_s else 0.0,
    )


def write_report(run_dir: Path, *, title: str, detail: str, audit: Audit | None) -> Path:
    """Write ``report.html`` and ``report.json`` into the run's folder; return the page's path."""
    import jinja2  # deferred: only a finished run needs it

    updates, evaluations = _rows(run_dir)
    summary = summarize(run_dir)
    balances = (
        [("groups", audit.groups), ("trajectories", audit.trajectories), ("tokens", audit.tokens)] if audit else []
    )
    if audit and audit.finished.admitted:
        balances.append(("responses for the critic", audit.finished))
    config = run_dir / RESOLVED_NAME
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        detail=detail,
        cards=_cards(summary),
        charts=_charts(updates, evaluations) + _value_charts(run_dir),
        evaluations=evaluations,
        audit=audit,
        balances=balances,
        reasons=sorted({reason for _, balance in balances for reason in balance.dropped}),
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )
    (run_dir / "report.json").write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    path = run_dir / "report.html"
    partial = path.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)  # whoever has the page open never reads half of one
    return path


def _rows(run_dir: Path) -> tuple[list[UpdateRow], list[EvaluationRow]]:
    rows = list(read_history(run_dir / HISTORY_NAME))
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    return updates, [row for row in rows if isinstance(row, EvaluationRow)]


def _cards(summary: Summary) -> list[_Card]:
    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    held_out = f"{summary.num_held_out:,} held-out responses" if summary.num_held_out else "no evaluation"
    after = held_out if summary.accuracy_after is not None else "no evaluation at the end"
    return [
        _Card("accuracy before", percent(summary.accuracy_before), held_out),
        _Card("accuracy after", percent(summary.accuracy_after), after),
        _Card("updates", f"{summary.num_updates:,}", f"{summary.num_trained_tokens:,} tokens"),
        _Card(
            "training time",
            _duration(summary.train_s),
            f"learner waited {100 * summary.learner_wait_share:.0f} %",
        ),
        _Card("staleness", f"≤ {summary.max_staleness}", "versions, at most"),
    ]


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def _charts(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRow]) -> list[str]:
    from matplotlib.ticker import MaxNLocator

    if not updates:
        return []
    numbers = [row.update for row in updates]
    first_update = {row.policy_version: row.update for row in updates}
    marker = "o" if len(updates) == 1 else None  # a line of one point is not seen

    def accuracy(axes: Axes) -> None:
        axes.plot(numbers, [100 * r.accuracy for r in updates], marker=marker, color=_COLOURS[0], lw=1.2, label="batch")
        at = [first_update.get(row.policy_version, 0) for row in evaluations]
        if evaluations:
            axes.plot(at, [100 * r.accuracy for r in evaluations], "o-", color=_COLOURS[1], label="held-out")
        axes.set_ylim(0, 104)

    def length(axes: Axes) -> None:
        axes.plot(numbers, [r.response_length for r in updates], marker=marker, color=_COLOURS[0], label="mean")
        axes.set_ylim(0, 1.25 * max(r.response_length for r in updates) + 1e-9)

    def staleness(axes: Axes) -> None:
        oldest = [r.staleness_max for r in updates]
        axes.plot(numbers, oldest, marker=marker, color=_COLOURS[1], drawstyle="steps-mid", label="oldest token")
        axes.plot(numbers, [r.staleness_mean for r in updates], marker=marker, color=_COLOURS[0], label="mean")
        axes.set_ylim(0, 1.25 * max(1, *oldest, 1))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))

    def seconds(axes: Axes) -> None:
        parts = {
            "waiting for units": [r.wait_s for r in updates],
            "log-probs": [r.logprob_s for r in updates],
            "steps and publishing": [r.step_s + r.publish_s for r in updates],
        }
        sums = [sum(column) for column in zip(*parts.values(), strict=True)]
        if len(updates) == 1:
            for place, (name, value) in enumerate(parts.items()):
                axes.bar(
                    numbers,
                    value,
                    0.3,
                    bottom=sum(v[0] for v in list(parts.values())[:place]),
                    label=name,
                    color=_COLOURS[place],
                )
            ceiling = sums[0]
        else:
            axes.stackplot(numbers, *parts.values(), labels=list(parts), colors=_COLOURS)
            ceiling = statistics.quantiles(sums, n=50)[-1]  # one stall must not flatten all the rest
        axes.set_ylim(0, 1.35 * ceiling + 1e-9)

    charts = {
        "Accuracy, %": accuracy,
        "Length of a response, tokens": length,
        "Staleness, versions": staleness,
        "Time of an update, seconds": seconds,
    }
    return [_svg(title, draw, only=numbers[0] if len(numbers) == 1 else None) for title, draw in charts.items()]


def _value_charts(run_dir: Path) -> list[str]:
    """Draw how well the value model explains returns, when the run has one."""
    rows = [row for row in read_history(run_dir / VALUE_HISTORY_NAME) if isinstance(row, ValueRow)]
    if not rows:
        return []
    steps = [row.step for row in rows]
    marker = "o" if len(rows) == 1 else None
    opened = next((row.step for row in rows if row.gate_open), None)

    def explained(axes: Axes) -> None:
        each, mean = [r.explained_variance for r in rows], [r.mean_explained_variance for r in rows]
        axes.plot(steps, each, marker=marker, color=_COLOURS[0], lw=0.8, alpha=0.5, label="each step")
        axes.plot(steps, mean, marker=marker, color=_COLOURS[0], label="moving mean")
        if opened is not None:
            axes.axvline(opened, color=_COLOURS[1], ls=":", label="the policy may start")
        axes.set_ylim(max(-1.0, min(0.0, *each, *mean)) - 0.04, 1.04)

    def loss(axes: Axes) -> None:
        axes.plot(steps, [r.loss for r in rows], marker=marker, color=_COLOURS[2], label="loss")
        axes.set_ylim(0, 1.25 * max(r.loss for r in rows) + 1e-9)

    return [
        _svg("Critic: explained variance of returns", explained, x_label="value step"),
        _svg("Critic: loss", loss, x_label="value step"),
    ]


def _svg(title: str, draw: Callable[[Axes], None], *, x_label: str = "update", only: int | None = None) -> str:
    """Render one chart as an inline SVG element, with text as text; ``only`` is the update when there is just one."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,  # the same run gives the same page, and ids of two charts on it differ
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
