"""The scoring engine in plain torch: a frozen model, packed sequences, no gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from pipeline.algorithms.batching import plan_micro_batches
from pipeline.process import work
from protocol.errors import ConfigError
from workers.engines.model.loading import load_model, resolve_device, resolve_dtype
from workers.engines.model.micro_batches import share_of_plan
from workers.engines.model.packed import PackedTokens, prepare_packed, score_packed
from workers.engines.scoring.seam import ScoringRequest, check_requests

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.schema import RunConfig


class TorchScoring:
    """A frozen causal language model behind :class:`workers.engines.scoring.seam.ScoringEngine`."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, micro_batch_tokens: int) -> None:
        """Freeze ``model``. Raises ConfigError (temperature 0 or below) or EngineError."""
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}, expected above 0; score greedy sampling at 1")
        self._model = prepare_packed(model.eval()).requires_grad_(False)
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens

    @torch.no_grad()
    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return, for each request, float32 [num_scored]. Raises as :func:`check_requests`."""
        vocabulary = cast("torch.Tensor", self._model.get_input_embeddings().weight).shape[0]
        check_requests(requests, vocabulary)
        results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(requests)
        lengths = [int(request.tokens.size) for request in requests]
        plan = plan_micro_batches(lengths, self._micro_batch_tokens)
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
    """Load the frozen reference of a run. Raises DataError or ConfigError naming the cause."""
    device = resolve_device(config.reference.device)
    if device.type == "cpu":
        torch.set_num_threads(config.reference.threads)
    model = load_model(model_path, resolve_dtype(config.model.dtype), device)
    return TorchScoring(
        model, temperature=config.training_temperature, micro_batch_tokens=config.reference.micro_batch_tokens
    )
