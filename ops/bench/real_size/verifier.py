"""The real-size run's verifier: right or wrong by a digest of the response's text.

About half of all texts are right. Random weights never solve a problem, and a group without a right
response teaches nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pipeline.rewards.verifier import Response

NAME = "ops.bench.real_size.verifier:judge"


def judge(responses: Sequence[Response]) -> list[float]:
    """Judge each response; about half are right."""
    digests = [hashlib.blake2b(response.response_text.encode(), digest_size=1).digest() for response in responses]
    return [float(digest[0] & 1) for digest in digests]
