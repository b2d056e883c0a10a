"""The emulated training backend: weights depend on every batch and its order, at configured costs.

A checkpoint holds ``emulated.json`` and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ops.emulated import weights
from ops.emulated.law import TokenLaw
from ops.emulated.pace import Pace
from ops.emulated.state import LearnedState
from pipeline.algorithms.batching import TrainingSample
from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from protocol.ids import TrajectoryId
from workers.engines.training.seam import StepResult

if TYPE_CHECKING:
    from pipeline.algorithms.objective import Objective
    from pipeline.weights.tensorfile import Publication


_GRAD_NORM = 1.0
_UNLIKELY = -12.0
"""Log-prob of a token that the policy would not have sampled."""


class EmulatedTraining:
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
        """Begin untrained. A step takes ``step_s``, and ``token_s`` for each of its tokens.

        ``law`` and the run's ``seed``: the policy, for samples that may be another's; None: all are
        its own."""
        self._num_weights = num_weights
        self._step_s = step_s
        self._token_s = token_s
        self._scoring_token_s = scoring_token_s
        self._law, self._seed = law, seed
        self._pace = Pace()
        self.state = LearnedState()

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return each sample's behaviour log-probs: an emulated policy never moves. Tokens that it
        would not have sampled are unlikely."""
        self._pace.spend(self._scoring_token_s * _num_tokens(samples))
        return [self._logprobs(sample) for sample in samples]

    def _logprobs(self, sample: TrainingSample) -> np.ndarray:
        if self._law is None:
            return sample.behavior_logprobs
        begin, tokens = sample.num_context_tokens, sample.tokens[sample.prompt_length :]
        trajectory = TrajectoryId.parse(".".join(sample.name.split(".")[:3]))
        is_own = self._law.is_own(self._seed, trajectory, begin, tokens)
        return np.where(is_own, sample.behavior_logprobs, _UNLIKELY).astype(np.float32)

    def step(
        self, samples: Sequence[TrainingSample], objective: Objective, limits: StepLimits = NO_LIMITS
    ) -> StepResult:
        """Take one step. Raises EngineError when there is no sample."""
        if not samples:
            raise EngineError("an optimiser step on 0 samples; expected at least 1; skip it")
        num_tokens = _num_tokens(samples)
        self._pace.spend(self._step_s + self._token_s * num_tokens)
        by_token = objective.token_weights(samples)
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
        """Ignore it: an emulated step has no rate."""

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the one tensor."""
        yield weights.TENSOR, weights.make_tensor(self.state.digest, self._num_weights)

    def base_publication(self) -> None:
        """There is none: whole versions are published."""

    def publication(self, base_digest: str | None = None) -> Publication:
        """Lay out the one tensor."""
        del base_digest
        return weights.publish_tensors(self.tensors())

    def digests(self) -> dict[str, bytes]:
        """Return the one tensor's digest."""
        return weights.digest_tensors(self.tensors())

    def environment(self) -> dict[str, str]:
        """Return that nothing but data matters."""
        return {"device": "emulated"}

    def random_state(self) -> dict[str, bytes]:
        """There are no random streams."""
        return {}

    def restore_random_state(self, states: Mapping[str, bytes]) -> None:
        """There are no random streams."""

    def snapshot(self) -> Callable[[Path], None]:
        """Return a function that writes ``emulated.json`` as of now; it raises OSError."""
        return self.state.save

    def load(self, folder: Path) -> None:
        """Take back a snapshot. Raises DataError naming the file, with nothing changed."""
        self.state = LearnedState.load(folder)

    def live_state(self) -> LiveState:
        """Return the state, which has no tensors."""
        return LiveState((), self.state.text(), lambda pages: None)

    def put_back(self, kept: KeptState) -> None:
        """Take back a ``live_state``. Raises DataError, with nothing changed."""
        self.state = LearnedState.parse(kept.note.encode(), kept.path)

    def close(self) -> None:
        """There is nothing to release."""


def _num_tokens(samples: Sequence[TrainingSample]) -> int:
    return sum(int(sample.tokens.size) for sample in samples)
