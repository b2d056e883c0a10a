"""The interface between the generator and the engines that sample tokens: local torch, vLLM, or
recorded responses.

An engine blocks and is single-threaded: ``advance`` computes and returns. The generator calls it
from its one compute thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Segment

if TYPE_CHECKING:
    from pipeline.data.responses import RecordedResponse
    from pipeline.weights.tensorfile import Publication


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution to sample from, as ``workers.engines.generation.sampling`` defines it."""

    temperature: float
    """0 is greedy; behaviour log-probs are then those of the temperature-1 distribution."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Least probability of a token as a share of the largest; 0 disables it."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies others, for tokens in prompt or response."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the response."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time it occurs in the response."""


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """Extend one trajectory by at most one window."""

    trajectory: TrajectoryId
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    """int32 [earlier response tokens]; its size is the position of the first token to sample"""
    window_tokens: int
    max_response_tokens: int
    """Maximum length of the response, earlier tokens included."""
    sampling: SamplingParams
    seed: int
    """The run's; the token at response position p is drawn from stream (seed, trajectory, sequence, p)."""
    stop_strings: tuple[str, ...] = ()
    """The response ends with the first token after which its text from ``text_start`` on contains one of them."""
    text_start: int = 0
    """Response position; after the last token of an environment."""
    sequence: int = 0
    """Number of the sequence within its trajectory."""
    recorded: RecordedResponse | None = None
    """A whole response whose next window is read instead of sampling."""


@dataclass(frozen=True, slots=True)
class SampledWindow:
    trajectory: TrajectoryId
    tokens: np.ndarray
    """int32 [new tokens], including the stop token or the token that completes a stop string"""
    behavior_logprobs: np.ndarray
    """float32 [new tokens], under the distribution that was sampled from (``SamplingParams``)"""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters, which only grow except for ``num_live``."""

    num_live: int
    """Requests in slots or waiting."""
    num_decode_steps: int
    num_sampled_tokens: int
    num_prefill_tokens: int


class GenerationEngine(Protocol):
    """Samples tokens for many trajectories at once (continuous batching)."""

    @property
    def num_slots(self) -> int: ...

    @property
    def policy_version(self) -> int:
        """Version that new tokens are sampled with; -1 before the first weights."""
        ...

    def view_weights(self, data: np.ndarray, path: Path) -> Mapping[str, Any]:
        """Return a version's tensors without copying, in the form that ``load_weights`` takes.

        ``data``, uint8 [bytes], is verified and does not change while the version is served.
        Processes of this host may map ``path``. Raises WeightsDamaged if the bytes are not a
        version."""
        ...

    def merge_weights(self, adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
        """Lay out the merged weights of an adapter and its base, floating-point numbers as
        ``dtype``.

        Neither file, uint8 [bytes], may change before the publication is written. Raises
        WeightsDamaged when one cannot be read, WeightsRejected when they do not fit."""
        ...

    def stage_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Copy the next weights close to the device, which shortens the pause in decoding.

        Optional; may be called on another thread while this one decodes. It does not change any
        sample. Raises EngineDied."""
        ...

    def load_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Load new weights between two tokens: torch tensors by name, or arrays for an emulated
        engine.

        Live requests continue under them, as the engine's KV policy says. Raises WeightsRejected
        when names or shapes do not fit; the old weights then stay in use."""
        ...

    def unserved(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the names of the ``tensors`` loaded last with which new tokens are not computed.

        The engine compares the weights that it really serves, so a stale engine is found. Empty if
        ``load_weights`` verifies log-probs."""
        ...

    def submit(self, request: WindowRequest) -> None:
        """Queue a request. Raises EngineError for a context that can never fit. An engine may keep
        a trajectory's KV cache after its window, to save the prefill of the next one."""
        ...

    def advance(self, max_steps: int) -> list[SampledWindow]:
        """Run up to ``max_steps`` decode steps and return the windows that finished.

        Returns early when slots become free and no request waits for them."""
        ...

    def cut(self) -> list[SampledWindow]:
        """End every live request at the current token; return windows of the tokens so far.

        Waiting requests, and those without a sampled token, are dropped."""
        ...

    def forget(self, trajectory: TrajectoryId) -> None:
        """Free all state of a trajectory; unknown ones are ignored."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """End the engine's other processes and threads; nothing may be called afterwards."""
        ...
