"""A generator's answers to self-checks: the same for the same weights, another for one flipped bit,
and never beside live windows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from pipeline.cli.selfcheck import _words
from pipeline.ledger.types import Unit
from pipeline.operator.attached import Attached
from pipeline.operator.fleet_check import check_fleet
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import Fleet
from pipeline.runtime.registry.vitals import CheckDigests
from pipeline.supervisor.run_folder import run_lock
from protocol.ids import Role, TrajectoryId
from protocol.trajectory import Field, Prompt
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.operator.small_run import small_run
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from tests.workers.engines.model_contract import published
from tests.workers.engines.tiny import tiny_model
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.generation.seam import GenerationEngine, SamplingParams, WindowRequest
from workers.generator.generator import Generator
from workers.generator.self_check import MAX_TOKENS, MOST_VERSIONS, NUM_PROMPTS, SelfChecker

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
        await checker.look()
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
        await checker.look()
        assert checker.is_due
        seen: list[int] = []
        for version in range(1, MOST_VERSIONS + 3):
            engine.load_weights(published(tiny_model(seed=1)), version)
            if checker.is_due:
                await checker.answer()
                seen.append(ctx.worker_state.check.policy_version)
        assert seen == list(range(1, MOST_VERSIONS + 1))
        await registry.replace_fleet(Fleet(check=7), Fleet(check=8))
        await checker.look()
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
                await checker.look()
                await checker.answer()
                assert run.registry.beat(ctx.worker_state.heartbeat())
                ctx.close()
    found = checked.result()
    assert found.found.workers == ("generator-1",) and not found.silent and not found.is_sound
    assert _words(found)[1].endswith("DIFFERS") and len(_words(found)) == 3
