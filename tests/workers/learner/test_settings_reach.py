"""Every setting that ``headrace update`` may change, and every one of guidance, alters what is
computed: one that is told as taken and read by nothing would go unnoticed.

The cases are the tables of the settings themselves. A new setting needs a probe here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipeline.algorithms import build
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.changing import CHANGEABLE, with_settings
from pipeline.config.rewards import GuidanceSection
from pipeline.config.schema import RunConfig
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.settings_change import SettingsChange, after
from pipeline.training.spikes import LEAST, NO_LIMITS, StepLimits
from protocol.errors import Diverged
from protocol.trajectory import Prompt
from tests.pipeline.op_config import op_config
from tests.workers.dying import Reaper, World
from tests.workers.engines.tiny import make_samples, tiny_model, tiny_tokenizer
from tests.workers.recording import RecordingTraining
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.seam import StepResult
from workers.engines.training.torch import TorchTraining
from workers.learner.policy_update import PolicyUpdate
from workers.scorers.guided_passes import GuidanceSource

Probe = Callable[[Path, pytest.MonkeyPatch, Mapping[str, str]], Awaitable[object]]
"""What is computed by the settings that a learner takes after its start; by those of its start where
there are none."""


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def policy() -> TorchTraining:
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=200)
    return TorchTraining(tiny_model(), forward, OptimizerSettings(learning_rate=1e-3))


def taking(start: RunConfig, backend: Any, changes: Mapping[str, str]) -> PolicyUpdate:
    update = PolicyUpdate(start, backend)
    update.apply_settings(with_settings(start, changes))
    return update


def loss(*base: str) -> Probe:
    """The weights after one update, whose ratios are far from 1."""

    async def weights(folder: Path, _: pytest.MonkeyPatch, changes: Mapping[str, str]) -> object:
        backend = policy()
        start = op_config(folder, "algorithm.importance=bypass", "algorithm.num_minibatches=1", *base)
        update = taking(start, backend, changes)
        await update.step(make_samples(6, with_old=False), policy_version=0, compute=at_once)
        return backend.digests()

    return weights


class Spiking(RecordingTraining):
    """A policy whose first steps have a gradient norm of 1, and later ones one of 20, or of none."""

    def __init__(self, *, quiet: int, norm: float) -> None:
        super().__init__()
        self._quiet, self._norm, self.tried = quiet, norm, 0

    def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        self.tried += 1
        norm = 1.0 if self.tried <= self._quiet else self._norm
        return replace(super().step(samples, rule, limits), grad_norm=norm, applied=limits.allow(0.25, norm))


def steps(*base: str, norm: float = 20.0) -> Probe:
    """Which of the following steps are applied, and when the learner gives up."""

    async def applied(folder: Path, _: pytest.MonkeyPatch, changes: Mapping[str, str]) -> object:
        backend = Spiking(quiet=LEAST, norm=norm)
        update = taking(op_config(folder, *base), backend, changes)
        found: list[bool] = []
        try:
            for _number in range(LEAST + 8):
                stepped = await update.step(make_samples(1), policy_version=0, compute=at_once)
                found += [result.applied for result in stepped.results]
        except Diverged:
            found.append(False)
        return found

    return applied


def life(**world: Any) -> Probe:
    """The updates, evaluations and checkpoints of a learner that takes the settings at its second
    update, and how its run ends."""

    async def course(folder: Path, patch: pytest.MonkeyPatch, changes: Mapping[str, str]) -> object:
        config: Mapping[str, Mapping[str, Any]] = world.get("config", {})
        made = World(folder, patch, snapshots="off", **{name: world[name] for name in world if name != "config"})
        for section, values in config.items():
            changed = getattr(made.config, section).model_copy(update=values)
            made.config = made.config.model_copy(update={section: changed})
        take = ActorContext.take_settings

        def taken(ctx: ActorContext, first_update: int = 0) -> SettingsChange | None:
            if changes and first_update == 2 and not ctx.worker_state.settings.number:
                held = dict.fromkeys(changes, "0")
                ctx._offered = after(None, dict(changes), held, by="a", at_s=1.0), with_settings(ctx.config, changes)
            return take(ctx, first_update)

        patch.setattr(ActorContext, "take_settings", taken)
        reaper = Reaper(None)
        assert await made.live(reaper)
        told = ("before ledger.settle", "before ledger.advance", "before ledger.request_evaluation")
        status = await made.registry.run_status()
        assert status is not None
        # a checkpoint is settled while the next update is made
        return {point: reaper.points.count(point) for point in told}, len(made.rows()), status.detail

    return course


EVALUATED: Mapping[str, Any] = {"num_evaluation_prompts": 2, "num_updates": 4}
ONE_CHECKPOINT: Mapping[str, Any] = {"checkpoint": {"every_updates": 1000, "every_s": 1000.0}}
UPDATE_PROBES: Mapping[str, tuple[str, Probe]] = {
    "learner.learning_rate": ("0.5", loss()),
    "run.num_updates": ("5", life(num_updates=3)),
    "learner.max_bad_steps": ("6", steps("learner.max_bad_steps=3", norm=float("nan"))),
    "learner.spike_factor": ("5.0", steps()),
    "learner.spikes": ('"train"', steps("learner.spike_factor=5", "learner.max_bad_steps=99")),
    "algorithm.clip_low": ("0.9", loss("algorithm.dual_clip=0")),
    "algorithm.clip_high": ("0.9", loss()),
    "algorithm.dual_clip": ("1.5", loss()),
    "algorithm.kl_coefficient": ("0.5", loss("algorithm.kl_coefficient=0.1")),
    "algorithm.entropy_coefficient": ("0.5", loss()),
    "evaluation.every_updates": ("2", life(**EVALUATED)),
    "evaluation.patience": ("1", life(**EVALUATED)),
    "checkpoint.every_updates": ("2", life(num_updates=5, config=ONE_CHECKPOINT)),
    "checkpoint.every_s": ("1e-6", life(num_updates=5, config=ONE_CHECKPOINT)),
}


@pytest.mark.parametrize("key", CHANGEABLE)
async def test_what_headrace_update_may_change_alters_what_the_learner_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    value, probe = UPDATE_PROBES[key]
    found: list[object] = []
    for number, changes in enumerate(({}, {}, {key: value})):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            found.append(await probe(folder, patch, changes))
    assert found[0] == found[1], "the probe itself is not repeatable"
    assert found[1] != found[2], f"{key} is read by nothing"


def guided(num: int = 6) -> list[TrainingSample]:
    """Right and wrong responses with guidance: probabilities on both sides of every threshold."""
    dice = np.random.default_rng(3)
    samples: list[TrainingSample] = []
    for number, sample in enumerate(make_samples(num, with_old=False)):
        size, is_right = sample.response_length, number % 2 == 0
        standard = np.log(dice.choice([0.004, 0.02, 0.3, 0.99], size)).astype(np.float32)
        judge = np.log(dice.choice([0.008, 0.05, 0.6, 0.9], size)).astype(np.float32)
        verdict = np.full(size, 1.0 if is_right else -1.0, np.float32)
        told = {"advantages": verdict, "standard_logprobs": standard, "judge_logprobs": None if is_right else judge}
        samples.append(replace(sample, loss_mask=np.ones(size, np.bool_), is_unguided=False, **told))
    return samples


def guided_loss(*base: str) -> Probe:
    """The loss of one step by guidance."""

    async def of_settings(folder: Path, _: pytest.MonkeyPatch, changes: Mapping[str, str]) -> object:
        given = [f"{key}={value}" for key, value in changes.items()]
        config = op_config(folder, "algorithm.name=nlft", *base, *given)
        return policy().step(guided(), build(config)).loss

    return of_settings


async def guided_prompt(folder: Path, _: pytest.MonkeyPatch, changes: Mapping[str, str]) -> object:
    """What the frozen policy reads, whose log-probs the learner's loss is made of."""
    (folder / "template.txt").write_text("{question} {gold}")
    (folder / "judging.txt").write_text("{question} {judgment}")
    sets = {key: value.replace("FOLDER", str(folder)) for key, value in changes.items()}
    config = op_config(folder, "algorithm.name=nlft", *(f"{key}={value}" for key, value in sets.items()))
    prompts = GuidedPrompts(tiny_tokenizer(), config.guidance)
    prompt = Prompt(prompt_id="train:0", tokens=np.array([2, 3], np.int32), text="aA", answer="bA", verifier="v")
    read = prompts.standard(prompt, "so"), prompts.judge(prompt, "so", "not so")
    return [one.tolist() for one in read], prompts.longest(max_prompt_tokens=8), prompts.version


