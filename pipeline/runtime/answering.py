"""Answers requests for parts: of weights, at the learner and at relays, and of a run's files, until the task is
cancelled.

*Consumes* requests. *Produces* answers, at once if the bytes have arrived. A request that has to wait gets
its own task, so that it does not delay others. *Waits for* requests."""

from __future__ import annotations

import asyncio
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from pipeline.runtime.clock import Clock
from protocol.channel import ReceivedRequest, Responder
from protocol.errors import ChannelClosed, UnknownMessage
from protocol.log_limiter import LogLimiter
from protocol.messages import Message

_TURN_S = 0.5
_MAX_WAITING = 128
"""Requests that may wait at once; beyond that, each further one is answered in turn."""


class Answers(Protocol):
    def answer_now(self, request: Message) -> Message | None:
        """Return the answer; None when it takes time. Raises UnknownMessage."""
        ...

    async def answer_later(self, request: Message) -> Message: ...


async def answer_requests(responder: Responder, answers: Answers, clock: Clock, log: FilteringBoundLogger) -> None:
    """Answer requests until the channel is closed. Raises ChannelClosed."""
    log_limiter = LogLimiter(clock.monotonic)
    num_waiting = 0

    async def answer_later(request: ReceivedRequest) -> None:
        nonlocal num_waiting
        num_waiting += 1
        try:
            responder.reply(request, await answers.answer_later(request.message))
        except ChannelClosed:
            # the worker is ending; its requesters will ask another source
            return
        finally:
            num_waiting -= 1

    async with asyncio.TaskGroup() as tasks:
        while True:
            request = await responder.next_request(timeout_s=_TURN_S)
            if request is None:
                continue
            try:
                answer = answers.answer_now(request.message)
            except UnknownMessage as error:
                # a peer's mistake must not end this worker
                num_silent = log_limiter.due("", "request")
                if num_silent is not None:
                    log.warning("request_refused", reason=str(error), num_not_logged=num_silent)
                continue
            if answer is not None:
                responder.reply(request, answer)
            elif num_waiting < _MAX_WAITING:
                tasks.create_task(answer_later(request))
            else:
                await answer_later(request)
