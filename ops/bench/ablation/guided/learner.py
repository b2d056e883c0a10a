"""Learning from responses in one process, with a run's own engines, rule and backend.

Responses are given, or sampled by the policy in groups; guided columns come from outside. There is
no ledger and no other process, so a seed gives the same run again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from ops.bench.ablation.guided.guides import Guide, prompt_of
from ops.demo.guided_responses import GuidedSample, judged
from ops.demo.make_tiny_model import EOS
from ops.demo.task import Problem
from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, FinishReason, GuidanceScore, RewardScore, Score, Segment, TrajectoryChunk
from workers.engines.build import build_engine, build_training_backend
from workers.engines.generation.seam import SamplingParams, WindowRequest
from workers.learner.policy_update import PolicyUpdate

_STEPS_A_TURN = 16


class GuidedLearner:
    """A policy that learns from responses."""

    def __init__(self, config: RunConfig) -> None:
        """Load the start model, as policy and as engine."""
        torch.set_num_threads(1)
        self.config = config
        self._tokenizer = load_text_tokenizer(config.model.path)
        self._end = self._tokenizer.encode(EOS)
        self._engine = build_engine(config, config.model.path)
        self._backend = build_training_backend(config)
        self._update = PolicyUpdate(config, self._backend)
        self._num_asked = 0
        self.num_steps = 0
        self.num_read_tokens = 0
        """Gone forward for learning so far, in steps and in sampling, prompts too."""

    def tokens_of(self, samples: Sequence[GuidedSample]) -> list[np.ndarray]:
        """Return int32 [tokens] of each response, with its end."""
        return [
            np.array(self._tokenizer.encode(sample.text) + ([] if sample.is_cut else self._end), np.int32)
            for sample in samples
        ]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the policy."""
        return {name: tensor.detach().clone() for name, tensor in self._backend.tensors()}

    def step(self, units: Sequence[ClaimedUnit]) -> None:
        """Do the optimiser steps of one update."""
        prepared = self._update.prepare(units)
        stepped = asyncio.run(self._update.step(prepared.samples, policy_version=self.num_steps, compute=_at_once))
        self.num_steps += len(stepped.results)
        self.num_read_tokens += sum(sample.tokens.size for sample in prepared.samples)

    def accuracy(self, asked: Sequence[Problem], weights: dict[str, torch.Tensor] | None = None) -> float:
        """Return the share of right greedy answers, of the present policy or of ``weights``."""
        texts = self._answer(asked, 0.0, self.weights() if weights is None else weights)
        return fmean(sample.is_right for sample in map(judged, asked, texts))

    def sample(self, problem: Problem, num: int) -> list[GuidedSample]:
        """Sample a group of responses to one question with the present policy."""
        asked = [problem] * num
        made = list(map(judged, asked, self._answer(asked, 1.0, self.weights())))
        num_prompt_tokens = len(self._tokenizer.encode(problem.prompt))
        self.num_read_tokens += sum(num_prompt_tokens + tokens.size for tokens in self.tokens_of(made))
        return made

    def units(self, groups: Sequence[Sequence[GuidedSample]], guide: Guide) -> list[ClaimedUnit]:
        """Return groups of responses as the learner claims them, with guided columns."""
        flat = [sample for group in groups for sample in group]
        tokens = self.tokens_of(flat)
        rest = iter(zip(flat, tokens, guide.scores(flat, tokens), strict=True))
        return [
            ClaimedUnit(
                str(number),
                tuple((self._chunk(TrajectoryId("t", number, member), *next(rest)),) for member in range(len(group))),
            )
            for number, group in enumerate(groups)
        ]

    def _chunk(
        self, trajectory: TrajectoryId, sample: GuidedSample, tokens: np.ndarray, guided: GuidanceScore | None
    ) -> ScoredChunk:
        verdict = float(sample.is_right)
        scores: dict[Field, Score] = {Field.REWARD: RewardScore(reward=2.0 * verdict - 1.0, accuracy=verdict)}
        if guided is not None:
            scores[Field.GUIDANCE] = guided
        prompt = prompt_of(sample, self._tokenizer.encode(sample.problem.prompt))
        return ScoredChunk(
            TrajectoryChunk(
                id=ChunkId(trajectory, 0),
                prompt=prompt,
                context_tokens=np.empty(0, np.int32),
                tokens=tokens,
                behavior_logprobs=np.zeros(tokens.size, np.float32),
                segments=(Segment(self.num_steps, tokens.size),),
                finish_reason=FinishReason.LENGTH if sample.is_cut else FinishReason.STOP,
                response_text=sample.text,
            ),
            scores,
        )

    def _answer(self, asked: Sequence[Problem], temperature: float, weights: dict[str, torch.Tensor]) -> list[str]:
        self._num_asked += 1
        self._engine.load_weights(weights, self._num_asked)
        limit, lane = self.config.generation.max_response_tokens, f"x{self._num_asked}"
        for index, problem in enumerate(asked):
            self._engine.submit(
                WindowRequest(
                    trajectory=TrajectoryId(lane, index, 0),
                    prompt_tokens=np.array(self._tokenizer.encode(problem.prompt), np.int32),
                    response_tokens=np.empty(0, np.int32),
                    window_tokens=limit,
                    max_response_tokens=limit,
                    sampling=SamplingParams(temperature),
                    seed=self.config.run.seed,
                )
            )
        found: dict[int, str] = {}
        while len(found) < len(asked):
            for window in self._engine.advance(_STEPS_A_TURN):
                end = EOS if window.finish_reason is FinishReason.STOP else ""
                found[window.trajectory.group] = self._tokenizer.decode(window.tokens.tolist()) + end
        return [found[index] for index in range(len(asked))]


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
