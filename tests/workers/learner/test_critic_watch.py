"""The learner's waits until its critic is good enough, and its reports of a value worker that is
gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.ledger.types import ClaimRefused, DropReason, Unit
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.training.critic_gate import GATE_OPEN
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_chunk, make_spec, reward, value
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.learner.critic_watch import CriticWatch

GENERATOR = Incarnation(Role.GENERATOR, "generator-0", 1)
SCORER = Incarnation(Role.REWARD, "reward-0", 1)


@asynccontextmanager
async def learner(folder: Path, unit: Unit) -> AsyncIterator[ActorContext]:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry, transport = MemoryRegistry(clock), zmq_transport()
        ctx = await context_of(small_config(folder), folder, Role.LEARNER, "learner", tasks, registry, transport, clock)
        fields = frozenset({Field.REWARD, Field.VALUE})
        await ctx.ledger.open(make_spec(unit, fields=fields, value_training=True, eta=0, group_size=1))
        yield ctx
        ctx.close()


async def beat(ctx: ActorContext, is_open: bool) -> None:
    who = await ctx.registry.register(Role.VALUE, "value")
    assert isinstance(ctx.registry, MemoryRegistry)
    now = ctx.clock.time()
    ctx.registry.beat(
        Heartbeat(
            who=who,
            pid=1,
            host="here",
            at_s=now,
            started_s=now,
            progress=1,
            progress_at_s=now,
            waiting_for=WaitingFor.INPUT,
            counters={GATE_OPEN: float(is_open)},
        )
    )


@pytest.mark.parametrize("unit", list(Unit))
async def test_what_is_ready_before_the_critic_is_dropped_and_generation_goes_on(tmp_path: Path, unit: Unit) -> None:
    async with learner(tmp_path, unit) as ctx:
        watch = CriticWatch(ctx, was_open=False)
        # with eta = 0 each batch's credit is only there because that before it was dropped
        for batch in range(3):
            grant = await ctx.ledger.lease(GENERATOR, max_trajectories=100)
            assert len(grant.leases) == 4
            for lease in grant.leases:
                chunk = make_chunk(lease.trajectory)
                await ctx.ledger.write_chunk(GENERATOR, chunk)
                assert isinstance(await watch.drop_batch(0), ClaimRefused)
                await ctx.ledger.write_score(SCORER, chunk.id, reward(lease.trajectory.group % 2))
                await ctx.ledger.write_score(SCORER, chunk.id, value())
            assert await watch.drop_batch(0) is None
            audit = await ctx.ledger.audit()
            assert audit.balances
            assert audit.trajectories.dropped == {DropReason.VALUE_WARMUP: 4 * (batch + 1)}
            # the critic learns from them all the same
            assert audit.finished.in_flight == {"waiting": 4 * (batch + 1)}


async def test_a_gate_that_was_seen_open_stays_open_when_the_value_worker_dies(tmp_path: Path) -> None:
    async with learner(tmp_path, Unit.CHUNK) as ctx:
        watch = CriticWatch(ctx, was_open=False)
        await watch.look()
        assert not watch.is_open and "no heartbeat" in watch.trouble
        await beat(ctx, False)
        await watch.look()
        assert watch.trouble == "" and not watch.is_open
        await beat(ctx, True)
        await watch.look()
        assert watch.trouble == "" and watch.is_open
        await advance(ctx, 30.0)
        await watch.look()
        assert "silent for 30 s" in watch.trouble and watch.is_open


async def advance(ctx: ActorContext, seconds: float) -> None:
    assert isinstance(ctx.clock, ManualClock)
    await ctx.clock.advance(seconds)


@pytest.mark.parametrize(("pretrain_steps", "is_open"), [(0, True), (1, False)])
async def test_a_gate_that_asks_for_no_steps_is_open_before_the_value_worker_says_so(
    tmp_path: Path, pretrain_steps: int, is_open: bool
) -> None:
    async with learner(tmp_path, Unit.GROUP) as ctx:
        section = ctx.config.value.model_copy(update={"pretrain_steps": pretrain_steps})
        ctx.config = ctx.config.model_copy(update={"value": section})
        watch = CriticWatch(ctx, was_open=False)
        await watch.look()
        assert watch.is_open is is_open
