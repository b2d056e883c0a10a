"""Requests and answers over DEALER and ROUTER, for weights between hosts.

An answer carries its request's sequence number, so several requests may be in flight at once, and a late
answer to an abandoned request is never taken for another's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog
import zmq

from protocol.arrays import Buffer
from protocol.channel import LinkStats, ReceivedRequest
from protocol.codec import decode, encode, read_claims
from protocol.errors import DeadlineExceeded, WireError
from protocol.inbound import MAX_NAME_CHARS, Inbound
from protocol.limits import check_size
from protocol.log_limiter import LogLimiter
from protocol.messages import Message
from protocol.waiting import Waiters
from protocol.zeromq.monitor import HandshakeWatch, RefusedConnections
from protocol.zeromq.sockets import POLLOUT, AsyncSocket

_LOOK_S = 0.25
"""Interval at which the connection is checked while an answer is awaited."""

_log = structlog.get_logger("headrace.wire")


class _Asked:
    def __init__(self) -> None:
        self.answer: Message | WireError | None = None
        self.waiters = Waiters()
        """The request itself, while another one reads."""


class ZmqRequester:
    """Sends requests to one responder. Created by ``ZmqTransport.requester``."""

    def __init__(
        self,
        socket: AsyncSocket,
        endpoint: str,
        sender: str,
        max_message_bytes: int,
        watch: HandshakeWatch | None = None,
        *,
        max_under_way: int,
    ) -> None:
        self._socket = socket
        self._watch = watch
        self.endpoint = endpoint
        self._sender = sender
        self._max_bytes = max_message_bytes
        self._sequence = 0
        self._under_way: dict[int, _Asked] = {}
        # the responder would have no room for more answers, and drop them
        self._room = asyncio.Semaphore(max_under_way)
        self._is_reading = False
        self._looked_s = -_LOOK_S
        self._down_s = 0.0

    async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._room:
                return await self._ask(message, deadline, unreached_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self.endpoint} to a {type(message).__name__} within {timeout_s:g} s; is its worker alive?"
            ) from error

    async def _ask(self, message: Message, deadline: float, unreached_s: float | None) -> Message:
        self._sequence += 1
        sequence = self._sequence
        asked = self._under_way[sequence] = _Asked()
        try:
            frames = encode(message, sender=self._sender, sequence=sequence, sent_s=time.time())
            await self._send(frames, deadline, unreached_s)
            return await self._answer(asked, sequence, deadline, unreached_s)
        finally:
            del self._under_way[sequence]
            # this request may have been chosen to read just as it was abandoned
            if not self._is_reading:
                self._let_another_read()

    async def _send(self, frames: list[Buffer], deadline: float, unreached_s: float | None) -> None:
        while True:
            left_s = self._next_look_s(deadline, unreached_s)
            if await self._socket.ready(POLLOUT, timeout_s=left_s) and self._socket.put(frames):
                return

    async def _answer(self, asked: _Asked, sequence: int, deadline: float, unreached_s: float | None) -> Message:
        """Return a request's answer. One request at a time reads, for all that are in flight."""
        while asked.answer is None:
            if self._is_reading:
                await asked.waiters.wait(self._next_look_s(deadline, unreached_s))
                continue
            self._is_reading = True
            try:
                while asked.answer is None:
                    received = await self._socket.take(timeout_s=self._next_look_s(deadline, unreached_s))
                    if received is not None:
                        self._note(received.frames, sequence)
            finally:
                self._is_reading = False
                self._let_another_read()
        if isinstance(asked.answer, WireError):
            raise asked.answer
        return asked.answer

    def _let_another_read(self) -> None:
        for other in self._under_way.values():
            # a request that is still sending will read by itself
            if other.answer is None and other.waiters:
                other.waiters.wake()
                return

    def _note(self, frames: Sequence[Buffer], reader: int) -> None:
        """Assign an answer to its request. An unreadable answer without a number goes to the reader; one to
        an abandoned request is dropped."""
        try:
            answer, envelope = decode(frames, max_bytes=self._max_bytes)
            sequence = envelope.sequence
        except WireError as error:
            answer, sequence = error, read_claims(frames).sequence
            if sequence == -1:
                sequence = reader
        asked = self._under_way.get(sequence)
        if asked is not None:
            asked.answer = answer
            asked.waiters.wake()

    def _next_look_s(self, deadline: float, unreached_s: float | None) -> float:
        """Return how long to wait before checking the connection again. Raises TimeoutError at the deadline,
        DeadlineExceeded when the responder has been unreachable for too long."""
        now = time.monotonic()
        left_s = deadline - now
        if left_s <= 0.0:
            raise TimeoutError
        if unreached_s is None:
            return left_s
        if now - self._looked_s >= _LOOK_S:
            self._looked_s, self._down_s = now, self.unreached_s()
        if self._down_s > unreached_s:
            raise DeadlineExceeded(
                f"{self.endpoint} has been unreachable for {self._down_s:.1f} s; is its worker alive?"
            )
        return min(left_s, _LOOK_S)

    def unreached_s(self) -> float:
        """Always 0 on one host, where the socket file is enough."""
        return 0.0 if self._watch is None else self._watch.down_s()

    def close(self) -> None:
        self._socket.close()
        if self._watch is not None:
            self._watch.close()


class ZmqResponder:
    """Answers requesters. Created by ``ZmqTransport.responder``."""

    def __init__(
        self,
        socket: AsyncSocket,
        *,
        endpoint: str,
        sender: str,
        max_message_bytes: int,
        refused: RefusedConnections | None = None,
    ) -> None:
        self._socket = socket
        self._refused = refused
        self._check = refused.check if refused else None
        self._log_limiter = LogLimiter()
        self.endpoint = endpoint
        self._sender = sender
        self._max_bytes = max_message_bytes
        self._inbound = Inbound(endpoint, max_bytes=max_message_bytes)

    async def next_request(self, *, timeout_s: float) -> ReceivedRequest | None:
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
        frames = encode(answer, sender=self._sender, sequence=request.sequence, sent_s=time.time())
        check_size(sum(map(len, frames)), self._max_bytes)
        try:
            sent = self._socket.put([request.route, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            sent = False
        peer = request.sender[:MAX_NAME_CHARS]
        if not sent and (num_silent := self._log_limiter.due(peer, "dropped")) is not None:
            _log.warning("answer dropped: its requester is gone or does not read", peer=peer, num_not_logged=num_silent)

    def stats(self) -> list[LinkStats]:
        """Return counters by requester. Refused connections count as one more requester."""
        return self._inbound.stats() + (self._refused.stats() if self._refused else [])

    def close(self) -> None:
        self._socket.close()
