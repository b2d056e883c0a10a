"""Reads libzmq's socket events: whether a peer is reachable, and which connections were refused.

libzmq raises no error for an unreachable peer, such as a wrong host name or a firewall; it keeps trying. A
link that never connects looks like a full mailbox. So does a link whose cable was pulled: its connection
stays open for a quarter of an hour, and only the kernel notices the missing acknowledgements. A peer's kernel
acknowledges all data, probes of a full mailbox, and keep-alives, even if its process is busy or frozen.
``TCP_USER_TIMEOUT`` would also cut off full mailboxes: https://www.rfc-editor.org/rfc/rfc5482.

Refused connections lack CURVE, have an unknown key, or expect another server's key. libzmq refuses them
during the handshake, so no mailbox receives their messages. An accepted connection stays open when its key is
removed; ``RefusedConnections.check`` refuses its messages."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.channel import LinkStats
from protocol.errors import PeerRefused
from protocol.log_limiter import LogLimiter
from protocol.zeromq.curve import CurveKeys

_CONNECTED = int(zmq.EVENT_CONNECTED)
_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DOWN = int(zmq.EVENT_DISCONNECTED)
_MAX_EVENTS = 1000
"""Events read at once; libzmq drops unread events."""
_CUT_AFTER = 2
"""Consecutive transmissions without acknowledgement; a single one may be in flight, or lost by chance."""
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
"""Exists only on Linux."""
_INFO = struct.Struct("=2x2B4x36xI8xI")
"""Retransmissions and probes, milliseconds since data were last sent and since an acknowledgement last came: from
``struct tcp_info`` (linux/tcp.h)."""
_numbers = itertools.count()
STRANGERS = "(refused keys)"
"""Peer name for refused connections."""

_REASONS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "its key is not in the folder of keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it has no key, or expects another key of this worker",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it does not use CURVE, or ended the handshake",
}
_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_MONITOR_STOPPED
)
_JOIN_S = 5.0
_LOOK_S = 0.2
_MAX_NAMES = 4096
_log = structlog.get_logger("headrace.wire")


def num_unanswered(descriptor: int) -> int:
    """Return the number of consecutive transmissions that the peer has not acknowledged; 0 if unknown.

    The descriptor stays open. One that is closed, or not of a TCP connection, gives 0."""
    if _TCP_INFO is None or descriptor < 0:
        return 0
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return unanswered_in(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO.size))
    except OSError:
        return 0


def unanswered_in(info: bytes) -> int:
    """Return that number of a connection whose ``struct tcp_info`` begins with ``info``.

    A peer that is full may refuse data within the window that it offered before. The kernel then counts every
    transmission of them, although the peer acknowledges each."""
    num_retransmissions, num_probes, sent_ms, acknowledged_ms = _INFO.unpack(info)
    return max(num_retransmissions if acknowledged_ms > sent_ms else 0, num_probes)


class HandshakeWatch:
    """Watches the peer of one connecting socket. Create it before the socket connects."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        raw: zmq.Socket[bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
        unanswered: Callable[[int], int] = num_unanswered,
    ) -> None:
        """``unanswered`` maps a connection's descriptor to its consecutive unacknowledged transmissions."""
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
        """Return for how many seconds the peer has been unreachable; 0 while it is reachable."""
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
        return self._events.closed

    def close(self) -> None:
        """Stop listening. Repeated calls do nothing."""
        self._events.close(linger=0)


class RefusedConnections:
    """Counts refused connections of one socket, from before it is bound until it is closed, and logs one a
    minute per reason. Also refuses messages of peers whose keys were removed.

    A thread waits for the socket's events, and ends with the socket or the context."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        raw: zmq.Socket[bytes],
        keys: CurveKeys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._clock = keys, clock
        self._looked: dict[str, tuple[bool, float]] = {}
        address = f"inproc://headrace-refused-{next(_numbers)}"
        self.num_refused = 0
        raw.monitor(address, _EVENTS)
        # a shadow context: destroying a context closes its sockets from another thread, and must not close this one
        own: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=context.underlying)
        events = own.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        events.connect(address)
        self._thread = threading.Thread(target=self._watch, args=(events,), name="refused-connections", daemon=True)
        self._thread.start()

    def check(self, name: str) -> None:
        """Check whether a peer's key is still permitted, at most five times a second.

        ``name`` is that of its key file, from the authenticator. Raises PeerRefused."""
        now = self._clock()
        is_permitted, until = self._looked.get(name, (False, 0.0))
        if now >= until:
            if len(self._looked) >= _MAX_NAMES:
                self._looked.clear()
            is_permitted = self._keys.permits_name(name)
            self._looked[name] = is_permitted, now + _LOOK_S
        if not is_permitted:
            raise PeerRefused(
                f"the key of {name} is no longer in {self._keys.folder}; permit it again to receive from it"
            )

    def stats(self) -> list[LinkStats]:
        """Return the refused connections as counters of one more peer; empty if there are none."""
        return [LinkStats(STRANGERS, 0, 0, self.num_refused)] if self.num_refused else []

    def join(self) -> None:
        """Wait until the thread has ended. Close the socket first."""
        self._thread.join(_JOIN_S)

    def _watch(self, events: zmq.Socket[bytes]) -> None:
        log_limiter = LogLimiter()
        # on a slow machine the socket may not be closed yet
        with events, contextlib.suppress(zmq.ContextTerminated):
            while True:
                event = recv_monitor_message(events)
                kind = int(event["event"])
                reason = _REASONS.get(kind)
                if reason is None:  # the socket is closed
                    return
                self.num_refused += 1
                num_silent = log_limiter.due("", reason)
                if num_silent is not None:
                    endpoint = event["endpoint"].decode(errors="replace")
                    _log.warning("connection refused", endpoint=endpoint, reason=reason, num_not_logged=num_silent)
