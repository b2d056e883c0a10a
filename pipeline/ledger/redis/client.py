"""How every process reaches the ledger server.

*Consumes* a URL: ``redis://``, ``rediss://`` (TLS) or ``unix://``, with a password when there is
one, or one that leads to a master by its Sentinels (``pipeline.ledger.redis.sentinel``). *Produces*
asyncio clients. *Waits for* at most ``timeout_s`` for a connection of the pool, for connecting, and
for each answer.

A client says how patient its calls are, and repeats nothing itself.
``pipeline.ledger.redis.connection`` is the one layer that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import hiredis
import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff

from pipeline.ledger.redis.sentinel import SCHEMES as SENTINEL_SCHEMES
from pipeline.ledger.redis.sentinel import master_pool, parse_sentinel_url
from pipeline.ledger.url import hide_password
from protocol.errors import ConfigError


class OwnConnection(AbstractConnection):
    """A connection whose writes a cancelled task does not survive, and which is made anew once for
    each attempt of a command.

    redis-py bounds a write by ``asyncio.wait_for``, which on Python 3.11 swallows a cancellation
    that comes as the write completes: nearly every one, on a fast socket. A worker would go on
    after its TaskGroup had told it to end. ``asyncio.timeout`` bounds the same write and lets the
    cancellation through. And a command on a lost connection would have each of its attempts repeat
    the connecting as often as itself is repeated, and never ask a Sentinel for the new master.

    Commands are packed in C. A pipeline is written piece by piece: redis-py would first join it,
    and asyncio would keep a copy of what the socket does not take at once, megabytes of fresh
    memory for long values.
    """

    __slots__ = ()

    def pack_command(self, *args: Any) -> list[bytes]:
        """Return a command as it is sent. Raises redis-py's DataError for an argument that cannot
        be sent.
        """
        command, *rest = args
        try:
            return [
                cast("Any", hiredis).pack_command((*command.split(), *rest))
            ]  # as redis-py's own: CONFIG GET are two words
        except TypeError as error:
            raise redis.exceptions.DataError(str(error)) from error

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        """Write a packed command within ``socket_timeout``. Raises redis-py's ConnectionError and
        TimeoutError.
        """
        if not self.is_connected:
            await self._connect_once()
        if check_health:
            await self.check_health()
        pieces = [command] if isinstance(command, (bytes, str)) else command
        writer, limit, self.socket_timeout = self._writer, self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                for piece in pieces:
                    # the rest of a command is none, to a new connection
                    if self._writer is not writer:
                        raise redis.exceptions.ConnectionError("the connection was closed while a command was written")
                    await super().send_packed_command(piece, check_health=False)
        except TimeoutError:  # not redis-py's: those are no subclass of it
            await self.disconnect(nowait=True)
            raise redis.exceptions.TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit

    async def take_over(self) -> asyncio.WriteTransport:
        """Connect anew, once, and return the transport. Its owner sets a protocol, which passes
        ``connection_lost`` on to the one before; ``disconnect``, of this connection or of its whole
        pool, still closes it."""
        await self.disconnect(nowait=True)
        try:
            await self._connect_once()
        except BaseException:
            await self.disconnect(nowait=True)
            raise
        return cast("asyncio.StreamWriter", self._writer).transport

    def error_of(self, text: str) -> Exception:
        """Return redis-py's exception for an error that the server answered."""
        return cast("Any", self._parser).parse_error(text)

    async def _connect_once(self) -> None:
        await self.connect_check_health(check_health=False, retry_socket_connect=False)


class _Tcp(OwnConnection, Connection):
    __slots__ = ()


class _Tls(OwnConnection, SSLConnection):
    __slots__ = ()


class _Master(OwnConnection, SentinelManagedConnection):
    async def _connect_once(self) -> None:
        # redis-py's name for one attempt: it asks the Sentinels first
        await self._connect_retry()


class _TlsMaster(_Master, SentinelManagedSSLConnection):
    pass


class _Unix(OwnConnection, UnixDomainSocketConnection):
    __slots__ = ()


_OURS = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
_SCHEMES = ("redis://", "rediss://", "unix://", *SENTINEL_SCHEMES)


class CallTimeouts(NamedTuple):
    """How long calls over a client bear a server that does not serve them, in seconds."""

    timeout_s: float
    """Without any answer: then the connection is given up."""
    lost_s: float
    """Of one call, from its making to its end, while no server answers."""
    disk_s: float
    """Of one call, while the server answers that its disk takes no writes, or is away and its disk
    is full.
    """
    disk_trouble: Callable[[], str]
    """Asked while no server answers: returns why its disk takes no writes, for people; "" when it
    does, or cannot be seen.
    """


def call_timeouts(client: redis.asyncio.Redis) -> CallTimeouts:
    """Return how patient calls over a client of ``connect`` are."""
    return cast("Any", client.connection_pool).timeouts


def connect(
    url: str,
    *,
    password: str | None = None,
    max_connections: int = 16,
    timeout_s: float = 5.0,
    patience_s: float = 5.0,
    disk_patience_s: float | None = None,
    disk_trouble: Callable[[], str] = str,
    client_name: str | None = None,
    **tls: Any,
) -> redis.asyncio.Redis:
    """Return a client of the server at ``url``; nothing is sent yet.

    A ledger call ends ``patience_s`` after it was made, however often it was asked again meanwhile;
    while the server answers that its disk takes no writes, after ``disk_patience_s``, if that is
    longer; and so while none answers and ``disk_trouble`` tells of its disk: it cannot start there.
    Within that, a connection without an answer for ``timeout_s`` is made anew. ``password``
    overrides the one in the URL. A caller that finds all ``max_connections`` in use waits its turn
    for up to ``timeout_s``. ``tls`` takes redis-py's ``ssl_*`` settings, such as ``ssl_ca_certs``.
    Raises ConfigError for a bad URL.
    """
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"ledger URL is {hide_password(url)!r}; expected one that starts with {', '.join(_SCHEMES)}")
    timeout_s = min(timeout_s, patience_s)
    settings: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": timeout_s,
        "socket_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        **tls,
    }
    if not url.startswith("unix://"):
        settings |= {"socket_connect_timeout": timeout_s, "socket_keepalive": True}
    if password is not None:
        settings["password"] = password
    if client_name is not None:
        settings["client_name"] = client_name
    if url.startswith("rediss://"):
        settings |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True} | tls
    try:
        if url.startswith(SENTINEL_SCHEMES):
            address = parse_sentinel_url(url)
            pool: Any = master_pool(address, _TlsMaster if address.is_tls else _Master, settings)
        else:
            pool = cast("Any", redis.asyncio.BlockingConnectionPool).from_url(url, **settings)
            pool.connection_class = _OURS[pool.connection_class]
    except ValueError as error:
        raise ConfigError(f"ledger URL {hide_password(url)!r} cannot be read: {error}") from error
    pool.timeouts = CallTimeouts(timeout_s, patience_s, max(patience_s, disk_patience_s or 0.0), disk_trouble)
    return redis.asyncio.Redis.from_pool(pool)
