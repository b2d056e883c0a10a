"""The claim of ``make demo MODEL=smollm2``: a real model learns on two cores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BAR = 60.0
"""Per cent of held-out answers that are right after training; about 13 are before."""


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_real_model_learns_arithmetic_from_its_package_to_the_bar() -> None:
    run = f"smollm2-test-{os.getpid()}"
    try:
        command = ["make", "demo", "MODEL=smollm2", "SEED=0", f"RUN={run}"]
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=7000.0, check=False
        )
        shown = done.stdout + done.stderr
        assert done.returncode == 0, shown[-4000:]
        before, after = map(float, re.findall(r"held-out accuracy: ([\d.]+) % before, ([\d.]+) % after", shown)[-1])
        assert before < 25.0, "the model is to learn it, not to know it"
        assert after >= BAR
        assert "it balances" in shown
    finally:
        shutil.rmtree(ROOT / "runs" / run, ignore_errors=True)
