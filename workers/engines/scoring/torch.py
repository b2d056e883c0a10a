"""The scoring engine in plain torch: a frozen model, packed sequences, no gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from pipeline.algorithms.batching import plan_micro_batches, plan_padded_batches
from pipeline.data.prompt_form import conversation_tokens
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.preflight.model_folder import check_reward_model, longest_input
from pipeline.process import work
from protocol.errors import ConfigError, EngineError
from protocol.trajectory import Prompt
from workers.engines.model.loading import load_model, load_reward_model, resolve_device, resolve_dtype
from workers.engines.model.packed import PackedTokens, planned_prefixes, prepare_packed, score_packed, share_of_plan
from workers.engines.scoring.seam import ScoringRequest, check_requests

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.schema import RunConfig
    from pipeline.config.training import RewardModelSection


class TorchScoring:
    def __init__(self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int) -> None:
        """Freeze ``model``. Raises ConfigError (temperature 0 or below) or EngineError."""
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}, expected above 0; score greedy sampling at 1")
        self._model = prepare_packed(model.eval()).requires_grad_(False)
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens

    @torch.no_grad()
    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Raises as :func:`check_requests`."""
        vocabulary = cast("torch.Tensor", self._model.get_input_embeddings().weight).shape[0]
        check_requests(requests, vocabulary)
        results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(requests)
        lengths = [int(request.tokens.size) for request in requests]
        prefixes = planned_prefixes(self._model, [request.tokens for request in requests])
        plan = plan_micro_batches(prefixes, self._micro_batch_tokens)
        for micro in plan:
            with work.part(share_of_plan(plan, micro, lengths)):
                num_scored = [requests[index].num_scored for index in micro]
                batch = PackedTokens.of([requests[index].tokens for index in micro], num_scored, self._model.device)
                scores = score_packed(self._model, batch, self._temperature).logprobs
                tails = np.split(scores.to("cpu", torch.float32).numpy(), np.cumsum(num_scored)[:-1])
                for index, tail in zip(micro, tails, strict=True):
                    results[index] = tail
        return results


def build_scoring(config: RunConfig, model_path: Path) -> TorchScoring:
    """Load the frozen reference of a run. Raises DataError or ConfigError."""
    device = resolve_device(config.reference.device)
    if device.type == "cpu":
        torch.set_num_threads(config.reference.threads)
    model = load_model(model_path, resolve_dtype(config.types.learner), device)
    return TorchScoring(
        model, temperature=config.training_temperature, micro_batch_tokens=config.reference.micro_batch_tokens
    )


class TorchRewardModel:
    def __init__(
        self, model: PreTrainedModel, tokenizer: TextTokenizer, *, micro_batch_tokens: int, max_tokens: int | None
    ) -> None:
        """Freeze ``model``; ``max_tokens`` is the longest sequence it takes, None for any length."""
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._micro_batch_tokens = micro_batch_tokens
        self._max_tokens = max_tokens
        self._vocabulary = cast("torch.Tensor", model.get_input_embeddings().weight).shape[0]
        self._text_config = model.config.get_text_config()
        self._padding: int | None = self._text_config.pad_token_id

    def scores(self, responses: Sequence[tuple[Prompt, str]]) -> list[float]:
        """Return the score of each response to its prompt, in order.

        Raises DataError when the chat template rejects a conversation, EngineError when one is too
        long or empty, a token is unknown, or a score is not finite; then no response is scored."""
        sequences = [conversation_tokens(self._tokenizer, prompt, response) for prompt, response in responses]
        for tokens in sequences:
            self._check(tokens)
        scores = [0.0] * len(sequences)
        for batch in plan_padded_batches([tokens.size for tokens in sequences], self._micro_batch_tokens):
            read = self._forward([sequences[index] for index in batch])
            work.step(len(batch) / len(sequences))
            for index, score in zip(batch, read, strict=True):
                if not math.isfinite(score):
                    raise EngineError(
                        f"the reward model gives {score} to a response to {responses[index][0].prompt_id}; expected a finite "
                        "number: set reward.model.dtype to float32, or give another reward model"
                    )
                scores[index] = score
        return scores

    @torch.no_grad()
    def _forward(self, sequences: Sequence[np.ndarray]) -> list[float]:
        shape = (len(sequences), max(tokens.size for tokens in sequences))
        padding = self._padding
        if padding is None:
            ends = {int(tokens[-1]) for tokens in sequences}
            padding = next((token for token in range(self._vocabulary) if token not in ends), None)
            # a tiny vocabulary: every token of it ends a row
            if padding is None:
                half = len(sequences) // 2
                return self._forward(sequences[:half]) + self._forward(sequences[half:])
        rows = np.full(shape, padding, np.int64)
        mask = np.zeros(shape, np.int64)
        for row, tokens in enumerate(sequences):
            rows[row, : tokens.size] = tokens
            mask[row, : tokens.size] = 1
        device = self._model.device
        # read by the model's forward
        self._text_config.pad_token_id = padding
        logits = self._model(
            input_ids=torch.from_numpy(rows).to(device), attention_mask=torch.from_numpy(mask).to(device)
        ).logits
        return logits[:, 0].float().tolist()

    def _check(self, tokens: np.ndarray) -> None:
        """Refuse tokens that the model cannot read: on a GPU, their lookup ends the process."""
        if not tokens.size:
            raise EngineError("a conversation has no tokens for the reward model; give prompts that are not empty")
        if self._max_tokens is not None and tokens.size > self._max_tokens:
            raise EngineError(
                f"a conversation has {tokens.size} tokens for the reward model, which reads at most {self._max_tokens}; lower "
                "generation.max_response_tokens, raise reward.model.max_tokens if that is what limits it, or give a reward "
                "model with more positions"
            )
        if tokens.max() >= self._vocabulary:
            raise EngineError(
                f"the reward model's tokenizer made token {tokens.max()}, its weights know 0 to {self._vocabulary - 1}; the "
                "two do not belong together: download the reward model again"
            )


def build_reward(config: RewardModelSection) -> TorchRewardModel:
    """Load a run's reward model. Raises DataError or ConfigError naming the cause."""
    path: Path = config.path
    longest = longest_input(path, check_reward_model(path), config.max_tokens)
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    return TorchRewardModel(
        load_reward_model(path, resolve_dtype(config.dtype), device),
        load_text_tokenizer(path),
        micro_batch_tokens=config.micro_batch_tokens,
        max_tokens=longest,
    )
