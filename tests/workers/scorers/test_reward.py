"""Claims about the reward worker with a reward model: real models, the ledger in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.training import RewardSection
from pipeline.ledger.contract import Ledger
from pipeline.runtime.registry.contract import WaitingFor
from protocol.errors import ConfigError
from protocol.ids import ChunkId, Role, TrajectoryId
from protocol.trajectory import Field, RewardScore, Score, TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import GENERATOR, make_chunk
from tests.pipeline.rewards.served import Reply, served
from tests.pipeline.runtime.fakes import small_config
from tests.workers.engines.tiny_reward import TEMPLATE, write_reward_model
from tests.workers.scorers.scorers import judge_all, scorer_context
from workers.engines.build import build_reward_model
from workers.scorers.reward import Reward


@dataclass
class Bench:
    ledger: Ledger
    worker: Reward

    async def finished(self, *texts: str, verifier: str = "arithmetic") -> list[TrajectoryChunk]:
        """Sample one finished response for each text."""
        grant = await self.ledger.lease(GENERATOR, max_trajectories=len(texts))
        chunks: list[TrajectoryChunk] = []
        for lease, text in zip(grant.leases, texts, strict=True):
            chunk = make_chunk(lease.trajectory)
            prompt = msgspec.structs.replace(chunk.prompt, verifier=verifier)
            chunk = msgspec.structs.replace(chunk, response_text=text, prompt=prompt)
            await self.ledger.write_chunk(GENERATOR, chunk)
            chunks.append(chunk)
        return chunks


@asynccontextmanager
async def opened(tmp_path: Path, **model: object) -> AsyncIterator[Bench]:
    section = RewardSection.model_validate({"model": {"path": tmp_path / "judge", "device": "cpu", **model}})
    config = small_config(tmp_path).model_copy(update={"reward": section})
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        try:
            yield Bench(ctx.ledger, worker)
        finally:
            await worker.teardown()


async def scores_of(bench: Bench, chunks: list[TrajectoryChunk]) -> list[RewardScore]:
    """Let the worker score chunks; return the written scores, in order."""
    written: dict[object, RewardScore] = {}

    async def keep(scored: Iterable[tuple[TrajectoryChunk, Score]]) -> None:
        scored = list(scored)
        for chunk, score in scored:
            assert isinstance(score, RewardScore)
            written[chunk.id] = score
        await Reward.write_all(bench.worker, scored)

    bench.worker.write_all = keep  # type: ignore[method-assign, assignment]
    await judge_all(bench.worker, chunks)
    return [written[chunk.id] for chunk in chunks if chunk.id in written]


async def test_the_weighted_score_is_a_part_of_the_reward_and_accuracy_stays_the_verifiers(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "judge", template=TEMPLATE)
    async with opened(tmp_path, weight=0.25, center=1.5, micro_batch_tokens=64) as bench:
        chunks = await bench.finished("2", "no idea", "it is 2", "3")
        scores = await scores_of(bench, chunks)
        section = bench.worker.ctx.config.reward.model
        assert section is not None and section.path == folder
        alone = build_reward_model(section)
        for chunk, score in zip(chunks, scores, strict=True):
            (raw,) = alone.scores([(chunk.prompt, chunk.response_text or "")])
            assert score.parts["model"] == pytest.approx(0.25 * (raw - 1.5), abs=1e-5)
            assert score.reward == pytest.approx(sum(score.parts.values()))
        assert [score.accuracy for score in scores] == [1.0, 0.0, 1.0, 0.0]
        assert bench.worker.ctx.counters["scored"] == 4


async def test_without_answers_accuracy_comes_from_the_reward_model(tmp_path: Path) -> None:
    write_reward_model(tmp_path / "judge")
    async with opened(tmp_path) as bench:
        chunks = await bench.finished("a", "bb", "ccc", "dddd", "e", "ff", verifier="reward_model")
        scores = await scores_of(bench, chunks)
        assert [score.accuracy for score in scores] == [float(score.parts["model"] > 0.0) for score in scores]
        assert {score.accuracy for score in scores} == {0.0, 1.0}


async def test_a_response_the_reward_model_cannot_read_is_a_dead_letter_and_others_scored(
    tmp_path: Path,
) -> None:
    write_reward_model(tmp_path / "judge")
    async with opened(tmp_path, max_tokens=40) as bench:
        chunks = await bench.finished("2", "2" * 100, "3", "2")
        scores = await scores_of(bench, chunks)
        assert [score.accuracy for score in scores] == [1.0, 0.0, 1.0]
        (letter,) = await bench.ledger.dead_letters()
        assert "which reads at most 40" in letter.error
        assert bench.worker.ctx.counters["failed"] == 1


@asynccontextmanager
async def hanging(tmp_path: Path, **reward: object) -> AsyncIterator[Bench]:
    """A reward worker whose verifier does not judge the response ``hang`` in time."""
    config = small_config(tmp_path)
    section = RewardSection.model_validate({"timeout_s": 5.0, "wait_s": 0.5, "verifiers": (HANGS,), **reward})
    ledger = config.ledger.model_copy(update={"max_attempts": 1})
    config = config.model_copy(update={"reward": section, "ledger": ledger})
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        try:
            yield Bench(ctx.ledger, worker)
        finally:
            await worker.teardown()


HANGS = "tests.pipeline.rewards.user_verifiers:hangs_when_told"


async def test_an_answer_not_judged_in_time_has_no_verdict_and_is_counted_and_a_dead_letter(tmp_path: Path) -> None:
    async with hanging(tmp_path) as bench:
        chunks = await bench.finished("hang", verifier=HANGS)
        await judge_all(bench.worker, chunks)
        (letter,) = await bench.ledger.dead_letters()
        assert (letter.chunk, "not judged within 0.5 s" in letter.error) == (str(chunks[0].id), True)
        assert bench.worker.ctx.counters == {"failed": 1, "late": 1, "without_verdict": 1, "scored_tokens": 0}


async def test_an_answer_not_judged_in_time_is_wrong_where_the_settings_say_so_and_counted(tmp_path: Path) -> None:
    async with hanging(tmp_path, late="wrong") as bench:
        late, fine = await scores_of(bench, await bench.finished("hang", "go on", verifier=HANGS))
        assert (late.accuracy, fine.accuracy) == (0.0, 1.0)
        assert late.reward == -1.0
        assert await bench.ledger.dead_letters() == []
        assert bench.worker.ctx.counters == {
            "scored": 2, "not_judged": 1, "scored_tokens": 6, "judged": 2, "judged_accuracy": 1.0,
        }  # fmt: skip


async def test_further_rewards_are_of_training_responses_and_evaluation_calls_none(tmp_path: Path) -> None:
    section = RewardSection.model_validate(
        {"functions": {"length": {"verifier": "tests.pipeline.rewards.user_verifiers:trl_penalty", "weight": 0.25}}}
    )
    config = small_config(tmp_path).model_copy(update={"reward": section})
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        try:
            bench = Bench(ctx.ledger, worker)
            first, second = await bench.finished("2", "is 3")
            held_out = msgspec.structs.replace(first, id=ChunkId(TrajectoryId("e0", 0, 0), 0))
            scores = await scores_of(bench, [held_out, first, second])
            assert [score.parts for score in scores] == [
                {"correct": 1.0},
                {"correct": 1.0, "length": -0.25},
                {"correct": -1.0, "length": -1.0},
            ]
            assert [score.reward for score in scores] == [1.0, 0.75, -2.0]
            assert [score.accuracy for score in scores] == [1.0, 1.0, 0.0]
        finally:
            await worker.teardown()


async def test_a_relative_judge_gets_the_whole_group_when_its_last_member_ends(tmp_path: Path) -> None:
    rank = {"verifier": "tests.pipeline.rewards.user_verifiers:ranks_its_group", "whole_group": True}
    section = RewardSection.model_validate({"functions": {"rank": rank}})
    config = small_config(tmp_path)
    algorithm = config.algorithm.model_copy(update={"group_size": 2})
    config = config.model_copy(update={"reward": section, "algorithm": algorithm})
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        try:
            leases = (await ctx.ledger.lease(GENERATOR, max_trajectories=2)).leases
            first, second = (make_chunk(lease.trajectory) for lease in leases)
            second = msgspec.structs.replace(second, response_text="is 3")
            await ctx.ledger.write_chunk(GENERATOR, first)
            assert await scores_of(Bench(ctx.ledger, worker), [first]) == []
            assert worker.ctx.counters["waited_for_group"] == 1
            await ctx.ledger.write_chunk(GENERATOR, second)
            held_out = msgspec.structs.replace(first, id=ChunkId(TrajectoryId("e0", 0, 0), 0))
            scores = await scores_of(Bench(ctx.ledger, worker), [second, held_out])
            assert [score.parts for score in scores] == [{"correct": -1.0, "rank": 201.0}, {"correct": 1.0}]
            assert await ctx.ledger.overdue(ctx.who, Field.REWARD, max_chunks=9) == []
            assert worker.ctx.counters["scored"] == 2, "the first member was scored with it"
        finally:
            await worker.teardown()


async def test_a_reply_without_a_number_is_tried_again_and_then_a_dead_letter_and_no_score(tmp_path: Path) -> None:
    with served(lambda body, number: (200, {"scores": []})) as server:
        async with judging(tmp_path, server.url, timeout_s=0.4) as bench:
            chunks = await bench.finished("2", "is 3", verifier="endpoint/own")
            assert await scores_of(bench, chunks) == [], "no score is written, least of all a wrong one"
            assert bench.worker.ctx.counters["failed"] == 2
            assert bench.worker.ctx.counters["own:retries"] >= 2
            (letter, *_) = await bench.ledger.dead_letters()
            assert "endpoint own: no number within 0.4 s" in letter.error


async def test_responses_wait_as_long_as_their_judge_is_down_and_are_then_judged(tmp_path: Path) -> None:
    is_up = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        return (200, {"scores": [1.0]}) if is_up.is_set() else (429, b"slow down")

    with served(reply) as server:
        async with judging(tmp_path, server.url, timeout_s=0.4) as bench:
            ctx, clock = bench.worker.ctx, bench.worker.ctx.clock
            assert isinstance(clock, ManualClock)
            await bench.finished("2", "is 3", verifier="endpoint/own")
            await clock.advance(6.0)
            assert await bench.worker.serve(0.0) == 2
            await until(lambda: ctx.counters.get("waited_for_endpoint", 0) >= 4)
            await bench.worker.serve(0.0)
            assert ctx.worker_state.kind is WaitingFor.ENDPOINT
            told = "endpoint own, which limits the rate: status 429: slow down (2 responses in flight)"
            assert ctx.worker_state.detail == told
            assert "failed" not in ctx.counters and await ctx.ledger.dead_letters() == []
            is_up.set()
            await until(lambda: ctx.counters.get("scored") == 2)


async def test_the_budget_of_requests_is_one_for_all_workers_and_restarts(tmp_path: Path) -> None:
    with served(lambda body, number: (200, {"scores": [1.0]})) as server:
        async with judging(tmp_path, server.url, max_requests=3) as bench:
            ledger = bench.ledger
            assert len(await scores_of(bench, await bench.finished("a", "b", verifier="endpoint/own"))) == 2
        async with judging(tmp_path, server.url, max_requests=3) as again:
            again.ledger = again.worker.ctx.ledger = ledger
            assert len(await scores_of(again, await again.finished("c", verifier="endpoint/own"))) == 1
            with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match="max_requests is 3, and all are used")):
                await scores_of(again, await again.finished("d", verifier="endpoint/own"))
            assert await ledger.dead_letters() == [] and "failed" not in again.worker.ctx.counters
        async with judging(tmp_path, server.url, max_requests=4) as raised:
            raised.ledger = raised.worker.ctx.ledger = ledger
            assert len(await scores_of(raised, await raised.finished("e", verifier="endpoint/own"))) == 1
    assert len(server.requests) == 4


@asynccontextmanager
async def judging(tmp_path: Path, url: str, *, max_in_flight: int = 256, **settings: object) -> AsyncIterator[Bench]:
    """A worker with responses that are judged over HTTP."""
    endpoint = {"url": url, "max_in_flight": 2, "timeout_s": 30.0, **settings}
    section = RewardSection.model_validate({"endpoints": {"own": endpoint}, "max_in_flight": max_in_flight})
    config = small_config(tmp_path).model_copy(update={"reward": section})
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        ctx.spawn("deadlines", worker._extend_deadlines())
        try:
            yield Bench(ctx.ledger, worker)
        finally:
            await ctx.cancel_spawned()
            await worker.teardown()


async def until(wanted: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not wanted():  # noqa: ASYNC110  another thread's server announces nothing
            await asyncio.sleep(0.01)


async def test_a_slow_judgement_holds_up_no_other_and_its_response_is_not_handed_out(tmp_path: Path) -> None:
    gate = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        text = body["responses"][0]["response"]
        if text == "slow":
            gate.wait(20.0)
        return 200, {"scores": [float(text == "right")]}

    with served(reply) as server:
        async with judging(tmp_path, server.url) as bench:
            ctx, clock = bench.worker.ctx, bench.worker.ctx.clock
            assert isinstance(clock, ManualClock)
            await bench.finished("slow", "right", verifier="endpoint/own")
            await bench.finished("wrong", "3", verifier="arithmetic")
            await clock.advance(6.0)
            assert await bench.worker.serve(0.0) == 4
            await until(lambda: ctx.counters.get("scored") == 3 and ctx.held == 1)
            assert await bench.worker.serve(0.0) == 0
            assert (ctx.held, ctx.worker_state.detail) == (1, "1 responses in flight")
            for _ in range(5):
                await clock.advance(4.0)
                assert await ctx.ledger.overdue(ctx.who, Field.REWARD, max_chunks=9) == [], "its deadline moves on"
            gate.set()
            await until(lambda: ctx.counters.get("scored") == 4 and ctx.held == 0)
            assert len(server.requests) == 2


async def test_no_more_responses_are_in_flight_than_the_limit_and_the_drain_judges_all(tmp_path: Path) -> None:
    gate = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply:
        gate.wait(20.0)
        return 200, {"scores": [1.0]}

    with served(reply) as server:
        async with judging(tmp_path, server.url, max_in_flight=3) as bench:
            ctx, clock = bench.worker.ctx, bench.worker.ctx.clock
            assert isinstance(clock, ManualClock)
            await bench.finished(*map(str, range(8)), verifier="endpoint/own")
            await clock.advance(6.0)
            assert await bench.worker.serve(0.0) == 3
            assert await bench.worker.serve(0.0) == 0, "there is no room"
            await until(lambda: len(server.requests) == 2)
            gate.set()
            await until(lambda: ctx.counters.get("scored") == 3)
            assert len(server.requests) == 3
            await clock.advance(6.0)
            assert await bench.worker.serve(0.0) == 3
            await bench.worker.drain()
            assert (ctx.counters["scored"], ctx.held) == (6, 0)


async def test_two_workers_that_receive_the_last_members_of_a_group_judge_it_once(tmp_path: Path) -> None:
    rank = {"verifier": "tests.pipeline.rewards.user_verifiers:ranks_its_group", "whole_group": True}
    section = RewardSection.model_validate({"functions": {"rank": rank}})
    config = small_config(tmp_path)
    algorithm = config.algorithm.model_copy(update={"group_size": 2})
    config = config.model_copy(update={"reward": section, "algorithm": algorithm})
    async with (
        scorer_context(tmp_path, config, Role.REWARD) as ctx,
        scorer_context(tmp_path, config, Role.REWARD) as two,
    ):
        two.ledger, two.who = ctx.ledger, await two.registry.register(Role.REWARD, "reward-1")
        workers = [Reward(ctx), Reward(two)]
        for worker in workers:
            await worker.setup()
        try:
            leases = (await ctx.ledger.lease(GENERATOR, max_trajectories=2)).leases
            chunks = [make_chunk(lease.trajectory) for lease in leases]
            for chunk in chunks:
                await ctx.ledger.write_chunk(GENERATOR, chunk)
            async with asyncio.TaskGroup() as tasks:
                for worker, chunk in zip(workers, chunks, strict=True):
                    tasks.create_task(judge_all(worker, [chunk]))
            both = [worker.ctx.counters for worker in workers]
            assert sorted(counters.get("scored", 0) for counters in both) == [0, 2]
            assert sum(counters.get("duplicates", 0) for counters in both) == 0
        finally:
            for worker in workers:
                await worker.teardown()
