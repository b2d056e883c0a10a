"""Claims about publishing: versions only grow, and laggards are waited for, then fenced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.runtime import WeightsSection
from pipeline.config.schema import RunConfig
from pipeline.process.work import WorkReport
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.weights import PARTS, TURNS
from pipeline.weights.digest import digest_file
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.engines.training.publishing import TorchPublishing
from workers.learner.weight_publisher import WeightPublisher


class Backend(TorchPublishing):
    """The part of a training backend that publishing reads."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.arange(6.0).reshape(2, 3)

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        raise AssertionError(f"no probe is published: {samples}")


def _config(folder: Path) -> RunConfig:
    weights = WeightsSection(shared_memory=False, max_generator_lag=2, ack_timeout_s=30.0)
    return small_config(folder).model_copy(update={"weights": weights})


class Bench:
    def __init__(self, ctx: ActorContext, clock: ManualClock, registry: MemoryRegistry) -> None:
        self.ctx, self.clock, self.registry = ctx, clock, registry
        self.publisher = WeightPublisher(ctx)

    async def generator(self, version: int, *, waiting: WaitingFor = WaitingFor.COMPUTE) -> Incarnation:
        """A generator that serves ``version``, seen just now."""
        name = f"generator-{len(await self.registry.heartbeats())}"
        who = await self.registry.register(Role.GENERATOR, name)
        self.beat(who, version, waiting=waiting)
        return who

    def beat(
        self,
        who: Incarnation,
        version: int,
        *,
        waiting: WaitingFor = WaitingFor.COMPUTE,
        steps: int = 0,
        turns: int = 0,
        parts: int = 0,
    ) -> bool:
        now = self.clock.time()
        return self.registry.beat(
            Heartbeat(
                who=who, pid=1, host="h", at_s=now, started_s=0.0, progress=1, progress_at_s=now, waiting_for=waiting,
                policy_version=version, work=WorkReport(steps=steps),
                counters={TURNS: float(turns), PARTS: float(parts)},
            )
        )  # fmt: skip

    async def publish(self, version: int) -> None:
        await self.publisher.publish(version, Backend())  # pyright: ignore[reportArgumentType]

    async def published(self) -> int:
        announced = await self.registry.weights()
        return -1 if announced is None else announced.policy_version

    async def seconds_until_published(self, version: int, who: Incarnation, serves: int, *, limit: int = 60) -> int:
        """Publish while ``who`` keeps beating; return how many seconds that took by the clock."""
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(self.publish(version))
            for second in range(limit):
                # the file is written on a thread
                for _ in range(50):
                    await asyncio.sleep(0.001)
                    if job.done():
                        return second
                self.beat(who, serves)
                await self.clock.advance(1.0)
            raise AssertionError(f"not published within {limit} s")


@asynccontextmanager
async def _opened(tmp_path: Path) -> AsyncIterator[Bench]:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            _config(tmp_path), tmp_path, Role.LEARNER, "learner", tasks, registry, zmq_transport(), clock
        )
        try:
            yield Bench(ctx, clock, registry)
        finally:
            ctx.close()


async def test_a_published_version_is_announced_with_a_digest_that_holds(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.publish(1)
        announced = await bench.registry.weights()
        assert announced is not None
        assert announced.policy_version == 1
        assert digest_file(Path(announced.path)) == announced.digest


async def test_a_generator_within_the_allowed_lag_is_not_waited_for(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(3)
        assert await bench.seconds_until_published(5, who, 3) == 0


async def test_a_laggard_is_waited_for_and_unblocks_by_taking_newer_weights(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(0)
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(bench.publish(5))
            await bench.clock.advance(1.0)
            assert not job.done()
            assert bench.ctx.worker_state.heartbeat().waiting_for is WaitingFor.WEIGHTS
            assert "generator-0 (version 0)" in bench.ctx.worker_state.heartbeat().detail
            bench.beat(who, 4)
            await bench.clock.advance(1.0)
        assert await bench.published() == 5
        assert bench.beat(who, 4), "it was not fenced"


async def test_a_laggard_past_the_deadline_is_fenced_and_holds_nobody_up(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(0)
        assert 29 <= await bench.seconds_until_published(5, who, 0) <= 31
        assert await bench.registry.epoch("generator-0") == 2
        assert not bench.beat(who, 0)


@pytest.mark.parametrize("version", [-1, 0])
async def test_generators_that_serve_nothing_yet_drain_or_are_silent_are_not_waited_for(
    tmp_path: Path, version: int
) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(version, waiting=WaitingFor.DRAINING if version == 0 else WaitingFor.WEIGHTS)
        await bench.publish(5)
        assert await bench.published() == 5
        bench.beat(who, 0)
        await bench.clock.advance(6.0)
        await bench.publish(6)
        assert await bench.registry.epoch("generator-0") == 1


async def test_a_laggard_in_a_long_turn_is_waited_for_while_pieces_of_it_get_done(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(0)
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(bench.publish(5))
            for second in range(100):
                bench.beat(who, 0, steps=second + 1)
                await bench.clock.advance(1.0)
            assert not job.done()
            # now it stands still
            for _ in range(32):
                bench.beat(who, 0, steps=100)
                await bench.clock.advance(1.0)
        assert await bench.registry.epoch("generator-0") == 2


async def test_a_laggard_that_decodes_turn_after_turn_and_takes_no_weights_is_fenced(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bench.publish(5))
            for second in range(32):
                bench.beat(who, 0, steps=second + 1, turns=second)
                await bench.clock.advance(1.0)
        assert await bench.registry.epoch("generator-0") == 2


async def test_a_laggard_is_waited_for_while_parts_come_and_fenced_once_they_stop(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        who = await bench.generator(0)
        async with asyncio.TaskGroup() as tasks:
            job = tasks.create_task(bench.publish(5))
            # it decodes under the old version meanwhile
            for second in range(100):
                bench.beat(who, 0, turns=10 * second, parts=second // 20)
                await bench.clock.advance(1.0)
            assert not job.done()
            assert await bench.registry.epoch("generator-0") == 1
            for second in range(100, 132):
                bench.beat(who, 0, turns=10 * second, parts=4)
                await bench.clock.advance(1.0)
        assert await bench.registry.epoch("generator-0") == 2


async def test_a_learner_that_is_told_to_drain_waits_for_no_laggard(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        await bench.generator(0)
        bench.ctx.draining.set()
        await bench.publish(5)
        assert await bench.published() == 5


async def test_restored_weights_get_a_new_number_when_later_ones_were_announced(tmp_path: Path) -> None:
    async with _opened(tmp_path) as bench:
        assert await bench.publisher.next_version(0) == 0
        await bench.publish(7)
        assert await bench.publisher.next_version(7) == 8
        assert await bench.publisher.next_version(5) == 8
        assert await bench.publisher.next_version(0) == 8
