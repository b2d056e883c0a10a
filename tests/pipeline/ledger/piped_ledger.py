"""The Redis ledger for load tests: calls that travel together, and copies that arrive late.

*Consumes* ledger calls. *Produces* the same answers as ``RedisLedger``. *Waits for* the server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import redis.asyncio

from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.redis.scripts import SCRIPTS
from protocol.errors import HeadraceError, LedgerError
from protocol.ids import Incarnation

_READING = {"totals", "audit", "queues"}
_KEYED = ("write_chunk", "write_score")
_KEPT = 100
_KEPT_SHARE = 0.02
"""Of the calls that travel together."""


class PipedLedger(RedisLedger):
    """The Redis ledger whose calls can travel together, and may arrive twice."""

    def __init__(self, client: redis.asyncio.Redis, run: str, now: Callable[[], float], dice: random.Random) -> None:
        super().__init__(client, run, now=now)
        self._dice = dice
        self._are_together = False
        self._old: list[tuple[str, Incarnation | None, dict[str, object]]] = []
        self.num_copies = 0

    async def together(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Make keyed calls, which do not wait for one another, in this order; return answers, or
        the kind of error instead."""
        # a server that needed the script first would answer that call after the others
        for name in _KEYED:
            await self._client.script_load(SCRIPTS.script(name).text)
        self._are_together = True
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(settled(call)) for call in calls]
        self._are_together = False
        return [task.result() for task in asked]

    async def copy_one(self) -> None:
        """Deliver an answered request again; the next comparison shows its changes."""
        if self._old:
            name, who, arguments = self._dice.choice(self._old)
            # fenced by now, or overtaken
            with suppress(LedgerError):
                await super()._call(name, who, **arguments)
            self.num_copies += 1

    async def _call(self, name: str, who: Incarnation | None, **arguments: object) -> Any:
        answer = await super()._call(name, who, **arguments)
        if self._is_kept(name, answer):
            self._old = [*self._old[-_KEPT:], (name, who, arguments)]
        return answer

    def _is_kept(self, name: str, answer: Any) -> bool:
        if self._are_together:
            return self._dice.random() < _KEPT_SHARE and answer not in (b"unknown", [b"fenced", 0])
        # a copy of that one moves the lease's end again
        return name not in _READING | {"renew"}


async def settled(call: Awaitable[Any]) -> Any:
    """Return an answer, or the kind of error it ended with."""
    try:
        return await call
    except HeadraceError as error:
        return type(error)
