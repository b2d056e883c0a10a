"""The drill's verifier: right or wrong by a digest of the response, and broken while a file demands
it.

The prompts' column ``switch`` names the file, with ``raise``, ``hang`` or ``exit`` as its content.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.rewards.verifier import Response

NAME = "ops.drill.verifier:judge"
_LONG_S = 600.0


def judge(responses: Sequence[Response]) -> list[float]:
    """Judge each response; about half are right."""
    return [_judge_one(response) for response in responses]


def _judge_one(response: Response) -> float:
    try:
        how = Path(response.extra["switch"]).read_text()
    except FileNotFoundError:
        return float(hashlib.blake2b(response.response_text.encode(), digest_size=1).digest()[0] & 1)
    match how:
        case "hang":
            time.sleep(_LONG_S)
        case "exit":
            os._exit(3)
        case _:
            pass
    raise RuntimeError(f"the drill orders this verifier to {how}")
