"""Claims about changes of settings by an operator."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from pipeline.config.load import write_resolved
from pipeline.files.code_copies import shared_digests
from pipeline.observability.start_record import StartRow, start_records
from pipeline.operator import updating
from pipeline.operator.attached import Attached
from pipeline.runtime.registry.contract import Fleet, Heartbeat
from pipeline.runtime.registry.settings_change import SettingsChange, SettingsTaken, after
from pipeline.supervisor.run_folder import run_lock
from pipeline.supervisor.settings_keeper import SettingsKeeper
from protocol.errors import ConfigError, LedgerUnavailable
from protocol.headrace import PACKAGES
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.operator.small_run import SmallRun, small_run

KEY = "learner.learning_rate"
ROOT = Path(__file__).parents[3]


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
    with pytest.raises(ConfigError, match="is already in effect"):
        await updating.update(at(run), [f"{KEY}=0.5"])
    assert len(await run.registry.settings_changes()) == 2


async def test_the_updates_that_the_learner_has_made_bound_the_runs_length(run: SmallRun) -> None:
    with pytest.raises(ConfigError, match="has already made 2 updates"):
        await updating.update(at(run), ["run.num_updates=2"])
    assert (await updating.update(at(run), ["run.num_updates=3"])).sets == {"run.num_updates": "3"}


async def test_a_rollback_sets_what_held_before_the_newest_change_that_stands(run: SmallRun) -> None:
    with pytest.raises(ConfigError, match="no change to roll back"):
        await updating.roll_back(at(run))
    for value in ("0.5", "0.25"):
        await updating.update(at(run), [f"{KEY}={value}"])
    assert (await updating.roll_back(at(run))).sets == {KEY: "0.5"}
    undone = await updating.roll_back(at(run), "worse")
    assert (undone.number, undone.sets, undone.undoes, undone.reason) == (4, {KEY: "1e-06"}, 1, "worse")
    with pytest.raises(ConfigError, match="no change to roll back"):
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
        await SettingsKeeper(run.config, run.run_dir).apply_changes(run.registry, [])
        await run.clock.advance(1.0)
        assert not waiting.done()
        beat = await run.beat(Role.LEARNER, "learner", updates=2)
        taken = SettingsTaken(number=1, first_update=3)
        assert run.registry.beat(msgspec.structs.replace(beat, settings=taken))
        await run.clock.advance(1.0)
        found = await waiting
    assert found.is_taken
    assert [(one.worker, one.is_taken, one.first_update) for one in found.taken] == [
        ("supervisor", True, 0),
        ("learner", True, 3),
    ]


async def test_the_wait_has_a_deadline_and_names_who_has_not_taken_the_change(run: SmallRun) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"])
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(updating.wait_until_taken(at(run), change, 5.0, run.clock))
        await run.clock.advance(5.1)
        found = await waiting
    assert not found.is_taken
    assert [(one.worker, one.is_taken) for one in found.taken] == [("supervisor", False), ("learner", False)]


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
        assert [one.worker for one in (await waiting).taken] == ["supervisor", "learner"]


async def test_a_ledger_that_does_not_say_whether_code_was_rolled_back_is_asked_again(
    judged: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = await updating.update_code(at(judged), version(tmp_path / "new", GOOD))

    async def mute(*_: object) -> list[SettingsChange]:
        raise LedgerUnavailable("no answer")

    async with asyncio.TaskGroup() as tasks:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryRegistry, "settings_changes", mute)
            waiting = tasks.create_task(updating.wait_until_taken(at(judged), change, 60.0, judged.clock))
            await judged.clock.advance(3.0)
            assert not waiting.done()
        undone = await updating.roll_back(at(judged))
        await judged.clock.advance(1.0)
        found = await waiting
    assert found.undone_by == undone and not found.is_taken


async def test_a_run_that_ends_before_all_have_answered_is_called_so(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = await updating.update(at(run), [f"{KEY}=0.5"])

    async def gone(*_: object) -> list[Heartbeat]:
        raise LedgerUnavailable("no such socket")

    monkeypatch.setattr(MemoryRegistry, "heartbeats", gone)
    monkeypatch.setattr("pipeline.supervisor.run_folder.supervisor_pid", lambda _: None)
    with pytest.raises(ConfigError, match=r"ended before all workers had answered; change 1 is recorded"):
        await updating.wait_until_taken(at(run), change, 60.0, run.clock)


def version(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "my_rewards.py").write_text(text)
    return folder


GOOD = "def judge(responses):\n    return [1.0 for _ in responses]\n"


@pytest.fixture
async def judged(tmp_path: Path) -> AsyncIterator[SmallRun]:
    """A run with a reward function of the user's, and two reward workers."""
    run = await small_run(
        tmp_path, "reward.functions.extra.verifier=my_rewards:judge", f"reward.path=['{tmp_path}']", "fleet.reward=2"
    )
    await run.beat(Role.REWARD, "reward-0")
    with run_lock(run.run_dir):
        yield run


