"""The weights of a standby's engine, or the versions for a generator of recorded responses.

A standby follows each new version that this host has as a file, verified. It sends no request to
the learner, and copies nothing that an engine can use in place. Adapters and versions from other
hosts are left to the generator that the standby may become."""

from __future__ import annotations

from pathlib import Path

from pipeline.runtime.actor import ActorContext
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import Topic, WaitingFor, WeightsAnnouncement
from pipeline.weights.digest import digest_buffer
from pipeline.weights.shared_files import MappedFile, SharedFileReader
from protocol.errors import WeightsDamaged
from workers.engines.generation.seam import GenerationEngine


class FollowedWeights:
    """Keeps a standby's engine at the newest version. Blocking."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self.reader = SharedFileReader()
        self.serving: tuple[WeightsAnnouncement, MappedFile] | None = None
        """The version that the engine serves, with the file that it may use."""

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def close(self) -> None:
        self.reader.close()

    def follow(self, announcement: WeightsAnnouncement) -> bool:
        """Load this version if it is newer and a file on this host; return whether the engine has
        it.

        A version that is being replaced at this moment is skipped. Raises WeightsDamaged when the
        file is not what was published, or the engine does not serve it."""
        version = announcement.policy_version
        if version <= self._engine.policy_version:
            return True
        if announcement.base is not None:
            return False
        try:
            file = self._verified(announcement)
        except OSError:
            return False
        tensors = self._engine.view_weights(file.data, file.lasting_path)
        self._engine.stage_weights(tensors, version)
        self._engine.load_weights(tensors, version)
        if (unserved := self._engine.unserved(tensors)) or self._engine.policy_version != version:
            raise WeightsDamaged(
                f"the engine was given version {version} but does not serve it: {len(unserved)} tensors differ"
            )
        if self.serving is not None:
            self.reader.release(self.serving[1])
        self.serving = announcement, file
        return True

    def _verified(self, announcement: WeightsAnnouncement) -> MappedFile:
        # a cached mapping is renewed before the file is blamed
        for _ in range(2):
            file = self.reader.open(Path(announcement.path))
            if file.data.size == announcement.num_bytes and digest_buffer(file.data) == announcement.digest:
                return file
            self.reader.forget(file)
        raise WeightsDamaged(f"{announcement.path} is not version {announcement.policy_version} as it was published")


class VersionFollower:
    """Keeps an engine without weights at the number of the newest announced version."""

    def __init__(self, ctx: ActorContext, engine: GenerationEngine) -> None:
        self._ctx, self._engine = ctx, engine
        self._announced = ctx.notifications.subscribe(Topic.WEIGHTS)
        self._newest = ctx.policy_version = engine.policy_version

    @property
    def has_newer(self) -> bool:
        return self._newest > self._engine.policy_version

    async def take_first(self) -> None:
        while self._engine.policy_version < 0 and not self._ctx.draining.is_set():
            self._ctx.waiting_for(WaitingFor.WEIGHTS, "the learner's first version")
            await self.poll()
            if self.has_newer:
                await self.swap()
            else:
                await self._wait()

    async def watch(self) -> None:
        while not self._ctx.draining.is_set():
            await self.poll()
            await self._wait()

    async def poll(self) -> None:
        self._announced.clear()
        newest = await self._ctx.registry.weights()
        if newest is not None:
            self._newest = max(self._newest, newest.policy_version)

    async def swap(self, *, counts: bool = True) -> None:
        """Serve the newest version; ``counts`` says whether that is progress."""
        if not self.has_newer:
            return
        self._engine.load_weights({}, self._newest)
        self._ctx.policy_version = self._newest
        self._ctx.count("weight_swaps")
        if counts:
            self._ctx.progress()

    def close(self) -> None: ...

    async def _wait(self) -> None:
        settings = self._ctx.config.weights
        limit_s = max(LOOK_ANYWAY_S, settings.poll_s) if self._newest >= 0 else settings.poll_s
        await self._ctx.clock.wait(self._announced, limit_s)
