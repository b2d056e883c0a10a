"""Claims about the environment worker: real classes in real processes, the ledger in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.rewards import EnvironmentSection
from pipeline.data.prompt_form import MESSAGES
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.environments.turns import row_of
from pipeline.ledger.contract import Ledger
from pipeline.ledger.types import Lease
from protocol.ids import Role
from protocol.trajectory import Field, FinishReason, Prompt, RewardScore, Score, TrajectoryChunk, Turn, TurnRequest
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import GENERATOR, make_spec
from tests.pipeline.runtime.fakes import small_config
from tests.workers.scorers.scorers import judge_all, scorer_context
from workers.engines.generation.seam import SampledWindow
from workers.generator.chunk_writer import chunk_of, opening_window
from workers.generator.held_trajectories import Held
from workers.scorers.environment import Environment
from workers.scorers.reward import Reward, has_ended, response_of

MODEL = Path("ops/demo/tools_model")
USERS = "tests.pipeline.environments.user_environments"
ROW = Prompt(
    prompt_id="train:0", tokens=np.empty(0, np.int32), text="", answer="156", verifier="arithmetic", extra={"start": 2}
)


@dataclass
class Bench:
    ledger: Ledger
    worker: Environment
    tokenizer: TextTokenizer

    async def leased(self) -> list[Lease]:
        return list((await self.ledger.lease(GENERATOR, max_trajectories=1)).leases)

    async def opened(self, row: Prompt = ROW) -> TrajectoryChunk:
        """Lease a trajectory and write its opening chunk."""
        (lease,) = await self.leased()
        return await self._written(Held.of(lease, row), opening_window(lease.trajectory, 0))

    async def said(self, text: str, *, ends: bool = True) -> TrajectoryChunk:
        """Continue the trajectory that is open by a turn with this text."""
        (lease,) = await self.leased()
        assert lease.last_chunk is not None
        tokens = self.tokenizer.encode(text) + ([self.tokenizer.eos_token_id or 0] if ends else [])
        reason = FinishReason.STOP if ends else FinishReason.LENGTH
        segments = opening_window(lease.trajectory, 0).segments
        window = SampledWindow(
            lease.trajectory,
            np.array(tokens, np.int32),
            np.zeros(len(tokens), np.float32),
            (msgspec.structs.replace(segments[0], num_tokens=len(tokens)),),
            reason,
        )
        return await self._written(Held.of(lease, lease.last_chunk.prompt), window)

    async def _written(self, held: Held, window: SampledWindow) -> TrajectoryChunk:
        chunk = chunk_of(held, window, self.tokenizer, self.worker.ctx.config, worker=str(GENERATOR))
        await self.ledger.write_chunk(GENERATOR, chunk)
        return chunk

    async def answered(self, chunk: TrajectoryChunk) -> None:
        self.worker._inbox.took(chunk.id, "", size=1, policy_version=0, span="turn", facts={}, trace="")
        answering = self.worker.ctx.spawn("test", self.worker._answer(chunk), endless=False)
        clock = self.worker.ctx.clock
        assert isinstance(clock, ManualClock)
        while not answering.done():
            # no reward worker listens, so it gives up to send what has ended
            await clock.advance(0.5)
            await asyncio.sleep(0.01)

    async def overdue_rewards(self) -> list[TrajectoryChunk]:
        found = await self.ledger.overdue(self.worker.ctx.who, Field.REWARD, max_chunks=9)
        return [
            msgspec.structs.replace(one.chunk, turn=turn)
            for one in found
            if isinstance(turn := one.scores.get(Field.TURN), Turn)
        ]


@asynccontextmanager
async def opened(tmp_path: Path, path: str, **settings: Any) -> AsyncIterator[Bench]:
    config = small_config(tmp_path)
    section = EnvironmentSection.model_validate({"path": path if path == "tools" else f"{USERS}:{path}", **settings})
    model = config.model.model_copy(update={"path": MODEL})
    config = config.model_copy(update={"environment": section, "model": model})
    spec = make_spec(max_attempts=2, fields=frozenset({Field.REWARD, Field.TURN}))
    async with scorer_context(tmp_path, config, Role.ENVIRONMENT, spec) as ctx:
        worker = Environment(ctx)
        await worker.setup()
        try:
            yield Bench(ctx.ledger, worker, load_text_tokenizer(MODEL))
        finally:
            await worker.teardown()
            await ctx.cancel_spawned()


async def test_a_conversation_goes_on_by_turns_and_is_scored_at_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown") as bench:
        await bench.answered(await bench.opened())
        first = await bench.said("12")
        assert first.prompt.text.endswith("<|im_start|>assistant\n")
        await bench.answered(first)
        last = await bench.said("34")
        start = last.given_spans[0].start
        assert last.context_tokens[:start].tolist() == first.tokens.tolist(), "as they were sampled"
        await bench.answered(last)
        (ended,) = await bench.overdue_rewards()
        assert has_ended(ended)
        assert isinstance(ended.turn, Turn)
        assert (ended.turn.reward, ended.turn.is_truncated) == (2.0, False)
        assert response_of(ended, None).response_text == "34"
        assert await bench.leased() == [] or (await bench.leased())[0].trajectory != last.trajectory


async def test_another_worker_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    contexts: list[list[int]] = []
    for restarts in (False, True):
        folder = tmp_path / str(restarts)
        folder.mkdir()
        async with opened(folder, "Countdown") as bench:
            await bench.answered(await bench.opened())
            chunk = await bench.said("12")
            if restarts:
                await bench.worker._pool.aclose()
            await bench.answered(chunk)
            contexts.append((await bench.said("34")).context_tokens.tolist())
    # the process's number is a part of what it says, but the model's tokenizer has no digits beyond ten
    assert contexts[0][: len(contexts[0]) - 12] == contexts[1][: len(contexts[1]) - 12]


async def test_a_trajectory_that_is_played_again_begins_with_the_same_row(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown") as bench:
        opening = await bench.opened()
        await bench.answered(opening)
        chunk = await bench.said("12")
        assert chunk.prompt.text
        assert row_of(chunk.prompt) == row_of(opening.prompt) == {
            "start": 2, "messages": [], "answer": "156", "prompt_id": "train:0",
        }  # fmt: skip


async def test_turns_that_the_first_messages_show_are_not_played_again(tmp_path: Path) -> None:
    async with opened(tmp_path, "Shows") as bench:
        await bench.answered(await bench.opened())
        await bench.answered(await bench.said("12"))
        await bench.worker._pool.aclose()
        await bench.answered(await bench.said("34"))
        (ended,) = await bench.overdue_rewards()
        assert isinstance(ended.turn, Turn)
        assert ended.turn.reward == 2.0


async def test_an_environment_that_says_something_else_when_it_is_played_again_has_failed(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown") as bench:
        await bench.answered(await bench.opened(msgspec.structs.replace(ROW, extra={"start": 5})))
        await bench.answered(await bench.said("12"))
        await bench.worker._pool.aclose()
        chunk = await bench.said("34")
        for _ in range(2):
            await bench.answered(chunk)
        (letter,) = await bench.ledger.dead_letters()
        assert "said something else when its earlier actions were played again" in letter.error


def asked_of(chunk: TrajectoryChunk) -> TurnRequest:
    assert isinstance(chunk.asked, TurnRequest)
    return msgspec.structs.replace(chunk.asked, state=b"")


async def test_a_conversation_that_begins_anew_is_a_sequence_of_its_own_and_each_turn_ends_as_it_was_asked(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, "Branches") as bench:
        await bench.answered(await bench.opened())
        first = await bench.said("12")
        await bench.answered(first)
        anew = await bench.said("49", ends=False)
        assert asked_of(first) == TurnRequest(max_tokens=3, whole=True)
        assert asked_of(anew) == TurnRequest(sequence=1, stop_strings=("9",))
        assert "2*2" in anew.prompt.text and "1+1" not in anew.prompt.text
        assert (anew.context_tokens.size, anew.given_spans) == (0, ())
        await bench.answered(anew)
        # both are played again elsewhere
        await bench.worker._pool.aclose()
        last = await bench.said("77", ends=False)
        assert (asked_of(last), last.prompt.text) == (TurnRequest(sequence=1, max_tokens=2), anew.prompt.text)
        await bench.answered(last)
        (ended,) = await bench.overdue_rewards()
        assert isinstance(ended.turn, Turn)
        assert (ended.turn.reward, ended.turn.is_truncated) == (1.0, False)


async def test_a_turn_without_an_end_ends_the_trajectory_as_truncated_with_its_reward_so_far(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown") as bench:
        await bench.answered(await bench.opened(msgspec.structs.replace(ROW, extra={"start": 5})))
        await bench.answered(await bench.said("12"))
        await bench.answered(await bench.said("3", ends=False))
        (ended,) = await bench.overdue_rewards()
        assert isinstance(ended.turn, Turn)
        assert (ended.turn.reward, ended.turn.accuracy, ended.turn.is_truncated) == (1.0, 0.0, True)
        assert response_of(ended, None).finish_reason is FinishReason.LENGTH


async def test_without_an_answer_a_trajectory_that_its_verifier_judges_is_as_wrong_as_a_wrong_one(
    tmp_path: Path,
) -> None:
    row = msgspec.structs.replace(ROW, extra={MESSAGES: [{"role": "user", "content": "12*13"}]})
    async with opened(tmp_path, "tools", tools=["calculator"]) as bench:
        await bench.answered(await bench.opened(row))
        await bench.answered(await bench.said("3", ends=False))
        (ended,) = await bench.overdue_rewards()
    async with scorer_context(tmp_path, small_config(tmp_path), Role.REWARD) as ctx:
        judge = Reward(ctx)
        await judge.setup()
        written: list[Score] = []

        async def keep(scored: Iterable[tuple[TrajectoryChunk, Score]]) -> None:
            written.extend(score for _, score in scored)

        judge.write_all = keep  # type: ignore[method-assign, assignment]
        await judge_all(judge, [ended])
        await judge.teardown()
    (score,) = written
    assert isinstance(score, RewardScore)
    assert (score.accuracy, score.reward) == (0.0, ctx.config.reward.wrong)


async def test_too_many_turns_end_the_trajectory_as_truncated(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown", max_turns=1) as bench:
        await bench.answered(await bench.opened())
        await bench.answered(await bench.said("12"))
        (ended,) = await bench.overdue_rewards()
        assert isinstance(ended.turn, Turn)
        assert ended.turn.is_truncated


async def test_a_context_without_room_for_the_next_turn_is_truncated_and_no_failure(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown") as bench:
        bench.worker._turns._limit = 8
        await bench.answered(await bench.opened())
        await bench.answered(await bench.said("12"))
        (ended,) = await bench.overdue_rewards()
        assert isinstance(ended.turn, Turn)
        assert ended.turn.is_truncated
        assert await bench.ledger.dead_letters() == []


@pytest.mark.parametrize(("path", "told"), [("Raises", "no such move"), ("Dies", "code 3")])
async def test_a_class_that_fails_is_tried_again_and_then_a_dead_letter_but_never_wrong(
    tmp_path: Path, path: str, told: str
) -> None:
    async with opened(tmp_path, path) as bench:
        await bench.answered(await bench.opened())
        chunk = await bench.said("12")
        for _ in range(2):
            assert await bench.ledger.dead_letters() == []
            await bench.answered(chunk)
        (letter,) = await bench.ledger.dead_letters()
        assert told in letter.error
        assert letter.role == Field.TURN
        assert await bench.overdue_rewards() == []


async def test_a_first_conversation_longer_than_the_limit_is_a_failure_that_names_it(tmp_path: Path) -> None:
    async with opened(tmp_path, "Countdown") as bench:
        data = bench.worker.ctx.config.data.model_copy(update={"max_prompt_tokens": 3})
        bench.worker._turns._config = bench.worker.ctx.config.model_copy(update={"data": data})
        chunk = await bench.opened()
        for _ in range(2):
            await bench.answered(chunk)
        (letter,) = await bench.ledger.dead_letters()
        assert "data.max_prompt_tokens" in letter.error
