"""The policy versions of an engine without a model: their numbers, and no weights.

It stands in the place of ``workers.generator.weight_receiver`` in a run that samples nothing. Each
announced version is served at once, since recorded responses are the same under all of them. So
their staleness counts from the moment at which they are given out."""

from __future__ import annotations

from pipeline.runtime.actor import ActorContext
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import Topic, WaitingFor
from workers.engines.generation.seam import GenerationEngine


class VersionFollower:
    """Gives an engine the number of the newest announced version."""

    def __init__(self, ctx: ActorContext, engine: GenerationEngine) -> None:
        self._ctx, self._engine = ctx, engine
        self._announced = ctx.notifications.subscribe(Topic.WEIGHTS)
        self._newest = ctx.policy_version = engine.policy_version

    @property
    def has_newer(self) -> bool:
        """Whether a newer version than the engine's is announced."""
        return self._newest > self._engine.policy_version

    async def take_first(self) -> None:
        """Wait for a version and take it."""
        while self._engine.policy_version < 0 and not self._ctx.draining.is_set():
            self._ctx.waiting_for(WaitingFor.WEIGHTS, "the learner's first version")
            await self.look()
            if self.has_newer:
                await self.swap()
            else:
                await self._wait()

    async def watch(self) -> None:
        """Look for newer versions until the drain."""
        while not self._ctx.draining.is_set():
            await self.look()
            await self._wait()

    async def look(self) -> None:
        """Look for the newest announced version."""
        self._announced.clear()
        newest = await self._ctx.registry.weights()
        if newest is not None:
            self._newest = max(self._newest, newest.policy_version)

    async def swap(self, *, counts: bool = True) -> None:
        """Serve the newest version. ``counts``: whether that is progress."""
        if not self.has_newer:
            return
        self._engine.load_weights({}, self._newest)
        self._ctx.policy_version = self._newest
        self._ctx.count("weight_swaps")
        if counts:
            self._ctx.progress()

    def close(self) -> None:
        """Nothing was fetched."""

    async def _wait(self) -> None:
        settings = self._ctx.config.weights
        limit_s = max(LOOK_ANYWAY_S, settings.poll_s) if self._newest >= 0 else settings.poll_s
        await self._ctx.clock.wait(self._announced, limit_s)
