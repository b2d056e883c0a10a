"""Log-probs of sampled tokens, kept where they are sampled until their request is finished.

vLLM carries log-probs from the sampler to a request's output token by token, through lists of
Python objects. If the engine reads them in the same process, this matrix replaces the lists: one
row per request, one column per position of its sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class LogprobJournal:
    def __init__(self, num_positions: int) -> None:
        """Hold sequences of up to ``num_positions`` tokens; rows are added as needed."""
        self._values = np.empty((1, num_positions), np.float32)
        self._lines: dict[str, int] = {}
        self._free: list[int] = []

    def lines(self, names: Sequence[str | None]) -> np.ndarray:
        """Return int64 [names], each request's row, assigning new ones; None's row is never read."""
        return np.array([0 if name is None else self._line(name) for name in names], np.int64)

    def write(self, lines: np.ndarray, positions: np.ndarray, logprobs: np.ndarray) -> None:
        """Store one log-prob per row, for the token at ``positions`` of its sequence, from 0."""
        self._values[lines, positions] = logprobs

    def read(self, name: str, start: int, num_tokens: int) -> np.ndarray:
        """Return float32 [num_tokens] from position ``start``; requests not scheduled yet have
        none."""
        if not num_tokens:
            return np.empty(0, np.float32)
        return self._values[self._lines[name], start : start + num_tokens].copy()

    def forget(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            self._free.append(line)

    def _line(self, name: str) -> int:
        line = self._lines.get(name)
        if line is None:
            if not self._free:
                first, more = self._values.shape[0], max(16, self._values.shape[0])
                self._values = np.concatenate([self._values, np.empty((more, self._values.shape[1]), np.float32)])
                self._free = list(range(first, first + more))
            line = self._lines[name] = self._free.pop()
        return line
