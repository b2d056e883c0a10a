"""Claims about generators whose number follows demand: a real supervisor, ledger and processes. The
learner waits, and generators are busy, by their script."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.observability.status import RunSnapshot
from pipeline.preflight.checks import preflight
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Drain, Fleet, WaitingFor
from pipeline.supervisor.generator_demand import GeneratorDemand
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.supervised import Run
from tests.pipeline.supervisor.test_autoscaler import beat

pytestmark = pytest.mark.timeout(90)


def command(run: Run, *words: str) -> str:
    """Run a command beside the supervisor's loop, which has this thread."""
    with ThreadPoolExecutor(1) as beside:
        result = beside.submit(CliRunner().invoke, headrace, [*words, "--run", str(run.run_dir)]).result(60)
    assert result.exception is None, result.output
    return result.output


def test_a_starved_run_gets_generators_until_their_number_is_set_by_hand(tmp_path: Path) -> None:
    run = Run(tmp_path, "fleet.max_generators=3", "fleet.grow_after_s=0.2", "launch.poll_s=0.1", generator="busy")
    told: list[str] = []
    asked: list[str] = []

    def react(snapshot: RunSnapshot) -> None:
        names = sorted(beat.who.worker for beat in snapshot.heartbeats if beat.who.role is Role.GENERATOR)
        if not asked and len(names) == 3:
            told.append(json.loads(command(run, "status", "--json"))["demand"])
            asked.append(command(run, "scale", "generator=1"))
        elif len(asked) == 1 and names == ["generator-0"]:
            told.append(json.loads(command(run, "status", "--json"))["demand"])
            asked.append(command(run, "scale", "generator=auto"))
        elif len(asked) == 2 and len(names) > 1:
            run.interrupt(snapshot)

    run.react = react
    with run_lock(run.run_dir):
        assert run.until_end().exit_code == ExitCode.OK
    assert (
        told[0].startswith("generators by demand (1 to 3): 3 wanted")
        and "since the learner waits 100% of its" in told[0]
    )
    assert told[1].startswith("generators by hand: 1 wanted") and "generator=auto" in told[1]
    assert "until `headrace scale generator=auto`" in asked[0] and "until" not in asked[1]


async def test_another_change_of_the_fleet_is_never_undone(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    demand = GeneratorDemand(op_config(tmp_path, "fleet.max_generators=4", "fleet.grow_after_s=1"))
    seen = Fleet({Role.LEARNER: 1, Role.GENERATOR: 1, Role.REWARD: 1})
    await registry.set_fleet(seen)
    starved = [
        beat("learner", Role.LEARNER, WaitingFor.INPUT, policy_version=0),
        beat("generator-0", Role.GENERATOR, WaitingFor.COMPUTE, policy_version=0),
    ]
    for second in range(4):
        seen = await demand.follow(registry, seen, starved, ["generator-0"], float(second))
    drains = (Drain("reward-0", 1, is_replaced=True),)
    changed = Fleet({**seen.counts, Role.REWARD: 2}, demand=seen.demand, drains=drains)
    await registry.set_fleet(changed)
    assert await demand.follow(registry, seen, starved, ["generator-0"], 5.0) == seen
    assert await registry.fleet() == changed
    after = await demand.follow(registry, changed, starved, ["generator-0"], 6.0)
    assert after == await registry.fleet()
    assert after.counts == {Role.LEARNER: 1, Role.GENERATOR: 2, Role.REWARD: 2}
    assert after.drains == drains


async def test_without_a_largest_number_the_fleet_stays_as_it_is(tmp_path: Path) -> None:
    registry, fleet = MemoryRegistry(), Fleet({Role.GENERATOR: 1})
    demand = GeneratorDemand(op_config(tmp_path))
    starved = [beat("learner", Role.LEARNER, WaitingFor.INPUT, policy_version=0)]
    for second in range(0, 4000, 100):
        assert await demand.follow(registry, fleet, starved, [], float(second)) is fleet


def test_limits_that_exclude_the_start_or_exceed_the_machine_are_refused(tmp_path: Path) -> None:
    for overrides in (("fleet.max_generators=2", "fleet.generator=3"), ("fleet.max_generators=9", "fleet.generator=0")):
        with pytest.raises(
            ConfigError, match=r"fleet\.generator is [03]; expected a number from fleet\.min_generators"
        ):
            op_config(tmp_path, *overrides)
    with pytest.raises(ConfigError, match="the fleet has 500002 workers"):
        preflight(op_config(tmp_path, "fleet.max_generators=500000"))
