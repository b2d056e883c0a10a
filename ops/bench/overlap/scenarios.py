"""The schedules that are compared, as overrides of one run file.

**Lengths** are log-normal, as response lengths of reasoning models usually are. The standard deviation of
ln(length) is 1 and the cap is eight medians, so the longest response of a batch is about five times the mean.
RollPacker (2509.21009) reports skewed lengths, and rollouts that take about 70 % of a synchronous update. The
emulated learner is slow enough to match that.

``judge`` is a verifier without a task: it draws the accuracy, 0 or 1, from the prompt's pass rate. A third of
the prompts are always right or always wrong; these are the groups without signal that over-sampling makes up
for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pipeline.rewards.verifier import Response

CONFIG: Final = Path("configs/overlap.toml")


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    overrides: tuple[str, ...]


def judge(responses: Sequence[Response]) -> list[float]:
    """Return 1 for a correct and 0 for a wrong response, a function of prompt and response alone."""
    return [float(_uniform(r.prompt_text + r.response_text) < _pass_rate(r.prompt_text)) for r in responses]


def _pass_rate(prompt: str) -> float:
    return min(1.0, max(0.0, 1.5 * _uniform(prompt) - 0.25))


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) / 2.0**64


_WHOLE: Final = "generation.window_tokens=512"

SCENARIOS: Final = (
    Scenario("synchronous barrier (eta 0)", ("staleness.eta=0", _WHOLE)),
    Scenario("one step off (eta 1)", ("staleness.eta=1", _WHOLE)),
    Scenario("asynchronous, whole rollouts (eta 4)", ("staleness.eta=4", _WHOLE)),
    Scenario(
        "asynchronous, windows of 128 (T-PPO, eta 2)",
        (
            "algorithm.name=tppo",
            "algorithm.tail_drop_tokens=8",
            # windows that hold as many tokens as 128 responses
            "algorithm.groups_per_update=160",
            "generation.window_tokens=128",
            "staleness.eta=2",
        ),
    ),
    Scenario(
        "asynchronous, over-sampling and filtering (DAPO, eta 4)",
        (
            "algorithm.name=dapo",
            "algorithm.group_size=8",
            "algorithm.groups_per_update=16",
            "algorithm.dynamic_sampling=true",
            "algorithm.max_generation_batches=0",
            "generation.window_tokens=128",
            "data.verifier=ops.bench.overlap.scenarios:judge",
            "staleness.eta=4",
        ),
    ),
)
