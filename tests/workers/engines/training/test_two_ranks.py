"""The training contract on two ranks: real processes, the product's own launcher, gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.process.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[4]
LIMIT_S = 600.0


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.engines.ranked", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


# a fleet on two ranks is in make test: tests/integration/test_ranks.py
@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
def test_the_training_contract_holds_on_two_ranks() -> None:
    tests = Path("tests/workers/engines")
    code, said = run(
        "2", "-q", str(tests / "training/test_training_contract.py"), str(tests / "value/test_ranked_value.py")
    )
    assert code == 0, said[-8000:]
    assert " passed" in said


SPLIT = ("-q", "tests/workers/engines/training/test_training_contract.py", "-k")


@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
def test_a_layer_split_over_two_ranks_learns_what_one_process_learns() -> None:
    code, said = run("2", *SPLIT, "tensor2 and follows_the_gradient")
    assert code == 0, said[-8000:]
    assert "1 passed" in said


# shares of the batch and of the layers at once
@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S)
def test_two_shares_of_a_batch_each_on_two_ranks_learn_what_one_process_learns() -> None:
    code, said = run(
        "4", *SPLIT, "tensor2 and (agree or gradient or another_backend or frozen or bitwise or muon or checkpoint)"
    )
    assert code == 0, said[-8000:]
    assert " passed" in said


@pytest.mark.integration
def test_a_rank_that_dies_ends_the_others_and_the_launcher_says_which() -> None:
    code, said = run("2", "--kill-rank-1")
    assert code == ExitCode.ENGINE, said
    last = said.strip().splitlines()[-1]
    assert "rank 1 of 2" in last
    assert f"was killed by {signal.SIGKILL.name}" in last
