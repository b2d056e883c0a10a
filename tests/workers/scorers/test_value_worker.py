"""Promises of the value process: every chunk valued once and never by NaN, every response trained
on once, nothing lost."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import FilteringBoundLogger

import workers.scorers.value
from pipeline.config.learning import ValueSection, algorithm_settings
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import FinishedTrajectory, Unit, WriteStatus
from pipeline.observability.history import VALUE_HISTORY_NAME, ValueRow, run_history
from pipeline.runtime.context import ActorContext
from pipeline.training.critic_gate import EXPLAINED_VARIANCE, GATE_OPEN, VALUE_STEPS
from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from protocol.channel import Delivery, LinkStats, Mailbox
from protocol.errors import Diverged, EngineError, StepDiffered
from protocol.ids import Incarnation, Role
from protocol.trajectory import Field, RewardScore, TrajectoryChunk, ValueScore
from tests.manual_clock import ManualClock
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.algorithms.conversations import conversations
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward
from tests.pipeline.runtime.fakes import small_config
from tests.transports import zmq_transport
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.regression import check_value_samples
from workers.engines.value.seam import ValueSample, ValueStepResult
from workers.scorers.value import Value, sample_of

BATCH = 4


@dataclass
class ScriptedEngine:
    """Values everything at its number of steps, and remembers its training samples."""

    explained: list[float] = field(default_factory=list)
    """Explained variance of each step to come; 0 when there is none left."""
    is_broken: bool = False
    poison: set[int] = field(default_factory=set)
    """Requests that end in such a token are valued at NaN."""
    refusals: int = 0
    num_steps: int = 0
    batches: list[list[ValueSample]] = field(default_factory=list)

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        if self.is_broken:
            raise EngineError("no memory")
        return [
            np.full(r.num_scored, np.nan if int(r.tokens[-1]) in self.poison else self.num_steps, np.float32)
            for r in requests
        ]

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        applied = self.refusals == 0
        self.refusals = max(0, self.refusals - 1)
        if applied:
            self.num_steps += 1
            self.batches.append(list(samples))
        explained = self.explained.pop(0) if self.explained else 0.0
        return ValueStepResult(applied, 0.5, explained, 0.0, 0.0, 0.0, 1.0, 1e-3, 10)

    def snapshot(self) -> Callable[[Path], None]:
        num_steps = self.num_steps

        def write(folder: Path) -> None:
            (folder / "engine.json").write_text(json.dumps(num_steps))

        return write

    def load(self, folder: Path) -> None:
        self.num_steps = json.loads((folder / "engine.json").read_text())

    def live_state(self) -> LiveState:
        return LiveState((), str(self.num_steps), lambda pages: None)

    def put_back(self, kept: KeptState) -> None:
        self.num_steps = int(kept.note)

    def close(self) -> None:
        pass


class Inbox:
    """A mailbox with messages that have come over the wire: they are there at once."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.arrived: deque[Delivery | None] = deque()

    @property
    def endpoint(self) -> str:
        return self.mailbox.endpoint

    async def receive(self, *, timeout_s: float) -> Delivery | None:
        return self.arrived.popleft() if self.arrived else await self.mailbox.receive(timeout_s=timeout_s)

    def stats(self) -> list[LinkStats]:
        return self.mailbox.stats()

    def close(self) -> None:
        self.mailbox.close()


