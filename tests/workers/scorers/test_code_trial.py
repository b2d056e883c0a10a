"""Claims about a reward worker's first work with a new version of the reward functions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pipeline.config import CHANGES_NAME
from pipeline.config.operations import REWARDS, CodeSection
from pipeline.config.training import RewardSection
from pipeline.files.code_copies import CODE_FOLDER, keep_code
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.settings_change import after, undoing
from pipeline.runtime.worker_start import hear_settings
from protocol.errors import ConfigError
from protocol.ids import Role
from protocol.trajectory import Field
from tests.pipeline.runtime.fakes import small_config
from tests.workers.scorers.scorers import judge_all, scorer_context
from tests.workers.scorers.test_reward import Bench, scores_of
from workers.scorers.reward import Reward

pytestmark = pytest.mark.timeout(60)
OLD = "def judge(responses):\n    return [0.25 for _ in responses]\n"
NEW = """
import time

def judge(responses):
    for one in responses:
        if "bad" in one.response_text:
            raise LookupError("of the function")
        if "slow" in one.response_text:
            time.sleep(60)
    return [0.5 for _ in responses]
"""


@asynccontextmanager
async def opened(
    tmp_path: Path, *, canary_pieces: int = 2, is_settled: bool = False, is_damaged: bool = False
) -> AsyncIterator[tuple[Bench, ActorContext]]:
    """Open a reward worker whose functions have a version besides the folder of the start."""
    for name, text in (("old", OLD), ("new", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_parts.py").write_text(text)
    version = keep_code(tmp_path / "new", tmp_path)
    change = after(None, {REWARDS: f'"{version}"'}, {REWARDS: '""'}, by="ann@a", at_s=1.0)
    (tmp_path / CHANGES_NAME).write_bytes(msgspec.json.encode([msgspec.structs.replace(change, is_settled=is_settled)]))
    if is_damaged:
        (tmp_path / CODE_FOLDER / version / "my_parts.py").write_text(OLD)
    reward = RewardSection.model_validate(
        {"path": [tmp_path / "old"], "timeout_s": 0.5, "functions": {"extra": {"verifier": "my_parts:judge"}}}
    )
    code = CodeSection(rewards=version, canary_pieces=canary_pieces)
    config = small_config(tmp_path).model_copy(update={"reward": reward, "code": code})
    async with scorer_context(tmp_path, config, Role.REWARD) as ctx:
        await ctx.registry.add_settings_change(change)
        worker = Reward(ctx)
        await worker.setup()
        try:
            yield Bench(ctx.ledger, worker), ctx
        finally:
            await worker.teardown()


async def failed(ctx: ActorContext) -> int:
    """Return how many responses count as failed: with one attempt each is a dead letter."""
    return int(ctx.counters.get("failed", 0))


async def test_a_version_comes_before_the_folder_of_the_start_and_is_reported(tmp_path: Path) -> None:
    async with opened(tmp_path) as (bench, ctx):
        (score,) = await scores_of(bench, await bench.finished("2"))
        assert score.parts["extra"] == 0.5, "0.25 is the start's"
        assert ctx.worker_state.heartbeat().settings.code == {REWARDS: bench.worker._trial.version}


@pytest.mark.parametrize("text", ["bad", "slow"])
async def test_a_response_that_a_version_on_trial_fails_on_is_kept_for_another(tmp_path: Path, text: str) -> None:
    async with opened(tmp_path) as (bench, ctx):
        await judge_all(bench.worker, await bench.finished(text, "2"))
        await judge_all(bench.worker, await bench.finished("3"))
        assert await failed(ctx) == 0, "one failure would be a dead letter"
        taken = ctx.worker_state.heartbeat().settings
        assert taken.failed == 1 and bench.worker._trial.version in taken.why
        assert ("LookupError: of the function" in taken.why) is (text == "bad")
        assert bench.worker.room() == 0, "it takes no more work"
        scored = int(ctx.counters.get("scored", 0))
        assert scored <= 1
        # another worker is given what is left, once its deadline has passed
        await ctx.clock.advance(1e6)  # type: ignore[attr-defined]
        left = await ctx.ledger.overdue(ctx.who, Field.REWARD, max_chunks=9)
        assert len(left) == 3 - scored


async def test_a_failed_trial_is_reported_until_it_is_rolled_back_whatever_else_changes(tmp_path: Path) -> None:
    async with opened(tmp_path) as (bench, ctx):
        await judge_all(bench.worker, await bench.finished("bad"))
        (first,) = await ctx.registry.settings_changes()
        other = after(first, {"learner.learning_rate": "0.5"}, {"learner.learning_rate": "1e-6"}, by="ann@a", at_s=2.0)
        assert await ctx.registry.add_settings_change(other)
        await hear_settings(ctx, is_taken=True)
        taken = ctx.worker_state.heartbeat().settings
        assert (taken.failed, taken.failed_to, bool(taken.why)) == (1, 1, True)
        assert await ctx.registry.add_settings_change(undoing([first, other], [first], by="reward-0", at_s=3.0))
        await hear_settings(ctx, is_taken=True)
        taken = ctx.worker_state.heartbeat().settings
        assert (taken.number, taken.failed) == (3, 0)


@pytest.mark.parametrize("is_settled", [True, False])
async def test_after_the_trial_a_failure_is_the_responses(tmp_path: Path, is_settled: bool) -> None:
    async with opened(tmp_path, is_settled=is_settled) as (bench, ctx):
        if not is_settled:
            await judge_all(bench.worker, await bench.finished("2", "3"))
        await judge_all(bench.worker, await bench.finished("bad"))
        assert await failed(ctx) == 1
        assert ctx.worker_state.heartbeat().settings.failed == 0
        assert bench.worker.room() > 0


async def test_a_worker_does_not_start_with_a_damaged_version(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as found:
        async with opened(tmp_path, is_damaged=True):
            pass
    assert found.group_contains(ConfigError, match=r"is not version \w{16} any more: my_parts\.py")
