"""The emulated value engine: values are a function of the tokens alone, steps have set costs.

Each step reports an explained variance of 1, so that the policy's gate opens at its first check."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.emulated.pace import Pace
from ops.emulated.scoring import tail_uniforms
from ops.emulated.state import EmulatedLearner
from protocol.errors import EngineError
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.seam import ValueSample, ValueStepResult


class EmulatedValue(EmulatedLearner):
    """A :class:`workers.engines.value.seam.ValueEngine`."""

    def __init__(self, *, token_s: float = 0.0, step_s: float = 0.0, training_token_s: float = 0.0) -> None:
        """Start untrained. Each valued token, including context, takes ``token_s``."""
        super().__init__()
        self._token_s = token_s
        self._step_s = step_s
        self._training_token_s = training_token_s
        self._pace = Pace()

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        self._pace.spend(self._token_s * sum(request.tokens.size for request in requests))
        return [(2.0 * tail_uniforms(request) - 1.0).astype(np.float32) for request in requests]

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Take one step. Raises EngineError without samples."""
        if not samples:
            raise EngineError("a value step on 0 samples; expected at least 1; skip it")
        num_tokens = sum(int(sample.tokens.size) for sample in samples)
        self._pace.spend(self._step_s + self._training_token_s * num_tokens)
        self.state = self.state.after(
            part
            for sample in samples
            for part in (sample.name.encode(), sample.tokens.tobytes(), str(sample.reward).encode())
        )
        return ValueStepResult(
            applied=True,
            loss=0.0,
            explained_variance=1.0,
            clip_fraction=0.0,
            value_mean=float(np.mean([sample.old_values.mean() for sample in samples])),
            target_mean=float(np.mean([sample.reward for sample in samples])),
            grad_norm=1.0,
            learning_rate=0.0,
            num_tokens=num_tokens,
        )
