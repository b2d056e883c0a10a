"""A verifier that judges nothing while a file is there: the prompts' column ``switch`` names it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.rewards.verifier import Response
from tests.integration import odd_verifier

NAME = "tests.integration.hanging_verifier:judge"
_LOOK_S = 0.05


def judge(responses: Sequence[Response]) -> list[float]:
    while any(Path(response.extra["switch"]).exists() for response in responses):
        time.sleep(_LOOK_S)
    return odd_verifier.judge(responses)
