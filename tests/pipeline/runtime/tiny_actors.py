"""Tiny workers for the tests of ``run_actor``: each is one way to live or to end. Run as

``python -P -m tests.pipeline.runtime.tiny_actors CLASS RUN_DIR WORKER``"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import ClassVar

from pipeline.config.load import read_resolved
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.actor import Actor
from pipeline.runtime.clock import RealClock
from pipeline.runtime.prepared import PreparedParts
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.worker_process import run_actor
from protocol.errors import ConfigError, EngineProcessDied
from protocol.ids import Role


class SkippingClock(RealClock):
    """The operating system's clock, which a worker may put forward."""

    skipped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.skipped_s


CLOCK = SkippingClock()


class Ticking(Actor):
    """Counts turns, calls the ledger at each, and leaves a file with the steps of its life."""

    role: ClassVar[Role] = Role.REWARD

    def mark(self, word: str) -> None:
        with (self.ctx.run_dir / f"{self.ctx.who.worker}.marks").open("a") as file:
            file.write(f"{word}\n")

    async def setup(self) -> None:
        self.mark("setup")
        self.ctx.policy_version = 3

    async def run(self) -> None:
        self.mark("run")
        while not self.ctx.draining.is_set():
            self.ctx.waiting_for(WaitingFor.LEDGER)
            await self.ctx.registry.weights()
            self.ctx.counters["turns"] = self.ctx.counters.get("turns", 0) + 1
            self.ctx.progress()
            self.ctx.waiting_for(WaitingFor.INPUT, "ticks")
            await self.ctx.clock.sleep(0.01)

    async def drain(self) -> None:
        self.mark("drain")

    async def teardown(self) -> None:
        self.mark("teardown")


class SlowToDrain(Ticking):
    """Takes its time to come to a boundary."""

    async def drain(self) -> None:
        self.mark("drain")
        await asyncio.sleep(60.0)
        self.mark("drained")


class Computing(Ticking):
    """Is inside a long computation that nothing can stop."""

    async def run(self) -> None:
        self.mark("run")
        await self.ctx.compute(time.sleep, 60.0)


class Crashing(Ticking):
    """Fails in its main loop."""

    async def run(self) -> None:
        self.mark("run")
        raise ZeroDivisionError("a bug in the loop")


class Returning(Ticking):
    """Forgets that its loop is endless."""

    async def run(self) -> None:
        self.mark("run")


class LosingATask(Ticking):
    """Something that it spawned fails while its main loop goes on."""

    async def setup(self) -> None:
        self.ctx.spawn("doomed", self.fail())
        await super().setup()

    async def fail(self) -> None:
        await asyncio.sleep(0.05)
        raise LookupError("a bug in a task")


class Finishing(Ticking):
    """Is done by itself, for a reason that has its own exit code."""

    async def run(self) -> None:
        self.ctx.spawn("endless", self.idle())
        self.ctx.finish(ExitCode.STARVED, "the data is exhausted")

    async def idle(self) -> None:
        await asyncio.Event().wait()


class Misconfigured(Ticking):
    """Finds a file missing in its set-up."""

    async def setup(self) -> None:
        raise ConfigError("model.path is /nowhere; expected a folder of a Hugging Face model")


class LosingItsEngine(Ticking):
    """Loses its engine's processes after a piece of work and a minute of it, in its first two incarnations."""

    works_s = 61.0

    async def setup(self) -> None:
        # loading an engine is no work
        CLOCK.skipped_s += 1000.0
        await super().setup()

    async def run(self) -> None:
        if self.ctx.who.epoch > 2:
            return await super().run()
        self.work()
        CLOCK.skipped_s += self.works_s
        raise EngineProcessDied("vLLM's processes failed")

    def work(self) -> None:
        self.ctx.deliver()


class LosingItsEngineSoon(LosingItsEngine):
    """Loses them within the first minute of its work."""

    works_s = 50.0


class LosingItsEngineIdle(LosingItsEngine):
    """Loses them before it has finished any work."""

    def work(self) -> None:
        pass


class LosingItsEngineFenced(LosingItsEngine):
    """Loses them, and is fenced after its last heartbeat."""

    async def run(self) -> None:
        async with asyncio.timeout(20.0):
            while not any(beat.policy_version == 3 for beat in await self.ctx.registry.heartbeats()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await super().run()

    async def teardown(self) -> None:
        await super().teardown()
        if self.ctx.who.epoch == 1:
            await self.ctx.registry.fence(self.ctx.who.worker)


class SlowStart(Ticking):
    """Loads an engine for a minute, on its compute thread."""

    async def setup(self) -> None:
        await super().setup()
        await self.ctx.compute(time.sleep, 60.0)


class DeadLoop(Ticking):
    """Blocks its event loop, as no actor should, once it has begun."""

    async def run(self) -> None:
        self.ctx.progress()
        self.ctx.waiting_for(WaitingFor.COMPUTE)
        time.sleep(60.0)  # noqa: ASYNC251 -- the very mistake


class Made(Ticking):
    """Takes the part that its process made as a standby, if there is one, and ends."""

    async def run(self) -> None:
        self.mark("run" if self.ctx.prepared.take("engine") is None else "warm")
        self.ctx.finish(ExitCode.OK, "")


class Engine:
    """A part that a standby made."""

    def __init__(self, marks: Path) -> None:
        self._marks = marks

    def close(self) -> None:
        with self._marks.open("a") as file:
            file.write("closed\n")


def made(run_dir: Path, worker: str, threads: int) -> PreparedParts:
    """Return a part by settings with so many threads of the learner, and another learning rate."""
    config = read_resolved(run_dir)
    learner = config.learner.model_copy(update={"threads": threads, "learning_rate": 0.25})
    parts = {"engine": Engine(run_dir / f"{worker}.marks")}
    return PreparedParts(config.model_copy(update={"learner": learner}), parts)


if __name__ == "__main__":
    name, folder, worker, *threads = sys.argv[1:]
    parts = made(Path(folder), worker, int(threads[0])) if threads else None
    sys.exit(run_actor(lambda: globals()[name], Path(folder), worker, parts, CLOCK))
