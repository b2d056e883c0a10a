"""Mailboxes (PULL) and the links to them (PUSH).

A link holds at most a high-water mark of messages at each end, besides the system's socket buffers.
When all of that is full, ``send`` waits: the back-pressure."""

from __future__ import annotations

import asyncio
import time

from protocol.channel import Delivery, LinkStats
from protocol.codec import Encoded, encode
from protocol.inbound import Inbound
from protocol.limits import check_size
from protocol.messages import Message
from protocol.zeromq.door import Door
from protocol.zeromq.sockets import POLLOUT, AsyncSocket
from protocol.zeromq.watch import HandshakeWatch


class ZmqSender:
    """The sending end of one link. Made by ``ZmqTransport.sender``."""

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
        self._num_bytes = 0
        self._num_refused = 0

    async def send(self, message: Message | Encoded, *, timeout_s: float) -> bool:
        """As ``Sender.send``. Raises MessageTooLarge or MalformedMessage for a bad message too."""
        deadline = time.monotonic() + timeout_s
        while await self._socket.ready(POLLOUT, timeout_s=deadline - time.monotonic()):
            frames = encode(message, sender=self._sender, sequence=self._sequence, sent_s=time.time())
            num_bytes = sum(map(len, frames))
            check_size(num_bytes, self._max_bytes)
            if self._socket.put(frames):
                self._sequence += 1
                self._num_bytes += num_bytes
                return True
        self._num_refused += 1
        return False

    def stats(self) -> LinkStats:
        """Return this link's counters."""
        return LinkStats(self.endpoint, self._sequence, self._num_bytes, self._num_refused)

    def unreached_s(self) -> float:
        """As ``Sender.unreached_s``. Always 0 on one host, where the socket file is enough."""
        return 0.0 if self._watch is None else self._watch.down_s()

    def close(self) -> None:
        """Close at once, without lingering. Repeated calls do nothing."""
        self._socket.close()
        if self._watch is not None:
            self._watch.close()


class ZmqMailbox:
    """The receiving end. Made by ``ZmqTransport.mailbox``."""

    def __init__(self, socket: AsyncSocket, *, endpoint: str, max_message_bytes: int, door: Door | None = None) -> None:
        self._socket = socket
        self._door = door
        self._check = door.check if door else None
        self.endpoint = endpoint
        self._inbound = Inbound(endpoint, max_bytes=max_message_bytes)

    async def receive(self, *, timeout_s: float) -> Delivery | None:
        """As ``Mailbox.receive``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (received := await self._socket.take(timeout_s=deadline - loop.time())) is not None:
            delivery = self._inbound.read(received.frames, address=received.address, check=self._check)
            if delivery is not None:
                return delivery
        return None

    def stats(self) -> list[LinkStats]:
        """Return counters by sender. Refused connections count as one more sender."""
        return self._inbound.stats() + (self._door.stats() if self._door else [])

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._socket.close()
