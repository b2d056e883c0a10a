"""A run's ledger over several servers.

A worker connects to a server when it first needs it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis.asyncio

from pipeline.ledger.redis.admin import RedisAdmin
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.inspection import RedisInspection
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.sharded.admin import ShardedAdmin
from pipeline.ledger.sharded.calls import together
from pipeline.ledger.sharded.inspection import ShardedInspection
from pipeline.ledger.sharded.ledger import ShardedLedger
from pipeline.ledger.types import LedgerSpec
from pipeline.ledger.url import without_credentials
from protocol.errors import LedgerError
from protocol.ids import Incarnation


class ServerShard(RedisLedger):
    """One server's part; its errors name the server."""

    def __init__(self, client: redis.asyncio.Redis, run: str, *, name: str) -> None:
        super().__init__(client, run)
        self.name, self.client = name, client

    async def open(self, spec: LedgerSpec) -> None:
        """Create or join the shard."""
        with _naming(self.name):
            await super().open(spec)

    async def _call(self, name: str, who: Incarnation | None, **arguments: object) -> Any:
        with _naming(self.name):
            return await super()._call(name, who, **arguments)

    async def _pipelined(self, doing: str, commands: Sequence[Any]) -> list[Any]:
        with _naming(self.name):
            return await super()._pipelined(doing, commands)


class LedgerServers(ShardedLedger):
    """``ShardedLedger`` over servers, with what workers and commands need of a server."""

    def __init__(self, servers: Sequence[ServerShard]) -> None:
        self._servers = tuple(servers)
        self._troubles = [""] * len(servers)
        raising = [server.raise_epoch for server in servers[1:]]
        super().__init__(servers, raise_epoch=raising, is_away=lambda index: bool(self._troubles[index]))
        self.on_trouble(lambda _: None)

    @property
    def admin(self) -> ShardedAdmin:
        """An operator's side of all servers."""
        return ShardedAdmin([RedisAdmin(server) for server in self._servers])

    @property
    def inspection(self) -> ShardedInspection:
        """Looks into all servers."""
        return ShardedInspection([RedisInspection(server) for server in self._servers])

    @property
    def names(self) -> tuple[str, ...]:
        """The servers' addresses, without passwords."""
        return tuple(server.name for server in self._servers)

    @property
    def further(self) -> tuple[tuple[str, redis.asyncio.Redis], ...]:
        """Address, without password, and client of each server beside the home."""
        return tuple((server.name, server.client) for server in self._servers[1:])

    @property
    def connections(self) -> tuple[PipelinedConnection, ...]:
        """The connection to each server."""
        return tuple(server.connection for server in self._servers)

    def on_trouble(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with why calls are repeated, and at which servers; with "" after it."""

        def told_by(index: int, name: str) -> Callable[[str], None]:
            def note(trouble: str) -> None:
                self._troubles[index] = f"ledger server {name}: {trouble}" if trouble else ""
                tell("; ".join(filter(None, self._troubles)))

            return note

        for index, server in enumerate(self._servers):
            server.on_trouble(told_by(index, server.name))

    async def check(self) -> None:
        """Ping every server. Raises LedgerUnavailable, or LedgerDiskFailed, of one."""
        await together(server.check() for server in self._servers)

    async def unwritten(self) -> str | None:
        """Return the folder of an append-only file whose last write failed, of any server."""
        found = await together(server.unwritten() for server in self._servers)
        return next(filter(None, found), None)

    async def fence(self, worker: str, epoch: int) -> None:
        """Make a worker's epoch known to the servers beside the registry's, as far as they answer.

        The others learn it from the worker's next incarnation; until then a lease runs out."""
        for server in self._servers[1:]:
            with suppress(LedgerError):
                await server.raise_epoch(worker, epoch)


def ledger_servers(clients: Sequence[redis.asyncio.Redis], run: str, urls: Sequence[str]) -> LedgerServers:
    """Return the ledger over these servers; closing it closes the clients."""
    pairs = zip(clients, urls, strict=True)
    return LedgerServers([ServerShard(client, run, name=without_credentials(url)) for client, url in pairs])


@contextmanager
def _naming(server: str) -> Generator[None]:
    """Name the server in the ledger's errors."""
    try:
        yield
    except LedgerError as error:
        raise type(error)(f"ledger server {server}: {error}") from error
