"""Claims about the one place that acts on workers: in what order, and what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pipeline.fleet.repair.budgets import past_repairs
from pipeline.fleet.repair.records import REPAIRS_NAME, RepairRow, read_repairs, read_steps
from pipeline.supervisor.executor import Executor
from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.processes import Processes
from protocol.errors import LedgerUnavailable
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry

GENERATOR = "generator-0"


class Fences(MemoryRegistry):
    """A registry that writes down its fences, unless it is away."""

    def __init__(self, acts: list[tuple[str, str]]) -> None:
        super().__init__()
        self.acts, self.is_away = acts, False

    async def fence(self, worker: str) -> int:
        if self.is_away:
            raise LedgerUnavailable("no answer")
        self.acts.append(("fence", worker))
        return 7


class Acts(Processes):
    """Processes that write down what is done to whom."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)
        self.acts: list[tuple[str, str]] = []
        self.registry = Fences(self.acts)
        self.executor = Executor(run_dir, self, lambda one: self.acts.append(("start", one.worker)))

    def stop(self, name: str, *, now: bool = False) -> None:
        self.acts.append(("kill" if now else "drain", name))


@pytest.fixture
def acts(tmp_path: Path) -> Acts:
    return Acts(tmp_path)


def one(verb: Verb, reason: str = "", worker: str = GENERATOR) -> Intervention:
    return Intervention(worker, verb, reason, Role.GENERATOR)


@pytest.mark.parametrize(
    ("verb", "done"),
    [
        (Verb.START, ["start"]),
        (Verb.DRAIN, ["drain"]),
        (Verb.KILL, ["kill"]),
        (Verb.REPLACE, ["fence", "kill"]),
        (Verb.EXPEL, ["fence", "kill"]),
        (Verb.FENCE, ["fence"]),
    ],
)
async def test_each_verb_does_the_same_whoever_wants_it_and_fences_before_it_kills(
    acts: Acts, verb: Verb, done: list[str]
) -> None:
    epochs = await acts.executor.carry_out(acts.registry, [one(verb)])
    assert acts.acts == [(what, GENERATOR) for what in done]
    assert epochs == ({GENERATOR: 7} if "fence" in done else {})


async def test_every_act_with_a_reason_is_one_line_of_the_record_and_one_of_the_log(acts: Acts, tmp_path: Path) -> None:
    wanted = [one(verb, f"why {verb}") for verb in Verb if verb is not Verb.START]
    with capture_logs() as logged:
        await acts.executor.carry_out(acts.registry, [*wanted, one(Verb.DRAIN), one(Verb.START)])
    events = ("worker_drained", "worker_killed", "worker_replaced", "worker_evicted", "unmanaged_worker_fenced")
    assert [(row["event"], row["worker"], row["reason"]) for row in logged] == [
        (event, GENERATOR, act.reason) for event, act in zip(events, wanted, strict=True)
    ]
    rows = read_steps(tmp_path)
    assert [(row.worker, row.role, row.rung, row.outcome, row.sentence) for row in rows] == [
        (GENERATOR, "generator", str(act.verb), "done", act.reason) for act in wanted
    ]
    past = past_repairs(rows, rows[0].at_s, 60.0)
    assert not (past.restarts or past.evictions or past.losses), "no budget is used twice"


async def test_an_act_without_the_ledger_is_recorded_with_the_next(acts: Acts, tmp_path: Path) -> None:
    acts.executor.act([one(Verb.KILL, "did not drain in time")])
    assert not read_steps(tmp_path)
    row = RepairRow(1.0, GENERATOR, "generator", "killed", 0.0, 1.0, 2.0, 3.0)
    await acts.executor.record(repairs=[row])
    assert [step.sentence for step in read_steps(tmp_path)] == ["did not drain in time"]
    assert read_repairs(tmp_path) == ([row], 0)


async def test_what_could_not_be_fenced_is_neither_killed_nor_recorded(acts: Acts, tmp_path: Path) -> None:
    acts.registry.is_away = True
    wanted = [one(Verb.DRAIN, "new code"), one(Verb.REPLACE, "it is slow", "generator-1"), one(Verb.DRAIN, "new code")]
    with pytest.raises(LedgerUnavailable):
        await acts.executor.carry_out(acts.registry, wanted)
    await acts.executor.record()
    assert acts.acts == [("drain", GENERATOR)]
    assert [(step.worker, step.rung) for step in read_steps(tmp_path)] == [(GENERATOR, "drain")]


async def test_the_steps_of_a_case_are_the_record_of_its_acts(acts: Acts, tmp_path: Path) -> None:
    act = Intervention(GENERATOR, Verb.REPLACE, "it is slow", Role.GENERATOR, ("stands in compute",), has_case=True)
    with capture_logs() as logged:
        await acts.executor.carry_out(acts.registry, [act])
    assert [(row["reason"], row["stands"]) for row in logged] == [("it is slow", ("stands in compute",))]
    assert not read_steps(tmp_path)


async def test_a_record_that_cannot_be_written_stops_no_act(acts: Acts, tmp_path: Path) -> None:
    (tmp_path / REPAIRS_NAME).mkdir()
    with capture_logs() as logged:
        await acts.executor.carry_out(acts.registry, [one(Verb.KILL, "late")])
    assert acts.acts == [("kill", GENERATOR)]
    assert [row["event"] for row in logged] == ["worker_killed", "repairs_not_written"]
