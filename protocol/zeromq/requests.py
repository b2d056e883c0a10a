"""Requests and answers: DEALER and ROUTER, for weights between hosts.

An answer carries its request's sequence number. So a late answer, to a request that was given up,
is never taken for the answer to a later one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog
import zmq

from protocol.channel import LinkStats
from protocol.codec import decode, encode, read_claims
from protocol.complaints import Complaints
from protocol.errors import DeadlineExceeded, WireError
from protocol.inbound import MAX_NAME_CHARS, Inbound
from protocol.limits import check_size
from protocol.messages import Message
from protocol.zeromq.door import Door
from protocol.zeromq.sockets import POLLOUT, AsyncSocket
from protocol.zeromq.watch import HandshakeWatch

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

    async def request(self, message: Message, *, timeout_s: float) -> Message:
        """As ``Requester.request``. Requests take turns."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                return await self._ask(message, deadline - loop.time())
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self.endpoint} to a {type(message).__name__} within {timeout_s:g} s; is its worker alive?"
            ) from error

    async def _ask(self, message: Message, timeout_s: float) -> Message:
        self._sequence += 1
        frames = encode(message, sender=self._sender, sequence=self._sequence, sent_s=time.time())
        while True:
            if not await self._socket.ready(POLLOUT, timeout_s=timeout_s):
                raise TimeoutError
            if self._socket.put(frames):
                break
        while (received := await self._socket.take(timeout_s=timeout_s)) is not None:
            try:
                decoded, envelope = decode(received.frames, max_bytes=self._max_bytes)
            except WireError:
                if read_claims(received.frames).sequence in (self._sequence, -1):
                    raise
                # an unreadable answer to a request that was given up
                continue
            if envelope.sequence == self._sequence:
                return decoded
        raise TimeoutError

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

    async def serve_one(self, handler: Callable[[Message], Awaitable[Message]], *, timeout_s: float) -> bool:
        """As ``Responder.serve_one``. Raises the handler's error; its requester gets no answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (received := await self._socket.take(timeout_s=deadline - loop.time())) is not None:
            route, *frames = received.frames
            opened = self._inbound.open(frames, address=received.address, check=self._check)
            if opened is None:
                continue
            message, envelope = opened
            answer = encode(await handler(message), sender=self._sender, sequence=envelope.sequence, sent_s=time.time())
            check_size(sum(map(len, answer)), self._max_bytes)
            try:
                sent = self._socket.put([route, *answer])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                sent = False
            if (
                not sent
                and (num_silent := self._complaints.due(envelope.sender[:MAX_NAME_CHARS], "dropped")) is not None
            ):
                _log.warning(
                    "answer dropped, its requester is gone or reads nothing",
                    peer=envelope.sender[:MAX_NAME_CHARS],
                    num_not_logged=num_silent,
                )
            return True
        return False

    def stats(self) -> list[LinkStats]:
        """Return counters by requester. Refused connections count as one more requester."""
        return self._inbound.stats() + (self._door.stats() if self._door else [])

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._socket.close()
