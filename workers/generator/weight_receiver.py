"""Brings the newest version of the weights to the engine: fetched and verified while decoding
continues, then swapped in.

    poll: announcement ──> file mapped, or fetched ──> digest matches ──> staged      (beside decoding)
                           an adapter: merged with the base, whose digest matches, too
                           vLLM on GPUs: copied to its devices, where there is room
    swap: staged ──> in the engine, between two tokens                                (the pause)

A file on this host is mapped. A file on another host is fetched once for all workers of this one,
whole or as a delta to the version that is here (``workers.generator.host_weights``).

A version whose bytes do not match the announced digest, while no newer one is announced, is refused
with WeightsDamaged. The worker must not sample under that version, and leaves.

An adapter's base is fetched once, the same way, and kept while announcements name its digest. The
digest is checked before every use, because the base stays for the whole run in pages that other
processes share. Merged weights are computed beside decoding, in pages of this process alone, so the
pause contains no merge. An engine either uses and so keeps them in place, or copies them, after
which they are freed.

Counters in the heartbeat: ``weight_swaps``; ``weights_bytes`` (mapped or fetched); ``weights_s``
(seconds from reading the announcement to verified and merged); ``weights_merge_s`` (of these,
merging); ``weights_pause_s`` (decoding stood still); ``weights_bases`` (bases fetched);
``weights_deltas`` (versions that came as deltas); ``weights_refreshes`` (whole versions after a
delta that did not fit); ``rejected_version`` (-1: none); ``stale_swaps`` (swaps after which old
weights were served)."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.runtime.actor import ActorContext
from pipeline.runtime.liveness import UNREACHED_SAID_AFTER_S
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import LinkReport, Topic, WaitingFor, WeightsAnnouncement
from pipeline.runtime.role_sender import unreached_words
from pipeline.weights.digest import digest_buffer
from pipeline.weights.shared_files import MappedFile, SharedFileReader, UnnamedFile
from pipeline.weights.store import fetched_folder, write_publication
from pipeline.weights.wire import Base
from protocol.channel import Requester
from protocol.errors import ParityFailed, WeightsDamaged, WeightsRejected
from protocol.ids import Role
from protocol.messages import BASE_VERSION
from workers.engines.generation.seam import GenerationEngine
from workers.generator.followed_weights import FollowedWeights

if TYPE_CHECKING:
    from workers.generator.host_weights import HostWeights

T = TypeVar("T")

_RETRY_S = 1.0
"""Seconds until a refused version is tried again: the learner may have published it again."""


@dataclass(frozen=True, slots=True)
class _Version:
    announcement: WeightsAnnouncement
    file: MappedFile
    tensors: Mapping[str, Any]
    """The whole weights; empty once the engine has them."""
    merged: UnnamedFile | None = None
    """Where the merged weights are if the file is an adapter, until the engine has them."""
    pages: weakref.ref[np.ndarray] | None = None
    """Reference to the ``merged`` weights once the engine has them: alive if it uses them in place."""


class WeightReceiver:
    def __init__(self, ctx: ActorContext, engine: GenerationEngine, followed: FollowedWeights | None = None) -> None:
        """``followed`` holds the version that a standby's engine serves already."""
        self._ctx = ctx
        self._engine = engine
        self._settings = ctx.config.weights
        self._announced = ctx.notifications.subscribe(Topic.WEIGHTS)
        self._reader = SharedFileReader() if followed is None else followed.reader
        self._host: HostWeights | None = None
        self._base: tuple[str, MappedFile] | None = None
        self._turn = asyncio.Lock()
        self._here = self._newest = -1
        """Versions: the last one brought here, and the last one known to be announced."""
        self._staged: _Version | None = None
        self._serving: _Version | None = None
        self._refused: WeightsRejected | None = None
        self._next_try = 0.0
        self._asked: tuple[str, Requester | None] = ("", None)
        self._unreached_since: float | None = None
        if followed is not None and followed.serving is not None:
            announcement, file = followed.serving
            self._serving = _Version(announcement, file, {})
            self._here = self._newest = ctx.policy_version = announcement.policy_version
        ctx.counters["rejected_version"] = -1
        ctx.watch_links(self._reports)

    @property
    def has_newer(self) -> bool:
        return self._staged is not None

    async def take_first(self) -> None:
        """Wait for a version and swap it in; after a refused one, wait for its repair or another."""
        kind, detail = WaitingFor.WEIGHTS, "the learner's first version"
        while self._engine.policy_version < 0 and not self._ctx.draining.is_set():
            self._ctx.waiting_for(kind, detail)
            try:
                await self.poll()
            except WeightsDamaged as error:
                kind, detail = WaitingFor.QUARANTINE, str(error)
            if self.has_newer:
                await self.swap()
            else:
                await self.wait()

    async def watch(self) -> None:
        """Poll until the worker drains. A refusal is raised by the next ``swap``."""
        while not self._ctx.draining.is_set():
            try:
                await self.poll()
            except WeightsRejected as error:
                self._refused = error
            await self.wait()

    async def wait(self) -> None:
        """Wait until an announcement arrives or the next poll is due."""
        is_here = 0 <= self._newest <= max(self._here, self._engine.policy_version)
        limit_s = max(LOOK_ANYWAY_S, self._settings.poll_s) if is_here else self._settings.poll_s
        await self._ctx.clock.wait(self._announced, limit_s)

    async def poll(self) -> None:
        """Fetch the newest announced version, if it is newer than the one here.

        Raises WeightsDamaged when its bytes differ from every source, WeightsRejected when the
        learner's answers make no sense."""
        async with self._turn:
            self._announced.clear()
            newest = await self._ctx.registry.weights()
            self._newest = -1 if newest is None else newest.policy_version
            if newest is None or newest.policy_version <= max(self._here, self._engine.policy_version):
                return
            is_refused = newest.policy_version == self._ctx.counters["rejected_version"]
            if is_refused and self._ctx.clock.monotonic() < self._next_try:
                return
            started = time.perf_counter()
            try:
                staged = await self._obtain(newest)
                self._unreached_since = None
            except (FileNotFoundError, TimeoutError, ConnectionError) as error:
                self._ctx.log.warning("weights_not_received", policy_version=newest.policy_version, reason=str(error))
                return
            except WeightsRejected as error:
                latest = await self._ctx.registry.weights()
                if latest is None or latest.policy_version != newest.policy_version:
                    # replaced while it was read: the next poll finds the newer one
                    return
                self._next_try = self._ctx.clock.monotonic() + _RETRY_S
                self._ctx.counters["rejected_version"] = newest.policy_version
                self._ctx.log.error("weights_rejected", policy_version=newest.policy_version, reason=str(error))
                raise
            try:
                await asyncio.to_thread(self._engine.stage_weights, staged.tensors, newest.policy_version)
            except BaseException:
                self._release(staged)
                raise
            self._release(self._staged)
            self._staged, self._here = staged, newest.policy_version
            self._ctx.counters["rejected_version"] = -1
            self._ctx.count("weights_s", time.perf_counter() - started)

    async def swap(self, *, counts: bool = True) -> None:
        """Swap the staged version in, if there is one.

        ``counts`` says whether that is progress. It is not while trajectories are live, since an
        engine that samples nothing would still take versions. Raises WeightsRejected when a version
        was refused since the last call or does not fit the model, ParityFailed when the engine does
        not serve it afterwards, and what the engine raises."""
        if self._refused is not None:
            raise self._refused
        staged, self._staged = self._staged, None
        if staged is None:
            return
        started = time.perf_counter()
        version = staged.announcement.policy_version
        before = [self._serving.pages()] if self._serving is not None and self._serving.pages is not None else []
        try:
            await self._on_engine(counts, self._engine.load_weights, staged.tensors, version)
            await self._check_served(staged.tensors, version, counts=counts)
        except BaseException:
            self._release(staged)
            raise
        self._ctx.count("weights_pause_s", time.perf_counter() - started)
        # freeing merged pages takes long, so it must not happen in the pause, where the engine
        # drops them
        asyncio.get_running_loop().run_in_executor(None, before.clear)
        self._release(self._serving)
        pages = None
        if staged.merged is not None:
            pages = weakref.ref(staged.merged.data)
            staged.merged.close()
        self._serving = replace(staged, tensors={}, merged=None, pages=pages)
        self._ctx.policy_version = version
        self._ctx.count("weight_swaps")
        if counts:
            self._ctx.progress()

    async def _on_engine(self, counts: bool, function: Callable[..., T], *arguments: Any) -> T:
        if counts:
            return await self._ctx.compute(function, *arguments)
        return await self._ctx.turn(function, *arguments, begins=False)

    async def _check_served(self, tensors: Mapping[str, Any], version: int, *, counts: bool) -> None:
        """Raise ParityFailed when the engine serves other weights; its own report is not trusted."""
        unserved = await self._on_engine(counts, self._engine.unserved, tensors)
        if not unserved and self._engine.policy_version == version:
            return
        self._ctx.count("stale_swaps")
        what = f"{len(unserved)} of {len(tensors)} tensors, first {unserved[0]}" if unserved else "the version before"
        raise ParityFailed(
            f"the engine was given version {version} but still serves old weights ({what}); sampling would record "
            f"the wrong version, so this worker ends: use another generation.engine for this model"
        )

    def close(self) -> None:
        """Release files, and remove those that were fetched."""
        self._release(self._staged)
        self._staged = None
        self._reader.close()
        if self._host is not None:
            self._host.close()

    # -- fetching a version --

    async def _obtain(self, announcement: WeightsAnnouncement) -> _Version:
        base = None if announcement.base is None else await self._obtain_base(announcement.base)
        file = await self._bring(announcement)
        try:
            return await asyncio.to_thread(self._make, announcement, file, base)
        except BaseException:
            self._reader.release(file)
            raise

    def _make(self, announcement: WeightsAnnouncement, file: MappedFile, base: MappedFile | None) -> _Version:
        if base is None or announcement.base is None:
            return _Version(announcement, file, self._engine.view_weights(file.data, file.lasting_path))
        started = time.perf_counter()
        digest, dtype = announcement.base.digest, self._ctx.config.types.weights
        publication = self._engine.merge_weights(file.data, base.data, digest, dtype=dtype)
        shared = {self._settings.shared_memory: None, False: None}
        folders = [fetched_folder(self._ctx.run_dir, shared_memory=is_shared) for is_shared in shared]
        merged = UnnamedFile.in_first_with_room(folders, publication.num_bytes)
        try:
            digest = write_publication(merged.data, publication)
            tensors = self._engine.view_weights(merged.data, merged.lasting_path)
        except BaseException:
            merged.close()
            raise
        self._ctx.count("weights_merge_s", time.perf_counter() - started)
        self._ctx.log.debug("weights_merged", policy_version=announcement.policy_version, digest=digest)
        return _Version(announcement, file, tensors, merged)

    async def _obtain_base(self, announcement: WeightsAnnouncement) -> MappedFile:
        """Return the announced base; fetch it unless the one here still matches its digest."""
        if self._base is not None:
            digest, file = self._base
            if digest == announcement.digest == await asyncio.to_thread(digest_buffer, file.data):
                return file
            self._base = None
            self._reader.forget(file)
        file = await self._bring(announcement)
        self._base = (announcement.digest, file)
        self._ctx.count("weights_bases")
        return file

    def _release(self, version: _Version | None) -> None:
        """Allow the files of a version that is no longer used to be overwritten."""
        if version is None:
            return
        self._reader.release(version.file)
        if version.merged is not None:
            version.merged.close()

    async def _bring(self, announcement: WeightsAnnouncement) -> MappedFile:
        mapped = None
        if self._settings.path != "wire":
            mapped = await asyncio.to_thread(self._map, announcement)
        if mapped is not None:
            self._ctx.count("weights_bytes", announcement.num_bytes)
            return mapped
        if self._settings.path != "file" and announcement.endpoint:
            return await self._fetch(announcement)
        if await asyncio.to_thread(os.path.exists, announcement.path):
            raise WeightsDamaged(
                f"{announcement.path} is not version {announcement.policy_version} as it was published: expected "
                f"{announcement.num_bytes} bytes with digest {announcement.digest}"
            )
        raise FileNotFoundError(f"{announcement.path} is gone, and the learner serves no endpoint")

    def _map(self, announcement: WeightsAnnouncement) -> MappedFile | None:
        path = Path(announcement.path)
        # a cached mapping is renewed before the file is blamed
        for _ in range(2):
            try:
                mapped = self._reader.open(path)
            except OSError:
                return None
            if mapped.data.size == announcement.num_bytes and digest_buffer(mapped.data) == announcement.digest:
                return mapped
            self._reader.forget(mapped)
        return None

    async def _fetch(self, announcement: WeightsAnnouncement) -> MappedFile:
        is_base = announcement.policy_version == BASE_VERSION
        if self._host is None:
            # a run on one host maps the learner's files and does not need this import
            from workers.generator.host_weights import HostWeights

            self._host = HostWeights(self._ctx, self._reader, self._announced, self._note_learner)
        held = (self._staged or self._serving) if self._settings.delta and not is_base else None
        base = held and Base(held.announcement.policy_version, held.announcement.digest, held.file.data)
        try:
            return await self._host.fetch(announcement, base)
        finally:
            self._note_reach()
            self._asked = self._asked[0], None

    def _note_learner(self, endpoint: str, requester: Requester) -> None:
        self._note_reach()
        if endpoint != self._asked[0]:
            self._unreached_since = None
        self._asked = endpoint, requester

    def _note_reach(self) -> None:
        _, requester = self._asked
        if requester is None:
            return
        down_s = requester.unreached_s()
        if down_s == 0.0:
            self._unreached_since = None
        elif self._unreached_since is None:
            self._unreached_since = self._ctx.clock.monotonic() - down_s

    def _reports(self) -> list[LinkReport]:
        """Report a learner's endpoint that cannot be reached; this link has no counters to return."""
        self._note_reach()
        since, words = self._unreached_since, ""
        if since is not None and (down_s := self._ctx.clock.monotonic() - since) >= UNREACHED_SAID_AFTER_S:
            words = unreached_words(Role.LEARNER, self._asked[0], down_s)
        self._ctx.report_unreached(Role.LEARNER, words)
        return []
