"""Which policy version sampled each token, and how old that makes a trajectory.

*Consumes* segments and behaviour log-probs, chunk by chunk. *Produces* one version and one log-prob a token, and the
quantities derived from them. *Waits for* nothing; numpy only.

A trajectory sampled by several versions is a sample of one well-defined behaviour policy as long as each token keeps its own
log-prob (2505.24298, proposition 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from pipeline.ledger.staleness import is_stale, staleness
from protocol.trajectory import Segment


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the tokens of a response come from. R is their number."""

    versions: Int[np.ndarray, " tokens"]
    """int32 [R]"""
    behavior_logprobs: Float[np.ndarray, " tokens"]
    """[R], in the dtype given"""

    @property
    def span(self) -> int:
        """Number of distinct policy versions."""
        return int(np.unique(self.versions).size)

    def staleness_newest(self, current_version: int) -> int:
        """Versions between the newest token and ``current_version``."""
        return staleness(current_version, int(self.versions.max()))

    def staleness_worst(self, current_version: int) -> int:
        """Versions between the oldest token and ``current_version``: what the staleness bound is about."""
        return staleness(current_version, int(self.versions.min()))

    def is_fresh(self, current_version: int, eta: int) -> bool:
        """Whether even the oldest token is at most ``eta`` versions old."""
        return not is_stale(current_version, int(self.versions.min()), eta)

    def on_policy_mask(self, current_version: int) -> Bool[np.ndarray, " tokens"]:
        """Mark the tokens that ``current_version`` itself sampled: bool [R]."""
        return self.versions == current_version


def token_versions(segments: Sequence[Segment]) -> Int[np.ndarray, " tokens"]:
    """Repeat each segment's version for each of its tokens: int32 [sum of lengths]."""
    versions = np.array([segment.policy_version for segment in segments], dtype=np.int32)
    return np.repeat(versions, [segment.num_tokens for segment in segments])


def join(parts: Iterable[tuple[Sequence[Segment], np.ndarray]]) -> Provenance:
    """Concatenate (segments, behaviour log-probs) of consecutive chunks.

    Raises:
        ValueError: There is no token, or a part's segments do not cover its log-probs exactly.
    """
    versions: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    for index, (segments, values) in enumerate(parts):
        expanded = token_versions(segments)
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
    return Provenance(np.concatenate(versions), np.concatenate(logprobs))
