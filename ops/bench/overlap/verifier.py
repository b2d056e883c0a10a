"""A verifier without a task: whether a response is right is drawn from its prompt's pass rate.

*Consumes* responses. *Produces* accuracies, 0 or 1. *Waits for* nothing. A third of the prompts are
always right or always wrong: groups without signal, as over-sampling is there for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pipeline.rewards.verifier import Response


def judge(responses: Sequence[Response]) -> list[float]:
    """Return 1 for a right response and 0 for a wrong one, a function of prompt and
    response alone.
    """
    return [float(_uniform(r.prompt_text + r.response_text) < _pass_rate(r.prompt_text)) for r in responses]


def _pass_rate(prompt: str) -> float:
    u = _uniform(prompt)
    return min(1.0, max(0.0, 1.5 * u - 0.25))


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2.0**64
