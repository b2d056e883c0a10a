"""Claims about whole fleets: real processes, real Redis, real ZeroMQ, and a real (small) model
where learning is claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_resolved
from pipeline.observability.start_record import read_starts
from tests.integration.fleet import EMULATED, fleet, kill
from tests.pipeline.observability.rows import answers_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SMALL = (
    "run.num_updates=6",
    "algorithm.groups_per_update=4",
    "algorithm.group_size=8",
    "evaluation.num_prompts=32",
    "checkpoint.every_updates=2",
)


def test_a_run_trains_evaluates_reports_and_balances(tmp_path: Path) -> None:
    with fleet(tmp_path, *SMALL) as run:
        assert run.finish() == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"] is True
        assert audit["groups"]["trained"] == 6 * 4
        assert audit["trajectories"]["trained"] == 6 * 4 * 8
        assert sum(audit["tokens"]["in_flight"].values()) == 0
        paths = [run.run_dir, *run.run_dir.rglob("*")]
        assert any(path.suffix == ".safetensors" for path in paths)
        assert [path for path in paths if path.lstat().st_mode & 0o077] == [], "the owner's alone, the model too"
        assert "types: float32 (" in run.output.read_text()
        assert read_resolved(run.run_dir).model.dtype == "float32", "decided, so that a resume keeps it"
        assert "learner float32" in read_starts(run.run_dir)[0][0].start.types
        report = json.loads((run.run_dir / "report.json").read_text())
        assert report["num_updates"] == 6
        assert report["num_held_out"] == 32
        assert report["max_staleness"] <= 2
        answers = answers_of(run.run_dir / "report.html")
        assert answers["runs/test/history"]["num_updates"] == 6
        assert answers["runs/test/audit"]["balances"] is True
        assert any((run.run_dir / "checkpoints").glob("*/model/model.safetensors"))


# deaths in a fleet are in test_faults, too; how much is generated again, in test_continuation
@pytest.mark.long
def test_killed_generators_and_scorers_are_replaced_and_the_ledger_balances(tmp_path: Path) -> None:
    # the dead are known by their ends and their epochs: no living worker is taken for one of them,
    # however busy the machine
    patient = ("ledger.lease_s=60", "supervisor.silent_after_s=60", "supervisor.stuck_after_s=120")
    with fleet(tmp_path, *SMALL, *EMULATED, *patient, "run.num_updates=1000", "ledger.scoring_deadline_s=2") as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")
        before: dict[str, dict[str, Any]] = {}
        for name in ("generator-0", "reward-0", "reference-0"):
            before[name] = kill(run, name)
            assert run.audit()["balances"] is True
        seen = run.num_updates()

        def all_replaced() -> bool:
            now = run.workers()
            return all(
                name in now and now[name]["epoch"] > before[name]["epoch"] for name in ("generator-0", "reward-0")
            )

        run.wait_until(all_replaced, "new incarnations of the killed workers")
        run.wait_until(lambda: run.num_updates() >= seen + 3, "updates after the kills")
        assert run.audit()["balances"] is True
        run.command("down", str(run.run_dir))
        assert run.finish() == 0
        audit = run.audit()
        assert audit["balances"] is True
        again = {row["who"]: row for row in audit["rework"]}
        killed = again.pop(f"generator-0#{before['generator-0']['epoch']}")
        assert killed["num_stored"] > 0
        assert killed["num_unwritten"] <= killed["limit"], "more than a window for each trajectory is generated again"
        assert not any(row["num_unwritten"] for row in again.values()), "a generator that drained left tokens behind"


# test_power_cut resumes a run from less
@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with fleet(tmp_path, *SMALL, *EMULATED, "run.num_updates=1000") as run:
        run.wait_until(lambda: run.num_updates() >= 3, "the third update")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0
        stopped_at = run.num_updates()
        first = run.audit()
        assert first["balances"] is True
        assert first["groups"]["trained"] == 4 * stopped_at
    with fleet(tmp_path, f"run.num_updates={stopped_at + 2}", resume=run.run_dir) as resumed:
        assert resumed.finish() == 0, resumed.output.read_text()
        assert resumed.num_updates() == stopped_at + 2
        second = resumed.audit()
        assert second["balances"] is True
        assert second["groups"]["trained"] == 4 * (stopped_at + 2)
        assert second["groups"]["admitted"] > first["groups"]["admitted"]


# test_elastic changes a fleet, test_fleet_size has the bounds
@pytest.mark.long
def test_scaling_changes_the_fleet_while_it_runs(tmp_path: Path) -> None:
    with fleet(tmp_path, *SMALL, *EMULATED, "run.num_updates=1000", "fleet.max_workers=6") as run:
        run.wait_until(lambda: run.num_updates() >= 1, "the first update")
        assert "expected at most 6 on this machine: the value of fleet.max_workers" in run.refused(
            "scale", "generator=5", "--run", str(run.run_dir)
        )
        run.command("scale", "generator=3", "--run", str(run.run_dir))
        run.wait_until(lambda: "generator-2" in run.workers(), "the third generator")
        run.command("scale", "generator=1", "--run", str(run.run_dir))
        run.wait_until(
            lambda: {n for n in run.workers() if n.startswith("generator")} == {"generator-0"}, "one generator"
        )
        assert run.audit()["balances"] is True
        run.command("down", str(run.run_dir))
        assert run.finish() == 0
