"""Client connections to the ledger server.

A URL is ``redis://``, ``rediss://`` (TLS) or ``unix://``, with a password if the server has one, or names
Sentinels (``pipeline.ledger.redis.sentinel``) or cluster nodes (``pipeline.ledger.redis.cluster``). Instead
of a password it may name a token file (``pipeline.ledger.token``). A client has timeouts but never retries:
``pipeline.ledger.redis.connection`` is the only layer that does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import hiredis
import redis.asyncio
import redis.exceptions
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from pipeline.ledger.redis.cluster import SCHEMES as CLUSTER_SCHEMES
from pipeline.ledger.redis.cluster import ClusterNodes, Place, parse_cluster_url
from pipeline.ledger.redis.sentinel import REFUSED, SentinelRefused, TokenRefused, master_pool, parse_sentinel_url
from pipeline.ledger.redis.sentinel import SCHEMES as SENTINEL_SCHEMES
from pipeline.ledger.url import hide_password, split_token_file
from protocol.errors import ConfigError


class _TokenFile(CredentialProvider):
    """Credentials from a token file, read again for each connection."""

    def __init__(self, path: Path, run_database: Callable[[], int]) -> None:
        self._path = path
        self._run_database = run_database
        self._user = "no token yet"

    def __str__(self) -> str:
        return f"{self._user} of {self._path}"

    def get_credentials(self) -> tuple[str, str]:
        from pipeline.ledger.token import read_token, user_name

        token = read_token(self._path)
        self._user = user_name(token.run, token.id, self._run_database())
        return self._user, token.secret

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()


class OwnConnection(AbstractConnection):
    """A connection that obeys cancellation, and connects only once per attempt of a command.

    redis-py bounds a write with ``asyncio.wait_for``. On Python 3.11 that swallows a cancellation that
    arrives as the write completes: nearly every one, on a fast socket. A worker would go on after its
    TaskGroup had ended it. ``asyncio.timeout`` does not have this bug.

    On a lost connection redis-py would retry connecting within each attempt of a command, and never ask a
    Sentinel for the new master.

    Commands are packed in C. A pipeline is written piece by piece: joining it would make asyncio copy
    whatever the socket does not take at once, megabytes for long values."""

    __slots__ = ()

    def pack_command(self, *args: Any) -> list[bytes]:
        command, *rest = args
        try:
            # split like redis-py: CONFIG GET is two words
            return [cast("Any", hiredis).pack_command((*command.split(), *rest))]
        except TypeError as error:
            raise redis.exceptions.DataError(str(error)) from error

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if not self.is_connected:
            await self._connect_once()
        if check_health:
            await self.check_health()
        pieces = [command] if isinstance(command, (bytes, str)) else command
        writer, limit, self.socket_timeout = self._writer, self.socket_timeout, None
        try:
            async with asyncio.timeout(limit):
                for piece in pieces:
                    # a new connection must not receive the rest of a command
                    if self._writer is not writer:
                        raise redis.exceptions.ConnectionError("the connection was closed while a command was written")
                    await super().send_packed_command(piece, check_health=False)
        except TimeoutError:
            # not redis-py's, which does not inherit from it
            await self.disconnect(nowait=True)
            raise redis.exceptions.TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = limit

    async def take_over(self) -> asyncio.WriteTransport:
        """Reconnect once and return the transport, on which the caller sets its own protocol.

        That protocol must forward ``connection_lost`` to the previous one. ``disconnect``, of this connection
        or its pool, still closes it."""
        await self.disconnect(nowait=True)
        try:
            await self._connect_once()
        except BaseException as error:
            await self.disconnect(nowait=True)
            if isinstance(self.credential_provider, _TokenFile):
                self._raise_refusal(self.credential_provider, error)
            raise
        return cast("asyncio.StreamWriter", self._writer).transport

    def _raise_refusal(self, file: _TokenFile, error: BaseException) -> None:
        """Raise TokenRefused, or the ConfigError of a bad token file, which redis-py wraps in a
        ConnectionError on Unix sockets."""
        for part in (error, *error.args):
            if isinstance(part, ConfigError):
                raise part from None
            if isinstance(part, REFUSED) and not isinstance(part, SentinelRefused):
                raise TokenRefused(f"{file}: {part}") from error

    def follow(self, error: redis.exceptions.AskError) -> bool:
        """Record a redirection by a cluster node; return whether the next connection follows it."""
        del error
        return False

    def error_of(self, text: str) -> Exception:
        return cast("Any", self._parser).parse_error(text)

    async def _connect_once(self) -> None:
        await self.connect_check_health(check_health=False, retry_socket_connect=False)


class _Tcp(OwnConnection, Connection):
    __slots__ = ()


class _Tls(OwnConnection, SSLConnection):
    __slots__ = ()


class _Master(OwnConnection, SentinelManagedConnection):
    async def _connect_once(self) -> None:
        # one attempt, which first looks up the master
        await self._connect_retry()


class _TlsMaster(_Master, SentinelManagedSSLConnection):
    pass


class _Node(OwnConnection, Connection):
    """Connects to the cluster node that owns the run's slot."""

    __slots__ = ()
    nodes: ClusterNodes

    def follow(self, error: redis.exceptions.AskError) -> bool:
        self.nodes.redirected(error, (self.host, self.port))
        return True

    async def _connect_once(self) -> None:
        place = self.host, self.port = self.nodes.next()
        try:
            await super()._connect_once()
        except (redis.exceptions.RedisError, OSError):
            self.nodes.failed(place)
            raise


