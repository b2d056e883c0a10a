"""Whether the other end of a link was ever reached: the handshakes of one connecting socket.

*Consumes* libzmq's own events of that socket. *Produces* whether a handshake stands, and for how long none has. *Waits for*
nothing: events are read when somebody asks.

A peer that cannot be reached (its name resolves to another machine, a firewall drops what is sent) is no error to libzmq, which
tries for ever and says nothing. What a link that never connects looks like from above is a mailbox that is always full.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DOWN = int(zmq.EVENT_DISCONNECTED)
_MAX_EVENTS = 1000
"""Read at once; events that nobody reads are dropped by libzmq."""
_numbers = itertools.count()


class HandshakeWatch:
    """Knows whether one connecting socket has its peer. Make it before the socket connects."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        raw: zmq.Socket[bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address = f"inproc://headrace-handshakes-{next(_numbers)}"
        raw.monitor(address, _UP | _DOWN)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self._clock = clock
        self._down_since: float | None = clock()

    def down_s(self) -> float:
        """Return for how long no handshake has stood, in seconds; 0 while one stands."""
        for _ in range(_MAX_EVENTS):
            if self._events.closed or not self._events.poll(0):
                break
            kind = int(recv_monitor_message(self._events)["event"])
            if kind == _UP:
                self._down_since = None
            elif self._down_since is None:
                self._down_since = self._clock()
        return 0.0 if self._down_since is None else self._clock() - self._down_since

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._events.closed

    def close(self) -> None:
        """Stop listening. Repeated calls do nothing."""
        self._events.close(linger=0)
