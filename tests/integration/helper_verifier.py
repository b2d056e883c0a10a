"""A verifier that keeps a helper process in a session of its own, as careless ones do."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from pipeline.rewards.verifier import Response


def warm_up() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def judge(responses: Sequence[Response]) -> list[float]:
    return [float(len(response.response_text) % 2) for response in responses]
