"""A ledger in a Redis Cluster: every connection goes to the node that owns the run's slot.

A URL is ``redis+cluster://[user:password@]host[:port][,host[:port]...]/[?option=value&...]``, or
``rediss+cluster://`` for TLS. It names some of the nodes; the others are discovered. User, password and
options apply to every node. The default port is 6379.

All keys of a run have the same hash tag, hence one slot and one owner (``pipeline.ledger.redis.keys``).
Another node answers MOVED with the owner's address, and the connection is reopened there. When the owner
cannot be reached, connections go to the nodes of the URL in turn, until one names the replica that took over.
While a slot migrates (ASK, TRYAGAIN), calls are repeated.

A failover can lose the old owner's last writes (``pipeline.ledger.redis.sentinel``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio.connection import parse_url

SCHEMES: Final = ("redis+cluster://", "rediss+cluster://")
DEFAULT_PORT: Final = 6379
Place = tuple[str, int]


@dataclass(slots=True)
class ClusterNodes:
    """Decides which node the next connection goes to; one per connection pool."""

    seeds: tuple[Place, ...]
    """The nodes of the URL."""
    owner: Place | None = None
    """The owner of the run's slot, as named by the last MOVED."""
    turn: int = field(default=0)

    def next(self) -> Place:
        """Return the owner or, while it is unknown, the next seed."""
        return self.owner or self.seeds[self.turn % len(self.seeds)]

    def failed(self, place: Place) -> None:
        """Record that a node is unreachable or that its connection was lost."""
        if place == self.owner:
            self.owner = None
        elif place == self.next():
            self.turn += 1

    def redirected(self, error: exceptions.AskError, place: Place) -> None:
        """Record a node's answer that the slot is elsewhere. ASK is ignored, since it is about single keys."""
        if isinstance(error, exceptions.MovedError):
            # a node that does not know its own address leaves it out
            host: str = cast("Any", error).host
            self.owner = (host.strip("[]") or place[0], error.port)


def parse_cluster_url(url: str) -> tuple[ClusterNodes, dict[str, Any], bool]:
    """Return the nodes, redis-py's settings for a connection to each, and whether it uses TLS.

    Raises ValueError with the reason, without the password."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    user, at, place = place.rpartition("@")
    hosts, _, path = place.partition("/")
    if path not in ("", "0"):
        raise ValueError(f"its database is {path!r}; a cluster has only database 0")
    is_tls = scheme == "rediss+cluster"
    tail = f"?{query}" if query else ""
    settings: dict[str, Any] = dict(parse_url(f"{'rediss' if is_tls else 'redis'}://{user}{at}node/0{tail}"))
    for name in ("host", "port", "db", "connection_class"):
        settings.pop(name, None)
    return ClusterNodes(tuple(_place(host) for host in hosts.split(","))), settings, is_tls


def other_nodes(text: str) -> set[Place]:
    """Return the reachable nodes in the output of CLUSTER NODES, without the one that answered."""
    found: set[Place] = set()
    for line in text.splitlines():
        _, address, flags, *_ = line.split(" ")
        address, *more = address.split(",")
        ip, _, port = address.partition("@")[0].rpartition(":")
        host = more[0] if more and more[0] and "=" not in more[0] else ip
        if host and not {"myself", "fail", "fail?", "handshake", "noaddr"} & set(flags.split(",")):
            found.add((host, int(port)))
    return found


def _place(text: str) -> Place:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise ValueError(f"{text!r} is not a node; expected HOST or HOST:PORT, several with commas between")
    return host, port or DEFAULT_PORT