class _TlsNode(_Node, SSLConnection):
    __slots__ = ()


class _Unix(OwnConnection, UnixDomainSocketConnection):
    __slots__ = ()


_OURS = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
_SCHEMES = ("redis://", "rediss://", "unix://", *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)


class CallTimeouts(NamedTuple):
    """How long calls wait for a server that does not answer, in seconds."""

    timeout_s: float
    """A connection without any answer for this long is closed."""
    lost_s: float
    """Limit of one call, with all retries, while no server answers."""
    disk_s: float
    """Limit of one call while the server's disk is full, even if the server is down."""
    disk_trouble: Callable[[], str]
    """Called while no server answers; describes the disk problem for people, or returns ""."""


def call_timeouts(client: redis.asyncio.Redis) -> CallTimeouts:
    return cast("Any", client.connection_pool).timeouts


def database_of(client: redis.asyncio.Redis) -> int:
    return _database_of(client.connection_pool)


def _database_of(pool: Any) -> int:
    return int(pool.connection_kwargs.get("db") or 0)


def is_of_cluster(client: redis.asyncio.Redis) -> bool:
    return issubclass(cast("Any", client.connection_pool).connection_class, _Node)


def client_of_node(client: redis.asyncio.Redis, place: Place, *, patience_s: float) -> redis.asyncio.Redis:
    """Return a client of one node of ``client``'s Cluster, for commands without keys."""
    pool = cast("Any", client.connection_pool)
    base = _TlsNode if issubclass(pool.connection_class, _TlsNode) else _Node
    kind = type("_Node", (base,), {"nodes": ClusterNodes((place,))})
    settings = pool.connection_kwargs | {"socket_timeout": patience_s, "socket_connect_timeout": patience_s}
    made: Any = cast("Any", redis.asyncio.BlockingConnectionPool)(connection_class=kind, max_connections=2, **settings)
    made.timeouts = CallTimeouts(patience_s, patience_s, patience_s, str)
    return redis.asyncio.Redis.from_pool(made)


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

    Args:
        url: A URL as in the module's docstring.
        password: Overrides the URL's.
        max_connections: When all are in use, a caller waits up to ``timeout_s`` for one.
        timeout_s: A connection without an answer for this long is reopened.
        patience_s: A ledger call fails after this long, retries included.
        disk_patience_s: The longer limit while the server reports that it cannot write to its disk,
            or while no server answers and ``disk_trouble`` returns a reason why it cannot start.
        disk_trouble: Describes the disk problem, or returns "".
        client_name: Name of the connections on the server.
        tls: redis-py's ``ssl_*`` settings, such as ``ssl_ca_certs``.

    Raises ConfigError for a bad URL; calls raise it for a bad token file."""
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"ledger URL is {hide_password(url)!r}; expected one that starts with {', '.join(_SCHEMES)}")
    url, token_file = split_token_file(url)
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
    if token_file is not None:
        settings["credential_provider"] = _TokenFile(token_file, lambda: _database_of(pool))
    elif password is not None:
        settings["password"] = password
    if client_name is not None:
        settings["client_name"] = client_name
    if url.startswith(("rediss://", "rediss+cluster://")):
        settings |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True} | tls
    try:
        if url.startswith(SENTINEL_SCHEMES):
            address = parse_sentinel_url(url)
            pool: Any = master_pool(address, _TlsMaster if address.is_tls else _Master, settings)
        elif url.startswith(CLUSTER_SCHEMES):
            nodes, own, is_tls = parse_cluster_url(url)
            kind = type("_Node", (_TlsNode if is_tls else _Node,), {"nodes": nodes})
            pool = cast("Any", redis.asyncio.BlockingConnectionPool)(connection_class=kind, **settings | own)
        else:
            pool = cast("Any", redis.asyncio.BlockingConnectionPool).from_url(url, **settings)
            pool.connection_class = _OURS[pool.connection_class]
    except ValueError as error:
        raise ConfigError(f"ledger URL {hide_password(url)!r} cannot be read: {error}") from error
    pool.timeouts = CallTimeouts(timeout_s, patience_s, max(patience_s, disk_patience_s or 0.0), disk_trouble)
    return redis.asyncio.Redis.from_pool(pool)
