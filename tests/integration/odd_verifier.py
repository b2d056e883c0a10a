"""A verifier for responses that mean nothing: about half of them are right."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.rewards.verifier import Response


def judge(responses: Sequence[Response]) -> list[float]:
    return [float(len(response.response_text) % 2) for response in responses]
