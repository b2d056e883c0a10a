"""Claims about a real fleet that is given code by which its learner hangs, or is slow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.process.exit_codes import ExitCode
from tests.integration.fleet import RunningFleet, fleet
from tests.integration.test_worker_code import SMALL, other, versions

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HANGS = """

class _Hangs(Learner):
    async def _update(self, claim, *, wait_s):
        self.ctx.waiting_for(WaitingFor.COMPUTE)
        time.sleep(1e6)


Learner = _Hangs
"""
SLOW = """

class _Slow(Learner):
    async def _update(self, claim, *, wait_s):
        await super()._update(claim, wait_s=wait_s)
        await self.ctx.clock.sleep(1.0)


Learner = _Slow
"""


def rollback(run: RunningFleet, number: int) -> Any:
    changes = [shown["change"] for shown in run.command("update", str(run.run_dir))]
    return next((change for change in changes if change["undoes"] == number), None)


@pytest.mark.long
def test_code_that_hangs_the_learner_or_slows_it_is_rolled_back_and_the_run_goes_on(tmp_path: Path) -> None:
    hangs = other(tmp_path / "hangs", workers__learner__learner=HANGS)
    slow = other(tmp_path / "slow", workers__learner__learner=SLOW)
    with fleet(tmp_path, *SMALL, "supervisor.stuck_after_s=8", "observer.enabled=false") as run:
        folder = str(run.run_dir)
        run.wait_until(lambda: run.num_updates() >= 8, "updates to compare with")
        for code, reason in (
            (hangs, "learner, which used it, was stuck: at compute without progress for "),
            (slow, "the rate of updates fell by a third or more: "),
        ):
            # all workers may go by it before it fails
            number = run.rolled_back("update", folder, "--code", code, "--timeout", "0")["change"]["number"]
            undone = run.wait_until(partial(rollback, run, number), "its rollback")
            assert undone["reason"].startswith(reason)
            assert (undone["sets"], undone["by"]) == ({"code.workers": '""'}, "supervisor")
            run.wait_until(lambda: {*versions(run).values()} == {""}, "the code of the start")
            made = run.num_updates()
            run.wait_until(lambda made=made: run.num_updates() >= made + 3, "updates after the rollback")
        run.command("down", folder)
        assert run.finish() == ExitCode.OK
        audit = run.audit()
        assert audit["balances"] and not audit["groups"]["dropped"].get("dead_letter")
