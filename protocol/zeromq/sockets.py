"""A ZeroMQ socket in asyncio: options, binding, and waiting without losing messages.

No ``recv`` is ever pending, so none is cancelled. A task waits until the socket is ready, then reads without
blocking and without another await. libzmq's descriptor is edge-triggered, so ``ready`` reads EVENTS before
each wait and after each wake, and every operation wakes the other waiters."""

from __future__ import annotations

import asyncio
import errno
import socket as os_socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from protocol.arrays import Buffer
from protocol.endpoints import Endpoint
from protocol.errors import ChannelClosed, ConfigError
from protocol.limits import MAX_FRAMES
from protocol.private import ensure_private_folder
from protocol.waiting import Waiters

HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 3000
"""For requests: a frozen peer is cut off after this. ZeroMQ's own threads answer heartbeats, so a busy
interpreter does not look frozen.

Links to mailboxes have no heartbeats. A full mailbox stops reading its connection, including heartbeats, and
would be cut off for being slow: in a measurement, 16 of 24 messages were lost in seven seconds of
back-pressure. A frozen reader is noticed by its silence in the registry, a lost host by
``protocol.zeromq.monitor``."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 3, 1, 20
"""An idle link to a lost host is noticed after four seconds, and given up after 23."""
HANDSHAKE_TIMEOUT_MS = 5000
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
TCP_BUFFER_BYTES = 256 * 1024
"""For links: in a measurement, the system's own buffers hid 20,000 small messages from the high-water mark.
Requests use the system's buffers, which grow with the distance, since few of them wait at once."""
ZERO_COPY_BYTES = 65536
"""Received frames from this size on are read in place; below it, copying is cheaper. As in pyzmq."""
TURNS_PER_YIELD = 32
"""After this many reads of a ready socket, other tasks get a turn."""
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
"""Plain numbers, since each use of a pyzmq flag costs a microsecond."""
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(frozen=True, slots=True)
class SocketLimits:
    high_water_mark: int
    """Messages queued per peer, at each end."""
    max_message_bytes: int
    """Per message. The socket also disconnects a peer that sends a larger frame."""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    frames: list[Buffer]
    address: Callable[[], str]
    """Returns the sender's name or address, as far as known."""


