"""One variant trained with one seed by a real fleet, and what there is to know about it.

*Consumes* a variant, a seed and a folder for everything that the run writes. *Produces* an ``Outcome``, kept as JSON so that a
comparison that was interrupted goes on. *Waits for* ``headrace up``, within a limit.

The policy's published weights are linked away while the run goes on, and examined after it: no evaluation takes time from what
is timed. Time is counted from the opening of the critic's gate, or from the first wait of a learner without a critic: starting
processes and training the critic beforehand are the same on both sides of a comparison, and are told apart.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ops.bench.fleet_run import last_counters, train
from pipeline.config.load import load_config, resolve_paths
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from protocol.errors import DataError

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Variant
    from pipeline.config.schema import RunConfig

_FLEET = Path("configs/fleets/demo.toml")


@dataclass(frozen=True, slots=True)
class Point:
    """A policy version that was examined."""

    update: int
    at_s: float
    """Since the first update began to wait for its batch."""
    accuracy: float
    """Share of right greedy responses to the held-out prompts."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave."""

    variant: str
    seed: int
    overrides: tuple[str, ...]
    curve: tuple[Point, ...]
    train_s: float
    """From the first wait for a batch to the last update."""
    phases_s: dict[str, float]
    """Seconds of the learner waiting for a batch, computing log-probs, stepping, publishing; ``decode``: of all generators, in
    the engine, start to end of the run."""
    decode_steps: int
    sampled_tokens: int
    prefill_tokens: int
    trained_tokens: int
    """Response tokens that carried loss."""
    staleness_mean: float
    entropy_last: float
    """Mean over the last five updates; nan when not recorded."""

    @property
    def mean_live(self) -> float:
        """Mean live sequences of a decode step."""
        return self.sampled_tokens / max(1, self.decode_steps)

    def final_accuracy(self, last: int = 5) -> float:
        """Mean accuracy of the last few versions."""
        points = self.curve[-last:]
        return sum(point.accuracy for point in points) / len(points)

    def reached(self, target: float, mean_of: int = 3) -> Point | None:
        """Return the first version at which the mean of ``mean_of`` versions in a row is at least ``target``."""
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
        curve = tuple(Point(**point) for point in values.pop("curve"))
        return Outcome(**values | {"curve": curve, "overrides": tuple(values["overrides"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} does not hold an outcome: {error}; remove it, and it is made again") from error


def carry_out(variant: Variant, seed: int, folder: Path, data: Path, *, num_held_out: int) -> Outcome:
    """Train a variant with a seed, examine its versions, and keep the outcome in ``folder``.

    Raises:
        DataError: the run did not finish; its folder, named in the message, is left for inspection.
    """
    kept = outcome_path(folder, variant, seed)
    name = kept.stem.replace("+", "plus")
    overrides = _overrides(variant, seed, folder, data, name)
    config = resolve_paths(load_config([variant.config, _FLEET], overrides))
    taken = folder / f"{name}.weights"
    _train(variant, overrides, config, taken)
    outcome = _examine(variant, seed, config, taken, num_held_out=num_held_out)
    _keep(outcome, kept)
    shutil.rmtree(taken)
    return outcome


def carry_out_here(variant: Variant, seed: int, folder: Path, data: Path) -> Outcome:
    """Train a variant with a seed in this process, synchronously, examine every version, and keep the outcome in ``folder``.

    What another process would have told (decoding, waiting) is 0. Greedy accuracy is that on all held-out prompts in ``data``.
    """
    from ops.bench.one_process import OneProcess

    files = [f'data.train=["{data / "train.jsonl"}"]', f'data.evaluation=["{data / "heldout.jsonl"}"]']
    config = load_config([variant.config], [*files, *variant.overrides, f"run.seed={seed}"])
    learner = OneProcess(config)
    learner.pretrain()
    began_s = time.monotonic()
    curve: list[Point] = []
    told: list[dict[str, float]] = []
    for update in range(1, config.run.num_updates + 1):
        told.append(learner.update())
        curve.append(Point(update, time.monotonic() - began_s, learner.evaluate()))
    outcome = Outcome(
        variant=variant.name,
        seed=seed,
        overrides=variant.overrides,
        curve=tuple(curve),
        train_s=curve[-1].at_s,
        phases_s={},
        decode_steps=0,
        sampled_tokens=0,
        prefill_tokens=0,
        trained_tokens=int(sum(metrics["trained_tokens"] for metrics in told)),
        staleness_mean=0.0,
        entropy_last=fmean(metrics["entropy"] for metrics in told[-5:]),
    )
    _keep(outcome, outcome_path(folder, variant, seed))
    return outcome


def _keep(outcome: Outcome, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _overrides(variant: Variant, seed: int, folder: Path, data: Path, name: str) -> list[str]:
    return [
        f'data.train=["{data / "train.jsonl"}"]',
        f'data.evaluation=["{data / "heldout.jsonl"}"]',
        "weights.shared_memory=false",  # so that the files can be linked away
        "weights.keep=100000",
        *variant.overrides,
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"run.name={name}",
    ]


def _train(variant: Variant, overrides: Sequence[str], config: RunConfig, taken: Path) -> None:
    """Run the fleet, linking every published version into ``taken``."""
    for left in (taken, config.run_dir):  # by a comparison that was interrupted
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
            except FileNotFoundError:  # the run has just ended
                return


def _examine(variant: Variant, seed: int, config: RunConfig, taken: Path, *, num_held_out: int) -> Outcome:
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
        curve.append(Point(row.update, row.at_s - began_s, examiner.accuracy(weights)))
    counters = list(last_counters(config.run_dir, "generator"))

    def total(name: str) -> float:
        return sum(values.get(name, 0.0) for values in counters)

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
    )


def outcomes(folder: Path, variants: Sequence[Variant], seeds: int) -> Iterator[Outcome]:
    """Yield every outcome that is kept, row by row."""
    for variant in variants:
        for seed in range(seeds):
            path = outcome_path(folder, variant, seed)
            if path.exists():
                yield read_outcome(path)
