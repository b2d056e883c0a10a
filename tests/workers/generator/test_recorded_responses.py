"""A generator of recorded responses: it reads a file in the seeded order, without a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.learning import algorithm_settings
from pipeline.config.runtime import GenerationSection, RunSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import WriteStatus
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import WeightsAnnouncement
from protocol.channel import Mailbox
from protocol.ids import ChunkId, Incarnation, Role
from protocol.trajectory import FinishReason, RewardScore, TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.engines.generation.recorded import RecordedEngine
from workers.generator.followed_weights import VersionFollower
from workers.generator.generator import Generator

MODEL = Path(__file__).resolve().parents[3] / "ops" / "demo" / "tiny_model"
WINDOW, SIZE, EPOCHS, PER_UPDATE = 4, 6, 2, 3


def config_of(folder: Path, **data: Any) -> RunConfig:
    lines = [
        {"prompt": f"a{n}b+{n}=", "response": f"a{n}b{2 * n % 10}={2 * n % 10}", "verdict": n % 2} for n in range(SIZE)
    ]
    file = folder / "responses.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = {
        "run": RunSection(name="recorded", dir=folder, seed=5),
        "model": ModelSection(path=MODEL),
        "data": DataSection(responses=(file,), epochs=EPOCHS, **data),
        "algorithm": algorithm_settings(
            name="reinforce++", group_size=1, groups_per_update=PER_UPDATE, importance="none"
        ),
        "generation": GenerationSection(window_tokens=WINDOW, max_response_tokens=32),
    }
    return small_config(folder).model_copy(update=sections)


def announced(version: int) -> WeightsAnnouncement:
    return WeightsAnnouncement(policy_version=version, digest="xxh3-128:0", path="/none", num_bytes=1, host="h")


async def learn(
    ctx: ActorContext, registry: MemoryRegistry, mailbox: Mailbox, reward: Incarnation, learner: Incarnation
) -> dict[str, list[TrajectoryChunk]]:
    """Be scorer and learner: judge what comes, claim it, and publish versions without weights."""
    claimed: dict[str, list[TrajectoryChunk]] = {}
    judged: set[ChunkId] = set()
    for version in range(SIZE * EPOCHS // PER_UPDATE):
        while not hasattr(claim := await ctx.ledger.claim(learner, policy_version=version), "units"):
            if (delivery := await mailbox.receive(timeout_s=5.0)) is None:
                raise AssertionError(f"no chunk came: {claim}")
            chunk = delivery.message
            assert isinstance(chunk, TrajectoryChunk)
            assert chunk.id not in judged, "no response comes twice"
            judged.add(chunk.id)
            score = RewardScore(reward=1.0, accuracy=1.0)
            assert await ctx.ledger.write_score(reward, chunk.id, score) is WriteStatus.STORED
        for unit in await ctx.ledger.fetch(claim):  # type: ignore[arg-type]
            claimed[unit.name] = [scored.chunk for scored in unit.trajectories[0]]
        await ctx.ledger.settle(learner, (claim.claim_id,), num_updates=version + 1)  # type: ignore[union-attr]
        await registry.announce_weights(learner, announced(version + 1))
        await ctx.ledger.advance(learner, version + 1)
    return claimed


@pytest.mark.filterwarnings("error")
async def test_each_response_is_read_once_an_epoch_in_the_order_of_the_source(tmp_path: Path) -> None:
    config, registry = config_of(tmp_path), MemoryRegistry(RealClock())
    mailbox = zmq_transport(Role.REWARD, high_water_mark=64).mailbox(f"ipc://{tmp_path}/reward.sock")
    reward, learner = [await registry.register(role, str(role)) for role in (Role.REWARD, Role.LEARNER)]
    await registry.set_endpoint(reward, mailbox.endpoint)
    await registry.announce_weights(learner, announced(0))
    async with asyncio.TaskGroup() as tasks:
        ctx = await context_of(
            config, tmp_path, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), RealClock()
        )
        ctx.spawn("news", ctx.notifications.watch())
        generator = Generator(ctx)
        await generator.setup()
        running = tasks.create_task(generator.run())
        async with asyncio.timeout(30.0):
            claimed = await learn(ctx, registry, mailbox, reward, learner)
            audit = await ctx.ledger.audit()
        ctx.draining.set()
        await running
        await generator.drain()
        await ctx.cancel_spawned()
        await generator.teardown()
        ctx.close()
    source = PromptSource(config, load_text_tokenizer(MODEL))
    assert source.responses is not None
    # A group's number is its place in the source. Which is judged first depends on the sender.
    assert sorted(map(int, claimed)) == list(range(SIZE * EPOCHS))
    for place, (group, chunks) in enumerate(claimed.items()):
        position = int(group)
        recorded = source.responses.at(source.at(position).prompt_id)
        assert chunks[0].prompt.prompt_id == source.at(position).prompt_id
        assert [token for chunk in chunks for token in chunk.tokens.tolist()] == recorded.tokens.tolist()
        assert [chunk.num_tokens for chunk in chunks[:-1]] == [WINDOW] * (len(chunks) - 1)
        assert chunks[-1].finish_reason is FinishReason.STOP
        update = place // PER_UPDATE
        assert {v for chunk in chunks for v in chunk.versions} <= set(range(max(0, update - 2), update + 1))
        text = next(line for line in texts(tmp_path) if line["prompt"] == chunks[0].prompt.text)["response"]
        assert chunks[-1].response_text == text
    assert audit.balances
    assert audit.trajectories.trained == SIZE * EPOCHS
    assert ctx.counters["sampled_tokens"] == sum(chunk.num_tokens for chunks in claimed.values() for chunk in chunks)


def texts(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


async def test_versions_are_followed_without_their_weights(tmp_path: Path) -> None:
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    async with asyncio.TaskGroup() as tasks:
        learner = await registry.register(Role.LEARNER, "learner")
        ctx = await context_of(
            config_of(tmp_path), tmp_path, Role.GENERATOR, "generator-0", tasks, registry, zmq_transport(), clock
        )
        engine = RecordedEngine(4)
        follower = VersionFollower(ctx, engine)
        taken = tasks.create_task(follower.take_first())
        await clock.advance(0.0)
        assert not taken.done(), "there is no version yet"
        await registry.announce_weights(learner, announced(3))
        await clock.advance(10.0)
        await taken
        assert (engine.policy_version, ctx.policy_version, ctx.counters["weight_swaps"]) == (3, 3, 1)
        await registry.announce_weights(learner, announced(4))
        await follower.poll()
        assert (follower.has_newer, engine.policy_version) == (True, 3)
        await follower.swap()
        await follower.swap()
        assert (engine.policy_version, ctx.counters["weight_swaps"], follower.has_newer) == (4, 2, False)
        with suppress(asyncio.CancelledError):
            await ctx.cancel_spawned()
        ctx.close()


@pytest.mark.parametrize("has_evaluation", [False, True])
def test_a_model_is_loaded_for_an_evaluation_alone(tmp_path: Path, has_evaluation: bool) -> None:
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "a1b+1=", "answer": "2"}\n')
    config = config_of(tmp_path, evaluation=(held_out,) if has_evaluation else ())
    assert config.has_sampling is has_evaluation
    (tmp_path / "config.json").write_text(config.model_dump_json())
    told = subprocess.run(
        [sys.executable, "-c", _BUILD, str(tmp_path / "config.json")], check=True, capture_output=True, text=True
    )
    assert told.stdout.split() == ["RecordedEngine", str(has_evaluation)]


_BUILD = """
import sys
from pathlib import Path
from pipeline.config.schema import RunConfig
from workers.engines.build import build_generation_engine
from workers.preparation import imports
from protocol.ids import Role
import importlib
config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
for module in imports(config, (Role.GENERATOR,)):
    importlib.import_module(module)
engine = build_generation_engine(config)
print(type(engine).__name__, "torch" in sys.modules)
"""
