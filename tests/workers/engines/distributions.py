"""The definition of what engines sample from, in plain float64: a token at a time."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from workers.engines.generation.seam import SampledWindow, SamplingParams, WindowRequest


def probabilities(logits: np.ndarray, sampling: SamplingParams, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Return float64 [vocabulary] after a prompt and the response so far; of greedy sampling, those
    of temperature 1."""
    scores = logits.astype(np.float64)
    for token in range(scores.size):
        count = int((response == token).sum())
        if count or token in prompt:
            scores[token] *= 1 / sampling.repetition_penalty if scores[token] > 0 else sampling.repetition_penalty
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
    greedy = sampling.temperature == 0.0
    share = np.exp((scores - scores.max()) / (sampling.temperature or 1.0))
    if not greedy:
        share[share < sampling.min_p * (1 - 1e-9)] = 0.0
        order = np.argsort(-share, kind="stable")
        if sampling.top_k:
            share[order[sampling.top_k :]] = 0.0
        if sampling.top_p < 1.0:
            reached = np.cumsum(share[order]) / share.sum()
            share[order[int(np.searchsorted(reached, sampling.top_p)) + 1 :]] = 0.0
    return share / share.sum()


def check_window(
    model: PreTrainedModel, asked: WindowRequest, window: SampledWindow, *, atol: float = 1e-4
) -> list[np.ndarray]:
    """Compare each token and its log-prob with the definition, by a plain forward; return the
    distributions."""
    sequence = np.concatenate([asked.prompt_tokens, asked.response_tokens, window.tokens]).astype(np.int64)
    with torch.no_grad():
        logits = model(torch.from_numpy(sequence)[None]).logits[0, -window.tokens.size - 1 : -1].double().numpy()
    found: list[np.ndarray] = []
    for place, (token, logprob) in enumerate(zip(window.tokens, window.behavior_logprobs, strict=True)):
        response = np.concatenate([asked.response_tokens, window.tokens[:place]])
        chances = probabilities(logits[place], asked.sampling, asked.prompt_tokens, response)
        assert chances[token] > 0.0, f"token {token} at {place} is outside the support"
        assert abs(np.log(chances[token]) - logprob) < atol, f"log-prob at {place}"
        if asked.sampling.temperature == 0.0:
            assert chances[token] >= chances.max() - 1e-6
        found.append(chances)
    return found