class Fleet:
    """A ledger, a wire, and one value worker after another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.epochs: dict[str, int] = {who.worker: who.epoch for who in (GENERATOR, SCORER, LEARNER)}
        self.clock = ManualClock()
        self.ledger = MemoryLedger(lambda worker: self.epochs.get(worker, 0), self.clock.time)
        self.registry = MemoryRegistry(self.clock)
        self.engine = ScriptedEngine()
        self.config: RunConfig = small_config(folder).model_copy(
            update={
                "algorithm": algorithm_settings(name="ppo"),
                "value": ValueSection(
                    batch_trajectories=BATCH,
                    min_explained_variance=0.1,
                    explained_variance_steps=2,
                    checkpoint_every_steps=100,
                ),
            }
        )
        monkeypatch.setattr(workers.scorers.value, "build_value_engine", lambda _: self.engine)

    async def open(self) -> None:
        fields = frozenset({Field.REWARD, Field.VALUE})
        spec = make_spec(Unit.TRAJECTORY, fields=fields, value_training=True, units_per_update=64, max_attempts=2)
        await self.ledger.open(spec)

    @asynccontextmanager
    async def value_worker(self) -> AsyncIterator[Value]:
        """A new incarnation, set up; left as a crash leaves it, unless it is drained
        by the test."""
        async with asyncio.TaskGroup() as tasks:
            who = await self.registry.register(Role.VALUE, "value")
            self.epochs["value"] = who.epoch
            ctx = ActorContext(
                config=self.config,
                run_dir=self.folder,
                who=who,
                ledger=self.ledger,
                registry=self.registry,
                transport=zmq_transport(str(who), high_water_mark=64),
                log=cast("FilteringBoundLogger", structlog.get_logger("test")),
                clock=self.clock,
                tasks=tasks,
            )
            worker = Value(ctx)
            await worker.setup()
            try:
                yield worker
            finally:
                await worker.teardown()
                ctx.close()

    async def sample(self, num: int, score: RewardScore | None = None) -> list[TrajectoryChunk]:
        """Write finished responses, each in one chunk, and their rewards, or ``score`` for each;
        they are not valued yet."""
        grant = await self.ledger.lease(GENERATOR, max_trajectories=num)
        chunks = [make_chunk(lease.trajectory) for lease in grant.leases]
        for chunk in chunks:
            assert (await self.ledger.write_chunk(GENERATOR, chunk)).status is WriteStatus.STORED
            await self.ledger.write_score(SCORER, chunk.id, score or reward(chunk.trajectory.group % 2))
        assert len(chunks) == num
        return chunks

    async def deliver(self, worker: Value, chunks: Sequence[TrajectoryChunk]) -> None:
        address = (await self.registry.endpoints(Role.VALUE))[worker.ctx.who.worker][0]
        sender = zmq_transport(str(GENERATOR), high_water_mark=64).sender(address)
        inbox = worker._mailbox = Inbox(worker._mailbox)
        for chunk in chunks:
            assert await sender.send(chunk, timeout_s=5.0)
            inbox.arrived.append(await inbox.mailbox.receive(timeout_s=5.0))

    def rows(self) -> list[ValueRow]:
        return [
            row for row in run_history(self.folder / VALUE_HISTORY_NAME).read_strictly() if isinstance(row, ValueRow)
        ]


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    made = Fleet(tmp_path, monkeypatch)
    await made.open()
    return made


async def _values_given(fleet: Fleet) -> list[tuple[float, int]]:
    """Return the values of finished responses, by claiming them as the value worker would."""
    who = Incarnation(Role.VALUE, "value", fleet.epochs["value"])
    claim = await fleet.ledger.claim_finished(who, num_trajectories=1)
    assert not isinstance(claim, int)
    return [(float(s.values[0]), s.value_version) for t in claim.trajectories for s in t.values]


async def test_every_chunk_is_valued_under_the_version_that_its_score_names(fleet: Fleet) -> None:
    fleet.engine.explained = [0.0]
    async with fleet.value_worker() as worker:
        await fleet.deliver(worker, await fleet.sample(BATCH))
        assert await worker.serve(0.0) == BATCH
        assert await worker._train()
        await fleet.deliver(worker, await fleet.sample(1))
        await worker.serve(0.0)
        assert await _values_given(fleet) == [(1.0, 1)]
        assert worker.ctx.counters["scored"] == BATCH + 1
        assert worker.ctx.counters["value_version"] == 1


async def test_a_chunk_whose_message_was_lost_is_valued_when_it_is_overdue(fleet: Fleet) -> None:
    await fleet.sample(2)
    async with fleet.value_worker() as worker:
        assert await worker.serve(0.0) == 0
        await fleet.clock.advance(20.0)
        assert await worker.serve(0.0) == 2
        assert worker.ctx.counters["overdue"] == 2


async def test_values_that_are_not_finite_are_never_written_and_make_a_dead_letter(fleet: Fleet) -> None:
    bad, good = await fleet.sample(2)
    fleet.engine.poison = {int(bad.tokens[-1])}
    # the same chunk, ending in another token
    good_chunk = make_chunk(good.trajectory, tokens=5)
    async with fleet.value_worker() as worker:
        for _ in range(2):
            await fleet.deliver(worker, [bad])
            await worker.serve(0.0)
        await fleet.deliver(worker, [good_chunk])
        await worker.serve(0.0)
        assert worker.ctx.counters["failed"] == 2 and worker.ctx.counters["scored"] == 1
    (letter,) = await fleet.ledger.dead_letters()
    assert letter.chunk == str(bad.id) and letter.role == "value"
    assert "3 of 3 values" in letter.error and str(bad.id) in letter.error


async def test_an_engine_that_fails_fails_the_chunks_and_not_the_worker(fleet: Fleet) -> None:
    chunks = await fleet.sample(2)
    fleet.engine.is_broken = True
    async with fleet.value_worker() as worker:
        await fleet.deliver(worker, chunks)
        await worker.serve(0.0)
        assert worker.ctx.counters["failed"] == 2
        fleet.engine.is_broken = False
        await fleet.deliver(worker, chunks)
        await worker.serve(0.0)
        assert worker.ctx.counters["scored"] == 2


async def test_each_response_is_trained_on_once_whole_with_the_values_it_was_given(fleet: Fleet) -> None:
    async with fleet.value_worker() as worker:
        chunks = await fleet.sample(BATCH + 2)
        await fleet.deliver(worker, chunks)
        await worker.serve(0.0)
        assert await worker._train()
        assert not await worker._train()
        assert worker.ctx.counters["finished"] == 2
        await fleet.deliver(worker, await fleet.sample(2))
        await worker.serve(0.0)
        assert await worker._train()
    trained = [sample for batch in fleet.engine.batches for sample in batch]
    assert len({sample.name for sample in trained}) == len(trained) == 2 * BATCH
    first = trained[0]
    assert first.tokens.tolist() == [1, 2, 0, 1, 2] and first.prompt_length == 2
    assert first.reward == 2 * (chunks[0].trajectory.group % 2) - 1
    assert [row.step for row in fleet.rows()] == [1, 2]


async def test_a_response_whose_reward_is_not_finite_never_trains_the_value_model(fleet: Fleet) -> None:
    spoiled = RewardScore(reward=float("nan"), accuracy=0.0)
    async with fleet.value_worker() as worker:
        sound = await fleet.sample(BATCH - 1)
        await fleet.deliver(worker, sound + await fleet.sample(1, spoiled))
        await worker.serve(0.0)
        assert await worker._train()
        ((*trained,),) = fleet.engine.batches
        assert [sample.name for sample in trained] == [str(chunk.trajectory) for chunk in sound]
        assert [row.num_trajectories for row in fleet.rows()] == [BATCH - 1]
        await fleet.deliver(worker, await fleet.sample(BATCH, spoiled))
        await worker.serve(0.0)
        assert await worker._train(), "a batch of nothing else is used up"
        assert fleet.engine.num_steps == worker.ctx.counters[VALUE_STEPS] == 1


async def test_the_gate_opens_with_a_checkpoint_and_is_open_after_a_crash(fleet: Fleet) -> None:
    fleet.engine.explained = [0.5, 0.3, -1.0]
    async with fleet.value_worker() as worker:
        for step in range(2):
            assert worker.ctx.counters[GATE_OPEN] == 0.0
            await fleet.deliver(worker, await fleet.sample(BATCH))
            await worker.serve(0.0)
            await worker._train()
            assert worker.ctx.counters[VALUE_STEPS] == step + 1
        assert worker.ctx.counters[GATE_OPEN] == 1.0
        assert worker.ctx.counters[EXPLAINED_VARIANCE] == pytest.approx(0.4)
    fleet.engine = ScriptedEngine()
    async with fleet.value_worker() as worker:
        assert worker.ctx.counters[GATE_OPEN] == 1.0 and fleet.engine.num_steps == 2
        assert worker.ctx.counters["value_version"] == 2


async def test_a_crash_gives_back_what_no_checkpoint_holds_and_no_version_names_two_models(fleet: Fleet) -> None:
    # ends without a drain: a crash
    async with fleet.value_worker() as worker:
        await fleet.deliver(worker, await fleet.sample(BATCH))
        await worker.serve(0.0)
        await worker._train()
    lost = [sample.name for sample in fleet.engine.batches[0]]
    fleet.engine = ScriptedEngine()
    async with fleet.value_worker() as worker:
        assert worker.ctx.counters["value_version"] == 2 and worker.ctx.counters[VALUE_STEPS] == 0
        # the row of the lost step is gone
        assert fleet.rows() == []
        assert await worker._train()
        assert [sample.name for sample in fleet.engine.batches[0]] == lost
        assert [(row.step, row.value_version) for row in fleet.rows()] == [(1, 3)]


async def test_a_drained_worker_keeps_what_it_learned_and_settles_it(fleet: Fleet) -> None:
    async with fleet.value_worker() as worker:
        await fleet.deliver(worker, await fleet.sample(BATCH))
        await worker.serve(0.0)
        await worker._train()
        await fleet.deliver(worker, await fleet.sample(1))
        await worker.drain()
    audit = await fleet.ledger.audit()
    assert audit.balances and audit.finished.trained == BATCH and sum(audit.finished.in_flight.values()) == 1
    fleet.engine = ScriptedEngine()
    async with fleet.value_worker() as worker:
        assert (fleet.engine.num_steps, worker.ctx.counters["value_version"]) == (1, 1)
        assert not await worker._train()


async def test_an_idle_worker_settles_what_it_learned_so_that_the_ledger_has_room_again(fleet: Fleet) -> None:
    async with fleet.value_worker() as worker:
        await fleet.deliver(worker, await fleet.sample(BATCH))
        await worker.serve(0.0)
        await worker._train()
        assert not await worker._train()
        assert (await fleet.ledger.audit()).finished.trained == 0
        await fleet.clock.advance(10.0)
        assert not await worker._train()
        await worker._writer.wait()
        assert (await fleet.ledger.audit()).finished.trained == BATCH


async def test_refused_steps_make_no_version_and_too_many_in_a_row_end_the_worker(fleet: Fleet) -> None:
    # each is made again at once
    fleet.engine.refusals = 6
    async with fleet.value_worker() as worker:
        chunks = list[TrajectoryChunk]()
        for _ in range(2):
            chunks = await fleet.sample(BATCH)
            await fleet.deliver(worker, chunks)
            await worker.serve(0.0)
            assert await worker._train()
        assert worker.ctx.counters["value_version"] == 0 and worker.ctx.counters["refused_steps"] == 2
        words = worker.ctx.worker_state.heartbeat().not_committed
        assert words.startswith("value step 1 on ") and "was not finite twice" in words
        assert str(chunks[0].trajectory) in words
        await fleet.deliver(worker, await fleet.sample(BATCH))
        await worker.serve(0.0)
        with pytest.raises(Diverged, match="3 value steps in a row"):
            await worker._train()


async def test_a_value_step_that_differs_when_it_is_made_again_ends_the_worker(fleet: Fleet) -> None:
    fleet.engine.refusals = 1
    async with fleet.value_worker() as worker:
        await fleet.deliver(worker, await fleet.sample(BATCH))
        await worker.serve(0.0)
        with pytest.raises(StepDiffered, match=f"host {socket.gethostname()} has a faulty memory or device"):
            await worker._train()
    fleet.engine = ScriptedEngine()
    async with fleet.value_worker() as worker:
        assert worker.ctx.counters["value_version"] == 0
        assert await worker._train(), "its responses come back"
        assert worker.ctx.counters["value_version"] == 1


async def test_the_loop_serves_first_and_trains_in_between(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mailbox that is never empty, steps are still taken, and each waits for full batches
    before it."""
    monkeypatch.setattr(Value, "max_batch", 2)
    turns: list[str] = []
    async with fleet.value_worker() as worker:
        supply = iter(await fleet.sample(32))

        async def serve(timeout_s: float = 0.0) -> int:
            await fleet.deliver(worker, [chunk for chunk, _ in zip(supply, range(2), strict=False)])
            turns.append("serve")
            return await Value.__mro__[1].serve(worker, 0.0)

        step = fleet.engine.step

        def noted_step(samples: Sequence[ValueSample]) -> ValueStepResult:
            turns.append("step")
            if fleet.engine.num_steps == 2:
                worker.ctx.draining.set()
            return step(samples)

        monkeypatch.setattr(worker, "serve", serve)
        monkeypatch.setattr(fleet.engine, "step", noted_step)
        await worker.run()
    assert turns[:9] == ["serve"] * 8 + ["step"]
    assert turns.count("step") == 3


@given(seed=st.integers(0, 2**32 - 1), replaces=st.sampled_from([0.0, 0.4, 1.0]))
def test_of_a_conversation_the_sampled_tokens_have_targets_each_with_its_own_value(seed: int, replaces: float) -> None:
    for one in conversations(seed, num_groups=1, replaces=replaces):
        values = [scored.scores[Field.VALUE] for scored in one.body]
        finished = FinishedTrajectory(one.chunks[-1].chunk, one.score, cast("tuple[ValueScore, ...]", tuple(values)))
        sample = sample_of(finished)
        check_value_samples([sample])
        last = max(number for number, earlier in enumerate(one.earlier) if earlier == 0)
        sampled = [token for window in one.windows[last:] for token in window]
        found = [(tuple(sample.tokens[:at].tolist()), int(sample.tokens[at])) for at in sample.scored]
        assert found == [(token.state, token.token) for token in sampled], "since the context was last replaced"
        assert sample.old_values.tolist() == [token.value for token in sampled]