async def test_new_reward_functions_are_copied_imported_and_then_a_change(judged: SmallRun, tmp_path: Path) -> None:
    source = version(tmp_path / "new", GOOD)
    change = await updating.update_code(at(judged), source, " better\n", is_lazy=True)
    value = change.sets["code.rewards"].strip('"')
    assert (change.former, change.reason, change.is_lazy) == ({"code.rewards": '""'}, "better", True)
    assert (judged.run_dir / "code" / value / "my_rewards.py").read_text() == (source / "my_rewards.py").read_text()
    with pytest.raises(ConfigError, match="is already in effect"):
        await updating.update_code(at(judged), source)
    undone = await updating.roll_back(at(judged))
    assert (undone.sets, undone.undoes) == ({"code.rewards": '""'}, 1)
    assert await updating.undone_by(at(judged), change) == undone


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import no_such_module_of_ours\n", "no_such_module_of_ours"),
        ("def judge(responses)\n", "SyntaxError"),
        ("def other(responses):\n    return []\n", "my_rewards has no 'judge'"),
        ("def judge(number, of, things):\n    return []\n", "has the signature"),
        ("import os\nos._exit(3)\n", "exited with code 3"),
    ],
)
async def test_code_that_cannot_be_used_is_refused_and_the_run_is_as_it_was(
    judged: SmallRun, tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        await updating.update_code(at(judged), version(tmp_path / "new", text))
    assert await judged.registry.settings_changes() == []


async def test_a_folder_without_the_runs_functions_or_with_a_part_of_headrace_is_refused(
    judged: SmallRun, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "others.py").write_text("")
    with pytest.raises(ConfigError, match="expected one of: my_rewards"):
        await updating.update_code(at(judged), tmp_path / "new")
    (tmp_path / "new" / "pipeline").mkdir()
    (tmp_path / "new" / "pipeline" / "__init__.py").write_text("")
    with pytest.raises(ConfigError, match=r"has pipeline, one of Headrace's packages, but no protocol"):
        await updating.update_code(at(judged), tmp_path / "new")


async def test_code_is_refused_while_another_host_has_reward_workers(judged: SmallRun, tmp_path: Path) -> None:
    await judged.beat(Role.REWARD, "reward-hostb-x-0")
    source = version(tmp_path / "new", GOOD)
    with pytest.raises(ConfigError, match="rewards of one group must be comparable"):
        await updating.update_code(at(judged), source)
    assert not (judged.run_dir / "code").exists()


async def test_code_is_refused_when_a_host_joins_while_it_is_checked(
    judged: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = updating.check_rewards

    async def slow(*arguments: Any) -> None:
        await check(*arguments)
        await judged.beat(Role.REWARD, "reward-hostb-x-0")

    monkeypatch.setattr(updating, "check_rewards", slow)
    with pytest.raises(ConfigError, match=r"reward-hostb-x-0 is on host, which the new code would not reach"):
        await updating.update_code(at(judged), version(tmp_path / "new", GOOD))
    assert await judged.registry.settings_changes() == []


async def test_a_lazy_change_is_taken_once_the_supervisor_has_written_it(judged: SmallRun, tmp_path: Path) -> None:
    change = await updating.update_code(at(judged), version(tmp_path / "new", GOOD), is_lazy=True)
    assert await updating.taken(at(judged), change) == [updating.TakenChange("supervisor", is_taken=False)]
    await SettingsKeeper(judged.config, judged.run_dir).apply_changes(judged.registry, [])
    assert await updating.taken(at(judged), change) == [updating.TakenChange("supervisor", is_taken=True)]


async def test_a_rollback_of_code_that_does_not_hold_any_more_is_no_error(judged: SmallRun, tmp_path: Path) -> None:
    change = await updating.update_code(at(judged), version(tmp_path / "new", GOOD))
    # as when the supervisor has gone further back than the version before
    sets, former = {"code.rewards": '""'}, {"code.rewards": change.sets["code.rewards"]}
    further = after(change, sets, former, by="supervisor", at_s=2.0, undone=[9])
    assert await judged.registry.add_settings_change(further)
    undone = await updating.roll_back(at(judged))
    assert (undone.undone, undone.holds) == ((1,), {"code.rewards": '""'})


async def test_code_is_taken_once_each_reward_worker_runs_it_also_those_being_replaced(
    judged: SmallRun, tmp_path: Path
) -> None:
    await judged.registry.set_fleet(Fleet({Role.REWARD: 2, Role.LEARNER: 1}))
    source = version(tmp_path / "new", GOOD)
    change = await updating.update_code(at(judged), source)
    await SettingsKeeper(judged.config, judged.run_dir).apply_changes(judged.registry, [])
    code = SettingsTaken(number=1, code={"code.rewards": change.sets["code.rewards"].strip('"')})
    beat = await judged.beat(Role.REWARD, "reward-0")
    assert judged.registry.beat(msgspec.structs.replace(beat, settings=code))
    found = await updating.taken(at(judged), change)
    assert {one.worker: one.is_taken for one in found} == {"supervisor": True, "reward-0": True, "reward-1": False}


def other_headrace(folder: Path, module: str = "", end: str = "") -> Path:
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "node_modules")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    if module:
        path = folder / module
        path.write_text(path.read_text() + end)
    return folder


async def test_another_headrace_is_taken_once_the_workers_of_all_roles_run_it(judged: SmallRun, tmp_path: Path) -> None:
    write_resolved(judged.config, judged.run_dir)
    start_records(judged.run_dir).append(StartRow(at_s=1.0, shared_code=shared_digests()))
    await judged.registry.set_fleet(Fleet({Role.REWARD: 1, Role.LEARNER: 1}))
    change = await updating.update_code(at(judged), other_headrace(tmp_path / "new", "workers/preparation.py", "\n"))
    (key,) = change.sets
    value = change.sets[key].strip('"')
    assert key == "code.workers" and change.former == {key: '""'}
    assert {path.name for path in (judged.run_dir / "code" / value).iterdir()} == set(PACKAGES)
    await SettingsKeeper(judged.config, judged.run_dir).apply_changes(judged.registry, [])
    for name, role in (("reward-0", Role.REWARD), ("learner", Role.LEARNER)):
        found = {one.worker: one.is_taken for one in await updating.taken(at(judged), change)}
        assert not found[name]
        beat = await judged.beat(role, name)
        taken = SettingsTaken(code={key: value})
        assert judged.registry.beat(msgspec.structs.replace(beat, settings=taken))
    found = {one.worker: one.is_taken for one in await updating.taken(at(judged), change)}
    assert found == {"supervisor": True, "reward-0": True, "learner": True}


@pytest.mark.parametrize(
    ("module", "end", "complaint"),
    [
        ("workers/learner/learner.py", "import no_such_module_of_ours\n", "No module named 'no_such_module_of_ours'"),
        ("workers/scorers/reward.py", "def (\n", "SyntaxError"),
        ("pipeline/config/operations.py", "\ndel CodeSection\n", "cannot import name 'CodeSection'"),
    ],
)
async def test_another_headrace_that_cannot_be_imported_is_refused(
    judged: SmallRun, tmp_path: Path, module: str, end: str, complaint: str
) -> None:
    write_resolved(judged.config, judged.run_dir)
    start_records(judged.run_dir).append(StartRow(at_s=1.0, shared_code=shared_digests()))
    with pytest.raises(ConfigError, match=complaint):
        await updating.update_code(at(judged), other_headrace(tmp_path / "new", module, end))
    assert await judged.registry.settings_changes() == []


async def test_another_headrace_is_refused_where_the_shared_code_differs_from_the_start(
    judged: SmallRun, tmp_path: Path
) -> None:
    source = other_headrace(tmp_path / "new", "pipeline/ledger/contract.py", "\n")
    with pytest.raises(ConfigError, match="was started by a Headrace that did not record its shared code"):
        await updating.update_code(at(judged), source)
    start_records(judged.run_dir).append(StartRow(at_s=1.0, shared_code=shared_digests()))
    with pytest.raises(ConfigError, match="differs in pipeline/ledger from the code the run was started with"):
        await updating.update_code(at(judged), source)
    assert await judged.registry.settings_changes() == []


async def test_another_headrace_is_refused_while_another_host_has_a_worker_of_any_role(
    judged: SmallRun, tmp_path: Path
) -> None:
    await judged.beat(Role.GENERATOR, "generator-hostb-x-0")
    with pytest.raises(ConfigError, match=r"generator-hostb-x-0 is on .* which the new code would not reach"):
        await updating.update_code(at(judged), other_headrace(tmp_path / "new"))
    assert not (judged.run_dir / "code").exists()
