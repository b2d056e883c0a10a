"""Waiting until the server's append-only file is on its disk.

*Consumes* a client. *Produces* certainty, or the word that there is none. *Waits for* the server's flush, a second as a rule.
"""

from __future__ import annotations

from typing import Any, cast

import redis.asyncio
from redis.exceptions import ResponseError

from pipeline.replay.faults import ledger_faults
from pipeline.replay.scripts import load
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation

_STEP_MS = 2000
"""Of one wait; below every client's patience for an answer."""
_MAX_STEPS = 30
_CANNOT = ("unknown command", "appendonly is disabled")


async def wait_durable(client: redis.asyncio.Redis, counters: str, who: Incarnation) -> bool:
    """Return once all writes so far are flushed; False when this server cannot say.

    Raises:
        Fenced: ``who`` is not the newest incarnation of its worker.
        LedgerUnavailable: No server answers, or its disk does not take the file for a minute.
    """
    with ledger_faults("make_durable"):
        for _ in range(_MAX_STEPS):
            async with client.pipeline(transaction=False) as pipe:
                # on one connection: WAITAOF waits for that connection's last write
                cast("Any", pipe).eval(load("sync"), 1, counters, "", who.worker, who.epoch)
                cast("Any", pipe).execute_command("WAITAOF", 1, 0, _STEP_MS)
                written, flushed = await pipe.execute(raise_on_error=False)
            if isinstance(written, Exception):
                raise written
            if isinstance(flushed, ResponseError) and any(text in str(flushed) for text in _CANNOT):
                return False
            if isinstance(flushed, Exception):
                raise flushed
            if flushed[0] >= 1:
                return True
    raise LedgerUnavailable(
        f"the ledger's append-only file was not flushed within {_MAX_STEPS * _STEP_MS // 1000} s: look at the server's disk"
    )
