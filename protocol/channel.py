"""The contract of mailboxes and links between actors, on one host and across hosts.

A *mailbox* belongs to the worker that reads it. A *link* goes from one sender to one mailbox and counts its
messages. ``protocol.zeromq`` implements both.

A link is fast, but may lose messages when a process dies. Everything that must last is in the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocol.codec import Encoded
from protocol.messages import Message


@dataclass(frozen=True, slots=True)
class LinkStats:
    """Counters of one link, as seen at one end. They only grow."""

    peer: str
    """The other end: a worker name, or an endpoint before the peer's first message."""
    num_messages: int = 0
    """At a sender: sent. At a mailbox: received and decoded."""
    num_bytes: int = 0
    num_refused: int = 0
    """At a mailbox: unreadable messages. At a sender: messages given up at the deadline."""
    num_gaps: int = 0
    """At a mailbox: sequence numbers that never arrived. Always 0 at a sender."""


@dataclass(frozen=True, slots=True)
class Delivery:
    message: Message
    sender: str
    sequence: int
    sent_s: float
    """Sender's wall-clock time, seconds since 1970."""
    trace: str = ""
    """Context of the span that made the message; may be empty. Unverified."""


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request received by a responder, to be answered once."""

    message: Message
    sender: str
    sequence: int
    route: bytes
    """The way back, only for the responder."""


class Sender(Protocol):
    """The sending end of one link."""

    @property
    def endpoint(self) -> str: ...

    async def send(self, message: Message | Encoded, *, timeout_s: float) -> bool:
        """Pass the message to the link, waiting at most ``timeout_s`` for room (the back-pressure).

        Returns False when there was no room in time, since the mailbox is full or gone. Raises ChannelClosed
        after ``close``."""
        ...

    def stats(self) -> LinkStats: ...

    def unreached_s(self) -> float:
        """Return for how many seconds the mailbox has been unreachable; 0 while it is reachable."""
        ...

    def close(self) -> None:
        """Close at once, without lingering. Repeated calls do nothing."""


class Mailbox(Protocol):
    """The receiving end; one per worker."""

    @property
    def endpoint(self) -> str:
        """Address for senders. A mailbox bound to port 0 reports its real port."""
        ...

    async def receive(self, *, timeout_s: float) -> Delivery | None:
        """Return the next readable message, or None if none arrived within ``timeout_s``.

        Unreadable messages are counted in ``stats`` under the peer's name, logged and dropped. Cancelling
        this call loses no message. Raises ChannelClosed after ``close``."""
        ...

    def stats(self) -> list[LinkStats]:
        """Return the counters by sender."""
        ...

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""


class Requester(Protocol):
    """Sends requests to one responder and waits for the answers. Used for weights between hosts."""

    async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
        """Return the answer. Raises DeadlineExceeded, ChannelClosed, or a WireError.

        Several requests may be in flight at once, and are answered in any order. Also raises DeadlineExceeded
        once the responder has been unreachable for ``unreached_s``."""
        ...

    def unreached_s(self) -> float:
        """Return for how many seconds the responder has been unreachable; 0 while it is reachable."""
        ...

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""


class Responder(Protocol):
    @property
    def endpoint(self) -> str: ...

    async def next_request(self, *, timeout_s: float) -> ReceivedRequest | None:
        """Return the next readable request; None if none arrived in time. Unreadable requests are counted and
        dropped. Raises ChannelClosed."""
        ...

    def reply(self, request: ReceivedRequest, answer: Message) -> None:
        """Answer a request, now or later, in any order. An answer that nobody reads is dropped."""
        ...

    def close(self) -> None:
        """Close at once. Repeated calls do nothing."""
