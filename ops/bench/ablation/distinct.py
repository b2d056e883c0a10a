"""The effect of a table's rows on one batch of drawn responses, before anything is trained: two
rows with the same effect are one.

A row that differs from another in a setting need not differ in its results. So a floor that an
adaptive lambda never leaves makes it a constant. The drawn responses go the way of a run: rewards
are shaped, groups without signal dropped, windows cut, advantages and targets made. The loss is
differentiated at log-probs that have left the proximal policy's, so that clipping counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.algorithms import build
from pipeline.algorithms.advantage import terminal_rewards
from pipeline.algorithms.base import Algorithm
from pipeline.algorithms.batching import TrainingSample, split_minibatches
from pipeline.algorithms.loss import imitation_loss, token_loss
from pipeline.algorithms.value_targets import lambda_targets
from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.schema import RunConfig
from pipeline.ledger.staleness import credit_limit
from pipeline.ledger.types import ClaimedUnit, ScoredChunk, Unit
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import Verdict
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    ValueScore,
)

NUM_RESPONSES = 64
_DRIFT = 0.3
"""Standard deviation of the current policy's log-probs around the proximal ones, nats: many ratios
leave the clip's bounds."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The results of a row for the drawn responses."""

    gradient: np.ndarray
    """float64: of the loss, by the log-prob of every drawn token; 0 where a token is not trained
    on."""
    targets: np.ndarray
    """float64: the critic's, of every drawn token that is within the cap; empty
    without a critic."""
    critic_start: tuple[float | str, ...]
    """Value steps before the policy may start, the explained variance that opens the gate earlier,
    and the critic's model."""
    group_size: int
    """Responses to one prompt."""
    admitted: int = 0
    """Units that the ledger admits before the first update is published, where a fleet makes the row; one process
    samples no further than it learns."""

    def differs_from(self, other: Effect) -> list[str]:
        """Return the names of what is not the same."""
        found = [
            name
            for name in ("gradient", "targets")
            if (one := getattr(self, name)).shape != (two := getattr(other, name)).shape
            or not np.allclose(one, two, rtol=1e-9, atol=1e-15)
        ]
        plain = ("critic_start", "group_size", "admitted")
        return found + [name for name in plain if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A response as it would be without a cap, with the models' figures of its tokens."""

    tokens: np.ndarray
    behavior: np.ndarray
    old: np.ndarray
    current: np.ndarray
    values: np.ndarray
    is_right: bool


@dataclass(frozen=True, slots=True)
class _NoStream:
    """Prompts that only the ledger's admission is asked about."""

    digest: str = ""
    num_prompts: int = 1


def effect_of(config: RunConfig, *, by_fleet: bool = False) -> Effect:
    """Return what a configuration makes of the drawn responses. ``by_fleet``: a fleet makes the
    row, so its admission counts too."""
    drawn = _draw()
    size = config.algorithm.group_size
    scores = [_score(config, response) for response in drawn]
    groups = [range(at, at + size) for at in range(0, NUM_RESPONSES, size)]
    if config.declaration.unit is Unit.GROUP and config.algorithm.dynamic_sampling:
        groups = [group for group in groups if len({scores[index].accuracy for index in group}) > 1]
    units = [unit for group in groups for unit in _units(config, drawn, scores, group)]
    algorithm = build(config)
    gradient = np.zeros((NUM_RESPONSES, max(response.tokens.size for response in drawn)))
    places: dict[str, tuple[int, int]] = {}
    samples: list[TrainingSample] = []
    for sample in algorithm.prepare(units):
        index, start = _place(sample, size)
        places[sample.name] = index, start
        within = slice(start, start + sample.response_length)
        samples.append(replace(sample, old_logprobs=drawn[index].old[within]))
    for batch in split_minibatches(samples, config.algorithm.num_minibatches) if samples else ():
        for sample, slope in zip(batch, _gradients(algorithm, batch, drawn, places), strict=True):
            index, start = places[sample.name]
            gradient[index, start : start + sample.response_length] += slope
    value = config.value
    bound = float("inf") if value.min_explained_variance is None else value.min_explained_variance
    return Effect(
        gradient=gradient,
        targets=_targets(config, drawn, scores) if config.has_critic else np.zeros(0),
        critic_start=(
            value.pretrain_steps,
            bound if value.pretrain_steps else 0.0,
            str(value.path or config.model.path),
        )
        if config.has_critic
        else (),
        group_size=size,
        admitted=credit_limit(ledger_spec(config, _NoStream()), 0) if by_fleet else 0,
    )


def indistinct(effects: Iterable[tuple[str, Effect]]) -> list[tuple[str, str]]:
    """Return the pairs of names whose effects are the same."""
    pairs = itertools.combinations(effects, 2)
    return [(one, other) for (one, first), (other, second) in pairs if not first.differs_from(second)]


def _draw() -> list[_Drawn]:
    dice = np.random.default_rng(0)
    drawn: list[_Drawn] = []
    for index in range(NUM_RESPONSES):
        # longer than a window of any table
        length = 4 + int(20 * dice.pareto(1.0)) % 320
        behavior = -dice.exponential(size=length)
        old = behavior + 0.05 * dice.normal(size=length)
        current = old + _DRIFT * dice.normal(size=length)
        values = 0.5 * dice.normal(size=length)
        # the third quarter is all wrong
        is_right = (index // 16) % 4 == 3 or ((index // 16) % 4 != 2 and dice.random() < 0.5)
        tokens = dice.integers(2, 40, length).astype(np.int32)
        drawn.append(_Drawn(tokens, behavior, old, current, values, bool(is_right)))
    return drawn


def _capped(config: RunConfig, response: _Drawn) -> int:
    return min(response.tokens.size, config.generation.max_response_tokens)


def _score(config: RunConfig, response: _Drawn) -> RewardScore:
    length = _capped(config, response)
    is_cut = length < response.tokens.size
    return shape(
        config.reward,
        Verdict(accuracy=float(response.is_right and not is_cut)),
        num_tokens=length,
        max_response_tokens=config.generation.max_response_tokens,
        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
    )


def _units(config: RunConfig, drawn: list[_Drawn], scores: list[RewardScore], group: range) -> list[ClaimedUnit]:
    number = group.start // len(group)
    members = [
        _chunks(config, drawn[index], scores[index], TrajectoryId("t", number, index - group.start)) for index in group
    ]
    match config.declaration.unit:
        case Unit.GROUP:
            return [ClaimedUnit(str(number), tuple(members))]
        case Unit.TRAJECTORY:
            return [ClaimedUnit(str(chunks[0].chunk.trajectory), (chunks,)) for chunks in members]
        case Unit.CHUNK:
            return [ClaimedUnit(str(scored.chunk.id), ((scored,),)) for chunks in members for scored in chunks]


def _chunks(
    config: RunConfig, response: _Drawn, score: RewardScore, trajectory: TrajectoryId
) -> tuple[ScoredChunk, ...]:
    length, window = _capped(config, response), config.generation.window_tokens
    prompt = Prompt(prompt_id="p", tokens=np.array([1, 2], np.int32), text="", answer="", verifier="")
    made: list[ScoredChunk] = []
    for index, start in enumerate(range(0, length, window)):
        end = min(start + window, length)
        is_final = end == length
        ended = FinishReason.LENGTH if length < response.tokens.size else FinishReason.STOP
        behavior = response.behavior[start:end].astype(np.float32)
        said: dict[Field, Score] = {Field.REFERENCE: ReferenceScore(logprobs=behavior)}
        if config.has_critic:
            said[Field.VALUE] = ValueScore(values=response.values[start:end].astype(np.float32), value_version=0)
        if is_final:
            said[Field.REWARD] = score
        chunk = TrajectoryChunk(
            id=ChunkId(trajectory, index),
            prompt=prompt,
            context_tokens=response.tokens[:start],
            tokens=response.tokens[start:end],
            behavior_logprobs=behavior,
            segments=(Segment(0, end - start),),
            finish_reason=ended if is_final else FinishReason.WINDOW,
            response_text="" if is_final else None,
        )
        made.append(ScoredChunk(chunk, said))
    return tuple(made)


def _place(sample: TrainingSample, group_size: int) -> tuple[int, int]:
    """Return the number of a sample's drawn response, and where in it the sample's response tokens
    begin."""
    _, group, member, *_ = sample.name.split(".")
    return int(group) * group_size + int(member), sample.num_context_tokens


def _gradients(
    algorithm: Algorithm, batch: list[TrainingSample], drawn: list[_Drawn], places: dict[str, tuple[int, int]]
) -> list[np.ndarray]:
    objective = algorithm.objective.at(1)
    rows: list[np.ndarray] = []
    for sample in batch:
        index, start = places[sample.name]
        rows.append(drawn[index].current[start : start + sample.response_length])
    lengths = torch.tensor([sample.response_length for sample in batch])
    logprobs = torch.from_numpy(np.concatenate(rows)).requires_grad_()

    def joined(arrays: Iterable[np.ndarray | None], dtype: type = np.float64) -> torch.Tensor:
        whole = [
            np.zeros(sample.response_length) if array is None else array
            for sample, array in zip(batch, arrays, strict=True)
        ]
        return torch.from_numpy(np.concatenate(whole).astype(dtype))

    losses, _ = token_loss(
        objective,
        logprobs=logprobs,
        old_logprobs=joined(s.old_logprobs for s in batch),
        behavior_logprobs=joined(s.behavior_logprobs for s in batch),
        reference_logprobs=joined(s.reference_logprobs for s in batch),
        entropy=-logprobs,
        advantages=joined(s.advantages for s in batch),
        mask=joined((s.loss_mask for s in batch), np.bool_),
        row_ids=torch.arange(len(batch)).repeat_interleave(lengths),
        num_rows=len(batch),
        versions=joined((s.versions for s in batch), np.int32),
    )
    total = (losses * joined(objective.token_weights(batch))).sum()
    imitated = imitation_loss(logprobs, joined((s.nll_mask for s in batch), np.bool_))
    total = total + (imitated * joined(objective.imitation_weights(batch))).sum()
    [slope] = torch.autograd.grad(total, [logprobs])
    return [part.numpy() for part in slope.split(lengths.tolist())]


def _targets(config: RunConfig, drawn: list[_Drawn], scores: list[RewardScore]) -> np.ndarray:
    gamma, lam = config.algorithm.gamma, config.value.gae_lambda
    made: list[np.ndarray] = []
    for response, score in zip(drawn, scores, strict=True):
        values = response.values[: _capped(config, response)]
        made.append(lambda_targets(terminal_rewards(score.reward, values.size), values, gamma=gamma, lam=lam))
    return np.concatenate(made)
