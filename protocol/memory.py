"""Mailboxes and links within one process, under the contract of ``protocol.channel``.

Messages pass through the codec as on a wire: a received message is a read-only copy, and bad ones
fail alike. For fleets in one process, and for tests that need a link but no network.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from protocol.channel import Delivery, LinkStats
from protocol.codec import Encoded, decode, encode
from protocol.errors import ChannelClosed, ConfigError, DeadlineExceeded
from protocol.inbound import Inbound
from protocol.limits import check_size
from protocol.messages import Message
from protocol.waiting import Waiters

SCHEME = "memory://"
TURNS_PER_YIELD = 32
"""After this many reads of a ready queue, other tasks run."""

Frames = list[bytes]


class _Queue:
    """Frames on their way to one receiver, at most ``limit`` for each sender."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # bounded by ``limit`` for each sender
        self.items: deque[tuple[str, Frames, MemoryRequester | None]] = deque()
        self.held: Counter[str] = Counter()
        self.input = Waiters()
        self.room = Waiters()
        self.closed = False
        self.turns = 0

    def put(self, link: str, frames: Frames, requester: MemoryRequester | None = None) -> None:
        self.items.append((link, frames, requester))
        self.held[link] += 1
        self.input.wake()

    def take(self) -> tuple[str, Frames, MemoryRequester | None]:
        item = self.items.popleft()
        self.held[item[0]] -= 1
        self.room.wake()
        return item

    def close(self) -> None:
        self.closed = True
        self.items.clear()
        self.held.clear()
        self.input.wake()
        self.room.wake()

    async def ready(self, deadline: float) -> bool:
        """Wait until an item can be taken; False at the deadline. Raises ChannelClosed."""
        loop = asyncio.get_running_loop()
        self.turns += 1
        if self.turns % TURNS_PER_YIELD == 0:
            await asyncio.sleep(0)
        while True:
            if self.closed:
                raise ChannelClosed("the mailbox was closed by its owner")
            if self.items:
                return True
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            await self.input.wait(remaining)


class MemoryHub:
    """Stands for the network: mailboxes by name, and the links to them.

    Example: ``hub.sender(hub.mailbox("reward-0").endpoint, sender="generator-0")``.
    """

    def __init__(self, *, high_water_mark: int = 16, max_message_bytes: int = 64 * 1024 * 1024) -> None:
        """``high_water_mark``: messages a link holds. ``max_message_bytes``: limit of a message."""
        self.high_water_mark = high_water_mark
        self.max_message_bytes = max_message_bytes
        self._queues: dict[str, _Queue] = {}
        self._bound = Waiters()

    def mailbox(self, name: str) -> MemoryMailbox:
        """Open a mailbox at ``memory://name``. Raises ConfigError when the name is in use."""
        return MemoryMailbox(*self._bind(name), self.max_message_bytes)

    def sender(self, endpoint: str, *, sender: str) -> MemorySender:
        """Open a link. Its mailbox may open later, close and come back."""
        return MemorySender(self, endpoint, sender)

    def responder(self, name: str, *, sender: str = "") -> MemoryResponder:
        """Open a responder at ``memory://name``. Raises ConfigError when it is in use."""
        return MemoryResponder(*self._bind(name), sender or name, self.max_message_bytes)

    def requester(self, endpoint: str, *, sender: str) -> MemoryRequester:
        """Open a requester."""
        return MemoryRequester(self, endpoint, sender)

    def transport(self, sender: str) -> MemoryTransport:
        """Return one worker's view of this hub, with the methods of a ``ZmqTransport``."""
        return MemoryTransport(self, sender)

    async def wait_for_room(
        self, endpoint: str, link: str, deadline: float, is_closed: Callable[[], bool]
    ) -> _Queue | None:
        """Return the endpoint's queue once it has room for ``link``; None at the deadline.

        Raises ChannelClosed.
        """
        loop = asyncio.get_running_loop()
        while True:
            if is_closed():
                raise ChannelClosed("the link was closed by its owner")
            queue = self._queues.get(endpoint)
            if queue is not None and not queue.closed and queue.held[link] < queue.limit:
                return queue
            remaining = deadline - loop.time()
            if remaining <= 0:
                return None
            waiters = self._bound if queue is None or queue.closed else queue.room
            await waiters.wait(remaining)

    def wake(self) -> None:
        """Wake every task that waits for room."""
        self._bound.wake()
        for queue in self._queues.values():
            queue.room.wake()

    def _bind(self, name: str) -> tuple[str, _Queue]:
        endpoint = SCHEME + name.removeprefix(SCHEME)
        present = self._queues.get(endpoint)
        if present is not None and not present.closed:
            raise ConfigError(f"{endpoint} is in use; close its mailbox first, or use another name")
        queue = self._queues[endpoint] = _Queue(self.high_water_mark)
        self._bound.wake()
        return endpoint, queue


