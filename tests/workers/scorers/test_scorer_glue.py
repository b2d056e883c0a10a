"""Requests of reward, reference and value workers to their engines for responses of several
windows, and their writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import structlog

import workers.scorers.reference
import workers.scorers.reward
import workers.scorers.value
from pipeline.config.learning import ValueSection, algorithm_settings
from pipeline.config.runtime import GenerationSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import RewardModelSection, RewardSection
from pipeline.ledger.types import Claim, ScoredChunk, Unit
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure
from pipeline.runtime.context import ActorContext
from protocol.ids import ChunkId, Role, TrajectoryId
from protocol.log_limiter import LOG_EVERY_S, MAX_LOGGED
from protocol.trajectory import Field, FinishReason, Prompt, RewardScore, Segment, TrajectoryChunk, ValueScore
from tests.manual_clock import ManualClock
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from tests.workers.recording import (
    RecordingPool,
    RecordingRewardModel,
    RecordingScoring,
    RecordingValue,
    tail_scores,
)
from tests.workers.scorers.scorers import judge_all
from workers.scorers.reference import Reference
from workers.scorers.reward import Reward
from workers.scorers.value import Value

LIMIT = 12
FIELDS = {Role.REWARD: Field.REWARD, Role.REFERENCE: Field.REFERENCE, Role.VALUE: Field.VALUE}


def windows_of(trajectory: TrajectoryId) -> list[list[int]]:
    """Member 0 fills the limit in three windows, member 1 stops soon."""
    group = trajectory.group
    return [
        [[20 + group, 21, 22, 23, 24], [30, 31, 32, 33, 34], [40, 41]],
        [[50 + group, 51, 52], [60]],
    ][trajectory.member]


def prompt_of(trajectory: TrajectoryId) -> Prompt:
    return Prompt(
        prompt_id=f"train:{trajectory.group}",
        tokens=np.array([7, 8, 9][: 2 + trajectory.group % 2], np.int32),
        text=f"prompt {trajectory.group}",
        answer=f"answer {trajectory.group}",
        verifier="arithmetic",
        extra={"level": trajectory.group},
    )


def chunks_of(trajectory: TrajectoryId) -> list[TrajectoryChunk]:
    windows, made, before = windows_of(trajectory), [], []
    for index, tokens in enumerate(windows):
        is_last = index == len(windows) - 1
        made.append(
            TrajectoryChunk(
                id=ChunkId(trajectory, index),
                prompt=prompt_of(trajectory),
                context_tokens=np.array(before, np.int32),
                tokens=np.array(tokens, np.int32),
                behavior_logprobs=np.zeros(len(tokens), np.float32),
                segments=(Segment(index, len(tokens)),),
                finish_reason=[FinishReason.LENGTH, FinishReason.STOP][trajectory.member]
                if is_last
                else FinishReason.WINDOW,
                response_text="x" * (3 + trajectory.member) if is_last else None,
            )
        )
        before += tokens
    return made


@dataclass
class Bench:
    ctx: ActorContext
    ledger: MemoryLedger
    trajectories: list[TrajectoryId]
    chunks: list[TrajectoryChunk]
    """Of all trajectories, in order."""

    async def written(self, field: Field) -> dict[ChunkId, ScoredChunk]:
        """Fill in the fields of other scorers, and read all back as the learner does."""
        for chunk in self.chunks:
            if chunk.finish_reason.is_final and field is not Field.REWARD:
                await self.ledger.write_score(SCORER, chunk.id, RewardScore(reward=0.5, accuracy=1.0))
        claim = await self.ledger.claim(LEARNER, policy_version=0)
        assert isinstance(claim, Claim)
        units = await self.ledger.fetch(claim)
        return {scored.chunk.id: scored for unit in units for member in unit.trajectories for scored in member}


@asynccontextmanager
async def opened(
    tmp_path: Path,
    config: RunConfig,
    role: Role,
    *,
    value_training: bool = False,
    clock: ManualClock | None = None,
) -> AsyncIterator[Bench]:
    """A ledger with four responses of several windows in it, and the surroundings of one worker of
    ``role``."""
    clock = clock or ManualClock()
    ledger = MemoryLedger(lambda _: 1, clock.time)
    fields = frozenset({Field.REWARD, FIELDS[role]})
    await ledger.open(make_spec(Unit.TRAJECTORY, fields=fields, value_training=value_training, eta=4))
    grant = await ledger.lease(GENERATOR, max_trajectories=4)
    chunks = [chunk for lease in grant.leases for chunk in chunks_of(lease.trajectory)]
    for chunk in chunks:
        assert (await ledger.write_chunk(GENERATOR, chunk)).status.value == "stored"
    async with asyncio.TaskGroup() as tasks:
        transport = zmq_transport(role, high_water_mark=64)
        ctx = await context_of(config, tmp_path, role, f"{role}-0", tasks, MemoryRegistry(clock), transport, clock)
        ctx.ledger = ledger
        try:
            yield Bench(ctx, ledger, [lease.trajectory for lease in grant.leases], chunks)
        finally:
            ctx.close()


async def test_a_verifier_that_fails_on_every_response_is_logged_once_a_minute_and_counted(tmp_path: Path) -> None:
    def traceback(number: int, error: str) -> str:
        return f"Traceback (most recent call last):\n  line {number}\n{error} in response {number}\n"

    async with opened(tmp_path, small_config(tmp_path), Role.REWARD) as bench:
        worker = Reward(bench.ctx)
        worker._inbox = bench.ctx.watch_mailbox(bench.ctx.transport.mailbox(f"ipc://{tmp_path}/mailbox"))
        chunk = next(chunk for chunk in bench.chunks if chunk.finish_reason.is_final)
        with structlog.testing.capture_logs() as logs:
            for number in range(1000):
                await worker.fail(chunk, traceback(number, "ValueError: no answer"))
            await worker.fail(chunk, traceback(1, "KeyError: level"))
            seen = [(row["error"].splitlines()[-1], row["dead_letter"]) for row in logs]
            assert sorted(seen) == [
                ("KeyError: level in response 1", False),
                ("ValueError: no answer in response 0", False),
                (f"ValueError: no answer in response {make_spec().max_attempts - 1}", True),
            ]
            # a verifier's errors may all differ
            for number in range(1000):
                await worker.fail(chunk, f"{'x' * number}Error")
            assert len(logs) <= 2 * MAX_LOGGED
            assert isinstance(bench.ctx.clock, ManualClock)
            await bench.ctx.clock.advance(LOG_EVERY_S)
            await worker.fail(chunk, traceback(0, "ValueError: no answer"))
        assert logs[-1]["error"] == traceback(0, "ValueError: no answer"), "a minute later it is told again"
        assert len(logs) + sum(row.get("num_not_logged", 0) for row in logs) == 2002
        assert bench.ctx.counters["failed"] == 2002


def context(chunk: TrajectoryChunk) -> list[int]:
    """Prompt, earlier windows and this one."""
    earlier = [token for window in windows_of(chunk.trajectory)[: chunk.id.index] for token in window]
    return [*prompt_of(chunk.trajectory).tokens.tolist(), *earlier, *windows_of(chunk.trajectory)[chunk.id.index]]


def evaluated(chunk: TrajectoryChunk) -> TrajectoryChunk:
    return msgspec.structs.replace(chunk, id=ChunkId(TrajectoryId("e0", 0, 0), chunk.id.index))


async def test_reference_log_probs_are_those_of_each_window_after_its_prompt_and_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RecordingScoring()
    monkeypatch.setattr(workers.scorers.reference, "build_scoring_engine", lambda _: engine)
    async with opened(tmp_path, small_config(tmp_path), Role.REFERENCE) as bench:
        worker = Reference(bench.ctx)
        await worker.setup()
        await worker.score(bench.chunks)
        assert [request.tokens.tolist() for request in engine.requests] == [context(chunk) for chunk in bench.chunks]
        assert [request.num_scored for request in engine.requests] == [chunk.num_tokens for chunk in bench.chunks]
        written = await bench.written(Field.REFERENCE)
        assert len(written) == len(bench.chunks)
        for chunk in bench.chunks:
            (score,) = [s for f, s in written[chunk.id].scores.items() if f is Field.REFERENCE]
            expected = tail_scores(np.array(context(chunk)), chunk.num_tokens)
            np.testing.assert_array_equal(score.logprobs, expected)  # pyright: ignore[reportAttributeAccessIssue]
        assert worker.wants(bench.chunks[0]) and not worker.wants(evaluated(bench.chunks[0]))
        await worker.teardown()


async def test_values_are_of_each_window_after_its_prefix_and_training_has_whole_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old values, around which new ones are clipped, are the stored values of the windows, one
    after the other."""
    engine = RecordingValue()
    monkeypatch.setattr(workers.scorers.value, "build_value_engine", lambda _: engine)
    config = small_config(tmp_path).model_copy(
        update={"algorithm": algorithm_settings(name="vapo"), "value": ValueSection(batch_trajectories=4)}
    )
    async with opened(tmp_path, config, Role.VALUE, value_training=True) as bench:
        worker = Value(bench.ctx)
        await worker.setup()
        await worker.score(bench.chunks)
        assert [request.tokens.tolist() for request in engine.requests] == [context(chunk) for chunk in bench.chunks]
        assert [request.num_scored for request in engine.requests] == [chunk.num_tokens for chunk in bench.chunks]
        written = await bench.written(Field.VALUE)
        given: dict[TrajectoryId, list[np.ndarray]] = {trajectory: [] for trajectory in bench.trajectories}
        for chunk in bench.chunks:
            score = written[chunk.id].scores[Field.VALUE]
            assert isinstance(score, ValueScore)
            np.testing.assert_array_equal(score.values, tail_scores(np.array(context(chunk)), chunk.num_tokens))
            given[chunk.trajectory].append(score.values)

        assert await worker._train()
        (batch,) = engine.batches
        assert sorted(sample.name for sample in batch) == sorted(map(str, bench.trajectories))
        for sample in batch:
            trajectory = TrajectoryId.parse(sample.name)
            tokens = [token for window in windows_of(trajectory) for token in window]
            prompt = prompt_of(trajectory).tokens.tolist()
            assert (sample.tokens.tolist(), sample.prompt_length) == (prompt + tokens, len(prompt))
            np.testing.assert_array_equal(sample.old_values, np.concatenate(given[trajectory]))
            assert sample.reward == 0.5
        assert worker.wants(bench.chunks[0]) and not worker.wants(evaluated(bench.chunks[0]))
        await worker.teardown()


