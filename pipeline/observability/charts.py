"""Charts of a run's report: its history, by heading. Absent figures make no chart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.observability.drawing import COLOURS, Draw, svg
from pipeline.observability.drawing import lines as draw_lines
from pipeline.observability.drawing import marker as marker_of
from pipeline.observability.history import EvaluationRow, UpdateRow, ValueRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_updates(updates: Sequence[UpdateRow], evaluations: Sequence[EvaluationRow]) -> dict[str, list[str]]:
    """Return the charts of the policy's updates, by heading; none without an update."""
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

        marker = marker_of(numbers)
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
            "Time of an update, seconds": lambda axes: _times(axes, updates),
            "Trained tokens a second": lines({"tokens": [_token_rate(row) for row in updates]}, from_zero=True),
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
    """Return the charts of the value model's steps, by heading; none without a step."""
    if not rows:
        return {}
    steps = [row.step for row in rows]
    marker = marker_of(steps)
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
            axes.bar(numbers, value, 0.3, bottom=below, label=name, color=COLOURS[place])
        ceiling = sums[0]
    else:
        axes.stackplot(numbers, *parts.values(), labels=list(parts), colors=COLOURS)
        # One stall does not flatten the rest.
        ceiling = statistics.quantiles(sums, n=50)[-1]
    axes.set_ylim(0, 1.35 * ceiling + 1e-9)
