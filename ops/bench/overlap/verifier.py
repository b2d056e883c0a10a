"""A verifier without a task: it draws the accuracy, 0 or 1, from the prompt's pass rate.

A third of the prompts are always right or always wrong. These are the groups without signal that
over-sampling makes up for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pipeline.rewards.verifier import Response


def judge(responses: Sequence[Response]) -> list[float]:
    """Return 1 for a right response and 0 for a wrong one, a function of prompt and
    response alone."""
    return [float(_uniform(r.prompt_text + r.response_text) < _pass_rate(r.prompt_text)) for r in responses]


def _pass_rate(prompt: str) -> float:
    u = _uniform(prompt)
    return min(1.0, max(0.0, 1.5 * u - 0.25))


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2.0**64
