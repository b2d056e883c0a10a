"""Claims about the ladder on a supervised run: real processes, a real registry, and the record."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.incidents.file import IncidentFile
from pipeline.incidents.records import IncidentRecord, IncidentStep
from pipeline.observability.repairs import StepRow, read_steps
from pipeline.observability.status import RunSnapshot
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import RunState
from pipeline.supervisor.repairing import made_ladder
from tests.pipeline.supervisor.supervised import Run

pytestmark = pytest.mark.timeout(90)
ONE_OF_TWO = ("fleet.generator=2", "supervisor.max_data_failures=2")


def steps(run: Run, rung: str, outcome: str) -> list[StepRow]:
    return [row for row in read_steps(run.run_dir) if (row.rung, row.outcome) == (rung, outcome)]


def breaking(run: Run) -> None:
    """Break generator-1 once both generators work; end the run when it was evicted and is gone."""
    broken: list[int] = []

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.heartbeats if beat.progress > 0}
        if not broken and {"generator-0", "generator-1"} <= pids.keys():
            broken.append(pids["generator-0"])
            (run.run_dir / "break-generator-1").touch()
        elif broken and steps(run, "evict", "begun") and "generator-1" not in snapshot.absent:
            assert pids["generator-0"] == broken[0], "the healthy one was left alone"
            run.interrupt(snapshot)

    run.react = react


def test_a_worker_that_breaks_at_each_start_is_evicted_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, *ONE_OF_TWO, generator="breaks")
    breaking(run)
    outcome = run.until_end()
    assert (outcome.exit_code, outcome.status.state) == (ExitCode.OK, RunState.STOPPING)
    (evicted,) = steps(run, "evict", "begun")
    assert evicted.worker == "generator-1" and evicted.role == "generator" and evicted.case == 1
    assert "ValueError: this one is broken" in evicted.sentence and "`headrace readmit generator-1`" in evicted.sentence
    (failed,) = steps(run, "restart", "failed")
    assert "ended twice by the same error" in failed.sentence
    assert made_ladder(run.config, run.run_dir)._next == 2, "the next supervisor's cases have other numbers"


def test_under_advice_the_run_ends_as_ever_and_the_record_has_what_would_be_done(tmp_path: Path) -> None:
    run = Run(tmp_path, *ONE_OF_TWO, "recovery.policy=advise", generator="breaks")
    breaking(run)
    outcome = run.until_end()
    assert (outcome.exit_code, outcome.status.state) == (ExitCode.CONFIG, RunState.FAILED)
    assert "generator-1 ended twice by the same error" in outcome.status.detail
    (advised,) = steps(run, "evict", "advised")
    assert advised.worker == "generator-1" and not steps(run, "evict", "begun")


@pytest.mark.parametrize(("policy", "is_restarted"), [("act", True), ("own_signs", False)])
def test_an_incident_restarts_its_worker_only_where_the_policy_says_so(
    tmp_path: Path, policy: str, is_restarted: bool
) -> None:
    run = Run(
        tmp_path, "fleet.generator=2", "observer.enabled=true", f"recovery.policy={policy}", "recovery.tolerate_s=0.5",
        generator="busy",
    )  # fmt: skip
    first: dict[str, int] = {}

    def react(snapshot: RunSnapshot) -> None:
        pids = {beat.who.worker: beat.pid for beat in snapshot.heartbeats}
        if not first and {"generator-1", "observer", "learner"} <= pids.keys():
            first.update(pids)
            record = IncidentRecord(
                number=7, step=IncidentStep.OPENED, at_s=time.time() + 60.0, component="generator-1", kind="hung",
                sentence="no progress for 9 s",
            )  # fmt: skip
            IncidentFile(run.run_dir).append([record])
        is_done = is_restarted and pids.get("generator-1", first.get("generator-1")) != first.get("generator-1")
        if first and (is_done or (not is_restarted and steps(run, "restart", "advised"))):
            assert {name: pid for name, pid in pids.items() if name != "generator-1"}.items() <= first.items()
            assert (pids["generator-1"] != first["generator-1"]) is is_restarted
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK
    (begun,) = steps(run, "tolerate", "begun")
    assert begun.sentence == "incident 7: generator-1 is hung: no progress for 9 s"
    assert [len(steps(run, rung, "begun")) for rung in ("isolate", "restart")] == [is_restarted] * 2
