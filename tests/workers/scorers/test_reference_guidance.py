"""Claims about a reference worker that guides finished responses: they come from the ledger with
their reward, take turns with chunks, and fail alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog

import workers.scorers.reference
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Claim, ScoredChunk, Unit, WriteStatus
from pipeline.runtime.context import ActorContext
from pipeline.runtime.prepared import PreparedParts
from protocol.errors import EngineDied, EngineError
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import Field, Guidance, GuidanceScore, RewardScore, TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec
from tests.pipeline.op_config import write_config
from tests.pipeline.runtime.fakes import context_of
from tests.transports import zmq_transport
from tests.workers.recording import RecordingScoring, tail_scores
from workers.engines.scoring.seam import ScoringRequest
from workers.preparation import prepare
from workers.scorers.reference import Reference

DEADLINE_S = 30.0
OTHER = Incarnation(Role.REFERENCE, "reference-1", 1)
RIGHT = Guidance(gold_text="13")
WRONG = Guidance(gold_text="13", judge_text="3says14")


def config_of(folder: Path, *overrides: str) -> RunConfig:
    (folder / "standard.txt").write_text("s{gold}={question}")
    (folder / "judge.txt").write_text("j{judgment}-{question}")
    return load_config(
        [write_config(folder)],
        [
            "algorithm.guidance=mix",
            f"guidance.standard_template={folder / 'standard.txt'}",
            f"guidance.judge_template={folder / 'judge.txt'}",
            f"ledger.scoring_deadline_s={DEADLINE_S}",
            *overrides,
        ],
    )


@dataclass
class Fleet:
    ctx: ActorContext
    ledger: MemoryLedger
    clock: ManualClock
    worker: Reference
    chunks: list[TrajectoryChunk] = field(default_factory=list[TrajectoryChunk])

    async def sample(self, number: int) -> list[TrajectoryChunk]:
        """Write responses of one window, of 3 tokens and more."""
        grant = await self.ledger.lease(GENERATOR, max_trajectories=number)
        made = [make_chunk(lease.trajectory, tokens=3 + at) for at, lease in enumerate(grant.leases)]
        assert len(made) == number
        for chunk in made:
            await self.ledger.write_chunk(GENERATOR, chunk)
        self.chunks += made
        return made

    async def judge(self, chunks: Sequence[TrajectoryChunk], guidance: Guidance | None = WRONG) -> None:
        for chunk in chunks:
            score = RewardScore(reward=0.0, accuracy=0.0, guidance=guidance)
            assert await self.ledger.write_score(SCORER, chunk.id, score) is WriteStatus.STORED

    async def guided(self) -> dict[ChunkId, GuidanceScore]:
        """Read back what the learner gets, of the next update."""
        claim = await self.ledger.claim(LEARNER, policy_version=0)
        assert isinstance(claim, Claim)
        scored = [one for unit in await self.ledger.fetch(claim) for member in unit.trajectories for one in member]
        return {one.chunk.id: msgspec.convert(one.scores[Field.GUIDANCE], GuidanceScore) for one in scored}


@asynccontextmanager
async def fleet(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: object,
    *overrides: str,
    updates_of: int = 1,
    parts: PreparedParts | None = None,
) -> AsyncIterator[Fleet]:
    """A worker that is set up. With ``reference.always`` among the overrides it fills both
    fields."""
    monkeypatch.setattr(workers.scorers.reference, "build_scoring_engine", lambda _: engine)
    config, clock = config_of(folder, *overrides), ManualClock()
    ledger = MemoryLedger(lambda _: 1, clock.time)
    spec = make_spec(
        Unit.TRAJECTORY,
        fields=config.score_fields,
        group_size=1,
        units_per_update=updates_of,
        eta=9,
        max_attempts=1,
        scoring_deadline_s=DEADLINE_S,
    )
    await ledger.open(spec)
    async with asyncio.TaskGroup() as tasks:
        transport = zmq_transport(Role.REFERENCE, high_water_mark=64)
        ctx = await context_of(
            config, folder, Role.REFERENCE, "reference-0", tasks, MemoryRegistry(clock), transport, clock
        )
        ctx.ledger = ledger
        ctx.prepared = parts or PreparedParts()
        worker = Reference(ctx)
        await worker.setup()
        try:
            yield Fleet(ctx, ledger, clock, worker)
        finally:
            await worker.teardown()
            ctx.close()


async def test_a_judged_response_is_guided_over_its_whole_length_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordingScoring()
    async with fleet(tmp_path, monkeypatch, engine, updates_of=2) as run:
        right, wrong = await run.sample(2)
        await run.judge([right], RIGHT)
        await run.judge([wrong], WRONG)
        assert await run.worker.serve(0.0) == 2
        assert [request.num_scored for request in engine.requests] == [3, 4, 4]
        written = await run.guided()
        standard, judged = written[right.id], written[wrong.id]
        np.testing.assert_array_equal(standard.standard_logprobs, tail_scores(engine.requests[0].tokens, 3))
        np.testing.assert_array_equal(judged.standard_logprobs, tail_scores(engine.requests[1].tokens, 4))
        np.testing.assert_array_equal(judged.judge_logprobs, tail_scores(engine.requests[2].tokens, 4))
        assert standard.judge_logprobs.size == 0
        assert standard.guide_version == judged.guide_version != ""
        read = sum(request.tokens.size for request in engine.requests)
        told = {"guided": 2, "guided_passes": 3, "guided_tokens": read, "scored_tokens": 11, "guidance_absent": 0}
        assert {name: run.ctx.counters[name] for name in told} == told
        assert "scored" not in run.ctx.counters
        work = run.ctx.work.service()
        assert (work["guidance"].pieces, work["guidance"].size) == (2, read)


async def test_the_windows_before_the_last_are_part_of_the_guided_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordingScoring()
    async with fleet(tmp_path, monkeypatch, engine) as run:
        (lease,) = (await run.ledger.lease(GENERATOR, max_trajectories=1)).leases
        await run.ledger.write_chunk(GENERATOR, make_chunk(lease.trajectory, 0, tokens=5, final=False))
        final = make_chunk(lease.trajectory, 1, tokens=2, context=5)
        await run.ledger.write_chunk(GENERATOR, final)
        await run.judge([final], RIGHT)
        await run.worker.serve(0.0)
        (request,) = engine.requests
        assert request.num_scored == 7 and request.tokens[-7:].tolist() == [0, 1, 2, 3, 4, 0, 1]


async def test_no_response_is_guided_before_its_reward_nor_in_a_run_without_guidance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordingScoring()
    async with fleet(tmp_path, monkeypatch, engine) as run:
        chunks = await run.sample(2)
        assert await run.worker.serve(0.0) == 0 and not engine.requests
        await run.judge(chunks)
        await run.clock.advance(1.0)
        assert await run.worker.serve(0.0) == 2
    plain = ("algorithm.guidance=none", "reference.always=true")
    async with fleet(tmp_path, monkeypatch, engine, *plain) as run:
        asked: list[Field] = []
        overdue = run.ledger.overdue

        async def recorded(who: Incarnation, field: Field, *, max_chunks: int) -> list[ScoredChunk]:
            asked.append(field)
            return await overdue(who, field, max_chunks=max_chunks)

        monkeypatch.setattr(run.ledger, "overdue", recorded)
        for _ in range(3):
            await run.worker.serve(0.0)
            await run.clock.advance(1.5)
        assert asked == [Field.REFERENCE] * 3


async def test_chunks_and_responses_take_turns_a_batch_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordingScoring()
    async with fleet(tmp_path, monkeypatch, engine, "reference.always=true", updates_of=6) as run:
        run.worker.max_batch = 2
        chunks = await run.sample(6)
        await run.judge(chunks, RIGHT)
        # the messages of all chunks were lost
        await run.clock.advance(DEADLINE_S)
        served: list[tuple[float, float]] = []
        for _ in range(3):
            assert await run.worker.serve(0.0) == 4
            served.append((run.ctx.counters["guided"], run.ctx.counters["scored"]))
            await run.clock.advance(1.0)
        assert served == [(2, 2), (4, 4), (6, 6)]
        assert len(await run.guided()) == 6


async def test_the_ledger_is_asked_again_at_once_only_after_a_full_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch, RecordingScoring()) as run:
        run.worker.max_batch = 2
        await run.judge(await run.sample(5))
        assert [await run.worker.serve(0.0) for _ in range(3)] == [2, 2, 1]
        await run.judge(await run.sample(1))
        await run.clock.advance(0.2)
        assert await run.worker.serve(0.0) == 0
        await run.clock.advance(0.1)
        assert await run.worker.serve(0.0) == 1


class Failing:
    """Fails with the given error on a batch that holds a response of ``length`` tokens."""

    def __init__(self, error: EngineError, length: int) -> None:
        self._error, self._length = error, length

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        if any(request.num_scored == self._length for request in requests):
            raise self._error
        return [np.zeros(request.num_scored, np.float32) for request in requests]


async def test_a_response_that_cannot_be_read_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Failing(EngineError("cannot be read"), 4)
    async with fleet(tmp_path, monkeypatch, engine, updates_of=2) as run:
        first, bad, last = await run.sample(3)
        await run.judge([first, bad, last])
        assert await run.worker.serve(0.0) == 3
        assert (run.ctx.counters["guided"], run.ctx.counters["failed"], run.ctx.counters["guided_passes"]) == (2, 1, 4)
        (letter,) = await run.ledger.dead_letters()
        assert (letter.chunk, letter.role) == (str(bad.id), "guidance") and "cannot be read" in letter.error
        assert set(await run.guided()) == {first.id, last.id}


async def test_a_dead_engine_is_no_fault_of_the_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch, Failing(EngineDied("gone"), 3)) as run:
        chunks = await run.sample(2)
        await run.judge(chunks)
        with pytest.raises(EngineDied):
            await run.worker.serve(0.0)
        assert "failed" not in run.ctx.counters and not await run.ledger.dead_letters()
        await run.clock.advance(DEADLINE_S)
        late = await run.ledger.overdue(OTHER, Field.GUIDANCE, max_chunks=9)
        assert {one.chunk.id for one in late} == {chunk.id for chunk in chunks}, "another process reads them"


class Slow:
    """Reads until it may end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        self.began.set()
        assert self.may_end.wait(20.0)
        return [np.zeros(request.num_scored, np.float32) for request in requests]


