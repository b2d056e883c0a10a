"""Engines and backends that compute nothing and remember all that a worker gave them: one for each
role.

They fill the seams of ``workers.engines`` as real ones do. So a test can check the exact tokens,
settings and lengths that left a worker's hands. Their answers are a plain function of the requests,
so that a test knows the right answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.rewards.verifier import Response, VerifierOutcome
from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from pipeline.training.spikes import NO_LIMITS, StepLimits
from pipeline.weights.tensorfile import Publication
from protocol.ids import TrajectoryId
from protocol.trajectory import FinishReason, Prompt, Segment
from workers.engines.generation.seam import EngineStats, SampledWindow, WindowRequest
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.seam import StepResult
from workers.engines.value.seam import ValueSample, ValueStepResult

STOP = 1
"""A response that ends with this token ends by itself; any other is cut at the limit."""


class RecordingGeneration:
    """Extends each trajectory by the next window of the response that ``responses``
    names for it."""

    def __init__(
        self,
        responses: Callable[[TrajectoryId], list[int]],
        *,
        num_slots: int = 8,
        on_window: Callable[[SampledWindow], None] = lambda _: None,
    ) -> None:
        self.num_slots = num_slots
        self.policy_version = 0
        self.requests: list[WindowRequest] = []
        self._responses = responses
        self._on_window = on_window
        self._live: list[WindowRequest] = []
        self._num_steps = self._num_sampled = 0

    def of(self, trajectory: TrajectoryId) -> list[WindowRequest]:
        """Return the requests of one trajectory, in order."""
        return [request for request in self.requests if request.trajectory == trajectory]

    def submit(self, request: WindowRequest) -> None:
        self.requests.append(request)
        self._live.append(request)

    def advance(self, max_steps: int) -> list[SampledWindow]:
        del max_steps
        windows = [self._window(request) for request in self._live]
        self._live.clear()
        self._num_steps += 1
        self._num_sampled += sum(window.tokens.size for window in windows)
        for window in windows:
            self._on_window(window)
        return windows

    def _window(self, request: WindowRequest) -> SampledWindow:
        response = self._responses(request.trajectory)[: request.max_response_tokens]
        start = request.response_tokens.size
        tokens = np.array(response[start : start + request.window_tokens], np.int32)
        end = start + tokens.size
        reason = FinishReason.STOP if tokens[-1] == STOP else FinishReason.WINDOW
        if reason is FinishReason.WINDOW and end == request.max_response_tokens:
            reason = FinishReason.LENGTH
        return SampledWindow(
            request.trajectory,
            tokens,
            sampled_logprobs(start, end),
            (Segment(self.policy_version, tokens.size),),
            reason,
        )

    def cut(self) -> list[SampledWindow]:
        self._live.clear()
        return []

    def forget(self, trajectory: TrajectoryId) -> None:
        self._live = [request for request in self._live if request.trajectory != trajectory]

    def stage_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        del tensors, policy_version

    def load_weights(self, tensors: Mapping[str, Any], policy_version: int) -> None:
        del tensors
        self.policy_version = policy_version

    def unserved(self, tensors: Mapping[str, Any]) -> list[str]:
        del tensors
        return []

    def stats(self) -> EngineStats:
        return EngineStats(len(self._live), self._num_steps, self._num_sampled, 0)

    def close(self) -> None:
        self._live.clear()


def sampled_logprobs(start: int, end: int) -> np.ndarray:
    """Return the behaviour log-probs that a recording engine gives the response tokens from
    ``start`` to ``end``."""
    return -np.arange(start + 1, end + 1, dtype=np.float32) / 64


class RecordingPool:
    """Judges by ``judge``, and remembers every response that it is shown."""

    def __init__(self, judge: Callable[[Response], VerifierOutcome]) -> None:
        self.responses: list[Response] = []
        self.config: Any = None
        self.configured: Container[str] = ()
        self._judge = judge

    def __call__(self, config: Any, *, configured: Container[str] = (), **_: object) -> RecordingPool:
        """Stand where the class of the pool stands."""
        self.config, self.configured = config, configured
        return self

    async def start(self) -> None:
        pass

    def is_quick(self, verifier: str) -> bool:
        return True

    async def score(self, responses: Sequence[Response]) -> list[VerifierOutcome]:
        self.responses += responses
        return [self._judge(response) for response in responses]

    async def aclose(self) -> None:
        pass


class RecordingRewardModel:
    """Scores a response by its length in characters."""

    def __init__(self) -> None:
        self.asked: list[tuple[Prompt, str]] = []

    def scores(self, conversations: Sequence[tuple[Prompt, str]]) -> list[float]:
        self.asked += conversations
        return [float(len(text)) for _, text in conversations]


class RecordingScoring:
    """Gives every token of the tail its own id and place: ``-(id + place / 100)``."""

    def __init__(self) -> None:
        self.requests: list[ScoringRequest] = []

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        self.requests += requests
        return [tail_scores(request.tokens, request.num_scored) for request in requests]


def tail_scores(tokens: np.ndarray, num_scored: int) -> np.ndarray:
    """Return a recording scorer's log-probs of the last ``num_scored`` of ``tokens``: float32
    [num_scored]."""
    places = np.arange(tokens.size - num_scored, tokens.size)
    return -(tokens[places] + places / 100).astype(np.float32)


@dataclass
class RecordingValue:
    """Values like :class:`RecordingScoring`, and takes every step."""

    requests: list[ScoringRequest] = field(default_factory=list[ScoringRequest])
    batches: list[list[ValueSample]] = field(default_factory=list[list[ValueSample]])

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        self.requests += requests
        return [tail_scores(request.tokens, request.num_scored) for request in requests]

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        self.batches.append(list(samples))
        return ValueStepResult(True, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 1e-3, 10)

    def snapshot(self) -> Callable[[Path], None]:
        return lambda folder: None

    def load(self, folder: Path) -> None:
        raise AssertionError(f"nothing was kept in {folder}")

    def live_state(self) -> LiveState:
        return LiveState((), str(len(self.batches)), lambda pages: None)

    def put_back(self, kept: KeptState) -> None:
        raise AssertionError(f"nothing was kept in {kept.path}")

    def close(self) -> None:
        pass


class RecordingTraining:
    """A policy whose log-prob of a token is ``-(id + steps taken)``: log-probs of another moment
    are other numbers."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[TrainingSample], Rule]] = []
        self.rates: list[float] = []
        self.asked: list[tuple[int, list[TrainingSample]]] = []
        """Steps taken before, and the samples whose log-probs were requested."""

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        self.asked.append((len(self.steps), list(samples)))
        return [policy_logprobs(sample, len(self.steps)) for sample in samples]

    def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        self.steps.append((list(samples), rule))
        return StepResult(True, 0.25, 1.0, 1e-3, {}, sum(sample.tokens.size for sample in samples))

    def set_learning_rate(self, learning_rate: float) -> None:
        self.rates.append(learning_rate)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        yield "weights", [str(len(self.steps))]

    def base_publication(self) -> None:
        return None

    def publication(self, base_digest: str | None = None) -> Publication:
        head = json.dumps([str(len(self.steps))]).encode()
        return Publication(head, len(head), iter(()))

    def digests(self) -> dict[str, bytes]:
        return {"weights": str(len(self.steps)).encode()}

    def environment(self) -> dict[str, str]:
        return {"device": "none"}

    def random_state(self) -> dict[str, bytes]:
        return {}

    def restore_random_state(self, states: Mapping[str, bytes]) -> None:
        assert not states, "it draws nothing"

    def snapshot(self) -> Callable[[Path], None]:
        text = json.dumps(len(self.steps))

        def write(folder: Path) -> None:
            (folder / "weights.json").write_text(text)

        return write

    def load(self, folder: Path) -> None:
        raise AssertionError(f"nothing was kept in {folder}")

    def live_state(self) -> LiveState:
        return LiveState((), str(len(self.steps)), lambda pages: None)

    def put_back(self, kept: KeptState) -> None:
        raise AssertionError(f"nothing was kept in {kept.path}")

    def close(self) -> None:
        pass


def policy_logprobs(sample: TrainingSample, num_steps: int) -> np.ndarray:
    """Return a recording policy's log-probs of a sample's response tokens after so many steps:
    float32 [response tokens]."""
    return -(sample.tokens[sample.prompt_length :] + num_steps).astype(np.float32)
