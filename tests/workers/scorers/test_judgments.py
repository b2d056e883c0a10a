"""Claims about guidance from the reward worker: wrong responses of training have judgments, and
what keeps one away changes no score."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pipeline.config.rewards import GuidanceSection
from pipeline.config.training import RewardSection
from protocol.ids import ChunkId, Role, TrajectoryId
from protocol.trajectory import Guidance
from tests.pipeline.rewards.served import served
from tests.pipeline.rewards.test_judgments import ENDPOINT, OWN, by_quote, section
from tests.pipeline.runtime.fakes import small_config
from tests.workers.scorers.scorers import scorer_context
from tests.workers.scorers.test_reward import Bench, scores_of
from workers.scorers.reward import Reward


@asynccontextmanager
async def opened(
    tmp_path: Path, judgments: str = "arithmetic", *, guidance: str = "mix", reward: RewardSection | None = None
) -> AsyncIterator[Bench]:
    config = small_config(tmp_path)
    given = {
        "algorithm": config.algorithm.model_copy(update={"guidance": guidance}),
        "guidance": GuidanceSection(judgments=judgments),
        "reward": reward or RewardSection(timeout_s=3.0),
    }
    async with scorer_context(tmp_path, config.model_copy(update=given), Role.REWARD) as ctx:
        worker = Reward(ctx)
        await worker.setup()
        try:
            yield Bench(ctx.ledger, worker)
        finally:
            await worker.teardown()


def absent(bench: Bench) -> dict[str, float]:
    begin = "judgments_absent_"
    return {name.removeprefix(begin): n for name, n in bench.worker.ctx.counters.items() if name.startswith(begin)}


async def test_a_wrong_response_has_a_judgment_and_a_right_one_its_gold_text_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        chunks = await bench.finished("1 + 1 = 3", "1 + 1 = 2", "no idea")
        wrong, right, lost = await scores_of(bench, chunks)
        assert wrong.guidance == Guidance(gold_text="2", judge_text="step 1 says 1 + 1 = 3, should be 2")
        assert right.guidance == Guidance(gold_text="2")
        assert lost.guidance is not None and lost.guidance.absent.startswith("nothing_found: ")
        assert [score.accuracy for score in (wrong, right, lost)] == [0.0, 1.0, 0.0]
        assert bench.worker.ctx.counters["judgments"] == 1
        assert absent(bench) == {"nothing_found": 1}


async def test_a_run_without_guidance_and_evaluation_have_none(tmp_path: Path) -> None:
    async with opened(tmp_path, guidance="none") as bench:
        (score,) = await scores_of(bench, await bench.finished("1 + 1 = 3"))
        assert score.guidance is None
    async with opened(tmp_path) as bench:
        (chunk,) = await bench.finished("1 + 1 = 3")
        held_out = msgspec.structs.replace(chunk, id=ChunkId(TrajectoryId("e0", 0, 0), 0))
        of_evaluation, of_training = await scores_of(bench, [held_out, chunk])
        assert of_evaluation.guidance is None
        assert of_training.guidance is not None
        assert bench.worker.ctx.counters["judgments"] == 1


@pytest.mark.parametrize(
    ("judgments", "texts", "expected"),
    [
        (f"{OWN}:says", ("raise", "hang", "nothing", "2"), {"raised": 1, "late": 1, "nothing_found": 1}),
        (ENDPOINT, ("3", "4", "2"), {"outage": 2}),
        ("", ("3", "2"), {"not_asked_for": 1}),
    ],
)
async def test_what_keeps_a_judgment_away_is_counted_and_changes_no_score(
    tmp_path: Path, judgments: str, texts: tuple[str, ...], expected: dict[str, int]
) -> None:
    gone = section("http://127.0.0.1:9/v1", timeout_s=0.4).model_copy(update={"timeout_s": 0.5})
    async with opened(tmp_path, judgments, reward=gone) as bench:
        scores = await scores_of(bench, await bench.finished(*texts))
        assert [score.accuracy for score in scores] == [float(text == "2") for text in texts]
        assert all(score.guidance is not None and score.guidance.gold_text == "2" for score in scores)
        assert absent(bench) == expected
        assert bench.worker.ctx.counters["scored"] == len(texts)
        assert "failed" not in bench.worker.ctx.counters
        assert await bench.ledger.dead_letters() == []


async def test_a_response_is_scored_while_another_waits_for_its_judgment(tmp_path: Path) -> None:
    with served(by_quote, latency_s=0.2) as server:
        async with opened(tmp_path, ENDPOINT, reward=section(server)) as bench:
            chunks = await bench.finished("so 3", "so 2")
            pieces = await bench.worker._pieces(chunks)
            assert [len(piece) for piece in pieces] == [1, 1], "a slow judgment holds up no other response"
            scores = await scores_of(bench, chunks)
    assert scores[0].guidance is not None and scores[0].guidance.judge_text.startswith('the step "so 3" is wrong')
