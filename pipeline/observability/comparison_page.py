"""``headrace run compare --html``: runs side by side on one self-contained page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.observability.charts import COLOURS, Draw, can_draw, render_page, svg, write_whole
from pipeline.observability.comparison import Basis, Comparison, Configuration, CurvePoint, RunFigures
from pipeline.observability.history import UpdateRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASES = {"updates": "equal updates", "tokens": "equal trained tokens", "seconds": "equal time of the learner"}


def run_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and a row of figures for each run."""
    letters = {place: one.name for one in comparison.configurations for place in one.runs}
    head = ("run", "configuration", "algorithm", "seed", "updates", "accuracy, last", "best", "trained tokens", "tokens/s",
            "learner waits", "staleness", "dropped")  # fmt: skip
    return [head, *(_run_row(run, letters[place]) for place, run in enumerate(comparison.runs))]


def _run_row(run: RunFigures, letter: str) -> tuple[str, ...]:
    dropped = sum(run.dropped.values()) if run.records.fleet else None
    stale = "–" if run.staleness_mean is None else f"{run.staleness_mean:.2f}, at most {run.staleness_max}"
    return (
        run.name,
        letter,
        run.algorithm or "–",
        "–" if run.seed is None else str(run.seed),
        f"{run.num_updates:,}",
        accuracy(run.curve[-1] if run.curve else None),
        percent(max((point.accuracy.value for point in run.curve), default=None)),
        f"{run.num_tokens:,}",
        "–" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}",
        percent(run.wait_share),
        stale,
        percent(dropped),
    )


def basis_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and each run's accuracy at each equal cost."""
    head = ("at", "up to", *(run.name for run in comparison.runs))
    return [head, *(_basis_row(basis) for basis in comparison.bases)]


def _basis_row(basis: Basis) -> tuple[str, ...]:
    unit = {"updates": "", "tokens": " tokens", "seconds": " s"}[basis.name]
    return (BASES[basis.name], f"{basis.limit:,.0f}{unit}", *(accuracy(point, where=True) for point in basis.points))


def configuration_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and a row for each configuration."""
    rows = [("configuration", "runs", "seeds", "accuracy at equal updates", "interval over")]
    return rows + [_configuration_row(comparison.runs, one) for one in comparison.configurations]


def _configuration_row(runs: Sequence[RunFigures], one: Configuration) -> tuple[str, ...]:
    names = ", ".join(runs[place].name for place in one.runs)
    seeds = ", ".join("–" if runs[place].seed is None else str(runs[place].seed) for place in one.runs)
    found = one.accuracy
    if found is None:
        return (one.name, names, seeds, "no interval on record", "–")
    value = f"{100 * found.value:.1f} % ({100 * found.low:.1f} to {100 * found.high:.1f})"
    of_prompts = "the prompts of one run" if len(one.runs) == 1 else "the prompts of one run, the widest"
    return (one.name, names, seeds, value, f"{len(one.runs)} runs" if one.is_of_seeds else of_prompts)


def setting_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and a row for each setting that differs."""
    head = ("setting", *(run.name for run in comparison.runs))
    return [head, *((key, *values) for key, values in comparison.differing.items())]


def role_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and throughput and use of time for each role of each run."""
    rows = [("run", "role", "workers", "computing", "tokens/s", "waits for")]
    for run in comparison.runs:
        for use in run.uses:
            share = f"{100 * use.compute_share:.0f} %"
            waits = use.waits_in_words(2)
            rows.append((run.name, use.role, f"{use.workers:.1f}", share, f"{use.tokens_per_s:,.0f}", waits))
    return rows


def drop_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a header, and for each reason the share of admitted groups that each run dropped."""
    reasons = dict.fromkeys(reason for run in comparison.runs for reason in run.dropped)
    head = ("groups dropped", *(run.name for run in comparison.runs))
    return [
        head,
        *(
            (
                reason.replace("_", " "),
                *(percent(run.dropped.get(reason, 0.0)) if run.records.fleet else "–" for run in comparison.runs),
            )
            for reason in reasons
        ),
    ]


def accuracy(point: CurvePoint | None, *, where: bool = False) -> str:
    """Format an accuracy with its interval and, with ``where``, its update."""
    if point is None:
        return "–"
    found = point.accuracy
    around = f" ({100 * found.low:.1f} to {100 * found.high:.1f})" if point.has_interval else ""
    return f"{100 * found.value:.1f} %{around}" + (f", update {point.update:,}" if where else "")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


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
        run_rows=run_rows,
        basis_rows=basis_rows,
        configuration_rows=configuration_rows,
        setting_rows=setting_rows,
        role_rows=role_rows,
        drop_rows=drop_rows,
    )
    write_whole(path, page)
    return path


def draw_comparison(comparison: Comparison) -> dict[str, list[str]]:
    """Return the charts by heading. A configuration has one colour, and each of its runs a line style."""
    looks = _line_styles(comparison)
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


def _line_styles(comparison: Comparison) -> list[tuple[str, str]]:
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
            times = list(accumulate(row.seconds for row in updates))
            tokens = accumulate(row.num_trained_tokens / 1e3 for row in updates)
            axes.plot(times, list(tokens), style, lw=1.2, color=colour, label=run.name)

    return draw
