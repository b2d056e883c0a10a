"""A fixed sequence, by whose log-probs in every version engines are compared with the learner.

The sequence is the same in every run of a model: token ids spread over the vocabulary by a fixed
stream. Every weight must have a part in its log-probs, among them the output layer's row of every
probed token."""

from __future__ import annotations

import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.schema import RunConfig
from pipeline.preflight.model_folder import read_model_config

PROBE_TOKENS = 48


def probe_tokens(vocabulary: int, longest: int) -> np.ndarray:
    """Return int32 [n] token ids, n being PROBE_TOKENS or ``longest``."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocabulary, size=min(PROBE_TOKENS, longest)).astype(np.int32)


def probe_sample(config: RunConfig) -> TrainingSample:
    """Return the probe's sequence for a run's model, to be scored at the sampling temperature."""
    folder = read_model_config(config.model.path)
    vocabulary = folder.get("vocab_size") or folder["text_config"]["vocab_size"]
    tokens = probe_tokens(int(vocabulary), config.data.max_prompt_tokens + config.generation.max_response_tokens)
    num_scored = tokens.size - 1
    zeros = np.zeros(num_scored, np.float32)
    return TrainingSample(
        name="probe",
        tokens=tokens,
        prompt_length=1,
        loss_mask=np.ones(num_scored, bool),
        advantages=zeros,
        behavior_logprobs=zeros,
        versions=np.zeros(num_scored, np.int32),
    )
