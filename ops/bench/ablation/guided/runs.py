"""One run of a row: a size, a learning rate and a seed. Its outcome is kept as JSON, and the best
policy beside it until it is tested: a table that was interrupted goes on."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ops.bench.ablation.guided.guides import Guide, ModelGuide, NoGuide, OracleGuide, is_lucky, misjudge
from ops.bench.ablation.guided.learner import GuidedLearner
from ops.bench.ablation.guided.rows import BATCH, PLAIN, RATES, SIZES, START, GuideKind, Row
from ops.demo.guided import problems
from ops.demo.guided_responses import GuidedSample, draw_samples
from ops.demo.task import Split
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from protocol.errors import DataError

NUM_VALIDATION, NUM_TEST = 200, 1500
EXAMINED = (3, 6, 10, 16, 25, 40, 63, 100, 160)
"""Optimiser steps after which the validation set is answered; the last ends a run."""
MAX_EPOCHS = 60
_LEAST_STEPS, _PATIENCE = 40, 3
"""A run ends where nothing got better for so many times the steps until the best, but not before so
many steps."""


@dataclass(frozen=True, slots=True)
class GuidedOutcome:
    """The result of one run."""

    row: str
    size: int
    rate: float
    seed: int
    overrides: tuple[str, ...]
    num_right: int
    """Of the responses that were learned from."""
    validated: tuple[tuple[int, float], ...]
    """Optimiser steps, and accuracy on the validation set."""
    best_step: int
    """The steps of the policy that was kept: the first of the best on the validation set."""
    forwarded_tokens: int
    """Read forward until then: by steps, guided passes and sampling, prompts too."""
    guided_tokens: int
    """Of these, those of guided passes."""
    seconds: float
    """Of one processor, until the end of the run, without examinations."""
    tested: float | None = None
    """Accuracy of the kept policy on the test set; None: not tested."""

    @property
    def best(self) -> float:
        """The best accuracy on the validation set."""
        return max(accuracy for _, accuracy in self.validated)


_Groups = list[list[GuidedSample]]


def outcome_path(folder: Path, row: Row, size: int, rate: float, seed: int) -> Path:
    """Return where the outcome of a run is kept."""
    name = "-".join("".join(one if one.isalnum() else " " for one in row.name.lower()).split())
    return folder / f"{name}.{size}.{rate:g}.seed-{seed}.json"


def read_outcome(path: Path) -> GuidedOutcome:
    """Read what ``carry_out`` kept. Raises DataError: the file holds something else."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values["overrides"] = tuple(values["overrides"])
        values["validated"] = tuple((int(step), float(accuracy)) for step, accuracy in values["validated"])
        return GuidedOutcome(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} does not hold an outcome: {error}; remove it, and it is made again") from error


