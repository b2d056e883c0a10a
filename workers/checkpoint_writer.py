"""Writes checkpoints while training continues, for the learner and the value worker.

A snapshot is taken on the compute thread between two steps, then written to disk. Only then are the
claims settled whose effect it holds.

A snapshot of weights and optimiser needs most of a learner's memory a second time. If less memory
is left free than the snapshot took, the next update waits until the checkpoint is written;
otherwise that update's activations could get the process killed for lack of memory.

Checkpoints are written one at a time: a worker whose next checkpoint is due waits for the previous
one. So at most one copy of the weights is in memory, and two snapshots' worth of claims are
unsettled.

The ledger is made durable before a checkpoint counts. Otherwise, if the ledger's machine died with
the last second of its file unwritten, it could forget a claim whose effect the checkpoint holds,
and the claim's units would be trained on twice.

When the disk refuses a checkpoint, for example because it is full, the previous one stays. Work
continues, log and status report it, and the next one due is tried again. Unsettled units stay
claimed."""

from __future__ import annotations

from asyncio import Task, wait
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pipeline.config.runtime import CheckpointSection
from pipeline.preflight.memory_needs import room_here
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.machine import this_machine
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.worker_state import resident_bytes
from pipeline.training.checkpoints import CheckpointFolder
from protocol.errors import StorageFailed

_LOOK_S = 1.0
_WORTH_WAITING_BYTES = 256 << 20
"""A smaller copy always fits."""
_RETRY_S = 5.0
_MAX_TRIES = 120
"""Attempts at the last checkpoint of a run or drain: ten minutes for an operator to make room."""
_FIRST_S = 30.0
"""The first update that ends later than this gets a checkpoint at once."""
_COST = 10.0
"""Least time between two checkpoints that are due by time, as a multiple of the last one's
duration."""


class CheckpointTimes:
    """Decides when a checkpoint is due. Pure: times are arguments, monotonic, in seconds."""

    def __init__(self, now_s: float, *, has_checkpoint: bool, is_on_disk: bool) -> None:
        """``is_on_disk`` is False after a restart from a snapshot; a checkpoint is then due."""
        self.has_checkpoint = has_checkpoint
        self._is_on_disk = is_on_disk
        self._begun_s = now_s

    def began(self, now_s: float) -> None:
        self._is_on_disk, self._begun_s = True, now_s

    def is_due(
        self, settings: CheckpointSection, now_s: float, num_updates: int, *, is_writing: bool, last_s: float
    ) -> bool:
        """Return whether a checkpoint is due after an update; ``last_s`` is the last one's
        duration.

        The first checkpoint comes early: a process that keeps dying before it would start over each
        time."""
        if num_updates % settings.every_updates == 0 or not self._is_on_disk:
            return True
        since_s = now_s - self._begun_s
        if not self.has_checkpoint and not is_writing:
            return since_s >= min(_FIRST_S, settings.every_s)
        return since_s >= max(settings.every_s, _COST * last_s)


class CheckpointWriter:
    def __init__(
        self,
        ctx: ActorContext,
        folder: CheckpointFolder,
        *,
        free_bytes: Callable[[], int] = lambda: room_here(this_machine()).free,
    ) -> None:
        self._free_bytes = free_bytes
        self._ctx = ctx
        self._folder = folder
        self._task: Task[None] | None = None
        self._failure: StorageFailed | None = None
        self._was_durable = True
        self.last_s: float = 0.0
        """Seconds that the last checkpoint took, from snapshot to settling."""
        self.ended_s: float = 0.0
        """When the last one ended, written or refused, on the actor's monotonic clock."""

    @property
    def is_writing(self) -> bool:
        return self._task is not None and not self._task.done()

    async def write(
        self,
        version: int,
        snapshot: Callable[[], Callable[[Path], None]],
        state: dict[str, Any],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        """Take a snapshot and start writing it; the caller continues. ``settle`` is called once it
        is on disk. No other checkpoint may be in progress: see :meth:`wait`."""
        started_s = self._ctx.clock.monotonic()
        before = resident_bytes()
        save = await self._ctx.compute(snapshot)
        copied = resident_bytes() - before
        self._task = self._ctx.spawn("checkpoint", self._write(version, save, state, settle, started_s), endless=False)
        del save
        if copied > _WORTH_WAITING_BYTES and self._free_bytes() < copied:
            await self.wait()

    async def wait(self) -> None:
        while self._task is not None and not self._task.done():
            self._ctx.waiting_for(WaitingFor.DISK, "the last checkpoint to be written")
            await wait({self._task}, timeout=_LOOK_S)

    async def complete(self, again: Callable[[], Awaitable[None]]) -> None:
        """Wait until the newest snapshot is on disk, calling ``again`` while the disk refuses it.

        Raises StorageFailed if it is still refused after ten minutes."""
        await self.wait()
        for _ in range(_MAX_TRIES):
            if self._failure is None:
                return
            self._ctx.waiting_for(WaitingFor.DISK, str(self._failure))
            await self._ctx.clock.sleep(_RETRY_S)
            await again()
            await self.wait()
        if self._failure is not None:
            raise self._failure

    async def _write(
        self,
        version: int,
        save: Callable[[Path], None],
        state: dict[str, Any],
        settle: Callable[[], Awaitable[None]],
        started_s: float,
    ) -> None:
        ctx = self._ctx
        try:
            if not await ctx.ledger.make_durable(ctx.who) and self._was_durable:
                self._was_durable = False
                ctx.log.warning(
                    "ledger_not_durable",
                    reason="the ledger's server does not confirm that its file is on its disk",
                    action="set appendonly yes on a Redis 7.2 or later; until then its death may let units be trained on twice",
                )
            with ctx.storing.task("checkpoint"):
                path = await ctx.store(self._folder.write, version, save, state)
        except StorageFailed as error:
            self._failure = error
            ctx.worker_state.refused = str(error)
            ctx.count("failed_checkpoints")
            ctx.log.error("checkpoint_failed", version=version, reason=str(error))
            self.ended_s = ctx.clock.monotonic()
            return
        self._failure, ctx.worker_state.refused = None, ""
        await settle()
        self.ended_s = ctx.clock.monotonic()
        self.last_s = self.ended_s - started_s
        ctx.counters["checkpoint_version"] = version
        ctx.log.info("checkpoint_written", version=version, took_s=self.last_s, folder=path.name)
