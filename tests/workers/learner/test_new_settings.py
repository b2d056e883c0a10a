"""Claims about a learner that takes new settings: between two updates, and on trial for one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.config.schema import RunConfig
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.runtime.registry.settings_change import SettingsChange, after, undoing
from pipeline.runtime.worker_state import WorkerState
from protocol.errors import EngineError, StepDiffered
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.pipeline.op_config import op_config
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
        self.changes: list[SettingsChange] = []
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
        recorder = cast("Any", SimpleNamespace(take=self.recorded.append))
        self.settings = NewSettings(self.ctx, PolicyUpdate(config, self.backend), recorder)

    async def _compute(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    @property
    def taken(self) -> Any:
        return self.ctx.worker_state.settings

    async def offer(self, value: str, key: str = KEY) -> SettingsChange:
        from pipeline.config.changing import value_of

        last = self.changes[-1] if self.changes else None
        present = last.holds.get(key) if last else None
        change = after(last, {key: value}, {key: present or value_of(self.start, key)}, by="ann@a", at_s=1.0)
        self.changes.append(change)
        assert await self.registry.add_settings_change(change)
        self.ctx.offer_settings(change)
        return change


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


async def test_an_offered_change_is_taken_between_two_updates_and_reported(rig: Rig) -> None:
    start = rig.ctx.config
    await rig.offer("0.5")
    assert rig.ctx.config is start
    assert (rig.taken.number, rig.backend.rates, rig.news) == (0, [], [])
    await rig.settings.take(6)
    assert rig.ctx.config.learner.learning_rate == 0.5
    assert rig.backend.rates == [0.5]
    assert [config.learner.learning_rate for config in rig.recorded] == [0.5]
    assert (rig.taken.number, rig.taken.first_update, rig.news) == (1, 7, [1])
    await rig.settings.take(6)
    assert rig.backend.rates == [0.5]


async def test_a_change_that_was_taken_is_not_offered_again(rig: Rig) -> None:
    change = await rig.offer("0.5")
    await rig.settings.take(6)
    rig.ctx.offer_settings(change)
    await rig.settings.take(7)
    assert rig.taken.first_update == 7


async def test_other_ranks_hear_at_the_start_what_holds(rig: Rig) -> None:
    await rig.settings.begin()
    assert rig.backend.rates == []
    await rig.offer("0.5")
    rig.ctx.take_settings()
    await rig.settings.begin()
    assert rig.backend.rates == [0.5]


async def test_a_finite_first_update_ends_the_trial(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.take(6)
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
    await rig.settings.take(6)
    assert await first(rig, 7, result) is result
    assert rig.ctx.config == before
    assert rig.backend.rates == [0.5, before.learner.learning_rate]
    assert rig.recorded[-1] == before
    assert rig.taken.failed == 1
    assert f"a step of update 7, the first with it, was {found}" in rig.taken.why


async def test_all_changes_that_wait_for_an_update_fail_together(rig: Rig) -> None:
    before = rig.ctx.config
    await rig.offer("0.5")
    await rig.settings.take(6)
    # of two at once, the learner meets the newer one alone
    await rig.offer("0.25")
    await rig.offer("9000", "run.num_updates")
    await rig.settings.take(6)
    assert rig.taken.number == 3
    assert rig.ctx.config.learner.learning_rate == 0.25
    await first(rig, 7, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 1
    assert rig.ctx.config == before


async def test_the_rollback_itself_is_not_on_trial(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.take(6)
    await first(rig, 7, stepped(float("nan"), applied=False))
    rig.ctx.offer_settings(undoing(rig.changes[-1], rig.changes, by="learner", at_s=2.0))
    await rig.settings.take(7)
    assert (rig.taken.number, rig.taken.failed) == (2, 0)
    await first(rig, 8, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 0


async def test_a_learner_that_ends_with_its_first_update_waits_for_the_rollback(rig: Rig) -> None:
    change = await rig.offer("0.5")
    await rig.settings.take(6)
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(_fails(rig))
        await rig.clock.advance(0.3)
        assert not ending.done()
        assert rig.taken.failed == 1
        assert await rig.registry.add_settings_change(undoing(change, [change], by="learner", at_s=2.0))
        await rig.clock.advance(0.3)
        assert await ending == "no memory"


async def test_a_failure_after_a_persons_rollback_leaves_it_to_that(rig: Rig) -> None:
    change = await rig.offer("0.5")
    await rig.settings.take(6)
    assert await rig.registry.add_settings_change(undoing(change, [change], by="ann@a", at_s=2.0))
    await first(rig, 7, stepped(float("nan"), applied=False))
    assert rig.taken.failed == 0
    assert await _fails(rig) == "no memory"


async def test_a_step_that_differs_the_second_time_is_no_fault_of_the_settings(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.take(6)
    with pytest.raises(StepDiffered):
        # without a wait for a rollback
        async with asyncio.timeout(5.0):
            await first(rig, 7, StepDiffered("this machine is at fault"))
    assert rig.taken.failed == 0 and rig.ctx.config.learner.learning_rate == 0.5


async def test_that_wait_has_a_deadline(rig: Rig) -> None:
    await rig.offer("0.5")
    await rig.settings.take(6)
    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(_fails(rig))
        await rig.clock.advance(6.0)
        assert await ending == "no memory"


async def _fails(rig: Rig) -> str:
    with pytest.raises(EngineError) as ended:
        await first(rig, 7, EngineError("no memory"))
    return str(ended.value)
