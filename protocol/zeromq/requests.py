"""Requests and answers: DEALER and ROUTER, for weights between hosts.

An answer carries its request's sequence number. So a late answer, to a request that was given up,
is never taken for the answer to a later one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
import zmq

from protocol.channel import LinkStats, ReceivedRequest
from protocol.codec import decode, encode, read_claims
from protocol.complaints import Complaints
from protocol.errors import DeadlineExceeded, WireError
from protocol.inbound import MAX_NAME_CHARS, Inbound
from protocol.limits import check_size
from protocol.messages import Message
from protocol.zeromq.door import Door
from protocol.zeromq.sockets import POLLOUT, AsyncSocket
from protocol.zeromq.watch import HandshakeWatch

_LOOK_S = 0.25
"""Between two looks at the connection while an answer is awaited."""

_log = structlog.get_logger("headrace.wire")


class ZmqRequester:
    """Sends requests to one responder. Made by ``ZmqTransport.requester``."""

    def __init__(
        self,
        socket: AsyncSocket,
        endpoint: str,
        sender: str,
        max_message_bytes: int,
        watch: HandshakeWatch | None = None,
    ) -> None:
        self._socket = socket
        self._watch = watch
        self.endpoint = endpoint
        self._sender = sender
        self._max_bytes = max_message_bytes
        self._sequence = 0
        self._turn = asyncio.Lock()

    async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
        """As ``Requester.request``. Requests take turns."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                return await self._ask(message, deadline - loop.time(), unreached_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self.endpoint} to a {type(message).__name__} within {timeout_s:g} s; is its worker alive?"
            ) from error

    async def _ask(self, message: Message, timeout_s: float, unreached_s: float | None) -> Message:
        self._sequence += 1
        frames = encode(message, sender=self._sender, sequence=self._sequence, sent_s=time.time())
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = self._next_look_s(deadline, unreached_s)
            if await self._socket.ready(POLLOUT, timeout_s=left_s) and self._socket.put(frames):
                break
        while True:
            left_s = self._next_look_s(deadline, unreached_s)
            if (received := await self._socket.take(timeout_s=left_s)) is None:
                continue
            try:
                decoded, envelope = decode(received.frames, max_bytes=self._max_bytes)
            except WireError:
                if read_claims(received.frames).sequence in (self._sequence, -1):
                    raise
                # an unreadable answer to a request that was given up
                continue
            if envelope.sequence == self._sequence:
                return decoded

    def _next_look_s(self, deadline: float, unreached_s: float | None) -> float:
        """Return how long to wait before the next look at the connection. Raises TimeoutError at
        the deadline, DeadlineExceeded for a responder that is unreachable for too long."""
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        if unreached_s is None:
            return left_s
        down_s = self.unreached_s()
        if down_s > unreached_s:
            raise DeadlineExceeded(f"{self.endpoint} has been unreachable for {down_s:.1f} s; is its worker alive?")
        return min(left_s, _LOOK_S)

    def unreached_s(self) -> float:
        """As ``Requester.unreached_s``. Always 0 on one host, where the socket file is enough."""
        return 0.0 if self._watch is None else self._watch.down_s()

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._socket.close()
        if self._watch is not None:
            self._watch.close()


class ZmqResponder:
    """Answers requesters. Made by ``ZmqTransport.responder``."""

    def __init__(
        self, socket: AsyncSocket, *, endpoint: str, sender: str, max_message_bytes: int, door: Door | None = None
    ) -> None:
        self._socket = socket
        self._door = door
        self._check = door.check if door else None
        self._complaints = Complaints()
        self.endpoint = endpoint
        self._sender = sender
        self._max_bytes = max_message_bytes
        self._inbound = Inbound(endpoint, max_bytes=max_message_bytes)

    async def next_request(self, *, timeout_s: float) -> ReceivedRequest | None:
        """As ``Responder.next_request``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (received := await self._socket.take(timeout_s=deadline - loop.time())) is not None:
            route, *frames = received.frames
            opened = self._inbound.open(frames, address=received.address, check=self._check)
            if opened is not None:
                message, envelope = opened
                return ReceivedRequest(message, envelope.sender, envelope.sequence, bytes(route))
        return None

    def reply(self, request: ReceivedRequest, answer: Message) -> None:
        """As ``Responder.reply``."""
        frames = encode(answer, sender=self._sender, sequence=request.sequence, sent_s=time.time())
        check_size(sum(map(len, frames)), self._max_bytes)
        try:
            sent = self._socket.put([request.route, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            sent = False
        peer = request.sender[:MAX_NAME_CHARS]
        if not sent and (num_silent := self._complaints.due(peer, "dropped")) is not None:
            _log.warning("answer dropped, its requester is gone or reads nothing", peer=peer, num_not_logged=num_silent)

    async def serve_one(self, handler: Callable[[Message], Awaitable[Message]], *, timeout_s: float) -> bool:
        """As ``Responder.serve_one``. Raises the handler's error; its requester gets no answer."""
        request = await self.next_request(timeout_s=timeout_s)
        if request is None:
            return False
        self.reply(request, await handler(request.message))
        return True

    def stats(self) -> list[LinkStats]:
        """Return counters by requester. Refused connections count as one more requester."""
        return self._inbound.stats() + (self._door.stats() if self._door else [])

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._socket.close()