async def test_responses_in_hand_are_given_to_no_other_worker_however_long_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Slow()
    async with fleet(tmp_path, monkeypatch, engine) as run, asyncio.TaskGroup() as tasks:
        await run.judge(await run.sample(1))
        running = tasks.create_task(run.worker.run())
        try:
            await asyncio.to_thread(engine.began.wait, 20.0)
            for _ in range(8):
                await run.clock.advance(DEADLINE_S / 3)
            assert await run.ledger.overdue(OTHER, Field.GUIDANCE, max_chunks=9) == []
        finally:
            engine.may_end.set()
            run.ctx.draining.set()
        await running
        assert run.ctx.counters["guided"] == 1
        await run.ctx.cancel_spawned()


async def test_absent_guidance_is_written_and_counted_and_each_reason_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch, RecordingScoring(), "guidance.max_judgment_tokens=9", updates_of=4) as run:
        chunks = await run.sample(4)
        for chunk, size in zip(chunks, (9, 10, 11, 12), strict=True):
            await run.judge([chunk], Guidance(gold_text="13", judge_text="1" * size))
        with structlog.testing.capture_logs() as logs:
            await run.worker.serve(0.0)
        (line,) = [row for row in logs if row["event"] == "guidance_absent"]
        assert "the judgment has 10 tokens" in line["reason"]
        assert run.ctx.counters["guidance_absent"] == 3 and run.ctx.counters["guided"] == 4
        written = await run.guided()
        assert [written[chunk.id].judge_logprobs.size for chunk in chunks] == [3, 0, 0, 0]
        assert [written[chunk.id].standard_logprobs.size for chunk in chunks] == [3, 4, 5, 6]


