"""Adapter of the family about T-PPO's steps, in which the lengths of all responses are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.algorithms.windows import SuccessiveBatching, WindowResult

NUM_STEPS = 6
"""Every trace of the family is six steps long, and lists the responses that were begun in them."""


def tppo_schedule(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Play the steps of a trace."""
    lengths = inputs["true_lengths"]
    schedule = SuccessiveBatching(inputs["slots"], inputs["window"], inputs["max_response"])
    steps: list[dict[str, Any]] = []
    for _ in range(NUM_STEPS):
        windows = schedule.fill(len(lengths))
        produced = [(w, min(w.limit, lengths[w.response]), lengths[w.response] <= w.limit) for w in windows]
        results = schedule.finish(produced)
        steps.append(
            {
                "batch": [_describe(result) for result in results],
                "policy_tokens": sum(result.num_policy_tokens for result in results),
                "value_tokens": sum(result.num_value_tokens for result in results),
                "new_prompts_next": inputs["slots"] - len(schedule.carried),
            }
        )
    return {"steps": steps}


def _describe(result: WindowResult) -> dict[str, Any]:
    return {
        "id": result.window.response,
        "start": result.window.start,
        "end": result.end,
        "finished": result.is_finished,
        "eos": result.is_eos,
        "lag_oldest_token": result.lag,
    }
