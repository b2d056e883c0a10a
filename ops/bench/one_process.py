"""A demo's learning in one process: sample, score, value and train in turn, with a run's own engines and rules.

    python -m ops.bench.one_process configs/vapo.toml --seeds 3

There is no ledger, wire or other process. Each update trains on samples of the weights before it
(``staleness.eta`` of 0), so a seed always gives the same run, and the effect of a setting on learning shows in
a minute or two. ``python -m ops.bench.demos`` measures whether a demo reaches its bar in an asynchronous run.

Takes run files of small tasks with the ``arithmetic`` verifier, or of recorded responses. Prints accuracies on
held-out prompts and clipped shares, update by update, and writes them as JSON."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from ops.bench.table import provenance, write_json
from ops.ending import exit_code
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.data.responses import RecordedResponses
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import ClaimedUnit, ScoredChunk, Unit
from pipeline.process.progress_bar import tracked
from pipeline.rewards.arithmetic import verify
from pipeline.rewards.recorded import verify as verify_recorded
from pipeline.rewards.registry import RECORDED
from pipeline.rewards.shaping import shape
from pipeline.rewards.verifier import Response, Verdict
from protocol.errors import ConfigError
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, FinishReason, Prompt, RewardScore, Score, Segment, TrajectoryChunk, ValueScore
from workers.engines.build import build_engine, build_training_backend, build_value_engine
from workers.engines.generation.seam import SampledWindow, SamplingParams, WindowRequest
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.seam import ValueSample
from workers.learner.policy_update import PolicyUpdate
from workers.learner.update_row import metrics_of_steps

_SUPPORTED = (0.0, "local", "arithmetic")
_NUM_SLOTS = 256
_STEPS_A_TURN = 16
_SPARE_GROUPS = 8
"""Sampled in addition to the missing ones, since some will have no signal."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A response with its text and score."""

    prompt: Prompt
    window: SampledWindow
    text: str
    score: RewardScore


@dataclass(slots=True)
class Live:
    """An unfinished response, which grows window by window (T-PPO)."""

    trajectory: TrajectoryId
    prompt: Prompt
    tokens: np.ndarray
    """int32 [tokens so far]"""
    values: np.ndarray
    """float32 [tokens so far], by the critic at the time of each window"""
    num_windows: int = 0


@dataclass(frozen=True, slots=True)
class LearningResult:
    config: str
    seed: int
    overrides: tuple[str, ...]
    value_steps: int
    """Optimiser steps of the critic before the policy's first."""
    held_out: tuple[tuple[int, float], ...]
    """Number of updates done, and accuracy."""
    clip_fraction: tuple[float, ...]
    """For each update."""
    entropy: tuple[float, ...]
    seconds: float


