"""The Protocol by which ``VllmEngine`` uses vLLM: requests in, samples out, weights in between.

Each wait for vLLM has a deadline. Of the two implementations, ``in_process`` steps vLLM on the
caller's thread, and ``background`` drives processes that run on by themselves."""

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
    """Unique among live ones."""
    context: np.ndarray
    """int32 [prompt and earlier response tokens]"""
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    stream: int
    """Key of the trajectory's random stream (``workers.engines.model.rng.stream_key``)."""
    salt: str
    """Cached prefixes are shared only among requests of one salt."""


@dataclass(frozen=True, slots=True)
class CoreSample:
    """The tokens that vLLM has sampled for a request."""

    name: str
    tokens: np.ndarray
    """int32 [new tokens]"""
    logprobs: np.ndarray
    """float32 [new tokens]"""
    spans: tuple[tuple[int, int], ...]
    """(policy version, number of tokens), in order, adding up to all tokens"""
    num_cached_tokens: int
    """Tokens of the context that were not computed, since a cached prefix held them."""
    is_over: bool
    """False when it was cut."""

    def up_to(self, num_tokens: int) -> CoreSample:
        """Return the first ``num_tokens`` of its tokens."""
        left, spans = num_tokens, list[tuple[int, int]]()
        for version, size in self.spans:
            if left > 0:
                spans.append((version, min(size, left)))
            left -= size
        tokens, logprobs = self.tokens[:num_tokens], self.logprobs[:num_tokens]
        return replace(self, tokens=tokens, logprobs=logprobs, spans=tuple(spans))


class Core(Protocol):
    """vLLM with a model, for one thread."""

    @property
    def has_streams(self) -> bool:
        """Whether tokens come from the trajectory's stream; else from vLLM's, by request seed."""
        ...

    @property
    def block_tokens(self) -> int:
        """Prefixes are cached in blocks of so many tokens."""
        ...

    def add(self, request: CoreRequest) -> None:
        """Queue a request."""
        ...

    def step(self, timeout_s: float) -> list[CoreSample]:
        """Decode once, or wait at most ``timeout_s`` for a core that decodes by itself; return the
        samples that are over. Raises EngineDied."""
        ...

    def sampled(self, name: str, start: int) -> Sequence[int]:
        """Return the tokens of a live request that were sampled so far, from ``start`` on."""
        ...

    def cut(self, names: Sequence[str]) -> list[CoreSample]:
        """End requests at the present token; return those with a sampled token."""
        ...

    def stage(self, path: Path, policy_version: int) -> None:
        """Bring a version's file near to where ``load`` needs it, while decoding goes on. May be
        called on another thread. Raises EngineDied."""
        ...

    def load(self, tensors: Mapping[str, torch.Tensor], policy_version: int, *, recompute: bool) -> None:
        """Change the weights between two tokens. With ``recompute`` live contexts are filled in
        again under the new ones, and no cached prefix outlives the old."""
        ...

    def probe(self, tokens: np.ndarray, timeout_s: float) -> tuple[np.ndarray, list[CoreSample]]:
        """Return float32 [tokens - 1], a sequence's log-probs, and samples that ended meanwhile."""
        ...

    def num_steps(self) -> int:
        """Return decode steps so far; of a core in the background, an estimate."""
        ...

    def close(self) -> None:
        """End vLLM's processes."""
        ...
