"""A generator's leases while its writers store and send windows that the decode loop may lease
again meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pipeline.ledger.admin import Place, RequeueRequest
from pipeline.ledger.types import Lease, Unit
from pipeline.runtime.context import ActorContext
from pipeline.runtime.worker_state import WorkerState
from protocol.codec import Encoded
from protocol.ids import Incarnation, Role, TrajectoryId
from protocol.trajectory import Field, FinishReason, Prompt, Segment
from tests.manual_clock import ManualClock
from tests.oracle.ledger.admin import MemoryAdmin
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_chunk, make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.engines.generation.seam import EngineStats, SampledWindow, WindowRequest
from workers.generator.chunk_writer import ChunkWriter
from workers.generator.generator import Generator, Neighbours
from workers.generator.held_trajectories import HeldTrajectories, Renewal, Stage

LEARNER = Incarnation(Role.LEARNER, "learner", 1)
PROMPT = Prompt(prompt_id="train:0", tokens=np.array([5, 9], np.int32), text="2+3=", answer="5", verifier="arithmetic")


class _SlowOutbox:
    """Credit returns, and the decode loop leases, while a chunk waits for room."""

    role = Role.VALUE

    def __init__(self, ctx: ActorContext, held: HeldTrajectories) -> None:
        self._ctx, self._held = ctx, held

    async def send(self, message: Encoded, **how: object) -> bool:
        del message, how
        await self._ctx.ledger.advance(LEARNER, 1)
        grant = await self._ctx.ledger.lease(self._ctx.who, max_trajectories=1, policy_version=1)
        (lease,) = grant.leases
        assert lease.next_index == 1, "the parked trajectory comes back before new prompts"
        assert self._held.renewal(lease) is Renewal.NEW
        self._held.add(lease, PROMPT)
        return True


def writer_of(ctx: ActorContext, held: HeldTrajectories, senders: Sequence[Any] = ()) -> ChunkWriter:
    """A writer of windows that have not ended, so without a tokenizer."""
    return ChunkWriter(ctx, held, cast("Any", None), senders, max_waiting=2)


@pytest.mark.parametrize("leased_meanwhile", [True, False])
async def test_a_parked_trajectory_that_comes_back_while_its_chunk_is_sent_stays_held(
    tmp_path: Path, leased_meanwhile: bool
) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        ctx = await context_of(
            small_config(tmp_path),
            tmp_path,
            Role.GENERATOR,
            "generator-0",
            tasks,
            MemoryRegistry(clock),
            zmq_transport(),
            clock,
        )
        fields = frozenset({Field.REWARD, Field.VALUE})
        await ctx.ledger.open(make_spec(Unit.CHUNK, fields=fields, eta=0, group_size=1, units_per_update=1))
        await ctx.ledger.advance(LEARNER, 0)
        (lease,) = (await ctx.ledger.lease(ctx.who, max_trajectories=1, policy_version=0)).leases
        trajectories = HeldTrajectories(4)
        trajectories.add(lease, PROMPT)
        trajectories.submit(lease.trajectory)
        writer = writer_of(ctx, trajectories, [_SlowOutbox(ctx, trajectories)] if leased_meanwhile else [])
        trajectories.sampled(window(lease.trajectory))

        await writer.write(window(lease.trajectory))

        held = trajectories.get(lease.trajectory)
        if leased_meanwhile:
            assert held is not None and (held.next_index, held.stage) == (1, Stage.LEASED)
            assert held.response_tokens.tolist() == [7, 8], "it goes on after the chunk that was stored"
        else:
            assert held is None, "without credit for its next window no generator has it"
        ctx.close()


@pytest.mark.parametrize("moved_on", [False, True])
async def test_a_trajectory_back_before_its_window_is_written_is_not_begun_twice(
    tmp_path: Path, moved_on: bool
) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock, registry = ManualClock(), MemoryRegistry(ManualClock())
        ctx = await context_of(
            small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), clock
        )
        ledger, other = ctx.ledger, Incarnation(Role.GENERATOR, "generator-1", 1)
        assert isinstance(ledger, MemoryLedger)
        admin = MemoryAdmin(ledger, lambda _: 1)
        await ledger.open(make_spec(group_size=1, units_per_update=1, num_prompts=1))
        (lease,) = (await ledger.lease(ctx.who, max_trajectories=1)).leases
        generator, engine = generator_of(ctx)
        await generator._begin(lease)
        generator._submit_resumable()
        await admin.requeue(RequeueRequest(worker="generator-0"))
        if moved_on:
            await ledger.lease(other, max_trajectories=1)
            await ledger.write_chunk(other, make_chunk(lease.trajectory, final=False))
            await ledger.give_back(other)

        (again,) = (await ledger.lease(ctx.who, max_trajectories=1)).leases
        await generator._begin(again)
        generator._submit_resumable()
        assert engine.submitted == [lease.trajectory]
        assert len(generator._held) == 1
        (waited,) = (await admin.waits()).units[0].trajectories
        assert waited.place is (Place.OPEN if moved_on else Place.LEASED), "what moved on elsewhere is for others"
        generator._tally.close()
        ctx.close()


class _OneSlot:
    """An engine with one slot, busy or free; it records the submitted windows."""

    num_slots = 1
    policy_version = 0

    def __init__(self) -> None:
        self.submitted: list[TrajectoryId] = []

    def submit(self, request: WindowRequest) -> None:
        self.submitted.append(request.trajectory)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)


class _Prompts:
    responses = None

    def at(self, position: int) -> Prompt:
        del position
        return PROMPT


def generator_of(ctx: ActorContext) -> tuple[Generator, _OneSlot]:
    """A generator around an engine with one slot."""
    generator, engine = Generator(ctx), _OneSlot()
    generator._assemble(cast("Any", _Prompts()), cast("Any", None), cast("Any", engine), ())
    return generator, engine


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.WINDOW])
async def test_an_ended_response_frees_its_slot_while_it_is_written_and_others_keep_it(
    tmp_path: Path, reason: FinishReason
) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock, registry = ManualClock(), MemoryRegistry(ManualClock())
        ctx = await context_of(
            small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), clock
        )
        await ctx.ledger.open(make_spec(group_size=1, units_per_update=4))
        (lease,) = (await ctx.ledger.lease(ctx.who, max_trajectories=1)).leases
        generator, engine = generator_of(ctx)
        await generator._begin(lease)
        generator._submit_resumable()
        engine.submitted.clear()

        await generator._writer.pass_on(replace(window(lease.trajectory), finish_reason=reason))
        await generator._lease_and_resume()

        assert len(engine.submitted) == (1 if reason is FinishReason.STOP else 0)
        generator._tally.close()
        ctx.close()


def window(trajectory: TrajectoryId) -> SampledWindow:
    return SampledWindow(
        trajectory=trajectory,
        tokens=np.array([7, 8], np.int32),
        behavior_logprobs=np.array([-0.1, -0.2], np.float32),
        segments=(Segment(0, 2),),
        finish_reason=FinishReason.WINDOW,
    )


class _Cut:
    """An outbox whose messages arrive nowhere while it is cut off."""

    role = Role.REWARD
    is_cut_off = True


@pytest.mark.parametrize(
    "other", ["reaches", "reaches scorers alone", "reaches nobody either", "is silent", "serves nothing yet", "none"]
)
async def test_a_neighbour_that_reaches_scorers_is_alive_with_weights_and_reaches_one(
    tmp_path: Path, other: str
) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry = MemoryRegistry(clock)
        settings = (small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks)
        ctx = await context_of(*settings, registry, zmq_transport(), clock)
        neighbour = await registry.register(Role.GENERATOR, "generator-1")
        if other != "none":
            worker_state = WorkerState(neighbour, clock)
            worker_state.policy_version = -1 if other == "serves nothing yet" else 3
            worker_state.unreached = {
                "reaches nobody either": "learner at tcp://h:1 (7 s); reward-0 at tcp://h:2 (7 s)",
                "reaches scorers alone": "learner at tcp://h:1 (7 s)",
            }.get(other, "")
            registry.beat(worker_state.heartbeat())
        if other == "is silent":
            await clock.advance(30.0)
        assert await Neighbours(ctx).reach_scorers() is (other in ("reaches", "reaches scorers alone"))
        ctx.close()


@pytest.mark.parametrize("is_cut_off", [True, False])
async def test_work_of_a_generator_that_reaches_no_scorer_goes_on_at_one_that_does(
    tmp_path: Path, is_cut_off: bool
) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        registry = MemoryRegistry(clock)
        settings = (small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks)
        ctx = await context_of(*settings, registry, zmq_transport(), clock)
        worker_state = WorkerState(await registry.register(Role.GENERATOR, "generator-1"), clock)
        worker_state.policy_version = 3
        registry.beat(worker_state.heartbeat())
        await ctx.ledger.open(make_spec(group_size=1, units_per_update=1, num_prompts=1))
        (lease,) = (await ctx.ledger.lease(ctx.who, max_trajectories=1)).leases
        generator, engine = generator_of(ctx)
        cut = _Cut()
        cut.is_cut_off = is_cut_off
        generator._writer = writer_of(ctx, generator._held, [cut])
        generator._held.add(lease, PROMPT)
        await generator._lease_and_resume()
        assert engine.submitted == ([] if is_cut_off else [lease.trajectory])
        assert len(generator._held) == (0 if is_cut_off else 1)
        other = Incarnation(Role.GENERATOR, "generator-1", 1)
        assert len((await ctx.ledger.lease(other, max_trajectories=1)).leases) == (1 if is_cut_off else 0)
        generator._tally.close()
        ctx.close()


async def test_leases_outlive_a_long_turn_and_run_out_when_the_engine_stands_still(
    tmp_path: Path,
) -> None:
    clock, renewed = ManualClock(), list[float]()
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks, MemoryRegistry(clock),
            zmq_transport(), clock,
        )  # fmt: skip

        async def renew(_who: Incarnation) -> None:
            renewed.append(clock.monotonic())

        ctx.ledger.renew = renew  # pyright: ignore[reportAttributeAccessIssue]
        generator = Generator(ctx)
        generator._held = HeldTrajectories(1)
        generator._held.add(Lease(TrajectoryId.parse("t.0.0"), 0, 0, None), PROMPT)
        keeping = tasks.create_task(generator._keep_leases())
        lease_s = ctx.config.ledger.lease_s
        # one turn of a minute and a half, layer by layer
        for _ in range(60):
            ctx.work.step()
            await clock.advance(lease_s / 10)
        assert len(renewed) >= 60 / 10 * 4 - 1
        renewed.clear()
        await clock.advance(100 * lease_s)
        assert len(renewed) <= 5, "nothing moves: what it holds goes on elsewhere"
        keeping.cancel()


async def test_a_generator_without_work_in_a_pause_names_it_and_is_not_to_blame(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        clock = ManualClock()
        settings = (small_config(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks)
        ctx = await context_of(*settings, MemoryRegistry(clock), zmq_transport(), clock)
        await ctx.ledger.open(make_spec(group_size=1, units_per_update=1))
        assert isinstance(ctx.ledger, MemoryLedger)
        await MemoryAdmin(ctx.ledger, lambda _: 1).pause(by="operator@host")
        generator, engine = generator_of(ctx)
        generator._writer = writer_of(ctx, generator._held)
        await generator._lease_and_resume()
        assert engine.submitted == []
        beat = ctx.worker_state.heartbeat()
        assert beat.waiting_for.may_hold, "the watchdog allows this wait for ever"
        assert "an operator, who has paused admission" in beat.detail
        generator._tally.close()
        ctx.close()
