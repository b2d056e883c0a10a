"""The generation engine of a run that learns from recorded responses (``data.responses``).

A request that carries a recorded response is answered with its next window, without model or
weights. Its behaviour log-probs are unknown and set to 0. Its policy version is the one served at
that moment, so a response does not age before it is handed out.

Requests without a recorded response come from evaluations. A run with held-out prompts wraps an
engine with a model for these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.responses import RecordedResponse
from pipeline.weights.tensorfile import Publication
from protocol.errors import EngineError, WeightsRejected
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Segment
from workers.engines.generation.seam import EngineStats, GenerationEngine, SampledWindow, WindowRequest
from workers.engines.generation.windows import check_request, is_live_already

_ANY_TOKEN = 2**31 - 1


class RecordedEngine:
    def __init__(self, num_slots: int, sampling: GenerationEngine | None = None) -> None:
        """``sampling`` answers requests without a recorded response, and sets the number of slots."""
        self.num_slots = num_slots if sampling is None else sampling.num_slots
        self.policy_version = -1
        self._sampling = sampling
        self._waiting: dict[TrajectoryId, tuple[WindowRequest, RecordedResponse]] = {}
        self._num_turns = self._num_tokens = 0

    def view_weights(self, data: np.ndarray, path: Path) -> Mapping[str, Any]:
        return {} if self._sampling is None else self._sampling.view_weights(data, path)

    def merge_weights(self, adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
        if self._sampling is None:
            raise WeightsRejected(
                f"an adapter on weights with digest {base_digest} was given to an engine without a model; recorded "
                f"responses need no weights: follow only the versions"
            )
        return self._sampling.merge_weights(adapter, base, base_digest, dtype=dtype)

    def stage_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        if self._sampling is not None:
            self._sampling.stage_weights(tensors, policy_version)

    def load_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        if self._sampling is not None:
            self._sampling.load_weights(tensors, policy_version)
        self.policy_version = policy_version

    def unserved(self, tensors: Mapping[str, Any]) -> list[str]:
        return [] if self._sampling is None else self._sampling.unserved(tensors)

    def submit(self, request: WindowRequest) -> None:
        """Raises EngineError for a recorded response that does not fit, or without a model to
        sample with."""
        name, recorded = request.trajectory, request.recorded
        if name in self._waiting:
            raise is_live_already(request)
        if recorded is None:
            if self._sampling is None:
                raise EngineError(
                    f"{name} needs sampling, but this run has no model for that: it reads data.responses and has no "
                    "held-out prompts"
                )
            self._sampling.submit(request)
            return
        check_request(request, positions=None, vocabulary=_ANY_TOKEN)
        used = request.response_tokens.size
        if used >= recorded.tokens.size or not np.array_equal(recorded.tokens[:used], request.response_tokens):
            raise EngineError(
                f"{name} has {used} tokens that are not the start of its recorded response of "
                f"{recorded.tokens.size} tokens; the file has changed since the run began"
            )
        if recorded.tokens.size > request.max_response_tokens:
            raise EngineError(
                f"the recorded response of {name} has {recorded.tokens.size} tokens, but at most "
                f"{request.max_response_tokens} may be trained on; raise generation.max_response_tokens"
            )
        self._waiting[name] = request, recorded

    def advance(self, max_steps: int) -> list[SampledWindow]:
        """Raises EngineError before the first weights."""
        if self.policy_version < 0:
            raise EngineError("the engine was advanced before its first weights; call load_weights first")
        windows = [self._read(request, recorded) for request, recorded in self._waiting.values()]
        self._waiting.clear()
        self._num_turns += bool(windows)
        if self._sampling is not None and self._sampling.stats().num_live:
            windows += self._sampling.advance(max_steps)
        return windows

    def cut(self) -> list[SampledWindow]:
        self._waiting.clear()
        return [] if self._sampling is None else self._sampling.cut()

    def forget(self, trajectory: TrajectoryId) -> None:
        self._waiting.pop(trajectory, None)
        if self._sampling is not None:
            self._sampling.forget(trajectory)

    def stats(self) -> EngineStats:
        """A call of ``advance`` that read windows counts as a decode step."""
        of = EngineStats(0, 0, 0, 0) if self._sampling is None else self._sampling.stats()
        return EngineStats(
            of.num_live + len(self._waiting),
            of.num_decode_steps + self._num_turns,
            of.num_sampled_tokens + self._num_tokens,
            of.num_prefill_tokens,
        )

    def close(self) -> None:
        if self._sampling is not None:
            self._sampling.close()

    def _read(self, request: WindowRequest, recorded: RecordedResponse) -> SampledWindow:
        start = request.response_tokens.size
        end = min(start + request.window_tokens, recorded.tokens.size)
        self._num_tokens += end - start
        return SampledWindow(
            trajectory=request.trajectory,
            tokens=recorded.tokens[start:end].astype(np.int32, copy=False),
            behavior_logprobs=np.zeros(end - start, np.float32),
            segments=(Segment(self.policy_version, end - start),),
            finish_reason=recorded.finish_reason if end == recorded.tokens.size else FinishReason.WINDOW,
        )
