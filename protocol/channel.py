"""The contract of mailboxes and links between actors, on one host and across hosts.

A *mailbox* belongs to the worker that reads it. A *link* goes from one sender to one mailbox and
counts its messages. ``protocol.zeromq`` has both.

A link is fast and may lose any message when a process dies. The ledger holds all that must last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from protocol.codec import Encoded
from protocol.messages import Message


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters of one link, as its owner sees them. They only grow."""

    peer: str
    """The other side: a worker name, or an endpoint before the peer's first message."""
    num_messages: int = 0
    """Sent (at a sender) or received and decoded (at a mailbox)."""
    num_bytes: int = 0
    num_refused: int = 0
    """At a mailbox: unreadable messages. At a sender: deliveries given up at the deadline."""
    num_gaps: int = 0
    """At a mailbox: sequence numbers that never arrived. Always 0 at a sender."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message out of a mailbox, with its sender."""

    message: Message
    sender: str
    sequence: int
    sent_s: float
    """Sender's wall-clock time in seconds since 1970."""
    trace: str = ""
    """Context of the span that made the message; empty without one. Unverified."""


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request out of a responder, to be answered once."""

    message: Message
    sender: str
    sequence: int
    route: bytes
    """The way back, for the responder alone."""


class Sender(Protocol):
    """The sending end of one link."""

    @property
    def endpoint(self) -> str:
        """Address of the mailbox."""
        ...

    async def send(self, message: Message | Encoded, *, timeout_s: float) -> bool:
        """Pass the message to the link; wait at most ``timeout_s`` for room: the back-pressure.

        Returns False when there was no room in time: the mailbox is full or gone. Raises
        ChannelClosed after ``close``."""
        ...

    def stats(self) -> LinkStats:
        """Return this link's counters."""
        ...

    def unreached_s(self) -> float:
        """Return for how long the mailbox has been unreachable, in seconds; 0 while reachable."""
        ...

    def close(self) -> None:
        """Close at once, without lingering. Repeated calls do nothing."""


class Mailbox(Protocol):
    """The receiving end: one per worker."""

    @property
    def endpoint(self) -> str:
        """Address for senders; a mailbox bound to port 0 reports its real port."""
        ...

    async def receive(self, *, timeout_s: float) -> Delivery | None:
        """Return the next readable message, or None when none came within ``timeout_s``.

        An unreadable message is counted in ``stats`` under the peer's name, logged and dropped.
        Cancelling this call loses no message. Raises ChannelClosed after ``close``."""
        ...

    def stats(self) -> list[LinkStats]:
        """Return counters by sender."""
        ...

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""


class Requester(Protocol):
    """Sends requests to one responder, and waits for answers. Weights between hosts use it."""

    async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
        """Return the answer. Raises DeadlineExceeded, ChannelClosed, or a WireError.

        Several requests may be under way at once, and are answered in any order.
        ``unreached_s``: DeadlineExceeded, too, once the responder has been unreachable so long."""
        ...

    def unreached_s(self) -> float:
        """Return for how long the responder has been unreachable, in seconds; 0 while reachable."""
        ...

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""


class Responder(Protocol):
    """Answers requesters."""

    @property
    def endpoint(self) -> str:
        """Address for requesters."""
        ...

    async def next_request(self, *, timeout_s: float) -> ReceivedRequest | None:
        """Return the next readable request; None when none came in time. An unreadable request is
        counted and dropped. Raises ChannelClosed."""
        ...

    def reply(self, request: ReceivedRequest, answer: Message) -> None:
        """Answer a request, now or later, in any order; an answer without a reader is dropped."""
        ...

    async def serve_one(self, handler: Callable[[Message], Awaitable[Message]], *, timeout_s: float) -> bool:
        """Answer the next request with ``handler``; False when none came in time. An unreadable
        request is counted and dropped."""
        ...

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