class AsyncSocket:
    """One socket, used by one event loop at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, limits: SocketLimits, *, ipv6: bool) -> None:
        self._socket = context.socket(kind)
        self._waiters = Waiters()
        self._turns = 0
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: limits.high_water_mark,
            zmq.RCVHWM: limits.high_water_mark,
            zmq.MAXMSGSIZE: limits.max_message_bytes,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
            zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL_S,
            zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_COUNT,
            zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
            zmq.IPV6: int(ipv6),
        }
        if kind in (zmq.PUSH, zmq.DEALER):
            # queue nothing for an absent peer
            options |= {zmq.IMMEDIATE: 1, zmq.RECONNECT_IVL: RECONNECT_MS, zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS}
        if kind in (zmq.PUSH, zmq.PULL):
            options |= {zmq.SNDBUF: TCP_BUFFER_BYTES, zmq.RCVBUF: TCP_BUFFER_BYTES}
        if kind in (zmq.DEALER, zmq.ROUTER):
            options |= {
                zmq.HEARTBEAT_IVL: HEARTBEAT_INTERVAL_MS,
                zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
                zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
            }
        if kind == zmq.ROUTER:
            options[zmq.ROUTER_MANDATORY] = 1
            # A requester has as many requests under way as the mark says. libzmq notices that messages have left
            # only when half of the mark have, so at the plain mark an answer may find no room.
            options[zmq.SNDHWM] = 2 * limits.high_water_mark
        for option, value in options.items():
            self._socket.setsockopt(option, value)

    @property
    def raw(self) -> zmq.Socket[bytes]:
        return self._socket

    @property
    def closed(self) -> bool:
        """Whether it was closed, here or by the context."""
        return self._socket.closed

    def bind(self, endpoint: Endpoint) -> Endpoint:
        """Listen on ``endpoint``; return it with the bound port. Raises ConfigError."""
        if endpoint.scheme == "ipc":
            _take_socket_file(Path(endpoint.path))
        try:
            self._bind_first(endpoint.candidates)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"{endpoint} is in use by another process; stop that, use port 0 for any free port, or allow more ports "
                    "(wire.ports)"
                ) from error
            raise ConfigError(
                f"cannot listen at {endpoint}: {error.strerror}; is it an address of this host (wire.host)?"
            ) from error
        if endpoint.scheme == "ipc":
            return endpoint
        bound = Endpoint.parse(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return Endpoint("tcp", host=endpoint.host, port=bound.port)

    def _bind_first(self, candidates: Sequence[Endpoint]) -> None:
        """Listen on the first free address. Raises ZMQError when none is free."""
        for endpoint in candidates[:-1]:
            try:
                self._socket.bind(str(endpoint))
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return
        self._socket.bind(str(candidates[-1]))

    def connect(self, endpoint: Endpoint) -> None:
        """Connect, now or when the peer listens. Raises ConfigError."""
        try:
            self._socket.connect(str(endpoint))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}; check the address") from error

    async def ready(self, event: int, *, timeout_s: float) -> bool:
        """Wait until ``event`` (POLLIN or POLLOUT) holds; return False after ``timeout_s``.

        No other task uses the socket before the caller's next await. Raises ChannelClosed."""
        deadline = time.monotonic() + timeout_s
        self._turns += 1
        if self._turns % TURNS_PER_YIELD == 0:
            await asyncio.sleep(0)
        while True:
            if self._socket.closed:
                raise ChannelClosed("the channel was closed by its owner")
            if self._socket.getsockopt(zmq.EVENTS) & event:  # pyright: ignore[reportOperatorIssue]
                return True
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            await self._signal(asyncio.get_running_loop(), remaining)

    async def take(self, *, timeout_s: float) -> ReceivedMessage | None:
        """Wait for a message and read it; None after ``timeout_s``. Raises ChannelClosed.

        There is no await between reading and returning, so a cancelled call has read nothing."""
        deadline = time.monotonic() + timeout_s
        while await self.ready(POLLIN, timeout_s=deadline - time.monotonic()):
            try:
                first = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                # POLLIN is only a hint: this happens on a new CURVE connection with a large message
                await asyncio.sleep(0)
                continue
            return self._read_rest(first)
        return None

    def _read_rest(self, first: zmq.Frame) -> ReceivedMessage:
        frames: list[Buffer] = [first.bytes]
        part = first
        while part.more:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            # a ROUTER adds a route frame; one frame over the limit is enough to refuse the message
            if len(frames) <= MAX_FRAMES + 1:
                frames.append(part.bytes if len(part) < ZERO_COPY_BYTES else part.buffer)
        self._waiters.wake()
        return ReceivedMessage(frames, lambda: _address(first))

    def put(self, frames: Sequence[Buffer]) -> bool:
        """Send one message without blocking; return False when there is no room for it.

        If a connection dies between two frames of a message, libzmq drops the rest. That rest is then
        flushed, so that the next message starts at its first frame."""
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            try:
                self._socket.send(frame, _MORE if index < last else _LAST, copy=False)
            except zmq.Again:
                if index and index < last:
                    for rest in range(index + 1, last + 1):
                        self._socket.send(b"", _MORE if rest < last else _LAST)
                return False
        self._waiters.wake()
        return True

    def close(self) -> None:
        """Close at once; waiting tasks get ChannelClosed. Repeated calls do nothing."""
        if not self._socket.closed:
            self._socket.close(linger=0)
        self._waiters.wake()

    async def _signal(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        """Return when libzmq signals an event, or another task has used the socket."""
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        if not self._waiters:
            loop.add_reader(descriptor, self._waiters.wake)
        try:
            await self._waiters.wait(timeout_s)
        finally:
            if not self._waiters:
                loop.remove_reader(descriptor)


def _take_socket_file(path: Path) -> None:
    """Remove a dead socket file. Raises ConfigError for a live one, which libzmq would replace."""
    ensure_private_folder(path.parent)
    if not path.exists():
        return
    with os_socket.socket(os_socket.AF_UNIX, os_socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"ipc://{path} is in use by another process; stop that, or use another name")


def _address(frame: zmq.Frame) -> str:
    """Return the authenticated name or network address of a frame's sender, as far as known."""
    for name in ("User-Id", "Peer-Address"):
        try:
            value = frame.get(name)
        except zmq.ZMQError:
            # this connection does not have the property
            continue
        if value:
            return str(value)
    return ""
