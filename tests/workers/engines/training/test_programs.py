"""Claims about programs of plans on real processes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.pipeline.plan.programs.plans import draw

ROOT = Path(__file__).resolve().parents[4]
FIRST, PLANS = 1000, 100
"""Seeds of the plans, for each number of processes."""


def on_ranks(number: int, first: int, plans: int, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.engines.training.programmed", str(number), str(first), str(plans)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.integration
def test_random_plans_on_two_processes_have_the_loss_and_gradients_of_one() -> None:
    on_ranks(2, 0, 3, 100.0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_two_hundred_plans_are_of_all_kinds() -> None:
    plans = [draw(random.Random(seed), number) for number in (2, 4) for seed in range(FIRST, FIRST + PLANS)]
    kinds = Counter[str]()
    for plan in plans:
        kinds[plan.words.partition(" ")[0]] += 1
        stages, shards = plan.placed.stages.values(), plan.placed.shards
        kinds["recomputed"] += any(stage.recompute for stage in stages)
        kinds["co-shared"] += any(len(row) > 1 + max(shard.slot for shard in row) for row in shards.values())
        kinds["cut within a stage"] += any(len(stage.devices) > 1 for stage in stages)
    assert kinds.keys() >= {"one", "V", "M", "MLLM", "loop", "wave", "3F1B"} and min(kinds.values()) >= 8, kinds


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("number", [2, 4])
def test_two_hundred_random_plans_have_the_loss_and_gradients_of_one_process(number: int) -> None:
    on_ranks(number, FIRST, PLANS, 1200.0)
