"""The ways to schedule that are compared, as overrides of one run file.

**Lengths** are log-normal, as response lengths of reasoning models usually are. The standard
deviation of ln(length) is 1 and the cap is eight medians. So the longest response of a batch is
about five times the mean. RollPacker (2509.21009) reports skewed lengths, and rollouts that take
about 70 % of a synchronous update. The emulated learner is as slow as that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONFIG: Final = Path("configs/overlap.toml")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to schedule."""

    name: str
    overrides: tuple[str, ...]


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
            "data.verifier=ops.bench.overlap.verifier:judge",
            "staleness.eta=4",
        ),
    ),
)