class MemorySender:
    """The sending end of one link. Made by ``MemoryHub.sender``."""

    def __init__(self, hub: MemoryHub, endpoint: str, sender: str) -> None:
        self._hub = hub
        self._endpoint = endpoint
        self._sender = sender
        self._link = f"{sender}/{id(self):x}"
        self._closed = False
        self._sequence = 0
        self._num_bytes = 0
        self._num_refused = 0

    @property
    def endpoint(self) -> str:
        """Where the mailbox listens."""
        return self._endpoint

    async def send(self, message: Message | Encoded, *, timeout_s: float) -> bool:
        """As ``Sender.send``. Raises MessageTooLarge or MalformedMessage for a bad message too."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        queue = await self._hub.wait_for_room(self._endpoint, self._link, deadline, lambda: self._closed)
        if queue is None:
            self._num_refused += 1
            return False
        frames = _copied(message, self._sender, self._sequence)
        num_bytes = sum(map(len, frames))
        check_size(num_bytes, self._hub.max_message_bytes)
        queue.put(self._link, frames)
        self._sequence += 1
        self._num_bytes += num_bytes
        return True

    def unreached_s(self) -> float:
        """Return 0: nothing lies between two ends in one process."""
        return 0.0

    def stats(self) -> LinkStats:
        """Return this link's counters."""
        return LinkStats(self._endpoint, self._sequence, self._num_bytes, self._num_refused)

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._closed = True
        self._hub.wake()


class MemoryMailbox:
    """The receiving end. Made by ``MemoryHub.mailbox``."""

    def __init__(self, endpoint: str, queue: _Queue, max_message_bytes: int) -> None:
        self._endpoint = endpoint
        self._queue = queue
        self._inbound = Inbound(endpoint, max_bytes=max_message_bytes)

    @property
    def endpoint(self) -> str:
        """Where senders connect."""
        return self._endpoint

    def deliver(self, frames: Frames) -> None:
        """Put raw frames into the mailbox, readable or not, as a hostile peer could."""
        self._queue.put("", frames)

    async def receive(self, *, timeout_s: float) -> Delivery | None:
        """As ``Mailbox.receive``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while await self._queue.ready(deadline):
            _, frames, _ = self._queue.take()
            delivery = self._inbound.read(frames)
            if delivery is not None:
                return delivery
        return None

    def stats(self) -> list[LinkStats]:
        """Return counters by sender."""
        return self._inbound.stats()

    def close(self) -> None:
        """Close at once. Unread messages are lost. Repeated calls do nothing."""
        self._queue.close()


class MemoryRequester:
    """Sends requests to one responder. Made by ``MemoryHub.requester``."""

    def __init__(self, hub: MemoryHub, endpoint: str, sender: str) -> None:
        self._hub = hub
        self._endpoint = endpoint
        self._sender = sender
        self._link = f"{sender}/{id(self):x}"
        self._closed = False
        self._sequence = 0
        self._answer: tuple[int, Frames] | None = None
        self._answered = Waiters()
        self._turn = asyncio.Lock()

    async def request(self, message: Message, *, timeout_s: float) -> Message:
        """As ``Requester.request``. Requests take turns."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                return await self._ask(message, deadline)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer from {self._endpoint} to a {type(message).__name__} within {timeout_s:g} s; is its worker alive?"
            ) from error

    async def _ask(self, message: Message, deadline: float) -> Message:
        self._sequence += 1
        self._answer = None
        queue = await self._hub.wait_for_room(self._endpoint, self._link, deadline, lambda: self._closed)
        if queue is None:
            raise TimeoutError
        queue.put(self._link, _copied(message, self._sender, self._sequence), self)
        loop = asyncio.get_running_loop()
        while self._answer is None:
            if self._closed:
                raise ChannelClosed("the requester was closed by its owner")
            await self._answered.wait(max(deadline - loop.time(), 0.0))
            if self._answer is None and loop.time() >= deadline:
                raise TimeoutError
        answer, _ = decode(self._answer[1], max_bytes=self._hub.max_message_bytes)
        return answer

    def answer(self, sequence: int, frames: Frames) -> None:
        """Store an answer; the answer to a request that was given up is dropped."""
        if sequence == self._sequence and not self._closed:
            self._answer = (sequence, frames)
            self._answered.wake()

    def unreached_s(self) -> float:
        """Return 0: nothing lies between two ends in one process."""
        return 0.0

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._closed = True
        self._answered.wake()
        self._hub.wake()