async def test_a_worker_that_a_standby_became_guides_with_the_parts_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    made = prepare(config, [Role.REFERENCE])
    assert set(made) == {"reference", "guided prompts"}

    def not_again(config: RunConfig) -> None:
        raise AssertionError(f"made once more: {config.run.name}")

    monkeypatch.setattr(workers.scorers.reference, "load_guided_prompts", not_again)
    async with fleet(tmp_path, monkeypatch, None, parts=PreparedParts(config, made)) as run:
        (chunk,) = await run.sample(1)
        await run.judge([chunk])
        assert await run.worker.serve(0.0) == 1
        score = (await run.guided())[chunk.id]
        assert score.guide_version == made["guided prompts"].version
        assert score.standard_logprobs.shape == score.judge_logprobs.shape == (3,)
        assert np.isfinite(score.standard_logprobs).all() and (score.standard_logprobs != score.judge_logprobs).any()


async def test_work_of_both_kinds_is_in_the_worker_s_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(tmp_path, monkeypatch, RecordingScoring(), "reference.always=true") as run:
        await run.judge(await run.sample(2), RIGHT)
        await run.clock.advance(DEADLINE_S)
        await run.worker.serve(0.0)
        assert {kind: sums.pieces for kind, sums in run.ctx.work.service().items()} == {"guidance": 2, "scoring": 2}
        assert run.ctx.held == 0 and len(run.worker._inbox) == 0