def judge(response: Response) -> Verdict | VerifierFailure:
    return Verdict(accuracy=1.0 if response.finish_reason is FinishReason.STOP else 0.25, parts={"format": 0.125})


async def test_a_response_is_judged_whole_and_its_reward_sums_the_configured_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The over-long penalty is of the length over all windows: of the last chunk's alone there
    would be none."""
    pool, model = RecordingPool(judge), RecordingRewardModel()
    monkeypatch.setattr(workers.scorers.reward, "VerifierPool", pool)
    monkeypatch.setattr(workers.scorers.reward, "build_reward_model", lambda _: model)
    section = RewardSection(
        model=RewardModelSection(path=tmp_path, weight=0.25, center=2.0),
        overlong="soft+filter",
        overlong_cache_tokens=10,
        overlong_factor=0.5,
        correct=3.0,
        wrong=-2.0,
        verifiers=("mine:verify",),
    )
    config = small_config(tmp_path).model_copy(
        update={"reward": section, "generation": GenerationSection(window_tokens=5, max_response_tokens=LIMIT)}
    )
    async with opened(tmp_path, config, Role.REWARD) as bench:
        worker = Reward(bench.ctx)
        await worker.setup()
        finals = [chunk for chunk in bench.chunks if worker.wants(chunk)]
        assert [chunk.id.index for chunk in finals] == [2, 1, 2, 1], "only whole responses are scored"
        written: dict[ChunkId, RewardScore] = {}

        async def keep(scored: Iterable[tuple[TrajectoryChunk, RewardScore]]) -> None:
            scored = list(scored)
            written.update((chunk.id, score) for chunk, score in scored)
            await Reward.write_all(worker, scored)

        # a masked response alone is no unit that the learner would claim
        monkeypatch.setattr(worker, "write_all", keep)
        await judge_all(worker, finals)
        judged = bench.ctx.work.service()["judging"]
        assert (judged.pieces, judged.size) == (4, sum(chunk.response_length for chunk in finals))
        assert pool.config is section and pool.configured == config.verifier_paths
        assert [(prompt.text, text) for prompt, text in model.asked] == [
            (f"prompt {chunk.trajectory.group}", chunk.response_text) for chunk in finals
        ]
        for chunk, response in zip(finals, pool.responses, strict=True):
            group, member = chunk.trajectory.group, chunk.trajectory.member
            assert response == Response(
                prompt_text=f"prompt {group}",
                response_text="x" * (3 + member),
                answer=f"answer {group}",
                verifier="arithmetic",
                extra={"level": group},
                token_ids=[*chunk.context_tokens.tolist(), *chunk.tokens.tolist()],
                num_tokens=[12, 4][member],
                finish_reason=[FinishReason.LENGTH, FinishReason.STOP][member],
                model_score=1.0 + member,
            )
        for chunk in finals:
            member = chunk.trajectory.member
            score = written[chunk.id]
            # 10 of 10 tokens into the cache interval, 2 of 10; half of it each
            parts = {
                "correct": [-2.0 + 0.25 * 5.0, 3.0][member],
                "format": 0.125,
                "model": 0.25 * (1.0 + member),
                "overlong": [-0.5, -0.1][member],
            }
            assert score.parts == pytest.approx(parts)
            assert score.reward == pytest.approx(sum(parts.values()))
            assert (score.accuracy, score.masked) == ([0.25, 1.0][member], member == 0)
        await worker.teardown()
