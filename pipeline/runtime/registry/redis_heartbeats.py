"""Writes heartbeats to the registry in Redis, for the heartbeat thread."""

from __future__ import annotations

import asyncio

import msgspec
from redis.exceptions import ResponseError

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.runtime.liveness import UNLISTED_AFTER_S
from pipeline.runtime.registry.contract import FleetSummary, Heartbeat
from pipeline.runtime.registry.redis_keys import keys_of, mend, standing
from pipeline.runtime.registry.scripts import SCRIPTS
from protocol.ids import Incarnation, Role

_INDEX_EVERY = 16
"""After this many heartbeats, the index entries are written again in case they were lost."""
_KEEP_EVERY = 4
"""Every so many heartbeats, one is written to the append-only file and sent to replicas.

A restarted server, or a replica that becomes the master, has the mailboxes' times of these. With one every
eight seconds, none of a live worker is older than ``UNLISTED_AFTER_S``."""


class RedisHeartbeatWriter:
    """A blocking writer with its own event loop and connection, for one thread at a time."""

    def __init__(
        self, url: str, run: str, *, timeout_s: float = 2.0, unlisted_after_s: float = UNLISTED_AFTER_S
    ) -> None:
        self._unlisted_after_s = unlisted_after_s
        self._keys = keys_of(run)
        self._runner = asyncio.Runner()
        self._client = connect(url, timeout_s=timeout_s, patience_s=timeout_s)
        self._connection = PipelinedConnection(self._client)
        self._indexed: tuple[Incarnation, int, bool, int] | None = None
        """A worker's index entries, and the number of connects when they were written."""
        self._until_indexed = 0
        self._fleet = FleetSummary()

    @property
    def fleet(self) -> FleetSummary:
        return self._fleet

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when fenced.

        Raises LedgerUnavailable, after at most ``timeout_s``."""
        return self._runner.run(self.send(heartbeat))

    async def send(self, heartbeat: Heartbeat) -> bool:
        """Like ``beat``, on the caller's event loop."""
        who = heartbeat.who
        with ledger_faults("heartbeat"):
            place, reaches = standing(who.role, heartbeat.policy_version), heartbeat.reaches_scorers
            before = self._connection.num_connects
            is_known = self._until_indexed > 0 and (who, place, reaches, before) == self._indexed
            arguments = {
                "worker": who.worker,
                "epoch": who.epoch,
                "heartbeat": msgspec.json.encode(heartbeat),
                "standing": None if is_known else place,
                "reaches": reaches,
                "listens": who.role is not Role.GENERATOR,
                "kept": not is_known or self._until_indexed % _KEEP_EVERY == 0,
                "silent_after": self._unlisted_after_s,
            }
            try:
                counts = await SCRIPTS.run(self._connection, "beat", self._keys, arguments)
            except ResponseError as error:
                if "WRONGTYPE" not in str(error) or not await mend(self._connection, self._keys):
                    raise
                counts = await SCRIPTS.run(self._connection, "beat", self._keys, arguments)
        # after another connect, this may be another server, which lacks them
        self._indexed = who, place, reaches, before if is_known else self._connection.num_connects
        self._until_indexed = self._until_indexed - 1 if is_known else _INDEX_EVERY
        if not counts:
            return False
        self._fleet = FleetSummary(counts[0], counts[1], self._connection.num_connects, counts[2] / 1e6)
        return True

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._close())

    async def _close(self) -> None:
        await self._connection.aclose()
        await self._client.aclose()
