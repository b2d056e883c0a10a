"""Claims about verdicts that take their time, as the settings allow, and the judges of hanging."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pipeline.config.training import RewardSection
from pipeline.process.work import Meter, listening
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind

SLOW = """import time

def judge(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return 1.0

def relative(prompts, completions, **columns):
    time.sleep({seconds})
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("whole_group", [False, True])
async def test_a_verdict_within_its_limit_is_work_that_moves_all_the_time(tmp_path: Path, whole_group: bool) -> None:
    (tmp_path / "patient.py").write_text(SLOW.format(seconds=3.5), encoding="utf-8")
    config = RewardSection(timeout_s=20.0, path=(tmp_path,))
    meter, longest_s, name = Meter(), 0.0, "patient:relative" if whole_group else "patient:judge"
    response = Response(verifier=name, response_text="r", answer="a")
    with listening(meter):
        async with VerifierPool(config, configured=(name,)) as pool:
            ask = pool.score_group(name, [response]) if whole_group else pool.score([response])
            async with asyncio.TaskGroup() as tasks:
                judging = tasks.create_task(ask)
                meter.begin()
                while not judging.done():
                    await asyncio.sleep(0.1)
                    longest_s = max(longest_s, time.monotonic() - meter.moved_s)
            (verdict,) = judging.result()
    assert isinstance(verdict, Verdict)
    assert verdict.judged
    assert longest_s < 2.5, "every judge of hanging takes a worker for moving whose pieces end"


async def test_a_verifier_that_keeps_no_limit_is_no_work_after_it(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(SLOW.format(seconds=3600), encoding="utf-8")
    meter = Meter()
    with listening(meter):
        async with VerifierPool(RewardSection(timeout_s=1.0, path=(tmp_path,)), configured=("endless:judge",)) as pool:
            response = Response(verifier="endless:judge", response_text="r", answer="a")
            (late,) = await pool.score([response])
            assert isinstance(late, VerifierFailure) and late.kind is VerifierFailureKind.LATE
            steps = meter.report().steps
            await asyncio.sleep(2.5)
    assert meter.report().steps == steps
