"""Counts the connections refused at a tcp endpoint, and logs one a minute and reason.

They lack CURVE, have an unknown key, or expect another server's key. libzmq refuses
them during the handshake. No mailbox receives a message of theirs. A connection that libzmq has
accepted stays open when its key is removed; from then on its messages are refused here.

*Waits for* libzmq's events of one listening socket, on a thread that ends with the socket, or with
the context."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.channel import LinkStats
from protocol.complaints import Complaints
from protocol.errors import PeerRefused
from protocol.zeromq.curve import CurveKeys

STRANGERS = "(refused keys)"
"""The peer name of refused connections."""

_REASONS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "its key is not in the folder of keys",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it holds no key, or takes this worker for the owner of another key",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it speaks no CURVE, or ended the handshake",
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
_numbers = itertools.count()
_log = structlog.get_logger("headrace.wire")


class Door:
    """Counts refused connections of one socket, from before it is bound until it is closed.
    Refuses messages of peers whose keys were removed."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        raw: zmq.Socket[bytes],
        keys: CurveKeys,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys, self._clock = keys, clock
        self._looked: dict[str, tuple[bool, float]] = {}
        address = f"inproc://headrace-door-{next(_numbers)}"
        self.num_refused = 0
        raw.monitor(address, _EVENTS)
        # A destroyed context closes the sockets that it made, from another thread: not this one.
        own: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=context.underlying)
        events = own.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        events.connect(address)
        self._thread = threading.Thread(target=self._watch, args=(events,), name="door", daemon=True)
        self._thread.start()

    def check(self, name: str) -> None:
        """Look whether a peer's key is still permitted, five times a second at most.

        ``name``: of its key file, as the authenticator gave it. Raises PeerRefused."""
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
        """Return the refused connections as counters of one more peer; empty without any."""
        return [LinkStats(STRANGERS, 0, 0, self.num_refused)] if self.num_refused else []

    def join(self) -> None:
        """Wait until the thread has ended. Close the socket first."""
        self._thread.join(_JOIN_S)

    def _watch(self, events: zmq.Socket[bytes]) -> None:
        complaints = Complaints()
        # A slow machine may not have ended the socket by then.
        with events, contextlib.suppress(zmq.ContextTerminated):
            while True:
                event = recv_monitor_message(events)
                kind = int(event["event"])
                reason = _REASONS.get(kind)
                if reason is None:
                    # the socket is closed
                    return
                self.num_refused += 1
                num_silent = complaints.due("", reason)
                if num_silent is not None:
                    endpoint = event["endpoint"].decode(errors="replace")
                    _log.warning("connection refused", endpoint=endpoint, reason=reason, num_not_logged=num_silent)
