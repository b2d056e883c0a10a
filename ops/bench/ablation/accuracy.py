"""Held-out accuracy of every policy version that a run published, measured after the run, so that
it costs the run nothing.

*Consumes* weight files and held-out prompts. *Produces* the share of right responses a
version. *Waits for* the verifiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, VerifierFailure
from protocol.errors import DataError
from protocol.ids import TrajectoryId
from workers.engines.build import build_engine
from workers.engines.generation.seam import GenerationEngine, SampledWindow, SamplingParams, WindowRequest
from workers.engines.model.weights_file import read_weights

_STEPS_A_TURN = 16


class Examiner:
    """Answers the held-out prompts with any version's weights, at the temperature of ``[evaluation]``,
    and marks the answers by the run's verifiers."""

    def __init__(self, config: RunConfig, *, num_prompts: int, num_slots: int = 256) -> None:
        """Load prompts and engine; ``num_prompts`` of the held-out ones are used,
        from the first."""
        generation = config.generation.model_copy(update={"num_slots": num_slots})
        self._config = config.model_copy(update={"generation": generation})
        self._tokenizer = load_text_tokenizer(config.model.path)
        source = PromptSource(config, self._tokenizer)
        self._prompts = [source.evaluation_at(index) for index in range(num_prompts)]
        self._engine: GenerationEngine = build_engine(self._config, config.model.path)
        self._num_loads = 0

    def accuracy_by_kind(self, weights: Path) -> dict[str, float]:
        """Return the share of right responses, in [0, 1]: of all under the empty name, and of each
        kind of prompt that the task has."""
        self._engine.load_weights(read_weights(weights), self._num_loads)
        windows = self._answer()
        self._num_loads += 1
        responses = [
            Response(
                prompt_text=prompt.text,
                response_text=self._tokenizer.decode(window.tokens.tolist()),
                answer=prompt.answer,
                verifier=prompt.verifier,
                extra=prompt.extra,
                num_tokens=window.tokens.size,
                finish_reason=window.finish_reason,
            )
            for prompt, window in zip(self._prompts, windows, strict=True)
        ]
        right: dict[str, list[bool]] = {}
        for prompt, is_right in zip(self._prompts, asyncio.run(self._mark(responses)), strict=True):
            for kind in {"", str(prompt.extra.get("kind", ""))}:
                right.setdefault(kind, []).append(is_right)
        return {kind: fmean(found) for kind, found in right.items()}

    def _answer(self) -> list[SampledWindow]:
        limit = self._config.generation.max_response_tokens
        lane = f"x{self._num_loads}"
        for index, prompt in enumerate(self._prompts):
            self._engine.submit(
                WindowRequest(
                    trajectory=TrajectoryId(lane, index, 0),
                    prompt_tokens=prompt.tokens,
                    response_tokens=np.empty(0, np.int32),
                    window_tokens=limit,
                    max_response_tokens=limit,
                    sampling=SamplingParams(self._config.evaluation.temperature),
                    seed=0,
                )
            )
        found: dict[int, SampledWindow] = {}
        while len(found) < len(self._prompts):
            for window in self._engine.advance(_STEPS_A_TURN):
                found[window.trajectory.group] = window
        return [found[index] for index in range(len(self._prompts))]

    async def _mark(self, responses: Sequence[Response]) -> list[bool]:
        right: list[bool] = []
        async with VerifierPool(self._config.reward, configured=self._config.verifier_paths) as pool:
            for verdict in await pool.score(responses):
                if isinstance(verdict, VerifierFailure):
                    raise DataError(f"a held-out response could not be marked: {verdict.error}")
                right.append(verdict.accuracy > 0.5)
        return right
