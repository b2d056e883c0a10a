"""Trains one variant with one seed in this process, and keeps its ``Outcome``.

The outcome is a JSON file, so an interrupted comparison can continue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline.config.load import load_config
from pipeline.observability.start_record import commit_of
from protocol.errors import DataError

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Variant
    from ops.bench.one_process import OneProcess

_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Point:
    """The evaluation of one policy version."""

    update: int
    at_s: float
    """Seconds since the first update began."""
    accuracy: float
    """Share of correct responses to the held-out prompts."""
    tokens: int
    """Sampled for learning so far, including dropped groups and the critic's pretraining."""
    responses: int
    """Sampled for learning so far, counted like ``tokens``."""
    accuracy_by_kind: dict[str, float] = field(default_factory=dict[str, float])
    """Accuracy on each kind of prompt that the task has."""


@dataclass(frozen=True, slots=True)
class Outcome:
    variant: str
    seed: int
    overrides: tuple[str, ...]
    curve: tuple[Point, ...]
    train_s: float
    sampled_tokens: int
    trained_tokens: int
    """Response tokens that carried loss."""
    entropy_last: float
    """Mean over the last five updates."""
    clip_fraction: float
    """Share of tokens whose ratio was clipped, mean over updates."""
    explained_variance: tuple[float, ...]
    """The critic's, for each update."""
    value_steps: int
    """Optimiser steps of the critic before the policy's first."""
    commit: str
    """Git commit of the sources, as in a run's start record; empty if unknown."""

    def late_accuracy(self, kind: str = "") -> float:
        """Mean accuracy of the last three evaluated versions, on all prompts or on those of one kind."""
        return fmean(point.accuracy_by_kind[kind] if kind else point.accuracy for point in self.curve[-3:])

    def mean_accuracy(self) -> float:
        """Mean accuracy of all evaluated versions: higher when accuracy rises sooner."""
        return fmean(point.accuracy for point in self.curve)

    def within(self, tokens: int) -> Outcome:
        """Return the outcome with its curve cut after this many sampled tokens; keeps at least one point."""
        kept = tuple(point for point in self.curve if point.tokens <= tokens)
        return replace(self, curve=kept or self.curve[:1])


def outcome_path(folder: Path, variant: Variant, seed: int) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in variant.name.lower()).strip("-")
    return folder / f"{name}.seed-{seed}.json"


def read_outcome(path: Path) -> Outcome:
    """Read what ``train_variant`` wrote. Raises DataError if the file holds something else."""
    try:
        values: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        curve = tuple(Point(**point) for point in values["curve"])
        tuples = {name: tuple(values[name]) for name in ("overrides", "explained_variance")}
        return Outcome(**{**values, **tuples, "curve": curve})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} does not hold an outcome: {error}; remove it to compute it again") from error


def outcomes(folder: Path, variants: Sequence[Variant], seeds: int) -> Iterator[Outcome]:
    for variant in variants:
        for seed in range(seeds):
            path = outcome_path(folder, variant, seed)
            if path.exists():
                yield read_outcome(path)


def train_variant(variant: Variant, seed: int, folder: Path, start: Sequence[str], *, every: int = 1) -> Outcome:
    """Train a variant with one seed in this process, synchronously, and keep the outcome in ``folder``.

    Answers all held-out prompts after every ``every`` updates. ``start`` holds the overrides that name prompts
    and models."""
    from ops.bench.one_process import OneProcess

    config = load_config([variant.config], [*start, *variant.overrides, f"run.seed={seed}"])
    learner = OneProcess(config)
    value_steps = learner.pretrain()
    began_s = time.monotonic()
    curve: list[Point] = []
    updates: list[dict[str, float]] = []
    for update in range(1, config.run.num_updates + 1):
        updates.append(learner.update())
        if update % every == 0:
            at_s = time.monotonic() - began_s
            curve.append(_evaluate(update, at_s, learner))
    outcome = Outcome(
        variant=variant.name,
        seed=seed,
        overrides=variant.overrides,
        curve=tuple(curve),
        train_s=time.monotonic() - began_s,
        sampled_tokens=learner.num_tokens,
        trained_tokens=int(sum(metrics["trained_tokens"] for metrics in updates)),
        entropy_last=fmean(metrics["entropy"] for metrics in updates[-5:]),
        clip_fraction=fmean(metrics["clip_fraction"] for metrics in updates),
        explained_variance=tuple(round(metrics.get("explained_variance", 0.0), 4) for metrics in updates),
        value_steps=value_steps,
        commit=commit_of(_ROOT),
    )
    path = outcome_path(folder, variant, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return outcome


def _evaluate(update: int, at_s: float, learner: OneProcess) -> Point:
    accuracies = learner.evaluate_prompts()
    kinds: dict[str, list[float]] = {}
    for prompt, accuracy in accuracies:
        kinds.setdefault(str(prompt.extra.get("kind", "")), []).append(accuracy)
    return Point(
        update,
        at_s,
        fmean(accuracy for _, accuracy in accuracies),
        tokens=learner.num_tokens,
        responses=learner.num_responses,
        accuracy_by_kind={kind: fmean(found) for kind, found in sorted(kinds.items()) if kind},
    )
