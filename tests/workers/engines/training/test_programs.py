"""Claims about programs of plans on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


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
    on_ranks(2, 0, 4, 100.0)


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("number", [2, 4])
def test_two_hundred_random_plans_have_the_loss_and_gradients_of_one_process(number: int) -> None:
    on_ranks(number, 1000, 100, 1200.0)