class SeedRuns:
    """The runs of one seed: they share questions, responses, guidance and held-out chains."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Sample the responses, which takes seconds."""
        self._folder, self._seed = folder, seed
        # seeds of chains are apart from one another, and from the demonstration's
        self._samples = draw_samples(max(SIZES), 1000 + seed)
        held_out = list(problems(Split.HELD_OUT, NUM_VALIDATION + NUM_TEST, 1000))
        self._validation, self._test = held_out[:NUM_VALIDATION], held_out[NUM_VALIDATION:]

    def carry_out(self, row: Row, size: int, rate: float) -> GuidedOutcome:
        """Learn, and keep the outcome with the best policy."""
        learner = GuidedLearner(self.config(row, rate))
        guide = _guide_of(row, learner)
        began, examined_s = time.process_time(), 0.0
        validated: list[tuple[int, float]] = []
        kept: dict[str, torch.Tensor] = {}
        forwarded = guided = num_right = 0
        best, best_step, num_updates = -1.0, 0, 0
        batches = self._sampled(learner, size) if row.samples_anew else self._given(row, size)
        for batch, is_last in _with_last(batches):
            learner.step(learner.units(batch, guide))
            num_updates += 1
            num_right += sum(sample.is_right for group in batch for sample in group)
            if not is_last and num_updates not in EXAMINED:
                continue
            paused = time.process_time()
            accuracy = learner.accuracy(self._validation)
            validated.append((num_updates, accuracy))
            if accuracy > best:
                best, best_step, kept = accuracy, num_updates, learner.weights()
                guided = guide.num_tokens
                forwarded = learner.num_read_tokens + guided
            examined_s += time.process_time() - paused
            if num_updates >= max(_LEAST_STEPS, _PATIENCE * best_step):
                break
        outcome = GuidedOutcome(
            row=row.name,
            size=size,
            rate=rate,
            seed=self._seed,
            overrides=row.overrides,
            num_right=num_right if row.samples_anew else sum(sample.is_right for sample in self.samples(row, size)),
            validated=tuple(validated),
            best_step=best_step,
            forwarded_tokens=forwarded,
            guided_tokens=guided,
            seconds=round(time.process_time() - began - examined_s, 2),
        )
        path = outcome_path(self._folder, row, size, rate, self._seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(kept, path.with_suffix(".safetensors"))
        _keep(outcome, path)
        return outcome

    def test(self, row: Row, size: int, rate: float) -> GuidedOutcome:
        """Answer the test set with a kept policy, and note it in the outcome."""
        path = outcome_path(self._folder, row, size, rate, self._seed)
        weights = load_file(path.with_suffix(".safetensors"))
        accuracy = GuidedLearner(self.config(row, rate)).accuracy(self._test, weights)
        outcome = replace(read_outcome(path), tested=accuracy)
        _keep(outcome, path)
        return outcome

    def config(self, row: Row, rate: float) -> RunConfig:
        """Return the configuration of a row's runs."""
        return load_config([START], [*row.overrides, f"learner.learning_rate={rate}", f"run.seed={self._seed}"])

    def samples(self, row: Row, size: int) -> list[GuidedSample]:
        """Return the responses that a row learns from, with its judge's judgments."""
        return [
            sample
            for sample in misjudge(self._samples[:size], row.misjudged, self._seed)
            if (sample.is_right or not row.only_right) and not (row.only_sound and is_lucky(sample))
        ]

    def given(self, size: int) -> list[GuidedSample]:
        """Return the first responses of the seed."""
        return self._samples[:size]

    def early_weights(self, row: Row, num_updates: int) -> torch.Tensor:
        """Return all weights after a few updates, float32 [parameters]: rows that end alike are
        one."""
        learner = GuidedLearner(self.config(row, RATES[0]))
        guide = _guide_of(row, learner)
        batches = self._sampled(learner, PLAIN) if row.samples_anew else self._given(row, PLAIN)
        for batch in islice(batches, num_updates):
            learner.step(learner.units(batch, guide))
        return torch.cat([tensor.flatten() for tensor in learner.weights().values()])

    def _given(self, row: Row, size: int) -> Iterator[_Groups]:
        """Yield batches of the given responses, epoch by epoch, each epoch in another order."""
        samples = self.samples(row, size)
        dice = random.Random(f"order:{self._seed}")
        cuts = range(0, len(samples), BATCH)
        num_epochs = min(MAX_EPOCHS, -(-EXAMINED[-1] // len(cuts)))
        for _ in range(num_epochs):
            dice.shuffle(samples)
            yield from ([[sample] for sample in samples[at : at + BATCH]] for at in cuts)

    def _sampled(self, learner: GuidedLearner, size: int) -> Iterator[_Groups]:
        """Yield a group of fresh responses an update, as many in all as others are given."""
        for sample in self._samples[: size // BATCH]:
            yield [learner.sample(sample.problem, BATCH)]


def _with_last(batches: Iterator[_Groups]) -> Iterator[tuple[_Groups, bool]]:
    """Yield each batch, and whether it is the last one."""
    before = next(batches, None)
    while before is not None:
        now = next(batches, None)
        yield before, now is None
        before = now


def _guide_of(row: Row, learner: GuidedLearner) -> Guide:
    match row.guide:
        case GuideKind.NONE:
            return NoGuide()
        case GuideKind.ORACLE:
            return OracleGuide()
        case GuideKind.FROZEN:
            return ModelGuide(learner.config, live=None)
        case GuideKind.LIVE:
            return ModelGuide(learner.config, live=learner.weights)


def _keep(outcome: GuidedOutcome, path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
