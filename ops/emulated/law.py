"""The responses of an emulated policy: length, tokens and log-probs, known beforehand.

All are pure functions of (seed, trajectory, position), independent of the weights. So any generator that
continues a trajectory samples the same tokens, and a check can verify every token from the ledger alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from protocol.ids import TrajectoryId
from workers.engines.model.rng import stream_key, uniforms

_LENGTH_STREAM = 0x4C454E47
_LOGPROB_STREAM = 0x4C4F4750
"""Mixed into a trajectory's key, so that length, tokens and log-probs are independent."""


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """How long responses would be if they were not cut."""

    kind: Literal["lognormal", "pareto", "constant"]
    median_tokens: float
    tail: float
    """Log-normal: standard deviation of ln(length). Pareto: the tail's exponent; small is heavy."""

    def quantile(self, u: float) -> float:
        """Return the length, in tokens, that a share ``u`` in (0, 1) of responses does not exceed."""
        match self.kind:
            case "lognormal":
                return self.median_tokens * math.exp(self.tail * NormalDist().inv_cdf(u))
            case "pareto":
                return self.median_tokens * (2.0 * (1.0 - u)) ** (-1.0 / self.tail)
            case "constant":
                return self.median_tokens

    def draw(self, seed: int, trajectory: TrajectoryId) -> int:
        """Return a trajectory's length in tokens, including its stop token; at least 1."""
        return self.end_after(seed, trajectory, 0)

    def end_after(self, seed: int, trajectory: TrajectoryId, start: int) -> int:
        """Return where the turn that goes on at position ``start`` ends. The lengths of a trajectory's turns are drawn
        one after the other, and what an environment says takes the place of what they would have sampled."""
        key = np.array([stream_key(seed, trajectory) ^ _LENGTH_STREAM], np.uint64)
        end = turn = 0
        while end <= start:
            end += max(1, math.ceil(self.quantile(float(uniforms(key, np.array([turn]))[0]))))
            turn += 1
        return end


@dataclass(frozen=True, slots=True)
class TokenLaw:
    """A response's tokens: uniform over the vocabulary, with the stop token at the end."""

    words: np.ndarray
    """int32 [tokens]: those that may occur before the end"""
    stop: int | None
    """None: only the limit ends a response."""

    @classmethod
    def of(cls, vocabulary: int, stop_token_ids: Iterable[int] = ()) -> TokenLaw:
        """Draw from all tokens below ``vocabulary`` except the stop tokens."""
        stops = sorted(set(stop_token_ids))
        return cls(np.setdiff1d(np.arange(vocabulary, dtype=np.int32), stops), stops[0] if stops else None)

    def tokens(self, seed: int, trajectory: TrajectoryId, begin: int, end: int, *, length: int) -> np.ndarray:
        """Return int32 [end - begin]: the tokens at these positions of a response of ``length`` tokens."""
        places = _draw(stream_key(seed, trajectory), begin, end) * self.words.size
        tokens = self.words[places.astype(np.int64)]
        if self.stop is not None and begin < end and end >= length:
            tokens[max(0, length - 1 - begin)] = self.stop
        return tokens

    def is_own(self, seed: int, trajectory: TrajectoryId, begin: int, tokens: np.ndarray) -> np.ndarray:
        """Return bool [tokens]: whether the policy could have sampled them from position ``begin`` on. A stop
        token may occur anywhere."""
        places = _draw(stream_key(seed, trajectory), begin, begin + tokens.size) * self.words.size
        return (tokens == self.words[places.astype(np.int64)]) | (tokens == self.stop)

    def logprobs(self, seed: int, trajectory: TrajectoryId, begin: int, end: int) -> np.ndarray:
        """Return float32 [end - begin]: log-probs, exponentially distributed with mean -1."""
        return np.log(_draw(stream_key(seed, trajectory) ^ _LOGPROB_STREAM, begin, end)).astype(np.float32)


def _draw(key: int, begin: int, end: int) -> np.ndarray:
    return uniforms(np.full(end - begin, key, np.uint64), np.arange(begin, end))
