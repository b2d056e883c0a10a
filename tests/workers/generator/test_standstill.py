"""An engine that reports success and samples nothing: no progress, and a loud end. After threads on
swallowed errors of other systems: verl-omni 433, SkyRL 1691, ms-swift 6962."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.ledger.types import Unit
from pipeline.weights.store import WeightsStore
from protocol.errors import EngineDied
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field, Prompt
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.engines.generation.seam import EngineStats, SampledWindow
from workers.generator.generator import Generator
from workers.generator.standstill import MAX_EMPTY_TURNS, Standstill

LEARNER = Incarnation(Role.LEARNER, "learner", 1)
PROMPT = Prompt(prompt_id="train:0", tokens=np.array([5, 9], np.int32), text="2+3=", answer="5", verifier="arithmetic")
STATS = EngineStats(num_live=2, num_decode_steps=5, num_sampled_tokens=9, num_prefill_tokens=4)
LIMIT_S = 30.0


def turn(watched: Standstill, now_s: float, after: EngineStats = STATS, *, num_windows: int = 0) -> bool:
    return watched.look(STATS, after, num_windows=num_windows, began_s=now_s - 0.1, now_s=now_s, limit_s=LIMIT_S)


def test_many_empty_turns_over_a_long_time_are_an_error_and_neither_alone_is() -> None:
    quick, slow = Standstill(), Standstill()
    assert not any(turn(quick, 0.1 + 0.01 * number) for number in range(10 * MAX_EMPTY_TURNS))
    assert not any(turn(slow, 60.0 * number) for number in range(MAX_EMPTY_TURNS))
    with pytest.raises(EngineDied, match=rf"no token in {MAX_EMPTY_TURNS + 1} turns .* 2 trajectories"):
        turn(slow, 60.0 * MAX_EMPTY_TURNS)
    with pytest.raises(EngineDied, match="a new engine takes its place"):
        turn(quick, 40.0)


@pytest.mark.parametrize("field", ["num_decode_steps", "num_sampled_tokens", "num_prefill_tokens"])
def test_a_turn_with_tokens_of_a_prompt_or_response_ends_a_standstill(field: str) -> None:
    watched = Standstill()
    for number in range(5 * MAX_EMPTY_TURNS):
        moves = number % (MAX_EMPTY_TURNS - 1) == 0
        after = replace(STATS, **{field: getattr(STATS, field) + 1}) if moves else STATS
        assert turn(watched, 10.0 * number, after) is moves
        assert watched.longest_s == (pytest.approx(970.1) if number >= MAX_EMPTY_TURNS - 1 else 0.0)
        assert watched.is_on is not moves and (watched.stood_s > 0.0) is not moves
    assert turn(watched, 1e5, num_windows=1)


def test_time_without_live_trajectories_is_no_standstill() -> None:
    watched = Standstill()
    for number in range(3 * MAX_EMPTY_TURNS):
        turn(watched, 0.01 * number)
    assert watched.stood_s > 1.0
    watched.rest()
    assert not watched.is_on and watched.stood_s == watched.longest_s == 0.0
    assert not turn(watched, 1e6)


class Silent(EmulatedEngine):
    """Returns at once from ``num_good`` turns on, without a token and without an error."""

    num_good = 0
    fails_with: Exception | None = None

    def advance(self, max_steps: int) -> list[SampledWindow]:
        if self.num_good > 0:
            self.num_good -= 1
            return super().advance(max_steps)
        if self.fails_with is not None:
            raise self.fails_with
        return []


class OnePrompt:
    """A stream of the same prompt."""

    responses = None

    def at(self, position: int) -> Prompt:
        del position
        return PROMPT


@asynccontextmanager
async def generating(folder: Path, engine: Silent) -> AsyncGenerator[tuple[Generator, ManualClock]]:
    """A generator that holds four trajectories of its engine."""
    config = small_config(folder)
    generation = config.generation.model_copy(update={"engine": "ops.emulated.build:generation", "steps_per_turn": 2})
    config = config.model_copy(update={"generation": generation})
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry = MemoryRegistry(clock)
        ctx = await context_of(config, folder, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), clock)
        await ctx.ledger.open(make_spec(Unit.CHUNK, fields=frozenset({Field.REWARD}), eta=2, group_size=1))
        await ctx.ledger.advance(LEARNER, 0)
        generator = Generator(ctx)
        generator._assemble(cast("Any", OnePrompt()), cast("Any", None), engine, ())
        engine.load_weights({TENSOR: make_tensor("00", 8)}, 0)
        try:
            yield generator, clock
        finally:
            await ctx.cancel_spawned()
            generator._tally.close()
            ctx.close()


def silent_engine(num_good: int = 0) -> Silent:
    engine = Silent(
        num_slots=4, lengths=LengthLaw("constant", median_tokens=900.0, tail=1.0), tokens=TokenLaw.of(32, {1}),
        vocabulary=32, positions=4096, num_weights=8,
    )  # fmt: skip
    engine.num_good = num_good
    return engine


async def passing(generator: Generator, clock: ManualClock, running: asyncio.Task[None], seconds: int) -> None:
    """Let time pass, with a turn of the loop at least every tenth of a second, or until it ends."""
    for _ in range(10 * seconds):
        num_turns = generator.ctx.counters.get("turns", 0)
        await clock.advance(0.1)
        async with asyncio.timeout(20.0):
            while not running.done() and generator.ctx.counters.get("turns", 0) == num_turns:  # noqa: ASYNC110
                await asyncio.sleep(0.0)


async def test_turns_without_tokens_are_no_progress_and_end_in_an_error(tmp_path: Path) -> None:
    async with generating(tmp_path, silent_engine(num_good=20)) as (generator, clock):
        state = generator.ctx.worker_state
        running = generator.ctx.tasks.create_task(expect_death(generator))
        while generator._engine.num_good:  # type: ignore[attr-defined]
            await passing(generator, clock, running, 1)
        await passing(generator, clock, running, 2)
        before, moved_s = state.heartbeat(), generator.ctx.moved_s
        held = {one.trajectory for one in generator._held._held.values()}
        assert before.progress > 5 and before.work.steps > 5 and before.held == 4
        await passing(generator, clock, running, 10)
        after = state.heartbeat()
        assert after.turns > before.turns, "the loop turns on"
        assert (after.progress, after.work.steps) == (before.progress, before.work.steps)
        assert after.counters["turns"] > before.counters["turns"]
        assert 9.0 < after.counters["standstill_s"] < 15.0 and state.counters["standstill_s"] > 0.0
        assert generator.ctx.moved_s == moved_s, "so its leases run out"
        await passing(generator, clock, running, 120)
        assert running.done(), "it ends by itself"
        await running
        other = Incarnation(Role.GENERATOR, "generator-1", 1)
        grant = await generator.ctx.ledger.lease(other, max_trajectories=4, policy_version=0)
        assert {lease.trajectory for lease in grant.leases} == held, "others go on with what it held"


async def expect_death(generator: Generator) -> None:
    with pytest.raises(EngineDied, match="returned no token"):
        await generator.run()


async def test_a_dead_engine_that_takes_new_weights_makes_no_progress(tmp_path: Path) -> None:
    async with generating(tmp_path, silent_engine(num_good=20)) as (generator, clock):
        ctx = generator.ctx
        learner = await ctx.registry.register(Role.LEARNER, "learner")
        store = WeightsStore(tmp_path / "weights", keep=2, max_part_bytes=1 << 20)
        running = ctx.tasks.create_task(expect_death(generator))
        while generator._engine.num_good:  # type: ignore[attr-defined]
            await passing(generator, clock, running, 1)
        await passing(generator, clock, running, 2)
        before, moved_s = ctx.worker_state.heartbeat(), ctx.moved_s
        for version in range(1, 6):
            stored = store.publish(version, publish_tensors([(TENSOR, make_tensor(f"0{version}", 8))]))
            await ctx.registry.announce_weights(learner, store.announcement(stored, endpoint=""))
            await generator._taker.look()
            async with asyncio.timeout(20.0):
                while ctx.policy_version < version:
                    await passing(generator, clock, running, 1)
        after = ctx.worker_state.heartbeat()
        assert (after.progress, after.work.steps, ctx.moved_s) == (before.progress, before.work.steps, moved_s)
        await passing(generator, clock, running, 60)
        await running


async def test_an_error_of_the_engine_ends_the_worker_and_is_not_lost(tmp_path: Path) -> None:
    engine = silent_engine(num_good=3)
    engine.fails_with = ValueError("a broken kernel")
    async with generating(tmp_path, engine) as (generator, clock):
        running = generator.ctx.tasks.create_task(lost(generator))
        await passing(generator, clock, running, 60)
        assert running.done()


async def lost(generator: Generator) -> None:
    with pytest.raises(ValueError, match="a broken kernel"):
        await generator.run()
