"""Claims about a learner that takes new settings: between two updates, and on trial for one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pipeline.config.changing import value_of
from pipeline.config.operations import REWARDS, WORKERS
from pipeline.config.schema import RunConfig
from pipeline.observability.history import Row, UpdateRow
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.settings_change import SettingsChange, after, undoing
from pipeline.runtime.worker_start import hear_settings
from pipeline.runtime.worker_state import WorkerState
from protocol.errors import EngineError, StepDiffered
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.observability.rows import update_row
from tests.pipeline.op_config import op_config
from tests.workers.dying import Reaper, World
from tests.workers.recording import RecordingTraining
from workers.engines.training.seam import StepResult
from workers.learner.new_settings import NewSettings
from workers.learner.policy_update import PolicyUpdate, Stepped

KEY = "learner.learning_rate"


class Rig:
    """A learner's parts that settings concern, without its ledger."""

    def __init__(self, config: RunConfig) -> None:
        self.clock, self.registry, self.backend = ManualClock(), MemoryRegistry(), RecordingTraining()
        self.recorded: list[RunConfig] = []
        self.news: list[int] = []
        self.start = config
        log = SimpleNamespace(info=lambda *_, **__: None, error=lambda *_, **__: None)
        self.ctx = ActorContext.__new__(ActorContext)
        self.ctx.config, self.ctx.clock, self.ctx.registry, self.ctx.log = (
            config,
            self.clock,
            self.registry,
            cast("Any", log),
        )
        self.ctx.worker_state = WorkerState(Incarnation(Role.LEARNER, "learner", 1), self.clock)
        self.ctx.worker_state.on_news = lambda: self.news.append(self.taken.number)
        self.ctx._offered = None
        cast("Any", self.ctx).compute = self._compute
        recorder = cast("Any", SimpleNamespace(apply_settings=self.recorded.append))
        self.settings = NewSettings(self.ctx, PolicyUpdate(config, self.backend), recorder)

    async def _compute(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    @property
    def taken(self) -> Any:
        return self.ctx.worker_state.settings

    async def offer(self, value: str, key: str = KEY) -> SettingsChange:
        last = await self.registry.last_settings_change()
        present = last.holds.get(key) if last else None
        change = after(last, {key: value}, {key: present or value_of(self.start, key)}, by="ann@a", at_s=1.0)
        await self.add(change)
        return change

    async def add(self, change: SettingsChange) -> None:
        """Add a change to the run, and offer what then holds."""
        assert await self.registry.add_settings_change(change)
        await self.hear()

    async def hear(self) -> None:
        await hear_settings(self.ctx, is_taken=False)


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(op_config(tmp_path))


def stepped(loss: float = 0.5, *, applied: bool = True) -> Stepped:
    return Stepped([StepResult(applied, loss, 1.0, 1e-3, {}, 8)], 0.0, 0.0)


async def made(result: Stepped | Exception) -> Stepped:
    if isinstance(result, Exception):
        raise result
    return result


async def first(rig: Rig, update: int, result: Stepped | Exception) -> Stepped:
    return await rig.settings.first(update, cast("Awaitable[Stepped]", made(result)))


async def roll_back(rig: Rig, number: int) -> None:
    changes = await rig.registry.settings_changes()
    await rig.add(undoing(changes, [changes[number - 1]], by="learner", at_s=2.0))


async def test_an_offered_change_is_taken_between_two_updates_and_reported(rig: Rig) -> None:
    start = rig.ctx.config
    await rig.offer("0.5")
    assert rig.ctx.config is start
    assert (rig.taken.number, rig.backend.rates, rig.news) == (0, [], [])
    await rig.settings.apply_due(6)
    assert rig.ctx.config.learner.learning_rate == 0.5
    assert rig.backend.rates == [0.5]
    assert [config.learner.learning_rate for config in rig.recorded] == [0.5]
    assert (rig.taken.number, rig.taken.first_update, rig.news) == (1, 7, [1])
    await rig.settings.apply_due(6)
    assert rig.backend.rates == [0.5]


async def test_a_change_that_was_taken_is_not_offered_again(rig: Rig) -> None:
    change = await rig.offer("0.5")
    await rig.settings.apply_due(6)
    rig.ctx.offer_settings(change)
    await rig.settings.apply_due(7)
    assert rig.taken.first_update == 7


async def test_other_ranks_hear_at_the_start_what_holds(rig: Rig) -> None:
    await rig.settings.restore()
    assert rig.backend.rates == []
    await rig.offer("0.5")
    rig.ctx.take_settings()
    await rig.settings.restore()
    assert rig.backend.rates == [0.5]


async def test_a_finite_first_update_ends_the_trial(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    await first(rig, 7, stepped())
    await first(rig, 8, stepped(float("nan"), applied=False))
    assert rig.ctx.config.learner.learning_rate == 0.5
    assert rig.taken.failed == 0


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (stepped(float("nan"), applied=False), "not finite"),
        (stepped(1.0, applied=False), "a spike"),
        (stepped(float("inf")), "not finite"),
    ],
)
async def test_a_first_update_that_is_refused_or_not_finite_brings_back_what_held(
    rig: Rig, result: Stepped, found: str
) -> None:
    before = rig.ctx.config
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    assert await first(rig, 7, result) is result
    assert rig.ctx.config == before
    assert rig.backend.rates == [0.5, before.learner.learning_rate]
    assert rig.recorded[-1] == before
    assert rig.taken.failed == 1
    assert f"a step of update 7, the first with it, was {found}" in rig.taken.why


