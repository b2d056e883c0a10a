"""The OpenAI-compatible endpoint of an environment's process, on loopback.

Each agent has a key of its own, by which its requests are known. A request is answered when the model's turn has ended,
which may take as long as the run does not sample: while it waits, nothing is sent, so clients need long timeouts."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.environments.chat_requests import (
    Body,
    ChatBody,
    ModelRequest,
    RequestRefused,
    TextBody,
    completion,
    events,
    read_request,
)
from pipeline.environments.contract import MAX_TURN_CHARS, ChatMessage

Exchange = Callable[[Sequence[ModelRequest]], Coroutine[Any, Any, list[ChatMessage]]]
MAX_WAITING = 256
"""Most turns that an agent may wait for at once."""
_MODEL = "policy"
_KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none sends a request while it is closed here."""


class Endpoint:
    """One listener for all agents of the process."""

    _of_process: ClassVar[Endpoint | None] = None

    def __init__(self, listening: socket.socket) -> None:
        self.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._agents: dict[str, Exchange] = {}
        self._waiting: Counter[Exchange] = Counter()
        """Turns that an agent waits for."""
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http="h11",
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        # for the life of the process; no error of it may end what serves the environments
        self._serving = asyncio.create_task(_Server(config).serve(sockets=[listening]))  # noqa: TID251

    @classmethod
    def of_process(cls) -> Endpoint:
        """Return the process's endpoint, which is started at the first call."""
        if cls._of_process is None:
            cls._of_process = cls(socket.create_server(("127.0.0.1", 0), backlog=1024))
        return cls._of_process

    def admit(self, exchange: Exchange) -> str:
        """Return the key of a new agent, whose requests ``exchange`` answers."""
        key = secrets.token_urlsafe(24)
        self._agents[key] = exchange
        return key

    def dismiss(self, key: str) -> None:
        self._agents.pop(key, None)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", partial(self._answer, kind=ChatBody), methods=["POST"]),
                Route("/v1/completions", partial(self._answer, kind=TextBody), methods=["POST"]),
            ],
            exception_handlers={RequestRefused: _refused, 404: _unknown},
        )

    def _agent(self, request: Request) -> Exchange:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        found = self._agents.get(key.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            raise RequestRefused(
                "no agent of this run has this key; use the api_key that the agent was called with, while its trajectory "
                "goes on",
                status=401,
                code="invalid_api_key",
            )
        return found

    async def _models(self, request: Request) -> Response:
        self._agent(request)
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        exchange = self._agent(request)
        body, asked = read_request(await _body_of(request), kind)
        if self._waiting[exchange] + len(asked) > MAX_WAITING:
            raise RequestRefused(
                f"{self._waiting[exchange]} turns of this agent wait already, and the model takes one after another; at most "
                f"{MAX_WAITING} may: make fewer requests at once",
                status=429,
                code="too_many_requests",
            )
        self._waiting[exchange] += len(asked)
        try:
            found = await self._exchanged(request, exchange, asked)
        finally:
            self._waiting -= Counter({exchange: len(asked)})
        if found is None:
            # its client is gone, and may ask again
            return Response(status_code=499)
        if body.stream:
            return StreamingResponse(events(body, found), media_type="text/event-stream")
        return JSONResponse(completion(body, found))

    async def _exchanged(
        self, request: Request, exchange: Exchange, asked: Sequence[ModelRequest]
    ) -> list[ChatMessage] | None:
        """Return the model's answers; None if the client is gone before. Raises RequestRefused if the trajectory ends."""
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(exchange(asked))
            gone = tasks.create_task(_disconnected(request))
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            is_gone = answering.cancel()
            gone.cancel()
        if is_gone:
            return None
        if answering.cancelled():
            raise RequestRefused("the trajectory has ended, so the model says nothing more", status=410, code="ended")
        return answering.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body_of(request: Request) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_TURN_CHARS:
            raise RequestRefused(f"the request has over {MAX_TURN_CHARS} bytes; shorten its messages", status=413)
    return bytes(data)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
    return JSONResponse({"error": told}, status_code=error.status)


async def _unknown(request: Request, _: Exception) -> Response:
    told = f"{request.url.path} is not known; expected /v1/chat/completions, /v1/completions or /v1/models"
    return await _refused(request, RequestRefused(told, status=404, code="unknown_url"))


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
