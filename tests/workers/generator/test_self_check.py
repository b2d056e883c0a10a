"""A generator's answers to self-checks: the same for the same weights, another for one flipped bit,
and never beside live windows.

An engine that reports success and samples nothing: no progress, and a loud end. After threads on
swallowed errors of other systems: verl-omni 433, SkyRL 1691, ms-swift 6962.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.cli.doctor import _words
from pipeline.ledger.types import Unit
from pipeline.operator.attached import Attached
from pipeline.operator.fleet_check import check_fleet
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import Fleet
from pipeline.runtime.registry.entries import CheckDigests
from pipeline.supervisor.run_folder import run_lock
from pipeline.weights.store import WeightsStore
from protocol.errors import EngineDied
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, Prompt
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.operator.small_run import small_run
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from tests.workers.engines.model_contract import published
from tests.workers.engines.tiny import tiny_model
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.generation.seam import EngineStats, GenerationEngine, SampledWindow, SamplingParams, WindowRequest
from workers.generator.generator import Generator
from workers.generator.self_check import (
    MAX_EMPTY_TURNS,
    MAX_TOKENS,
    MOST_VERSIONS,
    NUM_PROMPTS,
    SelfChecker,
    StallDetector,
)

PROMPTS = [
    Prompt(prompt_id=f"train:{n}", tokens=np.array([5 + n, 9, 11], np.int32), text="", answer="", verifier="arithmetic")
    for n in range(NUM_PROMPTS)
]


class Prompts:
    responses = None

    def at(self, position: int) -> Prompt:
        return PROMPTS[position % NUM_PROMPTS]


def engine_of(*, flipped: bool = False, version: int = 3) -> LocalEngine:
    engine = LocalEngine(tiny_model(seed=1), num_slots=2)
    weights = published(tiny_model(seed=1))
    if flipped:
        weights["model.layers.0.mlp.up_proj.weight"].view(torch.int32)[3, 5] ^= 1 << 22
    engine.load_weights(weights, version)
    return engine


@asynccontextmanager
async def context(folder: Path, registry: MemoryRegistry) -> AsyncIterator[ActorContext]:
    config = small_config(folder)
    generation = config.generation.model_copy(update={"window_tokens": 16, "max_response_tokens": 32})
    config = config.model_copy(update={"generation": generation})
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            config, folder, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), RealClock()
        )
        yield ctx
        await ctx.cancel_spawned()
        ctx.close()


async def answered(folder: Path, engine: GenerationEngine, check: int = 1) -> CheckDigests:
    registry = MemoryRegistry(RealClock())
    await registry.set_fleet(Fleet(check=check))
    async with context(folder, registry) as ctx:
        checker = SelfChecker(ctx, engine, PROMPTS)
        assert not checker.is_due, "no check is known yet"
        await checker.poll()
        assert checker.is_due
        assert await checker.answer() == NUM_PROMPTS * MAX_TOKENS and engine.stats().num_live == 0
        assert not checker.is_due, "one answer a version"
        return ctx.worker_state.heartbeat().check


async def test_engines_with_the_same_weights_answer_alike_and_a_flipped_bit_shows(tmp_path: Path) -> None:
    first, again, flipped = [
        await answered(tmp_path, engine) for engine in (engine_of(), engine_of(), engine_of(flipped=True))
    ]
    assert (first.number, first.policy_version) == (1, 3) and first == again
    assert flipped.logprobs != first.logprobs


async def test_a_check_is_answered_under_each_new_version_a_few_times(tmp_path: Path) -> None:
    registry, engine = MemoryRegistry(RealClock()), engine_of(version=1)
    await registry.set_fleet(Fleet(check=7))
    async with context(tmp_path, registry) as ctx:
        checker = SelfChecker(ctx, engine, PROMPTS)
        await checker.poll()
        assert checker.is_due
        seen: list[int] = []
        for version in range(1, MOST_VERSIONS + 3):
            engine.load_weights(published(tiny_model(seed=1)), version)
            if checker.is_due:
                await checker.answer()
                seen.append(ctx.worker_state.check.policy_version)
        assert seen == list(range(1, MOST_VERSIONS + 1))
        await registry.replace_fleet(Fleet(check=7), Fleet(check=8))
        await checker.poll()
        assert checker.is_due


async def test_a_due_check_waits_for_live_windows_and_nothing_begins_meanwhile(tmp_path: Path) -> None:
    registry = MemoryRegistry(RealClock())
    async with context(tmp_path, registry) as ctx:
        await ctx.ledger.open(make_spec(Unit.CHUNK, fields=frozenset({Field.REWARD}), eta=2, group_size=1))
        generator, engine = Generator(ctx), engine_of(version=0)
        generator._assemble(cast("Any", Prompts()), cast("Any", None), engine, ())
        sampling = SamplingParams(1.0)
        live = WindowRequest(TrajectoryId("t", 9, 0), PROMPTS[0].tokens, np.zeros(0, np.int32), 4, 4, sampling, 0)
        engine.submit(live)
        engine.advance(1)
        generator._check._number, generator._check._left = 1, 1
        assert generator._check.is_due
        await generator._lease_and_resume()
        assert not generator._held, "a window that begins now would put the check off"
        generator._check._left = 0
        await generator._lease_and_resume()
        await generator._leasing.join()
        await generator._lease_and_resume()
        assert generator._held
        generator._tally.close()
        generator._taker.close()


async def test_of_three_generators_the_one_with_a_flipped_bit_is_named_by_the_check(tmp_path: Path) -> None:
    run = await small_run(tmp_path, fleet={Role.LEARNER: 1, Role.GENERATOR: 3, Role.REWARD: 1})
    names = [f"generator-{n}" for n in range(3)]
    for name in names:
        await run.beat(Role.GENERATOR, name)
    with run_lock(run.run_dir):
        async with asyncio.TaskGroup() as tasks:
            checked = tasks.create_task(check_fleet(cast("Attached", run), 60.0))
            await asyncio.sleep(0)
            for name in names:
                ctx = await context_of(
                    run.config, run.run_dir, Role.GENERATOR, name, tasks, run.registry, zmq_transport(), RealClock()
                )
                checker = SelfChecker(ctx, engine_of(flipped=name == "generator-1"), PROMPTS)
                await checker.poll()
                await checker.answer()
                assert run.registry.beat(ctx.worker_state.heartbeat())
                ctx.close()
    found = checked.result()
    assert found.found.workers == ("generator-1",) and not found.silent and not found.is_sound
    assert _words(found)[1].endswith("DIFFERS") and len(_words(found)) == 3


LEARNER = Incarnation(Role.LEARNER, "learner", 1)
PROMPT = Prompt(prompt_id="train:0", tokens=np.array([5, 9], np.int32), text="2+3=", answer="5", verifier="arithmetic")
STATS = EngineStats(num_live=2, num_decode_steps=5, num_sampled_tokens=9, num_prefill_tokens=4)
LIMIT_S = 30.0


def turn(watched: StallDetector, now_s: float, after: EngineStats = STATS, *, num_windows: int = 0) -> bool:
    return watched.observe_turn(
        STATS, after, num_windows=num_windows, began_s=now_s - 0.1, now_s=now_s, limit_s=LIMIT_S
    )


def test_many_empty_turns_over_a_long_time_are_an_error_and_neither_alone_is() -> None:
    quick, slow = StallDetector(), StallDetector()
    assert not any(turn(quick, 0.1 + 0.01 * number) for number in range(10 * MAX_EMPTY_TURNS))
    assert not any(turn(slow, 60.0 * number) for number in range(MAX_EMPTY_TURNS))
    with pytest.raises(EngineDied, match=rf"no token in {MAX_EMPTY_TURNS + 1} turns .* 2 trajectories"):
        turn(slow, 60.0 * MAX_EMPTY_TURNS)
    with pytest.raises(EngineDied, match="a new engine takes its place"):
        turn(quick, 40.0)


@pytest.mark.parametrize("field", ["num_decode_steps", "num_sampled_tokens", "num_prefill_tokens"])
def test_a_turn_with_tokens_of_a_prompt_or_response_ends_a_standstill(field: str) -> None:
    watched = StallDetector()
    for number in range(5 * MAX_EMPTY_TURNS):
        moves = number % (MAX_EMPTY_TURNS - 1) == 0
        after = replace(STATS, **{field: getattr(STATS, field) + 1}) if moves else STATS
        assert turn(watched, 10.0 * number, after) is moves
        assert watched.longest_s == (pytest.approx(970.1) if number >= MAX_EMPTY_TURNS - 1 else 0.0)
        assert watched.is_on is not moves and (watched.stood_s > 0.0) is not moves
    assert turn(watched, 1e5, num_windows=1)


def test_time_without_live_trajectories_is_no_standstill() -> None:
    watched = StallDetector()
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
            await generator._taker.poll()
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
