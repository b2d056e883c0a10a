"""Claims about what an operator may ask of a run: the refusals, and what is wanted afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import msgspec
import pytest

from pipeline.cli.common import _plain as as_plain
from pipeline.config.resolved import LightFleet
from pipeline.operator import steering
from pipeline.operator.attached import Attached
from pipeline.runtime.registry.contract import Drain, Fleet, RunState, RunStatus, WaitingFor
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.operator.small_run import COUNTS, GUEST, SmallRun, small_run


async def drain(run: SmallRun, worker: str, *, replace: bool = False) -> Fleet:
    return await steering.drain(cast("Attached", run), worker, replace)


async def refusal(run: SmallRun, worker: str, *, replace: bool = False) -> str:
    before = await run.registry.fleet()
    with pytest.raises(ConfigError) as refused:
        await drain(run, worker, replace=replace)
    assert await run.registry.fleet() == before
    return str(refused.value)


async def test_a_drain_lowers_its_role_by_one_and_a_repeat_changes_nothing(run: SmallRun) -> None:
    fleet = await drain(run, "generator-0")
    assert fleet.counts == {**COUNTS, Role.GENERATOR: 1}
    assert fleet.drains == (Drain("generator-0", 3),)
    assert await drain(run, "generator-0") == fleet
    assert as_plain(fleet)["drains"] == [{"worker": "generator-0", "epoch": 3, "is_replaced": False}]
    assert await run.registry.fleet() == fleet
    grown = await steering.change_fleet(cast("Attached", run), {Role.GENERATOR: 2})
    assert grown.drains == (), "a role that grows takes the name back"


async def test_an_unknown_worker_is_answered_with_those_that_exist(run: SmallRun) -> None:
    await run.beat(Role.REWARD, GUEST)
    names = f"generator-0, generator-1, learner, reward-0, {GUEST}"
    assert f"has no worker generator-7\\x1b[31m; it has: {names}" in await refusal(run, "generator-7\x1b[31m")
    await run.registry.set_fleet(Fleet({**COUNTS, Role.GENERATOR: 200}))
    assert "and 183 more" in await refusal(run, "x")


@pytest.mark.parametrize("replace", [False, True])
async def test_the_learner_is_not_drained(run: SmallRun, replace: bool) -> None:
    assert "the run's only learner" in await refusal(run, "learner", replace=replace)


async def test_the_last_of_a_role_is_replaced_or_stays(run: SmallRun) -> None:
    told = await refusal(run, "reward-0")
    assert "the run's last reward" in told and "--replace" in told
    assert (await drain(run, "reward-0", replace=True)).counts == COUNTS
    await run.beat(Role.REWARD, GUEST)
    fleet = await drain(run, GUEST)
    assert (fleet.counts, fleet.drains[-1]) == (COUNTS, Drain(GUEST, 1))
    await run.beat(Role.REWARD, f"{GUEST[:-1]}1")
    assert (await drain(run, "reward-0")).counts[Role.REWARD] == 0, "a joined host's works on"


async def test_two_drains_in_a_row_leave_a_role_its_last_worker(run: SmallRun) -> None:
    await run.beat(Role.GENERATOR, "generator-1")
    await drain(run, "generator-1")
    assert "the run's last generator" in await refusal(run, "generator-0"), "generator-1 still drains"


async def test_a_drain_right_after_a_smaller_scale_leaves_a_role_its_last_worker(run: SmallRun) -> None:
    for number in (1, 2):
        await run.beat(Role.GENERATOR, f"generator-{number}")
    await run.registry.set_fleet(Fleet({**COUNTS, Role.GENERATOR: 3}))
    await steering.change_fleet(cast("Attached", run), {Role.GENERATOR: 1})
    assert "the run's last generator" in await refusal(run, "generator-0"), "the others still drain"


async def test_a_joined_worker_that_is_silent_or_leaves_is_not_counted_on(run: SmallRun) -> None:
    await run.beat(Role.REWARD, GUEST, waiting_for=WaitingFor.DRAINING)
    assert "the run's last reward" in await refusal(run, "reward-0"), "it drains"
    await run.beat(Role.REWARD, GUEST)
    await run.clock.advance(6.0)
    await run.beat(Role.REWARD, "reward-0", epoch=3)
    assert "the run's last reward" in await refusal(run, "reward-0"), "it is silent"
    await run.beat(Role.REWARD, GUEST)
    await drain(run, GUEST)
    assert "the run's last reward" in await refusal(run, "reward-0"), "it has yet to read its drain"
    await run.beat(Role.REWARD, GUEST, epoch=2)
    assert (await drain(run, "reward-0")).counts[Role.REWARD] == 0, "a newer incarnation works on"


async def test_a_worker_that_is_not_there_cannot_be_replaced(run: SmallRun) -> None:
    assert "generator-1 is not running" in await refusal(run, "generator-1", replace=True)
    assert (await drain(run, "generator-1")).counts[Role.GENERATOR] == 1


async def test_generators_by_demand_are_not_drained_below_their_least(run: SmallRun) -> None:
    run.settings = msgspec.structs.replace(run.settings, fleet=LightFleet(min_generators=2, max_generators=8))
    assert "fleet.min_generators=2" in await refusal(run, "generator-0")
    await run.registry.set_fleet(Fleet(COUNTS, is_by_hand=True))
    assert (await drain(run, "generator-0")).is_by_hand


async def test_a_run_that_does_not_run_is_not_steered(run: SmallRun) -> None:
    await run.registry.set_run_status(RunStatus(RunState.STOPPING))
    assert "is stopping, not running" in await refusal(run, "generator-0")


async def test_a_change_during_a_supervisors_start_is_told_to_wait(run: SmallRun) -> None:
    before = await run.registry.fleet()
    await run.registry.set_run_status(RunStatus(RunState.RUNNING, supervisor=os.getpid() + 1))
    assert "is still starting; try again in a moment" in await refusal(run, "generator-0")
    assert await run.registry.fleet() == before
    await run.registry.set_run_status(RunStatus(RunState.RUNNING, supervisor=os.getpid()))
    assert (await drain(run, "generator-0")).drains


async def test_a_role_is_not_scaled_beyond_its_gpus(tmp_path: Path) -> None:
    run = await small_run(tmp_path, "fleet.gpus.generator=[1,2]", fleet=COUNTS)
    await run.beat(Role.LEARNER, "learner", epoch=3)
    with run_lock(run.run_dir):
        grown = await steering.change_fleet(cast("Attached", run), {Role.GENERATOR: 2})
        assert grown.counts[Role.GENERATOR] == 2
        with pytest.raises(ConfigError, match="has 2 GPUs; expected 3 for 3 generator"):
            await steering.change_fleet(cast("Attached", run), {Role.GENERATOR: 3})
