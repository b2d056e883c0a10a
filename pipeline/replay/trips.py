"""Script calls that are made at the same time share a trip to the server.

*Consumes* calls of one process. *Produces* each call's own answer or error. *Waits for* the trip before: what is asked in one
turn of the event loop, or while a trip is under way, goes together in the next, in the order of asking, as a log's writers
share one flush. Nobody waits for company any longer than that. The first in the queue makes the trip for all; when it is
back, or is cancelled, whoever is first then makes the next.

Sharing changes nothing but the cost: a trip is no transaction, every script in it is atomic by itself, and one that fails fails
alone. What the ledger promises of a repeated call holds for a repeated trip, since it is those calls again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import redis.asyncio
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError

from pipeline.replay.faults import NOT_NOW

MAX_CALLS: Final = 64
"""Of one trip: bounds what waits in the buffers of both sides."""


@dataclass(slots=True, eq=False)
class _Call:
    script: AsyncScript
    key: str
    args: Sequence[Any]
    woken: asyncio.Future[None]
    """When it is answered, or leads."""
    answer: Any = None
    is_answered: bool = False


class Trips:
    """Runs scripts, one trip at a time."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: list[_Call] = []
        self._leader: _Call | None = None
        """The first of those that wait: it is on its way, or about to leave."""

    async def ask(self, script: AsyncScript, key: str, args: Sequence[Any]) -> Any:
        """Run a script on the key that routes it; raise what the client raises for it.

        A caller that is cancelled may have been heard by the server or not. Those whose call shared its trip ask again.
        """
        call = _Call(script, key, args, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        try:
            if self._leader is None:
                self._leader = call
                await asyncio.sleep(0)  # whoever asks in this turn of the loop comes along
            else:
                await call.woken
            if self._leader is call:
                await self._travel(self._waiting[:MAX_CALLS])
        finally:
            if not call.is_answered:
                self._waiting.remove(call)
            if self._leader is call:
                self._leader = self._waiting[0] if self._waiting else None
                if self._leader is not None:
                    _wake(self._leader)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    async def _travel(self, calls: list[_Call]) -> None:
        answers = await (self._alone(calls[0]) if len(calls) == 1 else self._together(calls))
        for call, answer in zip(calls, answers, strict=True):
            call.answer, call.is_answered = answer, True
            _wake(call)
        self._waiting = [call for call in self._waiting if not call.is_answered]

    async def _alone(self, call: _Call) -> list[Any]:
        try:
            return [await call.script(keys=[call.key], args=call.args)]
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            return [error]

    async def _together(self, calls: list[_Call]) -> list[Any]:
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for call in calls:
                    cast("Any", pipe).execute_command("EVALSHA", call.script.sha, 1, call.key, *call.args)
                answers = await pipe.execute(raise_on_error=False)
        except Exception as error:  # noqa: BLE001 - raised where the calls were made
            return [error] * len(calls)
        for place, answer in enumerate(answers):
            if isinstance(answer, (NoScriptError, *NOT_NOW)):  # the script's text must go along, or it is too early
                [answers[place]] = await self._alone(calls[place])
        return answers


def _wake(call: _Call) -> None:
    if not call.woken.done():  # else its caller was cancelled
        call.woken.set_result(None)
