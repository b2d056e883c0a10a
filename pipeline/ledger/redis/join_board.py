"""How the run's host and joined hosts meet in the ledger: a manifest, and entries sent home.

Entries go through a stream of bounded length, so they may be lost; their writers keep a copy. All hosts
compare their clocks with the server's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.ledger.redis import keys
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults

if TYPE_CHECKING:
    import redis.asyncio

MAX_ENTRIES = 256
"""Entries on their way home; when there are more, the oldest are dropped."""
_CLOCK_READINGS = 3


class JoinBoard:
    """A run's manifest and the entries of joined hosts. Every call raises LedgerUnavailable without a server."""

    def __init__(self, client: redis.asyncio.Redis, run: str) -> None:
        self._client = client
        self._connection = PipelinedConnection(client)
        self._manifest, self._home = keys.manifest(run), keys.home(run)

    async def set_manifest(self, manifest: bytes) -> None:
        """Publish the manifest; empty means that a new one is being made."""
        with ledger_faults("manifest SET"):
            await self._connection.ask("SET", self._manifest, manifest)

    async def manifest(self) -> bytes:
        """Return the manifest; empty if there is none."""
        with ledger_faults("manifest GET"):
            return await self._connection.ask("GET", self._manifest) or b""

    async def send_home(self, entry: bytes) -> None:
        """Append an entry. Raises LedgerFull at the server's memory limit."""
        with ledger_faults("home XADD"):
            await self._connection.ask("XADD", self._home, "MAXLEN", MAX_ENTRIES, "*", "entry", entry)

    async def at_home(self, count: int) -> list[tuple[bytes, bytes]]:
        """Return up to ``count`` entries, oldest first, each with its id."""
        with ledger_faults("home XRANGE"):
            found = await self._connection.ask("XRANGE", self._home, "-", "+", "COUNT", count)
        return [(entry_id, fields[1]) for entry_id, fields in found]

    async def received(self, ids: Sequence[bytes]) -> None:
        """Delete entries that were saved in the run's folder."""
        with ledger_faults("home XDEL"):
            await self._connection.ask("XDEL", self._home, *ids)

    async def clock_difference_s(self) -> float:
        """Return the server's time minus this host's, from the fastest of a few answers."""
        readings: list[tuple[float, float]] = []
        for _ in range(_CLOCK_READINGS):
            asked_s = time.time()
            with ledger_faults("clock TIME"):
                seconds, microseconds = await self._connection.ask("TIME")
            answered_s = time.time()
            server_s = int(seconds) + int(microseconds) / 1e6
            readings.append((answered_s - asked_s, server_s - (asked_s + answered_s) / 2))
        return min(readings)[1]

    async def aclose(self) -> None:
        await self._connection.aclose()
        await self._client.aclose()
