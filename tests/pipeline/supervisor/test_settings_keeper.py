"""Claims about the supervisor's part in changes of a run's settings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from pipeline.config import CHANGES_NAME
from pipeline.config.changing import with_settings
from pipeline.config.load import read_resolved, write_resolved
from pipeline.config.schema import RunConfig
from pipeline.fleet.state import Worker
from pipeline.observability.settings_changes import read_changes
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.runtime.registry.settings_change import SettingsChange, SettingsTaken, after, standing
from pipeline.supervisor.settings_keeper import SettingsKeeper
from protocol.errors import ConfigError
from protocol.ids import Incarnation, Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.op_config import op_config
from tests.pipeline.runtime.registries import worker_of
from tests.pipeline.supervisor.supervised import Run

KEY = "learner.learning_rate"
LEARNER = Incarnation(Role.LEARNER, "learner", 1)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = op_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    write_resolved(config, config.run_dir)
    return config


async def changed(config: RunConfig, registry: MemoryRegistry, *values: str) -> None:
    for value in values:
        last = await registry.last_settings_change()
        former = last.holds[KEY] if last else "1e-06"
        assert await registry.add_settings_change(after(last, {KEY: value}, {KEY: former}, by="ann@a", at_s=1.0))
    await SettingsKeeper(config, config.run_dir).apply_changes(registry, [])


async def test_a_runs_configuration_has_its_changes(config: RunConfig) -> None:
    registry = MemoryRegistry()
    await changed(config, registry, "0.5", "0.25")
    assert read_changes(config.run_dir) == await registry.settings_changes()
    assert read_resolved(config.run_dir).learner.learning_rate == 0.25
    assert with_settings(config, {KEY: "0.25"}) == read_resolved(config.run_dir)


def test_a_damaged_file_of_changes_is_refused_by_name(config: RunConfig) -> None:
    (config.run_dir / CHANGES_NAME).write_bytes(b"[{")
    with pytest.raises(ConfigError, match=CHANGES_NAME):
        read_resolved(config.run_dir)


async def test_a_resume_keeps_what_holds_and_its_own_set_is_a_new_change(config: RunConfig) -> None:
    registry = MemoryRegistry()
    await changed(config, registry, "0.5")
    await SettingsKeeper(read_resolved(config.run_dir), config.run_dir).begin(registry)
    assert len(await registry.settings_changes()) == 1
    given = with_settings(read_resolved(config.run_dir), {KEY: "0.125"})
    await SettingsKeeper(given, config.run_dir).begin(registry)
    last = await registry.last_settings_change()
    assert last is not None
    assert (last.number, last.sets, last.former) == (2, {KEY: "0.125"}, {KEY: "0.5"})
    assert read_resolved(config.run_dir).learner.learning_rate == 0.125


async def test_changes_that_a_learner_gave_up_are_rolled_back_once(config: RunConfig) -> None:
    registry, keeper = MemoryRegistry(), SettingsKeeper(config, config.run_dir)
    await changed(config, registry, "0.5", "0.25", "0.125")
    taken = SettingsTaken(number=3, first_update=7, failed=2, failed_to=3, why="a step was not finite")
    beats = [msgspec.structs.replace(worker_of(LEARNER), settings=taken)]
    for _ in range(3):
        await keeper.apply_changes(registry, beats)
    changes = await registry.settings_changes()
    assert len(changes) == 4
    assert (changes[-1].sets, changes[-1].undoes, changes[-1].by) == ({KEY: "0.5"}, 2, "learner")
    assert changes[-1].reason == "a step was not finite"
    assert [change.number for change in standing(changes)] == [1]
    assert read_changes(config.run_dir) == changes


def gave_up(who: Incarnation, failed: int, failed_to: int = 0, silent_s: float = 0.0) -> Worker:
    taken = SettingsTaken(number=max(failed, failed_to), failed=failed, failed_to=failed_to, why="not finite")
    return msgspec.structs.replace(worker_of(who), settings=taken, silent_s=silent_s)


async def test_a_change_that_corrects_a_failed_one_stands_after_its_rollback(config: RunConfig) -> None:
    registry, keeper = MemoryRegistry(), SettingsKeeper(config, config.run_dir)
    await changed(config, registry, "0.5")
    beats = [gave_up(LEARNER, 1)]
    await keeper.apply_changes(registry, beats)
    # the learner reports it until it has taken the rollback
    await changed(config, registry, "0.25")
    await keeper.apply_changes(registry, beats)
    changes = await registry.settings_changes()
    assert [change.undoes for change in changes] == [0, 1, 0]
    assert [change.number for change in standing(changes)] == [3]


async def test_a_change_that_comes_before_the_rollback_of_a_failed_one_stands(config: RunConfig) -> None:
    registry, keeper = MemoryRegistry(), SettingsKeeper(config, config.run_dir)
    await changed(config, registry, "0.5", "0.25")
    await keeper.apply_changes(registry, [gave_up(LEARNER, 1)])
    changes = await registry.settings_changes()
    assert [change.number for change in standing(changes)] == [2]
    assert (changes[-1].undone, changes[-1].holds) == ((1,), {KEY: "0.25"})


async def test_a_report_counts_from_a_live_worker_of_a_role_that_tries_the_change(config: RunConfig) -> None:
    registry, keeper = MemoryRegistry(), SettingsKeeper(config, config.run_dir)
    await changed(config, registry, "0.5")
    others = [Incarnation(role, f"{role}-0", 1) for role in (Role.GENERATOR, Role.REWARD, Role.OBSERVER)]
    await keeper.apply_changes(registry, [gave_up(LEARNER, 1, silent_s=6.0), *(gave_up(who, 1) for who in others)])
    assert [change.number for change in standing(await registry.settings_changes())] == [1]
    await keeper.apply_changes(registry, [gave_up(LEARNER, 1, silent_s=1.0)])
    assert standing(await registry.settings_changes()) == []


@pytest.mark.parametrize("is_own", [True, False])
def test_only_a_process_that_the_supervisor_started_can_have_a_change_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    supervisor, registry = Run(tmp_path).supervisor, MemoryRegistry()
    beat = gave_up(LEARNER, 1)
    pids = {"learner": beat.pid if is_own else beat.pid + 1}
    monkeypatch.setattr(type(supervisor._processes), "pids", property(lambda _: pids))

    async def steered() -> list[SettingsChange]:
        await registry.set_run_status(RunStatus(RunState.RUNNING))
        assert await registry.add_settings_change(after(None, {KEY: "0.5"}, {KEY: "1e-06"}, by="ann@a", at_s=1.0))
        await supervisor._steer(registry, [beat], 0.0, is_paused=False)
        return standing(await registry.settings_changes())

    assert bool(asyncio.run(steered())) is not is_own


async def test_a_new_change_is_written_at_the_next_poll(config: RunConfig) -> None:
    registry, keeper = MemoryRegistry(), SettingsKeeper(config, config.run_dir)
    await keeper.begin(registry)
    assert await registry.add_settings_change(after(None, {KEY: "0.5"}, {KEY: "1e-06"}, by="ann@a", at_s=1.0))
    await keeper.apply_changes(registry, ())
    assert [change.sets for change in read_changes(config.run_dir)] == [{KEY: "0.5"}]


async def test_a_version_of_code_that_has_proved_good_stays_so_for_the_next_supervisor(config: RunConfig) -> None:
    registry, keeper = MemoryRegistry(), SettingsKeeper(config, config.run_dir)
    await changed(config, registry, "0.5", "0.25")
    await keeper.settle(registry, 2)
    assert [change.is_settled for change in read_changes(config.run_dir)] == [False, True]
    successor = SettingsKeeper(read_resolved(config.run_dir), config.run_dir)
    await successor.begin(registry)
    assert successor.is_settled(2) and not successor.is_settled(1)
    assert [change.is_settled for change in read_changes(config.run_dir)] == [False, True]
