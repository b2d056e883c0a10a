"""The Protocol through which ``VllmEngine`` uses vLLM: requests in, samples out, weights in
between.

Each wait for vLLM has a deadline. ``in_process`` steps vLLM on the caller's thread; ``background``
drives processes that decode on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from workers.engines.generation.seam import SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """One request to vLLM: a window of a trajectory."""

    name: str
    """Unique among live requests."""
    context: np.ndarray
    """int32 [prompt and earlier response tokens]"""
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    stream: int
    """Key of the trajectory's random stream (``workers.engines.model.rng.stream_key``)."""
    salt: str
    """Cached prefixes are shared only among requests with the same salt."""


@dataclass(frozen=True, slots=True)
class CoreSample:
    """The tokens that vLLM has sampled for a request."""

    name: str
    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[tuple[int, int], ...]
    """(policy version, number of tokens), in order, covering all tokens"""
    num_cached_tokens: int
    """Context tokens that were not computed, because a prefix was cached."""
    is_over: bool
    """False if it was cut."""

    def up_to(self, num_tokens: int) -> CoreSample:
        left, spans = num_tokens, list[tuple[int, int]]()
        for version, size in self.spans:
            if left > 0:
                spans.append((version, min(size, left)))
            left -= size
        tokens, logprobs = self.tokens[:num_tokens], self.logprobs[:num_tokens]
        return replace(self, tokens=tokens, logprobs=logprobs, spans=tuple(spans))


class Core(Protocol):
    @property
    def has_streams(self) -> bool:
        """Whether tokens come from the trajectory's stream; otherwise vLLM draws them, seeded per
        request."""
        ...

    @property
    def block_tokens(self) -> int:
        """Prefixes are cached in blocks of this many tokens."""
        ...

    def add(self, request: CoreRequest) -> None: ...

    def step(self, timeout_s: float) -> list[CoreSample]:
        """Decode once, or wait up to ``timeout_s`` for output; return what finished. Raises
        EngineDied."""
        ...

    def sampled(self, name: str, start: int) -> Sequence[int]: ...

    def cut(self, names: Sequence[str]) -> list[CoreSample]: ...

    def stage(self, path: Path, policy_version: int) -> None:
        """Copy a version's file close to where ``load`` needs it, while decoding continues.

        May be called on another thread. Raises EngineDied."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor], policy_version: int, *, recompute: bool) -> None:
        """Change the weights between two tokens. With ``recompute`` live contexts are prefilled
        again under the new weights, and cached prefixes are dropped."""
        ...

    def probe(self, tokens: np.ndarray, timeout_s: float) -> tuple[np.ndarray, list[CoreSample]]:
        """Return log-probs, float32 [tokens - 1], and the samples that finished meanwhile."""
        ...

    def num_steps(self) -> int:
        """Return decode steps so far; an estimate for a core in the background."""
        ...

    def close(self) -> None: ...
