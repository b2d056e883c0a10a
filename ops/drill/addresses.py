"""Replaces a mailbox's address by one of the drill's, as the worker registers its own.

Senders that know the mailbox's address read the new one as a change. Written in another way, the address would
reach new senders only, and the fault would never strike the others."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from ops.drill.fleet import RUN, DrillFleet
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis import keys
from pipeline.ledger.redis.client import connect
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import Fenced, LedgerUnavailable
from protocol.ids import Incarnation, Role


def mailbox_addresses(fleet: DrillFleet) -> dict[Incarnation, str]:
    """Return the addresses of the registered mailboxes, by the workers' current incarnations."""
    found = dict[Incarnation, str]()
    for name, blob in (fleet.ledger("HGETALL", keys.endpoints(RUN)) or {}).items():
        epoch = fleet.ledger("HGET", keys.epochs(RUN), name)
        # the drill itself writes junk
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            entry = msgspec.json.decode(blob)
            if epoch is not None:
                found[Incarnation(Role(entry["role"]), name.decode(), int(epoch))] = entry["endpoint"]
    return found


def put_address(fleet: DrillFleet, who: Incarnation, address: str, key: str | None = None) -> None:
    """Register an address as an incarnation's mailbox, by default with the mailbox's key. Does nothing if the
    worker has a successor, or the ledger does not answer."""
    blob = fleet.ledger("HGET", keys.endpoints(RUN), who.worker) if key is None else None
    public_key = key or (msgspec.json.decode(blob).get("public_key", "") if blob else "")
    with contextlib.suppress(Fenced, LedgerUnavailable):
        asyncio.run(_put(read_ledger_url(fleet.run_dir), who, address, public_key))


async def _put(url: str, who: Incarnation, address: str, public_key: str) -> None:
    registry = RedisRegistry(connect(url), RUN)
    try:
        await registry.set_endpoint(who, address, public_key=public_key)
    finally:
        await registry.aclose()
