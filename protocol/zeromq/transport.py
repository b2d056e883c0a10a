"""One worker's ZeroMQ context, limits and keys, and the sockets made with them.

On one host, ipc sockets in a private folder need no keys. Over tcp every connection uses CURVE, and keys
identify both ends. Without keys, tcp only works on the loopback interface.

A link (PUSH to a mailbox's PULL) holds at most a high-water mark of messages at each end, plus the system's
socket buffers. When all of that is full, ``send`` waits: that is the back-pressure."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import zmq

from protocol.channel import Delivery, LinkStats
from protocol.codec import Encoded, encode
from protocol.endpoints import Endpoint
from protocol.errors import ChannelClosed, ConfigError
from protocol.hosts import wants_ipv6
from protocol.inbound import Inbound
from protocol.limits import check_size
from protocol.messages import Message
from protocol.zeromq.curve import CurveKeys, KeyAuthenticator
from protocol.zeromq.monitor import HandshakeWatch, RefusedConnections
from protocol.zeromq.requests import ZmqRequester, ZmqResponder
from protocol.zeromq.sockets import POLLOUT, AsyncSocket, SocketLimits


class ZmqTransport:
    """One worker's mailboxes, links, requesters and responders; ``sender_name`` is its name."""

    def __init__(
        self,
        sender: str,
        *,
        high_water_mark: int,
        max_message_bytes: int,
        keys: CurveKeys | None,
        advertise_host: str | None = None,
        num_io_threads: int = 1,
    ) -> None:
        """Args:
        sender: The worker's name in messages.
        high_water_mark: Messages that a link holds at each end.
        max_message_bytes: Limit of a message.
        keys: For tcp; None limits tcp to loopback.
        advertise_host: Address for other hosts, instead of the bound one.
        num_io_threads: Threads that share the connections, and encrypt."""
        self.sender_name = sender
        self._limits = SocketLimits(high_water_mark, max_message_bytes)
        self._keys = keys
        self._advertise_host = advertise_host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(num_io_threads)
        self._authenticator: KeyAuthenticator | None = None
        self._sockets: list[AsyncSocket] = []
        self._refused: list[RefusedConnections] = []
        self._watches: list[HandshakeWatch] = []

    @property
    def public_key(self) -> str:
        """This worker's public CURVE key; "" when the transport has none."""
        return self._keys.public if self._keys else ""

    def mailbox(self, endpoint: str) -> ZmqMailbox:
        """Bind a mailbox. Raises ConfigError for a bad or used endpoint, or tcp without keys."""
        socket, bound, refused = self._bind(zmq.PULL, endpoint)
        return ZmqMailbox(socket, endpoint=bound, max_message_bytes=self._limits.max_message_bytes, refused=refused)

    def peers(self) -> dict[str, str] | None:
        """Return public key -> name of each permitted peer, as the folder is now; None without keys."""
        return None if self._keys is None else self._keys.allowed()

    def sender(self, endpoint: str, *, server_key: str = "") -> ZmqSender:
        """Connect a link; for tcp, ``server_key`` is the owner's public key. Raises ConfigError."""
        socket, watch = self._connect(zmq.PUSH, endpoint, server_key)
        return ZmqSender(socket, endpoint, self.sender_name, self._limits.max_message_bytes, watch)

    def responder(self, endpoint: str) -> ZmqResponder:
        """Bind a responder. Raises ConfigError like ``mailbox``."""
        socket, bound, refused = self._bind(zmq.ROUTER, endpoint)
        limit = self._limits.max_message_bytes
        return ZmqResponder(socket, endpoint=bound, sender=self.sender_name, max_message_bytes=limit, refused=refused)

    def requester(self, endpoint: str, *, server_key: str = "") -> ZmqRequester:
        """Connect to a responder. Raises ConfigError like ``sender``."""
        socket, watch = self._connect(zmq.DEALER, endpoint, server_key)
        limits = self._limits
        return ZmqRequester(
            socket, endpoint, self.sender_name, limits.max_message_bytes, watch, max_under_way=limits.high_water_mark
        )

    def close(self) -> None:
        """Close everything; waiting tasks get ChannelClosed. Repeated calls do nothing."""
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        for watch in self._watches:
            watch.close()
        self._watches.clear()
        for refused in self._refused:
            refused.join()
        self._refused.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        if not self._context.closed:
            self._context.destroy(linger=0)

    def _socket(self, kind: int, endpoint: Endpoint) -> AsyncSocket:
        if self._context.closed:
            raise ChannelClosed("the transport was closed by its owner")
        socket = AsyncSocket(
            self._context, kind, self._limits, ipv6=endpoint.scheme == "tcp" and wants_ipv6(endpoint.host)
        )
        self._sockets = [*(other for other in self._sockets if not other.closed), socket]
        return socket

    def _bind(self, kind: int, text: str) -> tuple[AsyncSocket, str, RefusedConnections | None]:
        endpoint = Endpoint.parse(text)
        secure = self._is_secure(endpoint)
        told = endpoint.told(self._advertise_host) if endpoint.scheme == "tcp" else ""
        socket = self._socket(kind, endpoint)
        refused = None
        if secure and self._keys is not None:
            if self._authenticator is None:
                self._authenticator = KeyAuthenticator(self._context, self._keys)
            self._keys.serve(socket.raw)
            refused = RefusedConnections(self._context, socket.raw, self._keys)
            self._refused.append(refused)
        bound = socket.bind(endpoint)
        if told:
            bound = replace(bound, host=told)
        return socket, str(bound), refused

    def _connect(self, kind: int, text: str, server_key: str) -> tuple[AsyncSocket, HandshakeWatch | None]:
        """Connect a socket; over tcp, watch its handshakes."""
        endpoint = Endpoint.parse(text)
        secure = self._is_secure(endpoint)
        if secure and not server_key:
            raise ConfigError(f"no server key for {text}; give the public key that its owner has registered")
        if server_key and self._keys is None:
            raise ConfigError(
                f"{text} has a server key, but this worker has no keys; start it with the run's keys folder"
            )
        socket = self._socket(kind, endpoint)
        if secure and self._keys is not None:
            try:
                self._keys.present(socket.raw, server_key)
            except ConfigError:
                socket.close()
                raise
        watch = HandshakeWatch(self._context, socket.raw) if endpoint.scheme == "tcp" else None
        self._watches = [*(other for other in self._watches if not other.is_closed), *([watch] if watch else [])]
        socket.connect(endpoint)
        return socket, watch

    def _is_secure(self, endpoint: Endpoint) -> bool:
        """Return whether the endpoint uses CURVE. Raises ConfigError for unencrypted remote tcp."""
        if endpoint.scheme == "ipc":
            return False
        if self._keys is None and not endpoint.is_local:
            raise ConfigError(
                f"{endpoint} leaves this host without encryption; give the transport CURVE keys, or use 127.0.0.1 or ipc"
            )
        return self._keys is not None