async def test_all_changes_that_wait_for_an_update_fail_together(rig: Rig) -> None:
    before = rig.ctx.config
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    # of two at once, the learner meets the newer one alone
    await rig.offer("0.25")
    await rig.offer("9000", "run.num_updates")
    await rig.settings.apply_due(6)
    assert rig.taken.number == 3
    assert rig.ctx.config.learner.learning_rate == 0.25
    await first(rig, 7, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 1
    assert rig.ctx.config == before


async def test_the_rollback_itself_is_not_on_trial(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    await first(rig, 7, stepped(float("nan"), applied=False))
    await roll_back(rig, 1)
    await rig.settings.apply_due(7)
    assert (rig.taken.number, rig.taken.failed) == (2, 0)
    await first(rig, 8, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 0


async def test_what_failed_is_reported_and_no_change_taken_until_it_is_rolled_back(rig: Rig) -> None:
    before = rig.ctx.config
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    # those that were on their way are kept back, too
    await rig.offer("9000", "run.num_updates")
    await rig.offer("0.25")
    await first(rig, 7, stepped(float("nan"), applied=False))
    await rig.hear()
    await rig.settings.apply_due(7)
    assert (rig.taken.number, rig.taken.failed, rig.taken.failed_to) == (1, 1, 1)
    assert rig.ctx.config == before, "what holds has the value that failed"
    await roll_back(rig, 1)
    await rig.settings.apply_due(7)
    assert (rig.taken.number, rig.taken.failed) == (4, 0)
    assert (rig.ctx.config.run.num_updates, rig.ctx.config.learner.learning_rate) == (9000, 0.25)
    # of those that it takes now, the rollback is not on trial, and the others are
    await first(rig, 8, stepped(float("nan"), applied=False))
    assert (rig.taken.failed, rig.taken.failed_to) == (2, 3)
    assert rig.ctx.config == before


@pytest.mark.parametrize(("made_with", "failed"), [([], 1), ([0, 1], 2), ([0, 1, 2], 0)])
async def test_a_new_learner_tries_the_changes_that_no_update_was_made_with(
    rig: Rig, made_with: list[int], failed: int
) -> None:
    for value in ("0.5", "0.25"):
        await rig.offer(value)
    # the runtime takes them before the actor's start
    rig.ctx.take_settings()
    await rig.settings.restore()
    rig.settings.resume([replace(update_row(9), settings_change=change) for change in made_with])
    await first(rig, 7, stepped(float("nan"), applied=False))
    assert (rig.taken.failed, rig.taken.failed_to) == (failed, 2 if failed else 0)


async def test_a_learner_that_comes_after_another_reads_the_history_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[int]] = []
    resume = NewSettings.resume

    def noted(settings: NewSettings, rows: list[Row]) -> None:
        told.append([row.update for row in rows if isinstance(row, UpdateRow)])
        resume(settings, rows)

    monkeypatch.setattr(NewSettings, "resume", noted)
    world = World(tmp_path, monkeypatch, num_updates=4, snapshots="off")
    # its checkpoint has two updates, and the third is made again
    await world.live_until_done(Reaper(3, "before batch"))
    assert told == [[], [1, 2]]


async def test_a_run_that_goes_on_with_another_ledger_tries_its_first_change(rig: Rig) -> None:
    rig.settings.resume([replace(update_row(9), settings_change=3)])
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    await first(rig, 7, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 1


@pytest.mark.parametrize("key", [REWARDS, WORKERS])
async def test_code_is_not_on_trial_in_a_learners_update_and_settings_beside_it_are(rig: Rig, key: str) -> None:
    await rig.offer('"00ff00ff00ff00ff"', key)
    await rig.settings.apply_due(6)
    await first(rig, 7, stepped(1.0, applied=False))
    assert rig.taken.failed == 0
    for value, changed in (("0.5", KEY), ('"11ff00ff00ff00ff"', key)):
        await rig.offer(value, changed)
    await rig.settings.apply_due(7)
    await first(rig, 8, stepped(1.0, applied=False))
    assert (rig.taken.failed, rig.taken.failed_to) == (2, 2)


async def test_a_learner_that_ends_with_its_first_update_waits_for_the_rollback(rig: Rig) -> None:
    change = await rig.offer("0.5")
    await rig.settings.apply_due(6)
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(_fails(rig))
        await rig.clock.advance(0.3)
        assert not ending.done()
        assert rig.taken.failed == 1
        assert await rig.registry.add_settings_change(undoing([change], [change], by="learner", at_s=2.0))
        await rig.clock.advance(0.3)
        assert await ending == "no memory"


async def test_a_failure_after_a_persons_rollback_leaves_it_to_that(rig: Rig) -> None:
    change = await rig.offer("0.5")
    await rig.settings.apply_due(6)
    assert await rig.registry.add_settings_change(undoing([change], [change], by="ann@a", at_s=2.0))
    await first(rig, 7, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 0
    assert await _fails(rig) == "no memory"


async def test_a_step_that_differs_the_second_time_is_no_fault_of_the_settings(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    with pytest.raises(StepDiffered):
        # without a wait for a rollback
        async with asyncio.timeout(5.0):
            await first(rig, 7, StepDiffered("this machine is at fault"))
    assert rig.taken.failed == 0 and rig.ctx.config.learner.learning_rate == 0.5


async def test_that_wait_has_a_deadline(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.apply_due(6)
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(_fails(rig))
        await rig.clock.advance(6.0)
        assert await ending == "no memory"


async def _fails(rig: Rig) -> str:
    with pytest.raises(EngineError) as ended:
        await first(rig, 7, EngineError("no memory"))
    return str(ended.value)
