"""A verifier for random models: an answer whose bytes have an even sum is right."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.rewards.verifier import Response, Verdict


def is_even(responses: Sequence[Response]) -> list[Verdict]:
    return [Verdict(accuracy=float(sum(one.response_text.encode()) % 2 == 0)) for one in responses]
