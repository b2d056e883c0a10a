"""Publishes policy versions beside training, and waits for generators that lag behind.

    compute thread    lend the weights of version v; training goes on, and its next change of them waits
    another thread    write and digest the version, and write the update log's outcome; the loan ends
    loop              announce it, then grant credit for new prompts

One version is published at a time, and the next waits for it: every version is announced, in order.
An error ends the worker. A learner that dies before the announcement publishes the same weights
again under the same number, as nobody has seen it.

A version is announced with its digest. When training an adapter, the base weights are published
once and then only the adapter.

A live generator that serves an older version than ``max_generator_lag`` allows gets
``ack_timeout_s`` to take the new weights. After that it is fenced, so the supervisor replaces it
and its trajectories continue elsewhere; versions never run away from generators that failed
silently. A generator cannot take weights in the middle of a long turn, such as a prefill, so the
learner keeps waiting while the turn makes progress or parts of a version arrive at its host.

A generator reports in its heartbeat when a version's bytes do not match. The learner then checks
its own copy and, if that is damaged, publishes the version again: same bytes and digest, different
pages.

Counters in the heartbeat: ``published_bytes``, ``published_s`` (seconds spent writing and
digesting, while training went on)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipeline.fleet.limits import limits_of
from pipeline.fleet.state import Worker, read_once
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.answering import answer_requests
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.training.live_states import StateLoan
from pipeline.weights import PARTS, TURNS
from pipeline.weights.store import StoredWeights, WeightsStore, weights_folder
from protocol.endpoints import mailbox_endpoint
from protocol.errors import WeightsDamaged
from protocol.ids import Role
from protocol.messages import BASE_VERSION, Message, WeightsPart, WeightsRequest

if TYPE_CHECKING:
    from pipeline.weights.tensorfile import Publication
    from workers.engines.training.seam import TrainingBackend

Digested = Callable[[int, dict[str, bytes]], None]
"""Gets a version and the digests of its weights."""

_LOG_S = 10.0
"""How long a checkpoint or snapshot waits for a version to be written, and with it the log of the update that
made it. Without, a replay may lack that update."""
_POLL_S = 0.05
_LOOK_S = 1.0
_TURNS_TO_TAKE = 2
"""The first may have begun before the version was published."""


class WeightPublisher:
    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        settings = ctx.config.weights
        folder = weights_folder(ctx.run_dir, shared_memory=settings.shared_memory)
        self._is_served = settings.path == "wire" or (settings.path == "auto" and ctx.config.wire.transport == "tcp")
        self._store = WeightsStore(
            folder,
            keep=settings.keep,
            max_part_bytes=settings.max_part_mb << 20,
            part_digest=settings.part_digest if self._is_served else None,
            instead=weights_folder(ctx.run_dir, shared_memory=False),
        )
        self._endpoint = ""
        self._task: asyncio.Task[None] | None = None
        self._loan: StateLoan | None = None
        self._making = asyncio.Lock()

    async def start(self) -> None:
        ctx = self._ctx
        if not self._is_served:
            return
        self._responder = ctx.transport.responder(mailbox_endpoint(ctx.config.wire, ctx.run_dir, ctx.who))
        self._endpoint = self._responder.endpoint
        await ctx.registry.set_endpoint(ctx.who, self._endpoint, public_key=ctx.transport.public_key)
        ctx.spawn("weights-server", answer_requests(self._responder, self, ctx.clock, ctx.log))

    async def next_version(self, checkpointed: int) -> int:
        """Return the first version to publish, above all announced ones.

        Restored weights get a new number, since a number never names two files."""
        announced = await self._ctx.registry.weights()
        return checkpointed if announced is None else max(checkpointed, announced.policy_version + 1)

    @property
    def waited_s(self) -> float:
        """Seconds that the engine has waited before it could change the weights being published."""
        return 0.0 if self._loan is None else self._loan.waited_s

    @property
    def _is_publishing(self) -> bool:
        return self._task is not None and not self._task.done()

    async def publish(self, policy_version: int, backend: TrainingBackend) -> None:
        """Publish a version and wait until it is announced."""
        await self.start_publication(policy_version, backend)
        await self.wait()

    async def start_publication(
        self,
        policy_version: int,
        backend: TrainingBackend,
        announced: Callable[[], Awaitable[None]] | None = None,
        digested: Digested | None = None,
    ) -> None:
        """Lend the weights to a publication; the caller continues. ``digested`` is called under the loan, on
        another thread, and ``announced`` at the end.

        Waits for the version before and for laggards."""
        await self.wait()
        await self._wait_for_laggards(policy_version)
        self._ctx.waiting_for(WaitingFor.COMPUTE)
        publication = await self._ctx.compute(self._lend, policy_version, backend, digested)
        self._task = self._ctx.spawn("publication", self._finish(publication, announced), endless=False)

    async def wait(self, limit_s: float = math.inf) -> None:
        """Wait until no publication is in progress, at most ``limit_s``. Raises EngineDied if it stands
        still."""
        end_s = time.monotonic() + limit_s
        while self._task is not None and self._is_publishing and (left_s := end_s - time.monotonic()) > 0.0:
            self._ctx.waiting_for(WaitingFor.COMPUTE, "the last version to be written")
            await asyncio.wait({self._task}, timeout=min(left_s, _LOOK_S))
            if self._loan is not None:
                self._loan.check()

    def join(self) -> None:
        """Block until the version lent last is written and ``digested`` was called, but not for long."""
        if self._loan is not None:
            self._loan.join(_LOG_S)

    def _lend(self, policy_version: int, backend: TrainingBackend, digested: Digested | None) -> _Publishing:
        base = self._store.held(BASE_VERSION) or self._write_base(backend)
        publication = backend.publication(base and base.digest)
        if digested is not None and publication.digests is None:
            found = backend.digests()
            publication = replace(publication, digests=lambda: found)
        made = _Publishing(policy_version, publication, self._publish, digested)
        self._loan = made.loan
        made.publication.begin(made.loan)
        return made

    async def _finish(self, made: _Publishing, announced: Callable[[], Awaitable[None]] | None) -> None:
        # the loan ends there, on the thread, which keeps running if this task is cancelled
        stored = await asyncio.to_thread(made.write)
        await self._ctx.registry.announce_weights(
            self._ctx.who, self._store.announcement(stored, endpoint=self._endpoint)
        )
        if announced is not None:
            await announced()

    async def repair(self, policy_version: int, backend: TrainingBackend) -> None:
        """Publish the newest version again if a generator refused it and this copy is damaged.

        The backend must still hold that version's weights. Raises WeightsDamaged when they now give
        other bytes; a new learner then publishes under a new number."""
        ctx = self._ctx
        if self._is_publishing:
            return
        beats = await ctx.registry.heartbeats(Role.GENERATOR, below_version=policy_version)
        if not any(beat.counters.get("rejected_version") == policy_version for beat in beats):
            return
        writes = {BASE_VERSION: self._write_base, policy_version: partial(self._write, policy_version)}
        for version, write in writes.items():
            damaged = self._store.held(version)
            if damaged is None or await asyncio.to_thread(damaged.is_intact):
                continue
            again = await ctx.compute(write, backend)
            digest = again.digest if again is not None else "nothing"
            ctx.log.error("weights_repaired", path=str(damaged.path), digest=digest)
            if digest != damaged.digest:
                raise WeightsDamaged(
                    f"version {version} was damaged where it lay ({damaged.digest}), and its weights now give {digest}"
                )

    def _write(self, policy_version: int, backend: TrainingBackend) -> StoredWeights:
        """Store a version, and first its base if that is not stored yet."""
        base = self._store.held(BASE_VERSION) or self._write_base(backend)
        started_s = time.perf_counter()
        return self._publish(policy_version, backend.publication(base and base.digest), started_s)

    def _write_base(self, backend: TrainingBackend) -> StoredWeights | None:
        started_s = time.perf_counter()
        below = backend.base_publication()
        return None if below is None else self._publish(BASE_VERSION, below, started_s)

    def _publish(self, version: int, publication: Publication, started_s: float) -> StoredWeights:
        stored = self._store.publish(version, publication)
        self._ctx.count("published_bytes", stored.num_bytes)
        self._ctx.count("published_s", time.perf_counter() - started_s)
        return stored

    def close(self) -> None:
        """Stop serving; the files stay for generators that have them mapped."""
        if self._endpoint:
            self._responder.close()
        self._store.close()

    def answer_now(self, request: Message) -> WeightsPart | None:
        """Answer on the event loop by copying a part; None for a delta, which takes longer."""
        if isinstance(request, WeightsRequest) and request.base >= 0:
            return None
        return self._store.answer(request)

    async def answer_later(self, request: Message) -> WeightsPart:
        """Answer on a thread, where deltas are computed one at a time."""
        async with self._making:
            return await asyncio.to_thread(self._store.answer, request)

    async def _wait_for_laggards(self, policy_version: int) -> None:
        ctx = self._ctx
        oldest_allowed = policy_version - ctx.config.weights.max_generator_lag
        limits = limits_of(ctx.config)
        deadline = ctx.clock.monotonic() + ctx.config.weights.ack_timeout_s
        progress: dict[str, _LaggardProgress] = {}
        while laggards := [
            beat
            for beat in read_once(await ctx.registry.heartbeats(Role.GENERATOR, below_version=oldest_allowed), limits)
            if _is_awaited(beat) and not ctx.draining.is_set()
        ]:
            names = ", ".join(f"{beat.who.worker} (version {beat.policy_version})" for beat in laggards)
            now = ctx.clock.monotonic()
            for beat in laggards:
                progress.setdefault(beat.who.worker, _LaggardProgress(beat, now)).observe(beat, now)
            still_s = ctx.config.weights.ack_timeout_s
            failed = [beat for beat in laggards if not progress[beat.who.worker].is_at_work(beat, now - still_s)]
            if now >= deadline and failed:
                failing = ", ".join(beat.who.worker for beat in failed)
                ctx.log.error("generators_fenced", generators=failing, oldest_allowed=oldest_allowed)
                for beat in failed:
                    await ctx.registry.fence(beat.who.worker)
                if len(failed) == len(laggards):
                    return
            ctx.waiting_for(WaitingFor.WEIGHTS, f"{names} to take version {policy_version - 1}")
            await ctx.clock.sleep(_POLL_S)


class _LaggardProgress:
    """Whether a laggard's turn advances and parts of a version arrive at it."""

    def __init__(self, beat: Worker, now_s: float) -> None:
        self._turn = beat.counters.get(TURNS, 0.0)
        self._steps = -1
        self._moved_s = now_s
        self._parts = beat.counters.get(PARTS, 0.0)
        self._came_s: float | None = None

    def observe(self, beat: Worker, now_s: float) -> None:
        if beat.work.steps != self._steps:
            self._steps, self._moved_s = beat.work.steps, now_s
        parts = beat.counters.get(PARTS, 0.0)
        if parts != self._parts:
            self._parts, self._came_s = parts, now_s

    def is_at_work(self, beat: Worker, since_s: float) -> bool:
        """Whether a part arrived since ``since_s``, or the delaying turn made progress."""
        if self._came_s is not None and self._came_s > since_s:
            return True
        return (
            beat.counters.get(TURNS, 0.0) - self._turn < _TURNS_TO_TAKE and self._steps > 0 and self._moved_s > since_s
        )


class _Publishing:
    """A version on its way."""

    def __init__(
        self,
        version: int,
        publication: Publication,
        publish: Callable[[int, Publication, float], StoredWeights],
        digested: Digested | None,
    ) -> None:
        self.publication = publication
        self._digested = partial(digested, version) if digested is not None else None
        self.loan = StateLoan(self._write, what=f"writing version {version} for the generators; check /dev/shm")
        self._publish = partial(publish, version, publication)
        self._stored: StoredWeights | None = None

    def write(self) -> StoredWeights:
        """Write and digest it under the loan. Blocks."""
        self.loan.copy()
        assert self._stored is not None, "the loan's copy raises if it fails"
        return self._stored

    def _write(self) -> None:
        self._stored = self._publish(time.perf_counter())
        if self._digested is not None and self.publication.digests is not None:
            self._digested(self.publication.digests())


def _is_awaited(laggard: Worker) -> bool:
    return laggard.policy_version >= 0 and not laggard.is_silent and laggard.waiting_for is not WaitingFor.DRAINING
