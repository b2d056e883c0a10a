"""One variant trained with one seed by a real fleet, and its ``Outcome``.

The outcome is kept as JSON in a folder, beside everything that the run writes: a comparison that
was interrupted goes on. ``headrace up`` runs within a limit.

The policy's published weights are linked away while the run goes on, and examined after it: no
evaluation takes time from the measured part. Time is counted from the opening of the critic's gate,
or from the first wait of a learner without a critic. Starting processes and training the critic
beforehand are the same on both sides of a comparison, and do not count."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ops.bench.ablation.window_ends import WindowEnds, of_run
from ops.bench.fleet_run import last_counters, train
from pipeline.config.load import load_config, resolve_paths
from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME, UpdateRow, ValueRow, read_history
from pipeline.observability.start_record import commit_of
from protocol.errors import DataError

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Variant
    from ops.bench.one_process import OneProcess
    from pipeline.config.schema import RunConfig

_FLEET = Path("configs/fleets/demo.toml")
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Point:
    """A policy version that was examined."""

    update: int
    at_s: float
    """Since the first update began to wait for its batch."""
    accuracy: float
    """Share of right responses to the held-out prompts."""
    tokens: int = 0
    """Sampled for learning by then, by the critic alone and for dropped groups too. Known in one
    process only."""
    responses: int = 0
    """Likewise."""
    accuracy_by_kind: dict[str, float] = field(default_factory=dict[str, float])
    """Of the kinds of prompt that the task has."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run."""

    variant: str
    seed: int
    overrides: tuple[str, ...]
    curve: tuple[Point, ...]
    train_s: float
    """From the first wait for a batch to the last update."""
    phases_s: dict[str, float]
    """Seconds of the learner waiting for a batch, computing log-probs, stepping, publishing;
    ``decode``: of all generators, in the engine, start to end of the run."""
    decode_steps: int
    sampled_tokens: int
    prefill_tokens: int
    trained_tokens: int
    """Response tokens that carried loss."""
    staleness_mean: float
    entropy_last: float
    """Mean over the last five updates; nan when not recorded."""
    clip_fraction: float = 0.0
    """Share of the tokens whose ratio was clipped, mean over updates."""
    explained_variance: tuple[float, ...] = ()
    """Of the critic, update by update; of a fleet its value steps' since the policy started."""
    value_steps: int = 0
    """Before the policy started."""
    window_ends: WindowEnds | None = None
    """Of a fleet's trained units, at the ends of the table's shortest windows."""
    commit: str = ""
    """Git's commit of the sources, as in a run's start record. Empty: not recorded."""

    @property
    def is_in_one_process(self) -> bool:
        """Whether this process sampled and learned in turn; else a fleet did."""
        return not self.phases_s

    @property
    def mean_live(self) -> float:
        """Mean live sequences of a decode step."""
        return self.sampled_tokens / max(1, self.decode_steps)

    def final_accuracy(self, last: int = 5) -> float:
        """Mean accuracy of the last few versions."""
        points = self.curve[-last:]
        return sum(point.accuracy for point in points) / len(points)

    def late_accuracy(self) -> float:
        """Mean accuracy of the last three versions, where every third is examined."""
        return self.final_accuracy(3)

    def mean_accuracy(self) -> float:
        """Mean accuracy of all versions: how soon it rises counts."""
        return self.final_accuracy(len(self.curve))

    def late_accuracy_of(self, kind: str, last: int = 3) -> float:
        """Mean accuracy of the last few versions on one kind of prompt."""
        points = self.curve[-last:]
        return sum(point.accuracy_by_kind[kind] for point in points) / len(points)

    def within(self, tokens: int) -> Outcome:
        """Return what there was when so many tokens had been sampled; the first
        version at least."""
        kept = tuple(point for point in self.curve if point.tokens <= tokens)
        return replace(self, curve=kept or self.curve[:1])

    def reached(self, target: float, mean_of: int = 3) -> Point | None:
        """Return the first version at which the mean of ``mean_of`` versions in a row is at least
        ``target``."""
        for end in range(mean_of, len(self.curve) + 1):
            if sum(point.accuracy for point in self.curve[end - mean_of : end]) > mean_of * target - 1e-9:
                return self.curve[end - 1]
        return None


