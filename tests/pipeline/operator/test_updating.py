"""Claims about changes of settings by an operator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from pipeline.operator import updating
from pipeline.operator.attached import Attached
from pipeline.runtime.registry.contract import Heartbeat
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.settings_change import SettingsTaken
from pipeline.supervisor.run_folder import run_lock
from pipeline.supervisor.settings_keeper import SettingsKeeper
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.ids import Role
from tests.pipeline.operator.small_run import SmallRun, small_run

KEY = "learner.learning_rate"


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[SmallRun]:
    run = await small_run(tmp_path)
    await run.beat(Role.LEARNER, "learner", updates=2)
    await run.beat(Role.GENERATOR, "generator-0")
    with run_lock(run.run_dir):
        yield run


def at(run: SmallRun) -> Attached:
    return cast("Attached", run)


async def test_a_change_has_number_author_reason_and_what_held_before(run: SmallRun) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"], " too\n slow ")
    assert (change.number, change.sets, change.former, change.reason) == (1, {KEY: "0.5"}, {KEY: "1e-06"}, "too slow")
    assert "@" in change.by
    second = await updating.update(at(run), ["run.num_updates=900"])
    assert (second.number, second.holds) == (2, {KEY: "0.5", "run.num_updates": "900"})
    with pytest.raises(ConfigError, match="holds already"):
        await updating.update(at(run), [f"{KEY}=0.5"])
    assert len(await run.registry.settings_changes()) == 2


async def test_the_updates_that_the_learner_has_made_bound_the_runs_length(run: SmallRun) -> None:
    with pytest.raises(ConfigError, match="has made 2 updates"):
        await updating.update(at(run), ["run.num_updates=2"])
    assert (await updating.update(at(run), ["run.num_updates=3"])).sets == {"run.num_updates": "3"}


async def test_a_rollback_sets_what_held_before_the_newest_change_that_stands(run: SmallRun) -> None:
    with pytest.raises(ConfigError, match="no change stands"):
        await updating.roll_back(at(run))
    for value in ("0.5", "0.25"):
        await updating.update(at(run), [f"{KEY}={value}"])
    assert (await updating.roll_back(at(run))).sets == {KEY: "0.5"}
    undone = await updating.roll_back(at(run), "worse")
    assert (undone.number, undone.sets, undone.undoes, undone.reason) == (4, {KEY: "1e-06"}, 1, "worse")
    with pytest.raises(ConfigError, match="no change stands"):
        await updating.roll_back(at(run))


async def test_a_run_without_a_supervisor_is_not_changed(tmp_path: Path) -> None:
    run = await small_run(tmp_path)
    with pytest.raises(ConfigError, match="no supervisor"):
        await updating.update(at(run), [f"{KEY}=0.5"])
    assert await run.registry.settings_changes() == []


async def test_the_command_waits_for_supervisor_and_learner_and_for_no_other(run: SmallRun) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"])
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(updating.wait_until_taken(at(run), change, 60.0, run.clock))
        await run.clock.advance(1.0)
        await SettingsKeeper(run.config, run.run_dir).keep(run.registry, [])
        await run.clock.advance(1.0)
        assert not waiting.done()
        beat = await run.beat(Role.LEARNER, "learner", updates=2)
        taken = SettingsTaken(number=1, first_update=3)
        assert run.registry.beat(msgspec.structs.replace(beat, settings=taken))
        await run.clock.advance(1.0)
        found = await waiting
    assert [(one.worker, one.is_taken, one.first_update) for one in found] == [
        ("supervisor", True, 0),
        ("learner", True, 3),
    ]


async def test_the_wait_has_a_deadline_and_names_who_has_not_taken_the_change(run: SmallRun) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"])
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(updating.wait_until_taken(at(run), change, 5.0, run.clock))
        await run.clock.advance(5.1)
        found = await waiting
    assert [(one.worker, one.is_taken) for one in found] == [("supervisor", False), ("learner", False)]


async def test_a_ledger_without_an_answer_is_asked_again_while_the_run_goes_on(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"])

    async def mute(*_: object) -> list[Heartbeat]:
        raise LedgerUnavailable("no answer")

    async with asyncio.TaskGroup() as tasks:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRegistry, "heartbeats", mute)
            waiting = tasks.create_task(updating.wait_until_taken(at(run), change, 5.0, run.clock))
            await run.clock.advance(3.0)
            assert not waiting.done()
        await run.clock.advance(2.5)
        assert [one.worker for one in await waiting] == ["supervisor", "learner"]


async def test_a_run_that_ends_before_all_have_answered_is_called_so(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"])

    async def gone(*_: object) -> list[Heartbeat]:
        raise LedgerUnavailable("no such socket")

    monkeypatch.setattr(MemoryRegistry, "heartbeats", gone)
    monkeypatch.setattr("pipeline.supervisor.run_folder.supervisor_pid", lambda _: None)
    with pytest.raises(ConfigError, match=r"has ended before all had answered; change 1 is recorded"):
        await updating.wait_until_taken(at(run), change, 60.0, run.clock)