class ZmqSender:
    """The sending end of one link. Created by ``ZmqTransport.sender``."""

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
        """Also raises MessageTooLarge or MalformedMessage for a bad message."""
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
        return LinkStats(self.endpoint, self._sequence, self._num_bytes, self._num_refused)

    def unreached_s(self) -> float:
        """Always 0 on one host, where the socket file is enough."""
        return 0.0 if self._watch is None else self._watch.down_s()

    def close(self) -> None:
        self._socket.close()
        if self._watch is not None:
            self._watch.close()


class ZmqMailbox:
    """The receiving end. Created by ``ZmqTransport.mailbox``."""

    def __init__(
        self, socket: AsyncSocket, *, endpoint: str, max_message_bytes: int, refused: RefusedConnections | None = None
    ) -> None:
        self._socket = socket
        self._refused = refused
        self._check = refused.check if refused else None
        self.endpoint = endpoint
        self._inbound = Inbound(endpoint, max_bytes=max_message_bytes)

    async def receive(self, *, timeout_s: float) -> Delivery | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (received := await self._socket.take(timeout_s=deadline - loop.time())) is not None:
            delivery = self._inbound.read(received.frames, address=received.address, check=self._check)
            if delivery is not None:
                return delivery
        return None

    def stats(self) -> list[LinkStats]:
        """Return counters by sender. Refused connections count as one more sender."""
        return self._inbound.stats() + (self._refused.stats() if self._refused else [])

    def close(self) -> None:
        self._socket.close()