def outcome_path(folder: Path, variant: Variant, seed: int) -> Path:
    """Return where the outcome of a variant and seed is kept."""
    name = "".join(letter if letter.isalnum() else "-" for letter in variant.name.lower()).strip("-")
    return folder / f"{name}.seed-{seed}.json"


def read_outcome(path: Path) -> Outcome:
    """Read back what ``carry_out`` kept. Raises DataError when the file holds something else."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return outcome_of(values)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} does not hold an outcome: {error}; remove it, and it is made again") from error


def outcome_of(values: Mapping[str, Any]) -> Outcome:
    """Return what a JSON object holds. Raises KeyError, TypeError: no outcome."""
    curve = tuple(Point(**point) for point in values["curve"])
    tuples = {name: tuple(values[name]) for name in ("overrides", "explained_variance")}
    ends = values.get("window_ends")
    return Outcome(**{**values, **tuples, "curve": curve, "window_ends": WindowEnds(**ends) if ends else None})


def carry_out(
    variant: Variant,
    seed: int,
    folder: Path,
    start: Sequence[str],
    *,
    num_held_out: int,
    window_tokens: int,
    every: int = 1,
) -> Callable[[], Outcome]:
    """Train a variant with a seed by a fleet. Return the function that examines every ``every``-th
    version and keeps the outcome in ``folder``: it may go on in a thread beside the next fleet.

    ``start``: overrides that name prompts and models. The critic is read at multiples of
    ``window_tokens``.

    Raises:
        DataError: the run did not finish; its folder, named in the message, is left for inspection.
    """
    kept = outcome_path(folder, variant, seed)
    name = kept.stem.replace("+", "plus")
    overrides = _overrides(variant, seed, folder, start, name)
    config = resolve_paths(load_config([variant.config, _FLEET], overrides))
    taken = folder / f"{name}.weights"
    _train(variant, overrides, config, taken)

    def examine() -> Outcome:
        outcome = _examine(variant, seed, config, taken, num_held_out=num_held_out, every=every)
        outcome = replace(outcome, window_ends=of_run(config.run_dir, window_tokens))
        _keep(outcome, kept)
        shutil.rmtree(taken)
        return outcome

    return examine


def carry_out_here(variant: Variant, seed: int, folder: Path, start: Sequence[str], *, every: int = 1) -> Outcome:
    """Train a variant with a seed in this process, synchronously, and keep the outcome in
    ``folder``.

    Figures of other processes (decoding, waiting) are 0. All held-out prompts are answered after
    every ``every`` updates. ``start``: overrides that name prompts and models."""
    from ops.bench.one_process import OneProcess

    config = load_config([variant.config], [*start, *variant.overrides, f"run.seed={seed}"])
    learner = OneProcess(config)
    value_steps = learner.pretrain()
    began_s = time.monotonic()
    curve: list[Point] = []
    told: list[dict[str, float]] = []
    for update in range(1, config.run.num_updates + 1):
        told.append(learner.update())
        if update % every == 0:
            at_s = time.monotonic() - began_s
            curve.append(_point(update, at_s, learner))
    outcome = Outcome(
        variant=variant.name,
        seed=seed,
        overrides=variant.overrides,
        curve=tuple(curve),
        train_s=time.monotonic() - began_s,
        phases_s={},
        decode_steps=0,
        sampled_tokens=learner.num_tokens,
        prefill_tokens=0,
        trained_tokens=int(sum(metrics["trained_tokens"] for metrics in told)),
        staleness_mean=0.0,
        entropy_last=fmean(metrics["entropy"] for metrics in told[-5:]),
        clip_fraction=fmean(metrics["clip_fraction"] for metrics in told),
        explained_variance=tuple(round(metrics.get("explained_variance", 0.0), 4) for metrics in told),
        value_steps=value_steps,
        commit=commit_of(_ROOT),
    )
    _keep(outcome, outcome_path(folder, variant, seed))
    return outcome


def _point(update: int, at_s: float, learner: OneProcess) -> Point:
    examined = learner.examine()
    kinds: dict[str, list[float]] = {}
    for prompt, accuracy in examined:
        kinds.setdefault(str(prompt.extra.get("kind", "")), []).append(accuracy)
    return Point(
        update,
        at_s,
        fmean(accuracy for _, accuracy in examined),
        tokens=learner.num_tokens,
        responses=learner.num_responses,
        accuracy_by_kind={kind: fmean(found) for kind, found in sorted(kinds.items()) if kind},
    )


def _keep(outcome: Outcome, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _overrides(variant: Variant, seed: int, folder: Path, start: Sequence[str], name: str) -> list[str]:
    return [
        *start,
        # so that the files can be linked away
        "weights.shared_memory=false",
        "weights.keep=100000",
        *variant.overrides,
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"run.name={name}",
    ]


def _train(variant: Variant, overrides: Sequence[str], config: RunConfig, taken: Path) -> None:
    """Run the fleet, linking every published version into ``taken``."""
    # by a comparison that was interrupted
    for left in (taken, config.run_dir):
        shutil.rmtree(left, ignore_errors=True)
    taken.mkdir(parents=True)
    train(
        [variant.config, _FLEET],
        overrides,
        config.run_dir,
        on_poll=lambda: _link(config.run_dir / "weights", taken),
    )


def _link(source: Path, taken: Path) -> None:
    for path in source.glob("v*.safetensors"):
        if not (taken / path.name).exists():
            try:
                os.link(path, taken / path.name)
            except FileNotFoundError:
                # the run has just ended
                return


def _examine(variant: Variant, seed: int, config: RunConfig, taken: Path, *, num_held_out: int, every: int) -> Outcome:
    from ops.bench.ablation.accuracy import Examiner

    rows = [row for row in read_history(config.run_dir / HISTORY_NAME) if isinstance(row, UpdateRow)]
    first = rows[0]
    began_s = first.at_s - first.wait_s - first.logprob_s - first.step_s - first.publish_s
    examiner = Examiner(config, num_prompts=num_held_out)
    curve: list[Point] = []
    for row in rows:
        weights = taken / f"v{row.policy_version:08d}.safetensors"
        if not weights.exists():
            raise DataError(f"version {row.policy_version} of {config.run_dir} was published, but not found in {taken}")
        if row.update % every == 0:
            found = examiner.accuracy_by_kind(weights)
            curve.append(Point(row.update, row.at_s - began_s, found.pop(""), accuracy_by_kind=found))
    counters = list(last_counters(config.run_dir, "generator"))

    def total(name: str) -> float:
        return sum(values.get(name, 0.0) for values in counters)

    steps = [row for row in read_history(config.run_dir / VALUE_HISTORY_NAME) if isinstance(row, ValueRow)]
    entropies = [row.metrics["entropy"] for row in rows[-5:] if "entropy" in row.metrics]
    return Outcome(
        variant=variant.name,
        seed=seed,
        overrides=variant.overrides,
        curve=tuple(curve),
        train_s=rows[-1].at_s - began_s,
        phases_s={
            "wait": sum(row.wait_s for row in rows),
            "logprob": sum(row.logprob_s for row in rows),
            "step": sum(row.step_s for row in rows),
            "publish": sum(row.publish_s for row in rows),
            "decode": total("decode_s"),
        },
        decode_steps=int(total("decode_steps")),
        sampled_tokens=int(total("sampled_tokens")),
        prefill_tokens=int(total("prefill_tokens")),
        trained_tokens=sum(row.num_trained_tokens for row in rows),
        staleness_mean=sum(row.staleness_mean for row in rows) / len(rows),
        entropy_last=sum(entropies) / len(entropies) if entropies else float("nan"),
        clip_fraction=fmean(row.metrics.get("clip_fraction", 0.0) for row in rows),
        explained_variance=tuple(round(step.explained_variance, 4) for step in steps if step.at_s > began_s),
        value_steps=sum(step.at_s <= began_s for step in steps),
        commit=commit_of(_ROOT),
    )


def outcomes(folder: Path, variants: Sequence[Variant], seeds: int) -> Iterator[Outcome]:
    """Yield every outcome that is kept, row by row."""
    for variant in variants:
        for seed in range(seeds):
            path = outcome_path(folder, variant, seed)
            if path.exists():
                yield read_outcome(path)
