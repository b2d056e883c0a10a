"""Claims about the escalation of repairs on a real fleet: a worker that cannot start any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.fleet.repair.records import read_steps
from tests.integration.fleet import EMULATED, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LASTING = (
    "run.num_updates=100000",
    "algorithm.groups_per_update=4",
    "supervisor.backoff_s=0.05",
    "observer.enabled=false",
)


def evictions(run: RunningFleet) -> list[str]:
    return [row.sentence for row in read_steps(run.run_dir) if (row.rung, row.outcome) == ("evict", "begun")]


def test_a_generator_that_ends_at_each_start_is_evicted_and_the_run_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, *EMULATED, *LASTING) as run:
        run.wait_until(lambda: run.num_updates() >= 2, "updates")
        own_log = run.run_dir / "logs" / "generator-1.jsonl"
        own_log.unlink()
        own_log.mkdir()
        before = run.workers()
        kill(run, "generator-1")
        (sentence,) = run.wait_until(lambda: evictions(run), "the eviction")
        assert "ended twice by the same error, before it had finished any work" in sentence
        assert "IsADirectoryError" in sentence and "`headrace fleet readmit generator-1`" in sentence
        (words,) = run.wait_until(lambda: run.status()["evicted"], "the eviction in the fleet")
        assert words.startswith("generator-1 is evicted by supervisor since ") and "IsADirectoryError" in words
        assert words in run.command("why", str(run.run_dir))["also"]
        done = run.num_updates()
        run.wait_until(lambda: run.num_updates() >= done + 2, "updates without it")
        after = run.workers()
        assert "generator-1" not in after
        assert all(after[name]["pid"] == before[name]["pid"] for name in before if name != "generator-1")

        own_log.rmdir()
        run.command("fleet", "readmit", "generator-1", str(run.run_dir))
        run.wait_until(lambda: run.workers().get("generator-1", {}).get("progress"), "its work after the readmission")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