class OneProcess:
    """Learns by one configuration.

    Raises:
        ConfigError: A setting needs a fleet."""

    def __init__(self, config: RunConfig) -> None:
        settings = (config.algorithm.kl_coefficient, config.generation.engine, config.data.verifier)
        if settings != _SUPPORTED:
            raise ConfigError(
                f"algorithm.kl_coefficient, generation.engine and data.verifier are {settings}; one process has no "
                f"reference policy, one engine and one verifier: set them to {_SUPPORTED}"
            )
        reference = config.reference.model_copy(update={"always": False})
        generation = config.generation.model_copy(update={"num_slots": _NUM_SLOTS})
        self.config = config.model_copy(update={"reference": reference, "generation": generation})
        self._tokenizer = load_text_tokenizer(config.model.path)
        self._source = PromptSource(config, self._tokenizer)
        self._engine = build_engine(self.config)
        self._backend = build_training_backend(self.config)
        self._critic = build_value_engine(self.config) if config.has_critic else None
        self._update = PolicyUpdate(self.config, self._backend)
        self._num_updates = 0
        self._position = 0
        self._num_lanes = 0
        self._live: list[Live] = []
        self._ended: list[ValueSample] = []
        self.num_responses = 0
        """Sampled for learning so far, including those for the critic alone."""
        self.num_tokens = 0
        """Tokens of these responses."""
        self._publish()

    def evaluate(self) -> float:
        """Return the accuracy on the held-out prompts, sampled with the settings of ``[evaluation]``."""
        return mean(accuracy for _, accuracy in self.evaluate_prompts())

    def evaluate_prompts(self) -> list[tuple[Prompt, float]]:
        """Return every held-out prompt with its accuracy."""
        prompts = [self._source.evaluation_at(index) for index in range(self._source.num_evaluation_prompts)]
        how = self.config.evaluation
        groups = self._sample(prompts, temperature=how.temperature, size=how.samples_per_prompt)
        return [(group[0].prompt, mean(one.score.accuracy for one in group)) for group in groups]

    def pretrain(self) -> int:
        """Train the critic until its gate would open; return the number of steps."""
        settings, num_steps = self.config.value, 0
        while self._critic is not None and num_steps < settings.pretrain_steps:
            groups = self._groups(filtered=False)
            explained = self._learn_values(_value_samples(groups, self._values(groups)))
            num_steps += len(explained)
            least = settings.min_explained_variance
            if explained and least is not None and mean(explained) >= least:
                break
        return num_steps

    def update(self) -> dict[str, float]:
        """Sample one update's batch, then train the policy and the critic on it. Return the metrics' means over
        the steps, the number of ``trained_tokens`` (those with loss), and ``explained_variance`` if the critic
        made a step.

        T-PPO's batch is one window of each of a number of responses; unfinished responses continue in the next
        update, under its weights. Every other algorithm's batch is whole responses."""
        if self.config.declaration.unit is Unit.CHUNK:
            units, ended = self._windows()
        else:
            groups = self._groups(filtered=self.config.algorithm.dynamic_sampling)
            values = self._values(groups)
            units, ended = (
                units_of(self.config, groups, values, version=self._num_updates),
                _value_samples(groups, values),
            )
        prepared = self._update.prepare(units)
        stepped = asyncio.run(self._update.step(prepared.samples, policy_version=self._num_updates, compute=_at_once))
        explained = [] if self._critic is None else self._learn_values(ended)
        self._num_updates += 1
        self._publish()
        trained = sum(int(np.count_nonzero(sample.loss_mask)) for sample in prepared.samples)
        metrics = metrics_of_steps(stepped.results)
        critic = {"explained_variance": mean(explained)} if explained else {}
        return metrics | critic | {"trained_tokens": float(trained)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights as they are now."""
        return self._backend.tensors()

    def _publish(self) -> None:
        self._engine.load_weights({name: tensor.clone() for name, tensor in self._backend.tensors()}, self._num_updates)

    def _groups(self, *, filtered: bool) -> list[list[Sampled]]:
        algorithm = self.config.algorithm
        if self._source.responses is not None:
            return self._recorded(self._source.responses)
        groups: list[list[Sampled]] = []
        while (lacking := algorithm.groups_per_update - len(groups)) > 0:
            many = lacking + (_SPARE_GROUPS if filtered else 0)
            prompts = [self._source.at(self._position + index) for index in range(many)]
            self._position += many
            sampled = self._sample(prompts, temperature=self.config.generation.temperature, size=algorithm.group_size)
            self.num_responses += many * algorithm.group_size
            self.num_tokens += sum(one.window.tokens.size for group in sampled for one in group)
            groups += [group for group in sampled if not filtered or len({one.score.accuracy for one in group}) > 1]
        return groups[: algorithm.groups_per_update]

    def _recorded(self, responses: RecordedResponses) -> list[list[Sampled]]:
        """Read one update's recorded responses, each as a group of one."""
        first, many = self._position, self.config.algorithm.groups_per_update
        self._position += many
        pairs: list[tuple[Prompt, SampledWindow]] = []
        for position in range(first, first + many):
            prompt = self._source.at(position)
            found = responses.at(prompt.prompt_id)
            nothing = np.zeros(found.tokens.size, np.float32)
            of = Segment(self._num_updates, found.tokens.size)
            name = TrajectoryId("t", position, 0)
            pairs.append((prompt, SampledWindow(name, found.tokens, nothing, (of,), found.finish_reason)))
            self.num_tokens += found.tokens.size
        self.num_responses += many
        return [[one] for one in self._mark(pairs)]

    def _sample(self, prompts: Sequence[Prompt], *, temperature: float, size: int) -> list[list[Sampled]]:
        limit = self.config.generation.max_response_tokens
        lane, self._num_lanes = f"x{self._num_lanes}", self._num_lanes + 1
        wanted = [TrajectoryId(lane, group, member) for group in range(len(prompts)) for member in range(size)]
        nothing = np.empty(0, np.int32)
        found = self._extend(
            [(trajectory, prompts[trajectory.group], nothing) for trajectory in wanted],
            window_tokens=limit,
            temperature=temperature,
        )
        marked = self._mark([(prompts[trajectory.group], found[trajectory]) for trajectory in wanted])
        return [marked[at : at + size] for at in range(0, len(marked), size)]

    def _extend(
        self, wanted: Sequence[tuple[TrajectoryId, Prompt, np.ndarray]], *, window_tokens: int, temperature: float
    ) -> dict[TrajectoryId, SampledWindow]:
        """Sample the next window of each response."""
        for trajectory, prompt, tokens in wanted:
            self._engine.submit(
                WindowRequest(
                    trajectory=trajectory,
                    prompt_tokens=prompt.tokens,
                    response_tokens=tokens,
                    window_tokens=window_tokens,
                    max_response_tokens=self.config.generation.max_response_tokens,
                    sampling=SamplingParams(temperature),
                    seed=self.config.run.seed,
                )
            )
        found: dict[TrajectoryId, SampledWindow] = {}
        while len(found) < len(wanted):
            found |= {window.trajectory: window for window in self._engine.advance(_STEPS_A_TURN)}
        return found

    def _windows(self) -> tuple[list[ClaimedUnit], list[ValueSample]]:
        """Start new responses in place of finished ones, and let every live response grow by a window. Return the
        windows, and the critic's samples of the responses that finished."""
        assert self._critic is not None
        algorithm = self.config.algorithm
        while len(self._live) < algorithm.groups_per_update * algorithm.group_size:
            prompt, group = self._source.at(self._position), self._position
            self._position += 1
            empty = np.empty(0, np.int32), np.empty(0, np.float32)
            members = [TrajectoryId("w", group, member) for member in range(algorithm.group_size)]
            self._live += [Live(trajectory, prompt, *empty) for trajectory in members]
            self.num_responses += len(members)
        generation = self.config.generation
        found = self._extend(
            [(live.trajectory, live.prompt, live.tokens) for live in self._live],
            window_tokens=generation.window_tokens,
            temperature=generation.temperature,
        )
        windows = [found[live.trajectory] for live in self._live]
        self.num_tokens += sum(window.tokens.size for window in windows)
        wholes = [
            np.concatenate([live.tokens, window.tokens]).astype(np.int32)
            for live, window in zip(self._live, windows, strict=True)
        ]
        values = self._critic.values(
            [
                ScoringRequest(np.concatenate([live.prompt.tokens, whole]).astype(np.int32), window.tokens.size)
                for live, whole, window in zip(self._live, wholes, windows, strict=True)
            ]
        )
        finished = [
            (live.prompt, replace(window, tokens=whole))
            for live, whole, window in zip(self._live, wholes, windows, strict=True)
            if window.finish_reason.is_final
        ]
        marked = iter(self._mark(finished))
        units: list[ClaimedUnit] = []
        ended: list[ValueSample] = []
        for live, whole, window, value in zip(self._live, wholes, windows, values, strict=True):
            one = next(marked) if window.finish_reason.is_final else None
            scored = self._window_chunk(live, window, value, one)
            units.append(ClaimedUnit(str(scored.chunk.id), ((scored,),)))
            live.tokens, live.values = whole, np.concatenate([live.values, value])
            live.num_windows += 1
            if one is not None:
                ended.append(_value_sample(one, live.values))
        self._live = [
            live for live, window in zip(self._live, windows, strict=True) if not window.finish_reason.is_final
        ]
        return units, ended

    def _window_chunk(self, live: Live, window: SampledWindow, value: np.ndarray, one: Sampled | None) -> ScoredChunk:
        scores: dict[Field, Score] = {Field.VALUE: ValueScore(values=value, value_version=0)}
        if one is not None:
            scores[Field.REWARD] = one.score
        chunk = TrajectoryChunk(
            id=ChunkId(live.trajectory, live.num_windows),
            prompt=live.prompt,
            context_tokens=live.tokens,
            tokens=window.tokens,
            behavior_logprobs=window.behavior_logprobs,
            segments=(Segment(self._num_updates, window.tokens.size),),
            finish_reason=window.finish_reason,
            response_text=None if one is None else one.text,
        )
        return ScoredChunk(chunk, scores)

    def _mark(self, pairs: Sequence[tuple[Prompt, SampledWindow]]) -> list[Sampled]:
        texts = [self._tokenizer.decode(window.tokens.tolist()) for _, window in pairs]
        responses = [
            Response(
                prompt_text=prompt.text,
                response_text=text,
                answer=prompt.answer,
                verifier=prompt.verifier,
                extra=prompt.extra,
                num_tokens=window.tokens.size,
                finish_reason=window.finish_reason,
            )
            for (prompt, window), text in zip(pairs, texts, strict=True)
        ]
        limit = self.config.generation.max_response_tokens
        made: list[Sampled] = []
        judge = verify_recorded if responses and responses[0].verifier == RECORDED else verify
        for (prompt, window), text, verdict in zip(pairs, texts, judge(responses), strict=True):
            num_tokens, reason = window.tokens.size, window.finish_reason
            assert isinstance(verdict, Verdict), verdict
            score = shape(
                self.config.reward, verdict, num_tokens=num_tokens, max_response_tokens=limit, finish_reason=reason
            )
            made.append(Sampled(prompt, window, text, score))
        return made

    def _values(self, groups: Sequence[Sequence[Sampled]]) -> list[list[np.ndarray]]:
        """Return the critic's values of each response, float32 [R]; empty without a critic."""
        if self._critic is None:
            return [[np.empty(0, np.float32) for _ in group] for group in groups]
        flat = [one for group in groups for one in group]
        requests = [ScoringRequest(_tokens(one), one.window.tokens.size) for one in flat]
        values = iter(self._critic.values(requests))
        return [[next(values) for _ in group] for group in groups]

    def _learn_values(self, samples: Sequence[ValueSample]) -> list[float]:
        """Train the critic once on every response; responses that do not fill a batch wait for more. Return the
        explained variance of each step."""
        assert self._critic is not None
        self._ended += samples
        size, explained = self.config.value.batch_trajectories, list[float]()
        while len(self._ended) >= size:
            explained.append(self._critic.step(self._ended[:size]).explained_variance)
            del self._ended[:size]
        return explained


def units_of(
    config: RunConfig, groups: Sequence[Sequence[Sampled]], values: Sequence[Sequence[np.ndarray]], *, version: int
) -> list[ClaimedUnit]:
    """Return whole responses in the form of a learner's claim; ``values`` are empty without a critic."""
    units: list[ClaimedUnit] = []
    for number, (group, of) in enumerate(zip(groups, values, strict=True)):
        members = [
            _chunks(config, TrajectoryId("t", number, member), one, value, version)
            for member, (one, value) in enumerate(zip(group, of, strict=True))
        ]
        match config.declaration.unit:
            case Unit.GROUP:
                units.append(ClaimedUnit(str(number), tuple(members)))
            case Unit.TRAJECTORY:
                units += [ClaimedUnit(str(chunks[0].chunk.trajectory), (chunks,)) for chunks in members]
            case Unit.CHUNK:
                units += [ClaimedUnit(str(one.chunk.id), ((one,),)) for chunks in members for one in chunks]
    return units


def _chunks(
    config: RunConfig, trajectory: TrajectoryId, one: Sampled, values: np.ndarray, version: int
) -> tuple[ScoredChunk, ...]:
    tokens, size = one.window.tokens, config.generation.window_tokens
    made: list[ScoredChunk] = []
    for index, start in enumerate(range(0, tokens.size, size)):
        end = min(start + size, tokens.size)
        is_final = end == tokens.size
        scores: dict[Field, Score] = {}
        if config.has_critic:
            scores[Field.VALUE] = ValueScore(values=values[start:end], value_version=0)
        if is_final:
            scores[Field.REWARD] = one.score
        chunk = TrajectoryChunk(
            id=ChunkId(trajectory, index),
            prompt=one.prompt,
            context_tokens=tokens[:start],
            tokens=tokens[start:end],
            behavior_logprobs=one.window.behavior_logprobs[start:end],
            segments=(Segment(version, end - start),),
            finish_reason=one.window.finish_reason if is_final else FinishReason.WINDOW,
            response_text=one.text if is_final else None,
        )
        made.append(ScoredChunk(chunk, scores))
    return tuple(made)


def _tokens(one: Sampled) -> np.ndarray:
    return np.concatenate([one.prompt.tokens, one.window.tokens]).astype(np.int32)


def _value_sample(one: Sampled, old: np.ndarray) -> ValueSample:
    return ValueSample(
        name=str(one.window.trajectory),
        tokens=_tokens(one),
        prompt_length=one.prompt.tokens.size,
        old_values=old,
        reward=one.score.reward,
    )


def _value_samples(groups: Sequence[Sequence[Sampled]], values: list[list[np.ndarray]]) -> list[ValueSample]:
    return [
        _value_sample(one, old)
        for group, of in zip(groups, values, strict=True)
        for one, old in zip(group, of, strict=True)
    ]


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def learn(config: Path, seed: int, overrides: Sequence[str], *, num_updates: int | None, every: int) -> LearningResult:
    """Train by a run file, with its number of updates or the given one. Evaluate before, after, and every
    ``every`` updates."""
    began = time.monotonic()
    loaded = load_config([config], [*overrides, f"run.seed={seed}"])
    learner = OneProcess(loaded)
    wanted = loaded.run.num_updates if num_updates is None else num_updates
    held_out = [(0, learner.evaluate())]
    value_steps = learner.pretrain()
    clipped: list[float] = []
    entropy: list[float] = []
    for update in tracked(range(1, wanted + 1), "training", "updates"):
        metrics = learner.update()
        clipped.append(round(metrics["clip_fraction"], 6))
        entropy.append(round(metrics["entropy"], 6))
        if update % every == 0 or update == wanted:
            held_out.append((update, learner.evaluate()))
            seconds = time.monotonic() - began
            print(
                f"{config.stem}, seed {seed}: {update} updates, {100 * held_out[-1][1]:.1f} %, {seconds:.0f} s",
                flush=True,
            )
    seconds = round(time.monotonic() - began, 1)
    curves = (tuple(held_out), tuple(clipped), tuple(entropy))
    return LearningResult(config.stem, seed, tuple(overrides), value_steps, *curves, seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.one_process", description="A demo's learning in one process."
    )
    parser.add_argument("configs", type=Path, nargs="+", metavar="CONFIG")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds (default: %(default)s)")
    parser.add_argument("--updates", type=int, help="number of updates (default: the run file's)")
    parser.add_argument("--every", type=int, default=10, help="updates between evaluations (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [
        learn(config, seed, options.overrides, num_updates=options.updates, every=options.every)
        for seed in range(options.seeds)
        for config in options.configs
    ]
    if options.json:
        write_json(options.json, provenance("one_process", arguments) | {"runs": [asdict(one) for one in results]})


if __name__ == "__main__":
    sys.exit(exit_code(main))
