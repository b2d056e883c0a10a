"""The learner's wait for work: one request, repeated until it has an answer, with chores beside it.

The wait ends with the answer or with the drain. Each chore is a task that the wait owns. It begins
when the first answer is "not yet", and has ended when the wait returns: an update never runs beside
a chore. A chore keeps its pace from one wait to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.ledger.types import ClaimRefused, ClaimWait
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.contract import WaitingFor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NotYet:
    """There is no answer yet; the request is repeated after a pause."""

    pause_s: float


@dataclass(slots=True)
class Chore:
    """Work that is due every so often while the learner waits."""

    name: str
    every_s: float
    do: Callable[[], Awaitable[None]]
    due_s: float = 0.0
    """By the actor's monotonic clock."""
    is_at_work: bool = False
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    """Rung when the wait is over."""


def wait_words(refused: ClaimRefused, trouble: str = "") -> str:
    """Return what an update waits for; ``trouble``: of the critic, in words."""
    what = f"{refused.num_ready} of {refused.num_needed} ready"
    if refused.wait is ClaimWait.LATE_WORK:
        what = f"{refused.oldest_running}, which would be too stale after this update"
    elif refused.oldest_running:
        what += f"; the oldest that is not is {refused.oldest_running}"
    return f"{trouble}; {what}" if trouble else what


class WorkWait:
    """Waits for one answer at a time."""

    def __init__(self, ctx: ActorContext, chores: Sequence[Chore]) -> None:
        self._ctx = ctx
        self._chores = chores
        self._began_s = 0.0
        self._is_over = True

    @property
    def waited_s(self) -> float:
        """Seconds since the present wait began; 0 outside of one."""
        return 0.0 if self._is_over else self._ctx.clock.monotonic() - self._began_s

    async def until(self, ask: Callable[[], Awaitable[T | NotYet]]) -> T | None:
        """Return the first answer of ``ask``, None at the drain. Errors of chores propagate."""
        ctx = self._ctx
        self._began_s = ctx.clock.monotonic()
        answer = await ask()
        if not isinstance(answer, NotYet):
            return answer
        self._is_over = False
        async with asyncio.TaskGroup() as tasks:
            for chore in self._chores:
                tasks.create_task(self._repeat(chore), name=f"chore-{chore.name}")
            try:
                while isinstance(answer, NotYet) and not ctx.draining.is_set():
                    await ctx.clock.sleep(answer.pause_s)
                    answer = await ask()
            finally:
                self._end()
        return None if isinstance(answer, NotYet) else answer

    async def _repeat(self, chore: Chore) -> None:
        while not self._is_over:
            wait_s = chore.due_s - self._ctx.clock.monotonic()
            if wait_s > 0.0:
                chore.bell.clear()
                await self._ctx.clock.wait(chore.bell, wait_s)
                continue
            chore.is_at_work = True
            try:
                await chore.do()
            finally:
                chore.is_at_work = False
                chore.due_s = self._ctx.clock.monotonic() + chore.every_s

    def _end(self) -> None:
        self._is_over = True
        for chore in self._chores:
            chore.bell.set()
        if names := [chore.name for chore in self._chores if chore.is_at_work]:
            self._ctx.waiting_for(WaitingFor.COMPUTE, ", ".join(names))
