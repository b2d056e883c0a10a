"""A ledger server behind Sentinels: every connection first asks them for the master.

A URL is ``redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db][?option=value&...]``, or
``rediss+sentinel://`` for TLS to servers and Sentinels. User and password are the servers'; the Sentinels'
own, if any, are the options ``sentinel_username`` and ``sentinel_password``. All other options are
redis-py's, for the servers; ``ssl_*`` apply to both. A Sentinel's default port is 26379.

Each Sentinel has two seconds to answer. Without a master the attempt fails and is retried like any other. A
password that most Sentinels refuse is not retried.

A failover can lose the old master's last writes, since replication is asynchronous; the ledger is then as
after a power cut. Writers that are ahead of it are fenced and sample again. The learner goes back to its
checkpoint if units that it trained come back. ``min-replicas-to-write 1`` on the servers keeps an isolated
master from accepting writes that will be lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlencode

from redis import exceptions
from redis.asyncio import sentinel as asyncio_sentinel
from redis.asyncio.connection import BlockingConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
DEFAULT_PORT: Final = 26379
REFUSED: Final = (exceptions.AuthenticationError, exceptions.AuthorizationError)
"""redis-py's errors for a refused user name or password."""
_ANSWER_S = 2.0
_OWN = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    sentinels: tuple[tuple[str, int], ...]
    service: str
    node: dict[str, Any]
    """redis-py's settings for a connection to a server: db, username, password and other options."""
    own: dict[str, Any]
    """Settings for a connection to a Sentinel."""
    is_tls: bool


def parse_sentinel_url(url: str) -> SentinelAddress:
    """Parse a Sentinel URL. Raises ValueError with the reason, without the password."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    user, at, place = place.rpartition("@")
    hosts, _, path = place.partition("/")
    service, _, db = path.partition("/")
    if not service:
        raise ValueError("it names no service; expected .../SERVICE or .../SERVICE/DB after the Sentinels")
    if db and not db.isdecimal():
        raise ValueError(f"its database is {db!r}; expected a number")
    options = dict(parse_qsl(query, keep_blank_values=True))
    own = {name: options.pop(option) for option, name in _OWN.items() if option in options}
    is_tls = scheme == "rediss+sentinel"
    tail = f"?{urlencode(options)}" if options else ""
    node: dict[str, Any] = dict(parse_url(f"{'rediss' if is_tls else 'redis'}://{user}{at}master/{db}{tail}"))
    for name in ("host", "port", "connection_class"):
        node.pop(name, None)
    shared = {name: value for name, value in node.items() if name.startswith("ssl_")}
    return SentinelAddress(tuple(_member(host) for host in hosts.split(",")), service, node, shared | own, is_tls)


def _member(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not a Sentinel; expected HOST or HOST:PORT, several with commas between")
    return host.strip("[]"), int(port)


class SentinelRefused(exceptions.AuthenticationError):
    """The Sentinels refused the password, or need one."""


class TokenRefused(exceptions.AuthenticationError):
    """The server refused a join token's secret, or has no such user."""


class _Sentinels(asyncio_sentinel.Sentinel):
    """Unlike redis-py's, distinguishes Sentinels that refuse a password from unreachable ones."""

    def __init__(self, addresses: Sequence[tuple[str, int]], settings: dict[str, Any]) -> None:
        cast("Any", super()).__init__(addresses, sentinel_kwargs=settings)
        self._refusals: dict[int, str] = {}
        for number, client in enumerate(cast("list[Any]", self.sentinels)):
            client.sentinel_masters = partial(self._ask, number, client.sentinel_masters)

    async def _ask(self, number: int, sentinel_masters: Callable[[], Awaitable[Any]]) -> Any:
        self._refusals.pop(number, None)
        try:
            return await sentinel_masters()
        except REFUSED as error:
            self._refusals[number] = str(error)
            raise

    async def discover_master(self, service_name: str) -> Any:
        """Return the master's address. Raises redis-py's MasterNotFoundError, or SentinelRefused when most
        Sentinels refuse, since the others would too."""
        try:
            return await cast("Any", super()).discover_master(service_name)
        except asyncio_sentinel.MasterNotFoundError as error:
            if 2 * len(self._refusals) > len(self.sentinels):
                raise SentinelRefused(next(iter(self._refusals.values()))) from error
            raise


class MasterPool(asyncio_sentinel.SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the current master. When all are in use, callers wait."""

    async def aclose(self) -> None:
        await super().aclose()  # pyright: ignore[reportUnknownMemberType]
        await cast("Any", self.sentinel_manager).aclose()


def master_pool(address: SentinelAddress, connection_class: type, settings: dict[str, Any]) -> MasterPool:
    """Return a pool of ``connection_class``, one of redis-py's Sentinel-managed classes."""
    own: dict[str, Any] = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S, **address.own}
    sentinels = _Sentinels(address.sentinels, own | {"retry": Retry(NoBackoff(), 0), "ssl": address.is_tls})
    return MasterPool(address.service, sentinels, connection_class=connection_class, **settings | address.node)
