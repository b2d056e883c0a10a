"""The emulated training backend: weights depend on every batch and its order, at configured costs.

A checkpoint has ``emulated.json`` and no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ops.emulated import weights
from ops.emulated.law import TokenLaw
from ops.emulated.pace import Pace
from ops.emulated.state import EmulatedLearner
from pipeline.algorithms.batching import TrainingSample
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from protocol.ids import TrajectoryId
from workers.engines.training.seam import StepResult

if TYPE_CHECKING:
    from pipeline.algorithms.base import Rule
    from pipeline.weights.tensorfile import Publication


_GRAD_NORM = 1.0
_UNLIKELY = -12.0
"""Log-prob of a token that the policy would not have sampled."""


class EmulatedTraining(EmulatedLearner):
    """A :class:`workers.engines.training.seam.TrainingBackend`."""

    def __init__(
        self,
        *,
        num_weights: int,
        step_s: float = 0.0,
        token_s: float = 0.0,
        scoring_token_s: float = 0.0,
        law: TokenLaw | None = None,
        seed: int = 0,
    ) -> None:
        """Start untrained. A step takes ``step_s``, and ``token_s`` for each of its tokens.

        ``law`` and the run's ``seed`` are the policy, to recognise samples of another one; None: all are its
        own."""
        super().__init__()
        self._num_weights = num_weights
        self._step_s = step_s
        self._token_s = token_s
        self._scoring_token_s = scoring_token_s
        self._law, self._seed = law, seed
        self._pace = Pace()

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return each sample's behaviour log-probs, because an emulated policy never moves. Tokens that it would
        not have sampled are unlikely."""
        self._pace.spend(self._scoring_token_s * _num_tokens(samples))
        return [self._logprobs(sample) for sample in samples]

    def _logprobs(self, sample: TrainingSample) -> np.ndarray:
        if self._law is None:
            return sample.behavior_logprobs
        begin, tokens = sample.num_context_tokens, sample.tokens[sample.prompt_length :]
        trajectory = TrajectoryId.parse(".".join(sample.name.split(".")[:3]))
        is_own = self._law.is_own(self._seed, trajectory, begin, tokens)
        if sample.places is not None:
            is_own = is_own[sample.places - sample.prompt_length]
        return np.where(is_own, sample.behavior_logprobs, _UNLIKELY).astype(np.float32)

    def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        """Take one step. Raises EngineError without samples."""
        if not samples:
            raise EngineError("an optimiser step on 0 samples; expected at least 1; skip it")
        num_tokens = _num_tokens(samples)
        self._pace.spend(self._step_s + self._token_s * num_tokens)
        by_token = rule.token_weights(samples)
        loss = -sum(float((sample.advantages * weight).sum()) for sample, weight in zip(samples, by_token, strict=True))
        if not limits.allow(loss, _GRAD_NORM):
            return StepResult(False, loss, _GRAD_NORM, 0.0, {}, num_tokens)
        self.state = self.state.after(
            part
            for sample, weight in zip(samples, by_token, strict=True)
            for part in (sample.name.encode(), sample.tokens.tobytes(), (sample.advantages * weight).tobytes())
        )
        return StepResult(True, loss, _GRAD_NORM, 0.0, {}, num_tokens)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Do nothing: an emulated step has no rate."""

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield weights.TENSOR, weights.make_tensor(self.state.digest, self._num_weights)

    def base_publication(self) -> None:
        """Return None: whole versions are published."""

    def publication(self, base_digest: str | None = None) -> Publication:
        del base_digest
        return weights.publish_tensors(self.tensors())

    def digests(self) -> dict[str, bytes]:
        return weights.digest_tensors(self.tensors())

    def environment(self) -> dict[str, str]:
        return {"device": "emulated"}

    def random_state(self) -> dict[str, bytes]:
        """Return nothing: there are no random streams."""
        return {}

    def restore_random_state(self, states: Mapping[str, bytes]) -> None:
        """Do nothing: there are no random streams."""


def _num_tokens(samples: Sequence[TrainingSample]) -> int:
    return sum(int(sample.tokens.size) for sample in samples)
