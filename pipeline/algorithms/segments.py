"""Which policy version sampled each token of a response.

A trajectory may be sampled by several versions. It is a sample of one well-defined behaviour policy
as long as each token keeps its own log-prob (2505.24298, proposition 1). Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from protocol.trajectory import Segment


def join_segments(parts: Iterable[tuple[Sequence[Segment], np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Join (segments, log-probs) of consecutive chunks: int32 versions [tokens], and log-probs.
    Raises ValueError without tokens, or when segments do not cover their log-probs exactly."""
    versions: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    for index, (segments, values) in enumerate(parts):
        named = np.array([segment.policy_version for segment in segments], dtype=np.int32)
        expanded = np.repeat(named, [segment.num_tokens for segment in segments])
        if expanded.shape != values.shape:
            raise ValueError(
                f"part {index} has segments for {expanded.size} tokens and behavior_logprobs of shape {values.shape}; expected "
                "one log-prob a token"
            )
        versions.append(expanded)
        logprobs.append(values)
    if not sum(part.size for part in versions):
        raise ValueError(
            "a response has 0 tokens; expected at least 1: a finished trajectory ends with a sampled token"
        )
    return np.concatenate(versions), np.concatenate(logprobs)