class MemoryResponder:
    """Answers requesters. Made by ``MemoryHub.responder``."""

    def __init__(self, endpoint: str, queue: _Queue, sender: str, max_message_bytes: int) -> None:
        self._endpoint = endpoint
        self._queue = queue
        self._sender = sender
        self._inbound = Inbound(endpoint, max_bytes=max_message_bytes)

    @property
    def endpoint(self) -> str:
        """Where requesters connect."""
        return self._endpoint

    async def serve_one(self, handler: Callable[[Message], Awaitable[Message]], *, timeout_s: float) -> bool:
        """As ``Responder.serve_one``. Raises the handler's error; its requester gets no answer."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while await self._queue.ready(deadline):
            _, frames, requester = self._queue.take()
            opened = self._inbound.open(frames, address=lambda: "")
            if opened is None:
                continue
            message, envelope = opened
            answer = _copied(await handler(message), self._sender, envelope.sequence)
            if requester is not None:
                requester.answer(envelope.sequence, answer)
            return True
        return False

    def stats(self) -> list[LinkStats]:
        """Return counters by requester."""
        return self._inbound.stats()

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
        self._queue.close()


class MemoryTransport:
    """One worker's view of a hub, with the methods of a ``ZmqTransport``. Keys are ignored."""

    def __init__(self, hub: MemoryHub, sender: str) -> None:
        self._hub = hub
        self._sender = sender
        self._open: list[MemoryMailbox | MemorySender | MemoryResponder | MemoryRequester] = []

    @property
    def public_key(self) -> str:
        """Always empty: nothing leaves the process."""
        return ""

    def mailbox(self, endpoint: str) -> MemoryMailbox:
        """Open a mailbox; any text is a name."""
        mailbox = self._hub.mailbox(endpoint)
        self._open.append(mailbox)
        return mailbox

    def sender(self, endpoint: str, *, server_key: str = "") -> MemorySender:
        """Open a link."""
        del server_key
        sender = self._hub.sender(endpoint, sender=self._sender)
        self._open.append(sender)
        return sender

    def responder(self, endpoint: str) -> MemoryResponder:
        """Open a responder; any text is a name."""
        responder = self._hub.responder(endpoint, sender=self._sender)
        self._open.append(responder)
        return responder

    def requester(self, endpoint: str, *, server_key: str = "") -> MemoryRequester:
        """Open a requester."""
        del server_key
        requester = self._hub.requester(endpoint, sender=self._sender)
        self._open.append(requester)
        return requester

    def close(self) -> None:
        """Close everything that this worker opened. Repeated calls do nothing."""
        for end in self._open:
            end.close()
        self._open.clear()


def _copied(message: Message | Encoded, sender: str, sequence: int) -> Frames:
    """Return the frames of ``message``, as copies."""
    return encode(message, sender=sender, sequence=sequence, sent_s=time.time())