async def judgments(folder: Path, _: pytest.MonkeyPatch, changes: Mapping[str, str]) -> object:
    """Which source writes the judgments of wrong responses."""
    config = op_config(folder, "algorithm.name=nlft", *(f"{key}={value}" for key, value in changes.items()))
    asked: list[str] = []
    pool = SimpleNamespace(is_quick=lambda name, *, judgments: asked.append(name))
    ctx = SimpleNamespace(config=config, clock=SimpleNamespace(monotonic=float))
    assert GuidanceSource(cast("Any", ctx), cast("Any", pool)).is_quick in (None, True)
    return asked


CLUSTERS = "guidance.clusters=true"
GUIDANCE_PROBES: Mapping[str, tuple[str, Probe]] = {
    "judgments": ("arithmetic", judgments),
    "max_judgment_tokens": ("1", guided_prompt),
    "standard_template": ("FOLDER/template.txt", guided_prompt),
    "judge_template": ("FOLDER/judging.txt", guided_prompt),
    "standard_threshold": ("0.25", guided_loss()),
    "standard_power": ("0.1", guided_loss()),
    "cluster_power": ("0.9", guided_loss(CLUSTERS, "guidance.cluster_distance=1")),
    "bonus_power": ("0.5", guided_loss()),
    "judge_ratio": ("20", guided_loss()),
    "min_judge_probability": ("0.5", guided_loss()),
    "max_flagged_share": ("1", guided_loss()),
    "unflagged_power": ("2", guided_loss("guidance.max_flagged_share=1")),
    "loss_scale": ("1", guided_loss()),
    "nll_coefficient": ("0", guided_loss()),
    "clusters": ("true", guided_loss("guidance.cluster_distance=1")),
    "cluster_distance": ("1", guided_loss(CLUSTERS)),
    "dissimilar_clusters": ("true", guided_loss(CLUSTERS)),
}


@pytest.mark.parametrize("name", GuidanceSection.model_fields)
async def test_every_setting_of_guidance_alters_what_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    value, probe = GUIDANCE_PROBES[name]
    without, with_it = [await probe(tmp_path, monkeypatch, of) for of in ({}, {f"guidance.{name}": value})]
    assert without != with_it, f"guidance.{name} is read by nothing"
