"""Whether a link's peer is reachable: from handshakes and acknowledgements of its socket.

libzmq raises no error for an unreachable peer, such as a name of another machine or a firewall: it
tries for ever. A link that never connects looks like a full mailbox. So does a link with a pulled
cable: its connection stays open for a quarter of an hour. Only the kernel knows of the missing
acknowledgements. A peer's kernel acknowledges all data, probes of a full mailbox, and keep-alives,
even if its process is busy or frozen. ``TCP_USER_TIMEOUT`` would also cut off full mailboxes:
https://www.rfc-editor.org/rfc/rfc5482."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

_CONNECTED = int(zmq.EVENT_CONNECTED)
_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DOWN = int(zmq.EVENT_DISCONNECTED)
_MAX_EVENTS = 1000
"""Events read at once; libzmq drops unread events."""
_CUT_AFTER = 2
"""Transmissions in a row without acknowledgement: one may be under way, or lost by chance."""
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
"""Only Linux has it."""
_HEAD = struct.Struct("4B")
"""State, congestion state, retransmissions, probes: start of ``struct tcp_info`` (linux/tcp.h)."""
_numbers = itertools.count()


def num_unanswered(descriptor: int) -> int:
    """Return the peer's unacknowledged transmissions in a row; 0 where unknown.

    The descriptor stays open. A closed one, or one of no TCP connection, gives 0."""
    if _TCP_INFO is None or descriptor < 0:
        return 0
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            _, _, num_retransmissions, num_probes = _HEAD.unpack(
                connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _HEAD.size)
            )
    except OSError:
        return 0
    return max(num_retransmissions, num_probes)


class HandshakeWatch:
    """Watches the peer of one connecting socket. Make it before the socket connects."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        raw: zmq.Socket[bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
        unanswered: Callable[[int], int] = num_unanswered,
    ) -> None:
        """``unanswered``: a connection's descriptor -> transmissions in a row without answer."""
        address = f"inproc://headrace-handshakes-{next(_numbers)}"
        raw.monitor(address, _CONNECTED | _UP | _DOWN)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self._clock = clock
        self._unanswered = unanswered
        self._descriptor = -1
        self._down_since: float | None = clock()
        self._unanswered_since: float | None = None

    def down_s(self) -> float:
        """Return for how long the peer has been unreachable, in seconds; 0 while reachable."""
        self._read_events()
        if self._down_since is not None:
            return self._clock() - self._down_since
        num = self._unanswered(self._descriptor)
        if num == 0:
            self._unanswered_since = None
        elif self._unanswered_since is None:
            self._unanswered_since = self._clock()
        return (
            self._clock() - self._unanswered_since if self._unanswered_since is not None and num >= _CUT_AFTER else 0.0
        )

    def _read_events(self) -> None:
        for _ in range(_MAX_EVENTS):
            if self._events.closed or not self._events.poll(0):
                return
            event = recv_monitor_message(self._events)
            match int(event["event"]):
                case kind if kind == _CONNECTED:
                    self._descriptor = int(event["value"])
                case kind if kind == _UP:
                    self._down_since = None
                case _:
                    self._descriptor = -1
                    if self._down_since is None:
                        self._down_since = self._clock() if self._unanswered_since is None else self._unanswered_since
                    self._unanswered_since = None

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._events.closed

    def close(self) -> None:
        """Stop listening. Repeated calls do nothing."""
        self._events.close(linger=0)
