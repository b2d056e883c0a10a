"""The Redis ledger for load tests: calls that travel together, and copies that arrive late.

*Consumes* ledger calls. *Produces* the same answers as ``RedisReplay``, whose scripts and codecs it uses, hundreds to a round
trip. *Waits for* the server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.replay.faults import ledger_faults
from pipeline.replay.redis import RedisReplay
from protocol.errors import HeadraceError, LedgerError
from protocol.ids import Incarnation

_READING = {"totals", "audit", "queues"}
_KEPT = 100
_KEPT_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class _Request:
    name: str
    who: Incarnation | None
    args: tuple[object, ...]
    answer: asyncio.Future[Any]


class PipedLedger(RedisReplay):
    """The Redis ledger whose calls can travel together, and may arrive twice."""

    def __init__(self, client: Any, run: str, now: Callable[[], float], dice: random.Random) -> None:
        super().__init__(client, run, now=now)
        self._dice = dice
        self._queue: list[_Request] | None = None
        self._old: list[tuple[str, Incarnation | None, tuple[object, ...]]] = []
        self.num_copies = 0

    async def together(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Make keyed calls, which do not wait for one another, in this order; return answers, or the kind of error instead."""
        self._queue = []
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(settled(call)) for call in calls]
            await asyncio.sleep(0)
            queue, self._queue = self._queue, None
            if queue:
                await self._send(queue)
        return [task.result() for task in asked]

    async def copy_one(self) -> None:
        """Deliver a request again that was answered before; what it changes shows in the next comparison."""
        if self._old:
            name, who, args = self._dice.choice(self._old)
            with suppress(LedgerError):  # fenced by now, or overtaken
                await super()._call(name, who, *args)
            self.num_copies += 1

    async def _call(self, name: str, who: Incarnation | None, *args: object) -> Any:
        if self._queue is not None:
            request = _Request(name, who, args, asyncio.get_running_loop().create_future())
            self._queue.append(request)
            with ledger_faults(name):
                return await request.answer
        answer = await super()._call(name, who, *args)
        if name not in _READING | {"renew"}:  # a copy of that one moves the lease's end again
            self._old = [*self._old[-_KEPT:], (name, who, args)]
        return answer

    async def _send(self, queue: list[_Request]) -> None:
        async with self._client.pipeline(transaction=False) as pipe:
            for request in queue:
                script = self._script(request.name)
                await script(keys=[self._counters], args=self._arguments(request.who, request.args), client=pipe)
            answers = await pipe.execute(raise_on_error=False)
        for request, answer in zip(queue, answers, strict=True):
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)
                if self._dice.random() < _KEPT_SHARE and answer not in (b"unknown", [b"fenced", 0]):
                    self._old = [*self._old[-_KEPT:], (request.name, request.who, request.args)]


async def settled(call: Awaitable[Any]) -> Any:
    """Return an answer, or the kind of error it ended with."""
    try:
        return await call
    except HeadraceError as error:
        return type(error)
