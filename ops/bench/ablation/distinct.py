"""Proves before a table is trained that its rows differ in effect.

A setting of ``[algorithm]`` may change nothing: an adaptive lambda never reaches a low floor. So each row makes
samples of the same drawn responses as a run would, and computes the losses of its first update. The current log-probs
differ from the proximal ones, so that clipping counts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ops.bench.one_process import Sampled, units_of
from pipeline.algorithms import build
from pipeline.algorithms.batching import TrainingSample, pack, split_minibatches
from pipeline.algorithms.loss import imitation_loss, policy_loss
from pipeline.config.load import load_config
from pipeline.ledger.types import Unit
from protocol.errors import ConfigError
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Prompt, RewardScore, Segment
from workers.engines.generation.seam import SampledWindow

if TYPE_CHECKING:
    from ops.bench.ablation.tables import Table
    from pipeline.algorithms.base import Rule
    from pipeline.config.schema import RunConfig

_NUM_RESPONSES = 64
_ROOT = Path(__file__).parents[3]


def check_rows(table: Table) -> None:
    """Raise ConfigError, with the names of the rows, if two rows of a table have the same effect."""
    effects = [(row.name, effect_of(load_config([_ROOT / row.config], row.overrides))) for row in table.variants]
    same = [f"{one!r} and {other!r}" for (one, a), (other, b) in itertools.combinations(effects, 2) if a == b]
    if same:
        raise ConfigError(f"{table.name}: the rows {', '.join(same)} train alike; change or remove one of them")


def effect_of(config: RunConfig) -> tuple[object, ...]:
    """Return the settings outside ``[algorithm]``, the batch's shape, and the losses of the first update's steps."""
    rng, rule, size = np.random.default_rng(0), build(config), config.algorithm.group_size
    drawn = [_draw(rng, number, config.generation.max_response_tokens) for number in range(_NUM_RESPONSES)]
    groups = [drawn[at : at + size] for at in range(0, _NUM_RESPONSES, size)]
    if config.declaration.unit is Unit.GROUP and config.algorithm.dynamic_sampling:
        groups = [group for group in groups if len({one.score.accuracy for one, _ in group}) > 1]
    responses, values = [[one for one, _ in group] for group in groups], [[of for _, of in group] for group in groups]
    samples = rule.prepare(units_of(config, responses, values, version=0))
    batches = split_minibatches(samples, config.algorithm.num_minibatches)
    losses = [f"{_loss(rule.at(0), batch):.9g}" for batch in batches]
    others = config.model_dump(exclude={"algorithm": True, "generation": {"window_tokens"}})
    return others, size, config.algorithm.groups_per_update, losses


def _draw(rng: np.random.Generator, number: int, limit: int) -> tuple[Sampled, np.ndarray]:
    """Return a response and the critic's values. The first 16 are all wrong: groups without signal."""
    length = int(rng.integers(4, limit))
    tokens, logprobs = rng.integers(2, 40, length, np.int32), -rng.exponential(size=length).astype(np.float32)
    values, is_right = 0.5 * rng.normal(size=length).astype(np.float32), float(number >= 16 and rng.random() < 0.5)
    name, segments = TrajectoryId("t", number, 0), (Segment(0, length),)
    window = SampledWindow(name, tokens, logprobs, segments, FinishReason.STOP)
    prompt = Prompt(prompt_id="p", tokens=np.array([1, 2], np.int32), text="", answer="", verifier="")
    return Sampled(prompt, window, "", RewardScore(reward=2 * is_right - 1, accuracy=is_right)), values


def _loss(rule: Rule, samples: list[TrainingSample]) -> float:
    batch = pack(samples)
    # log-probs are functions of a token alone, however rows are cut; many ratios leave the clip's bounds
    behavior = torch.from_numpy(batch.behavior_logprobs).double()
    old = behavior + 0.05 * torch.sin(997.0 * behavior)
    current = old + 0.4 * torch.sin(101.0 * behavior)
    losses, _ = policy_loss(
        rule, logprobs=current, old_logprobs=old, behavior_logprobs=behavior, reference_logprobs=None,
        entropy=-current, advantages=torch.from_numpy(batch.advantages), mask=torch.from_numpy(batch.loss_mask),
        row_ids=torch.from_numpy(batch.row_ids), num_rows=batch.num_rows, versions=torch.from_numpy(batch.versions),
    )  # fmt: skip
    imitated = imitation_loss(current, torch.from_numpy(batch.nll_mask))
    weights, of_imitated = map(np.concatenate, (rule.token_weights(samples), rule.imitation_weights(samples)))
    return float((losses * torch.from_numpy(weights) + imitated * torch.from_numpy(of_imitated)).sum())
