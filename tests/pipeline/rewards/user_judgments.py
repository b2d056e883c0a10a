"""Judgments as users might write them, good and bad. Run in sandbox processes by the tests beside
this file."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.rewards.verifier import Response


def says(responses: Sequence[Response]) -> object:
    """Obey the first response of a call."""
    match responses[0].response_text:
        case "raise":
            raise KeyError("no rule")
        case "hang":
            time.sleep(600.0)
        case "number":
            return [3.0]
        case "long":
            return ["x" * 30_000]
        case "too few":
            return []
        case "nothing":
            return [None]
        case "blank":
            return [" \n"]
        case _:
            pass
    return [f"{response.response_text} is not {response.answer}" for response in responses]


def of_columns(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[str]:
    """Take TRL's arguments."""
    return [f"{c} is not {a}" for c, a in zip(completions, answer, strict=True)]


def of_one(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> str:
    """Take verl's arguments."""
    return f"{solution_str} is not {ground_truth}"


async def together(responses: Sequence[Response]) -> list[str | None]:
    """Judge several a call, and find something wrong with the long ones alone."""
    return [f"one of {len(responses)}" if len(r.response_text) > 1 else None for r in responses]


together.max_batch = 4  # type: ignore[attr-defined]
