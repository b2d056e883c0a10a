"""The seam between the generator and the engines that sample tokens: local torch, and vLLM. An
engine of recorded responses reads them in place of sampling.

An engine is blocking and single-threaded: ``advance`` computes and returns. The generator drives it
from the one compute thread that it owns."""

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
    """The distribution to sample from; ``workers.engines.generation.sampling`` defines it."""

    temperature: float
    """0 is greedy; behaviour log-probs are then those of the temperature-1 distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Least probability of a token, as a share of the largest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of others, of tokens in prompt or response."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that is in the response."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that it is in the response."""


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """Extend one trajectory by at most one window."""

    trajectory: TrajectoryId
    prompt_tokens: np.ndarray
    """int32 [prompt tokens]"""
    response_tokens: np.ndarray
    """int32 [earlier response tokens]; its size is the position of the first token to sample"""
    window_tokens: int
    """At most this many new tokens."""
    max_response_tokens: int
    """The response, earlier tokens included, is cut here."""
    sampling: SamplingParams
    seed: int
    """The run's; the token at response position p is drawn from stream (seed, trajectory, p)."""
    stop_strings: tuple[str, ...] = ()
    """The response ends with the first token after which its text holds one of them."""
    recorded: RecordedResponse | None = None
    """The whole response, of which the next window is read. Nothing is sampled then."""


@dataclass(frozen=True, slots=True)
class SampledWindow:
    """The tokens that an engine sampled for one request."""

    trajectory: TrajectoryId
    tokens: np.ndarray
    """int32 [new tokens], the stop token included, or the token that completes a stop string"""
    behavior_logprobs: np.ndarray
    """float32 [new tokens], of the distribution really sampled from, by ``SamplingParams``"""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters that only grow, but for ``num_live``."""

    num_live: int
    """Requests in slots or waiting."""
    num_decode_steps: int
    num_sampled_tokens: int
    num_prefill_tokens: int


class GenerationEngine(Protocol):
    """Samples tokens for many trajectories at once (continuous batching)."""

    @property
    def num_slots(self) -> int:
        """Requests decoded at once."""
        ...

    @property
    def policy_version(self) -> int:
        """Version that new tokens are sampled with; -1 before the first weights."""
        ...

    def view_weights(self, data: np.ndarray, path: Path) -> Mapping[str, Any]:
        """Return a version's tensors where they lie, as ``load_weights`` takes them.

        ``data``, uint8 [bytes], is verified, and stays as it is while the version is served.
        Processes of this host may map ``path``. Raises WeightsDamaged for bytes of no version."""
        ...

    def merge_weights(self, adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
        """Lay out the version that an adapter makes of its base, floating-point as ``dtype``.

        Neither file, uint8 [bytes], may change before the publication is written. Raises
        WeightsDamaged when one cannot be read, WeightsRejected when they do not fit."""
        ...

    def stage_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Bring the next weights near to the device, which shortens the pause of decoding.

        It may be called on another thread while this one decodes, or not at all. It changes no
        sample. Raises EngineDied."""
        ...

    def load_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        """Take new weights (torch tensors by name; of emulated ones, arrays) between two tokens;
        live requests go on under them, by the engine's KV policy.

        Raises WeightsRejected when names or shapes do not fit; the old weights then stay in use."""
        ...

    def unserved(self, tensors: Mapping[str, Any]) -> list[str]:
        """Return the names of the ``tensors`` loaded last that new tokens are not computed with.

        The engine compares the weights that it serves, not those that were loaded, so that a stale
        engine is found. If ``load_weights`` verifies log-probs, the answer is none."""
        ...

    def submit(self, request: WindowRequest) -> None:
        """Queue a request. Raises EngineError for a context that can never fit.

        An engine may keep the KV cache of a trajectory whose last window it sampled, and so spare
        the prefill of the next one."""
        ...

    def advance(self, max_steps: int) -> list[SampledWindow]:
        """Run up to ``max_steps`` decode steps; return the windows that finished. It returns early
        when slots fall free and no request waits for them."""
        ...

    def cut(self) -> list[SampledWindow]:
        """End every live request at the present token; return windows of the tokens so far.
        Waiting requests, and those without a sampled token, are forgotten."""
        ...

    def forget(self, trajectory: TrajectoryId) -> None:
        """Free all state of a trajectory; unknown ones are ignored."""
        ...

    def stats(self) -> EngineStats:
        """Return counters."""
        ...

    def close(self) -> None:
        """End the engine's other processes and threads; nothing else may be called after it."""
        ...
