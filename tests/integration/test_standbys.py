"""Claims about standbys on a real fleet: a generator and the learner are killed, and a standby does
their work."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.fleet.repair.records import RepairRow, read_repairs, read_steps
from pipeline.observability.history import UpdateRow, run_history
from pipeline.process.records import read_reports
from tests.integration.fleet import EMULATED, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

LOAD_S = 6.0
STANDBYS = (
    "run.num_updates=100000",
    "algorithm.groups_per_update=4",
    "observer.enabled=false",
    f"engines.settings.load_s={LOAD_S}",
    "fleet.standby=1",
    "fleet.standby_learner=on",
)


def ready(run: RunningFleet, *names: str) -> bool:
    reports = read_reports(run.run_dir)
    return all(name in reports and reports[name].roles for name in names)


def repair(run: RunningFleet, worker: str) -> RepairRow:
    def found() -> list[RepairRow]:
        return [row for row in read_repairs(run.run_dir)[0] if row.worker == worker]

    (row,) = run.wait_until(found, f"the repair of {worker}")
    return row


def test_a_standby_does_the_work_of_a_killed_generator_and_of_a_killed_learner(tmp_path: Path) -> None:
    with fleet(tmp_path, *EMULATED, *STANDBYS) as run:
        run.wait_until(lambda: ready(run, "standby-1", "learner-standby-2"), "the standbys")
        before = run.workers()
        pids = {name: report.pid for name, report in read_reports(run.run_dir).items()}
        assert not {"standby-1", "learner-standby-2"} & before.keys()
        assert len(run.status()["standbys"]) == 2
        # by which the standbys' models were not made
        assert run.command("update", str(run.run_dir), "--set", "learner.learning_rate=0.0078125")

        kill(run, "generator-1")
        row = repair(run, "generator-1")
        assert (row.standby, row.num_losses) == ("standby-1", 1)
        assert row.detect_s + row.replace_s + row.reload_s < LOAD_S
        after = run.workers()
        assert after["generator-1"]["pid"] == pids["standby-1"]
        assert after["generator-1"]["epoch"] > before["generator-1"]["epoch"]
        assert all(after[name]["pid"] == before[name]["pid"] for name in before if name != "generator-1")

        num_before = run.num_updates()
        kill(run, "learner")
        row = repair(run, "learner")
        assert row.standby == "learner-standby-2"
        assert row.detect_s + row.replace_s + row.reload_s < LOAD_S
        run.wait_until(lambda: run.num_updates() >= num_before + 2, "its updates")
        assert run.workers()["learner"]["pid"] == pids["learner-standby-2"]

        run.wait_until(lambda: ready(run, "standby-3"), "the refill")
        steps = [(step.worker, step.rung, step.outcome) for step in read_steps(run.run_dir)]
        for worker in ("generator-1", "learner"):
            log = (run.run_dir / "logs" / f"{worker}.jsonl").read_text()
            assert "standby_not_used" not in log
            assert (worker, "replace", "begun") in steps and (worker, "replace", "done") in steps
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
        rows = run_history(run.run_dir / "history.jsonl").read_strictly()
        updates = [row.update for row in rows if isinstance(row, UpdateRow)]
        repeated = len(updates) - len(set(updates))
        assert sorted(set(updates)) == list(range(1, max(updates) + 1)) and repeated <= 1
