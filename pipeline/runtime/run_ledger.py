"""A process's connections to its run's ledger: one server, or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.disk import disk_trouble

if TYPE_CHECKING:
    import redis.asyncio

    from pipeline.config.schema import RunConfig
    from pipeline.ledger.sharded.servers import LedgerServers

RunLedger: TypeAlias = "RedisLedger | LedgerServers"


def run_ledger(
    client: redis.asyncio.Redis, run: str, run_dir: Path, connect_to: Callable[[str], redis.asyncio.Redis]
) -> RunLedger:
    """Return a run's ledger over ``client``, and over the further servers of its address.

    ``connect_to`` returns a client of a URL; nothing is sent yet."""
    address = read_address(run_dir)
    if address is None or not address.shards:
        return RedisLedger(client, run)
    from pipeline.ledger.sharded.servers import ledger_servers

    clients = [client, *map(connect_to, address.shards)]
    return ledger_servers(clients, run, [address.url, *address.shards])


def connections_of(ledger: RunLedger) -> tuple[PipelinedConnection, ...]:
    """Return a ledger's connections, one for each server."""
    return (ledger.connection,) if isinstance(ledger, RedisLedger) else ledger.connections


def connect_worker(config: RunConfig, run_dir: Path, url: str, worker: str) -> redis.asyncio.Redis:
    """Return a client with the configured limits of an outage and of a full disk."""
    settings = config.ledger
    address = read_address(run_dir)
    folder = run_dir / "ledger"
    # The folder is absent on other hosts.
    is_seen = address is not None and address.is_embedded and folder.is_dir()
    return connect(
        url,
        patience_s=settings.outage_timeout_s,
        disk_patience_s=settings.disk_timeout_s,
        disk_trouble=(lambda: disk_trouble(folder, is_refused=False)) if is_seen else str,
        client_name=worker,
    )
