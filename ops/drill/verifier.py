"""The drill's verifier: right or wrong by a digest of the response, and broken while a file demands it.

The prompts' column ``switch`` names the file. Its content is ``raise``, ``hang``, ``exit``, ``sometimes
SECONDS`` (one response in a few takes this much longer) or ``late`` (one in a few is never answered, however
often it is asked). A last word ``@PID`` restricts it to the verifiers of that reward worker. The column
``verdict_s`` has the seconds that a healthy verdict takes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.rewards.verifier import Response

NAME = "ops.drill.verifier:judge"
_LONG_S = 600.0
_ONE_IN = 12
"""One response in this many is slow or late. The text decides, so repetitions agree."""


def judge(responses: Sequence[Response]) -> list[float]:
    """Judge each response; about half are right."""
    return [_judge_one(response) for response in responses]


def verdict(response_text: str) -> float:
    """Return the true verdict: 0 or 1."""
    return float(hashlib.blake2b(response_text.encode(), digest_size=1).digest()[0] & 1)


def is_chosen(response_text: str) -> bool:
    """Whether ``sometimes`` and ``late`` affect this response."""
    return hashlib.blake2b(response_text.encode(), digest_size=2).digest()[0] % _ONE_IN == 0


def ordered(text: str, parent: int) -> tuple[str, float]:
    """Return the order in a switch's content for a child of ``parent``, and its number; "" without one."""
    words = text.split()
    if words and words[-1].startswith("@") and words.pop() != f"@{parent}":
        return "", 0.0
    return (words[0] if words else ""), float(words[1]) if len(words) > 1 else 0.0


def _judge_one(response: Response) -> float:
    try:
        text = Path(response.extra["switch"]).read_text()
    except FileNotFoundError:
        text = ""
    how, seconds = ordered(text, os.getppid())
    match how:
        case "" | "sometimes" | "late":
            if not is_chosen(response.response_text):
                seconds = 0.0
            elif how == "late":
                seconds = _LONG_S
            time.sleep(float(response.extra.get("verdict_s", 0.0)) + seconds)
            return verdict(response.response_text)
        case "hang":
            time.sleep(_LONG_S)
        case "exit":
            os._exit(3)
        case _:
            pass
    raise RuntimeError(f"the drill orders this verifier to {how}")
