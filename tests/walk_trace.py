"""One small DAPO run in this process, and the files of ours that run on its chunks' way.

The model is real and tiny, the engine is the local one, and the backend is torch. The ledger is a
server's, and the links are ZeroMQ's. Files are recorded from the first lease until the generator
serves the weights that its chunks have trained."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger

from pipeline.config.learning import AlgorithmSection, DataSection, ModelSection
from pipeline.config.running import GenerationSection, RunSection
from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.runtime.actor import Actor
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor import leftovers
from protocol.trajectory import TrajectoryChunk
from tests.byte_tokenizer import NUM_TOKENS, write_byte_tokenizer
from tests.transports import zmq_transport
from tests.workers.engines.tiny import tiny_model
from workers.generator.generator import Generator
from workers.learner.learner import Learner
from workers.scorers.reward import Reward

ROOT = Path(__file__).parents[1]
LIMIT_S = 60.0


class Trace:
    """Records the files of the shipped packages in which functions are called."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if name not in self._known:
            path = Path(name)
            ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("pipeline", "protocol", "workers")
            self._known[name] = path.relative_to(ROOT).as_posix() if ours else ""
        # the body of a module or class runs at its import
        if self._known[name] and not frame.f_code.co_name.startswith("<module") and frame.f_code.co_flags & 0x02:
            self.files.add(self._known[name])

    def begin(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(cast("Any", None))


class Encodings:
    """Notes each chunk that the codec encodes."""

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self.chunks: list[TrajectoryChunk] = []

    def __call__(self, message: Any) -> bytes:
        if isinstance(message, TrajectoryChunk):
            self.chunks.append(message)
        return self._encode(message)


def small_run(folder: Path) -> RunConfig:
    model = folder / "model"
    tiny_model(vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1).save_pretrained(model)
    write_byte_tokenizer(model)
    data = folder / "train.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        run=RunSection(name="walk", dir=folder, num_updates=1),
        model=ModelSection(path=model),
        data=DataSection(train=(data,), verifier="tests.even_sum:is_even"),
        algorithm=AlgorithmSection(group_size=4, groups_per_update=2, num_minibatches=1),
        generation=GenerationSection(window_tokens=4, max_response_tokens=8),
    )


async def traced(folder: Path, server: str) -> set[str]:
    """Make one update, and return the files."""
    config, trace = small_run(folder), Trace()
    run_dir = folder / "run"
    run_dir.mkdir()
    contexts: list[ActorContext] = []
    actors: dict[str, Actor] = {}

    async def begin(kind: type[Actor], tasks: asyncio.TaskGroup) -> Any:
        client = connect(server)
        registry = RedisRegistry(client, "walk")
        who = await registry.register(kind.role, f"{kind.role}-0")
        ctx = ActorContext(
            config=config,
            run_dir=run_dir,
            who=who,
            ledger=RedisLedger(connect(server), "walk"),
            registry=registry,
            transport=zmq_transport(str(who), high_water_mark=16),
            log=cast("FilteringBoundLogger", structlog.get_logger("walk")),
            clock=RealClock(),
            tasks=tasks,
        )
        contexts.append(ctx)
        actors[kind.role] = actor = kind(ctx)
        ctx.spawn("news", ctx.notifications.watch())
        return actor

    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            reward, learner, generator = [await begin(kind, tasks) for kind in (Reward, Learner, Generator)]
            await reward.setup()
            await learner.setup()
            await generator.setup()
            taken = asyncio.Event()
            generator.ctx.worker_state.on_news = taken.set
            for ctx in contexts:
                await ctx.compute(trace.begin)
                await ctx.store(trace.begin)
            trace.begin()
            running = [tasks.create_task(actor.run()) for actor in (reward, learner, generator)]
            await taken.wait()
            trace.end()
            await running[1]
            for ctx in contexts:
                ctx.draining.set()
            await asyncio.wait(running)
            for ctx in contexts:
                await ctx.cancel_spawned()
    finally:
        trace.end()
        for actor in actors.values():
            await actor.teardown()
        for ctx in contexts:
            ctx.close()
            await ctx.ledger.aclose()
            await ctx.registry.aclose()
        # a supervisor's work, which this run has not
        leftovers.clear(run_dir)
    return trace.files
