"""A worker's connection to its run's ledger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.server.disk import disk_trouble

if TYPE_CHECKING:
    import redis.asyncio

    from pipeline.config.schema import RunConfig


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
