"""A start says its phases, and the next of the same kind says them before."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.start_phases import StartPhases
from pipeline.fleet.state import Worker
from pipeline.fleet.status import RunSnapshot
from pipeline.preflight.passed import PassedCheck
from pipeline.runtime.registry.contract import Incarnation, RunState, RunStatus, WaitingFor
from protocol.ids import Role
from tests.pipeline.op_config import op_config


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def snapshot(sampled: float | None) -> RunSnapshot:
    beats: list[Worker] = []
    for role in (Role.LEARNER, *([] if sampled is None else [Role.GENERATOR])):
        who = Incarnation(role=role, worker=str(role), epoch=1)
        counters = {} if role is Role.LEARNER else {"sampled_tokens": sampled or 0.0}
        beats.append(
            Worker(
                who=who, pid=1, host="h", at_s=0.0, started_s=0.0, progress=0, progress_at_s=0.0,
                waiting_for=WaitingFor.STARTING, counters=counters,
            )
        )  # fmt: skip
    return RunSnapshot(RunStatus(RunState.RUNNING), beats, None, ())  # pyright: ignore[reportArgumentType]


def start(kept: PassedCheck, *snapshots: tuple[float, RunSnapshot]) -> tuple[str, list[str]]:
    """What is said before and during a start with snapshots at these seconds after its checks of 3 s."""
    clock = Clock()
    phases = StartPhases(clock)
    clock.now_s += 3.0
    before, said = phases.checked(kept), []
    for at_s, seen in snapshots:
        clock.now_s = 103.0 + at_s
        said.append(phases.observe(seen))
    return before, said


def test_the_phases_of_a_start_are_the_estimate_of_the_next_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = PassedCheck("start", op_config(tmp_path))
    seen = [(1.0, snapshot(None)), (9.0, snapshot(0)), (11.0, snapshot(0)), (14.0, snapshot(20)), (15.0, snapshot(40))]
    words = "took 17 s to the first tokens (checks 3, imports 9, engine and weights 5)"
    assert start(kept, *seen) == ("", ["", "", "", f"this start {words}", ""])
    assert (
        start(PassedCheck("start", op_config(tmp_path, "run.name=next")))[0] == f"the last start of this kind {words}"
    )
    assert start(PassedCheck("start", op_config(tmp_path, "generation.num_slots=9")))[0] == ""


def test_a_run_whose_generators_are_at_work_already_gives_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = PassedCheck("start", op_config(tmp_path))
    assert start(kept, (1.0, snapshot(500)), (2.0, snapshot(900)))[1] == ["", ""]
    assert kept.notes() is None
