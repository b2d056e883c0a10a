"""A receiver's counters of its peers: messages received, never arrived, and refused.

An unreadable message is counted under the peer's name, logged (``protocol.log_limiter``) and dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from protocol.arrays import Buffer
from protocol.channel import Delivery, LinkStats
from protocol.codec import Envelope, decode, read_claims
from protocol.errors import WireError
from protocol.log_limiter import LogLimiter
from protocol.messages import Message

MAX_PEERS = 1024
"""Peers counted by name. Later ones are counted together, so that invented names don't fill memory."""
MAX_NAME_CHARS = 80
MAX_GAPS = 2**53
"""The count stops here, since a peer may claim any sequence number, and counters travel as JSON."""
OTHERS = "(others)"
UNNAMED = "(unnamed)"

_log = structlog.get_logger("headrace.wire")


@dataclass(slots=True)
class _Peer:
    num_messages: int = 0
    num_bytes: int = 0
    num_refused: int = 0
    num_gaps: int = 0
    expected: int | None = None
    """Next sequence number; None before the first."""


class Inbound:
    """Decodes and counts frames, for one receiver."""

    def __init__(self, endpoint: str, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._max_bytes = max_bytes
        self._peers: dict[str, _Peer] = {}
        self._log_limiter = LogLimiter(clock)

    def read(
        self,
        frames: Sequence[Buffer],
        *,
        address: Callable[[], str] = lambda: "",
        check: Callable[[str], None] | None = None,
    ) -> Delivery | None:
        """Return the message, or None when it was refused. ``address`` names an unnamed peer; ``check`` is as
        in ``open``."""
        opened = self.open(frames, address=address, check=check)
        if opened is None:
            return None
        message, envelope = opened
        return Delivery(message, envelope.sender, envelope.sequence, envelope.sent_s, envelope.trace)

    def open(
        self, frames: Sequence[Buffer], *, address: Callable[[], str], check: Callable[[str], None] | None = None
    ) -> tuple[Message, Envelope] | None:
        """Return message and envelope, or None when the message was refused.

        ``check`` is called first with the address, and raises WireError for a peer that is not permitted."""
        if check is not None:
            try:
                check(address())
            except WireError as error:
                # by the name in its envelope it might count as a permitted peer
                self.refuse(address() or UNNAMED, error)
                return None
        try:
            message, envelope = decode(frames, max_bytes=self._max_bytes)
        except WireError as error:
            claims = read_claims(frames)
            self.refuse(claims.sender or address() or UNNAMED, error, sequence=claims.sequence)
            return None
        peer = self._peer(envelope.sender)
        peer.num_messages += 1
        peer.num_bytes += sum(map(len, frames))
        _follow(peer, envelope.sequence)
        return message, envelope

    def refuse(self, name: str, error: WireError, *, sequence: int = -1) -> None:
        """Count an unreadable message, and log it unless this peer was logged recently."""
        name = name[:MAX_NAME_CHARS]
        peer = self._peer(name)
        peer.num_refused += 1
        if sequence >= 0:
            _follow(peer, sequence)
        kind = type(error).__name__
        num_silent = self._log_limiter.due(name, kind)
        if num_silent is None:
            return
        _log.warning(
            "message refused",
            peer=name,
            endpoint=self._endpoint,
            kind=kind,
            reason=str(error),
            num_not_logged=num_silent,
        )

    def stats(self) -> list[LinkStats]:
        """Return counters by peer, in order of first appearance."""
        return [
            LinkStats(name, peer.num_messages, peer.num_bytes, peer.num_refused, peer.num_gaps)
            for name, peer in self._peers.items()
        ]

    def _peer(self, name: str) -> _Peer:
        name = name[:MAX_NAME_CHARS]
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                name = OTHERS
            peer = self._peers.setdefault(name, _Peer())
        return peer


def _follow(peer: _Peer, sequence: int) -> None:
    """Count the numbers missing before this one. A smaller number means a restarted sender."""
    if peer.expected is not None and sequence > peer.expected:
        peer.num_gaps = min(peer.num_gaps + sequence - peer.expected, MAX_GAPS)
    peer.expected = sequence + 1
