"""Script calls that are made at the same time share a trip to the server.

*Consumes* calls of one process. *Produces* each call's own answer or error. *Waits for* the trip before: what is asked while
one is under way goes together in the next, in the order of asking, as a log's writers share one flush. Nobody waits for
company: a call that finds no trip under way leaves at once, alone.

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
    answer: Any = None
    is_answered: bool = False


class Trips:
    """Runs scripts, one trip at a time."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: list[_Call] = []
        self._turn = asyncio.Lock()

    async def ask(self, script: AsyncScript, key: str, args: Sequence[Any]) -> Any:
        """Run a script on the key that routes it; raise what the client raises for it.

        A caller that is cancelled may have been heard by the server or not. Those whose call shared its trip ask again.
        """
        call = _Call(script, key, args)
        self._waiting.append(call)
        try:
            async with self._turn:
                while not call.is_answered:
                    await self._travel(self._waiting[:MAX_CALLS])
        finally:
            if not call.is_answered:
                self._waiting.remove(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    async def _travel(self, calls: list[_Call]) -> None:
        answers = await (self._alone(calls[0]) if len(calls) == 1 else self._together(calls))
        for call, answer in zip(calls, answers, strict=True):
            call.answer, call.is_answered = answer, True
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
