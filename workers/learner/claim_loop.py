"""The learner's wait for work: it asks for a batch until it gets one, and runs periodic tasks
meanwhile.

Periodic tasks start only when the first request is refused, and have all finished when the wait
returns, so none runs during an update. While the critic's gate is closed, ready units are dropped,
which makes room for new work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.ledger.types import ClaimRefused, ClaimWait, DropReason
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.training.critic_gate import CriticView, opens, view_critic
from protocol.ids import Role


class CriticWatch:
    """Polls the value worker's heartbeat. An open gate stays open, even if that worker is lost."""

    def __init__(self, ctx: ActorContext, *, was_open: bool) -> None:
        self._ctx = ctx
        self.is_open = was_open or opens((), num_steps=0, settings=ctx.config.value)
        self.view = CriticView(self.is_open, True, "")

    async def poll(self) -> None:
        beats = await self._ctx.registry.heartbeats(Role.VALUE)
        self.view = view_critic(beats, self._ctx.config)
        self.is_open |= self.view.is_open

    @property
    def trouble(self) -> str:
        """Why no values arrive; empty while the value worker is healthy."""
        return "" if self.view.is_live else self.view.detail

    async def drop_batch(self, policy_version: int) -> ClaimRefused | None:
        """Claim a batch and drop it as ``value_warmup``; return the refusal if there was none.

        Dropping returns credit, so generation continues. The value worker keeps the finished
        responses."""
        ledger, who = self._ctx.ledger, self._ctx.who
        claim = await ledger.claim(who, policy_version=policy_version)
        if isinstance(claim, ClaimRefused):
            return claim
        for unit in claim.units:
            await ledger.drop(who, claim, unit, DropReason.VALUE_WARMUP)
        await ledger.settle(who, (claim.claim_id,))
        self._ctx.progress()
        return None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NotYet:
    pause_s: float


@dataclass(slots=True)
class PeriodicTask:
    name: str
    every_s: float
    do: Callable[[], Awaitable[None]]
    due_s: float = 0.0
    """On the actor's monotonic clock."""
    is_at_work: bool = False
    bell: asyncio.Event = field(default_factory=asyncio.Event)


def wait_words(refused: ClaimRefused, trouble: str = "") -> str:
    """Describe what an update is waiting for; ``trouble`` is the critic's, if any."""
    what = f"{refused.num_ready} of {refused.num_needed} ready"
    if refused.wait is ClaimWait.LATE_WORK:
        what = f"{refused.oldest_running}, which would be too stale after this update"
    elif refused.oldest_running:
        what += f"; the oldest that is not is {refused.oldest_running}"
    return f"{trouble}; {what}" if trouble else what


class ClaimLoop:
    def __init__(self, ctx: ActorContext, tasks: Sequence[PeriodicTask]) -> None:
        self._ctx = ctx
        self._periodic = tasks
        self._began_s = 0.0
        self._is_over = True

    @property
    def waited_s(self) -> float:
        """Seconds since the current wait began; 0 when not waiting."""
        return 0.0 if self._is_over else self._ctx.clock.monotonic() - self._began_s

    async def until(self, ask: Callable[[], Awaitable[T | NotYet]]) -> T | None:
        """Call ``ask`` until it answers, and return the answer, or None when the worker drains.

        Raises what a periodic task raises."""
        ctx = self._ctx
        self._began_s = ctx.clock.monotonic()
        answer = await ask()
        if not isinstance(answer, NotYet):
            return answer
        self._is_over = False
        async with asyncio.TaskGroup() as tasks:
            for task in self._periodic:
                tasks.create_task(self._repeat(task), name=f"task-{task.name}")
            try:
                while isinstance(answer, NotYet) and not ctx.draining.is_set():
                    await ctx.clock.sleep(answer.pause_s)
                    answer = await ask()
            finally:
                self._end()
        return None if isinstance(answer, NotYet) else answer

    async def _repeat(self, task: PeriodicTask) -> None:
        while not self._is_over:
            wait_s = task.due_s - self._ctx.clock.monotonic()
            if wait_s > 0.0:
                task.bell.clear()
                await self._ctx.clock.wait(task.bell, wait_s)
                continue
            task.is_at_work = True
            try:
                await task.do()
            finally:
                task.is_at_work = False
                task.due_s = self._ctx.clock.monotonic() + task.every_s

    def _end(self) -> None:
        self._is_over = True
        for task in self._periodic:
            task.bell.set()
        if names := [task.name for task in self._periodic if task.is_at_work]:
            self._ctx.waiting_for(WaitingFor.COMPUTE, ", ".join(names))
