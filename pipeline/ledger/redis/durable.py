"""Waits until the server's append-only file is on disk, usually about a second.

If the server cannot confirm it, the ledger counts that for ``status`` and ``audit``."""

from __future__ import annotations

from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.errors import ledger_faults
from pipeline.ledger.redis.scripts import SCRIPTS
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation

_STEP_MS = 2000
"""Duration of one wait; below every client's answer timeout."""
_MAX_STEPS = 30
_CANNOT = ("unknown command", "appendonly is disabled")


async def wait_durable(connection: PipelinedConnection, counters: str, who: Incarnation) -> bool:
    """Return True once all writes so far are flushed to disk, False if this server cannot confirm that.

    Raises Fenced, and LedgerUnavailable when no server answers or the disk takes over a minute."""
    with ledger_faults("make_durable"):
        for _ in range(_MAX_STEPS):
            # together on one connection: WAITAOF waits for that connection's last write
            asked = [_sync(counters, who), ("WAITAOF", 1, 0, _STEP_MS)]
            num_unflushed, flushed = await connection.ask_all(asked, raises=False)
            if isinstance(num_unflushed, Exception):
                raise num_unflushed
            if _cannot_say(flushed):
                await connection.ask(*_sync(counters, who, "unflushed"))
                return False
            if isinstance(flushed, Exception):
                raise flushed
            if flushed[0] >= 1:
                # the server can confirm again
                if num_unflushed:
                    await connection.ask(*_sync(counters, who, "flushed"))
                return True
    raise LedgerUnavailable(
        f"the ledger's append-only file was not flushed within {_MAX_STEPS * _STEP_MS // 1000} s: look at the server's disk"
    )


def _sync(counters: str, who: Incarnation, outcome: str = "") -> tuple[Any, ...]:
    sync = SCRIPTS.script("sync")
    given = {"given_now": None, "worker": who.worker, "epoch": who.epoch, "outcome": outcome}
    return ("EVAL", sync.text, *sync.words({"counters": counters}, given))


def _cannot_say(answer: object) -> bool:
    """Return whether the server has no append-only file, lacks the command, or forbids it to this user."""
    if isinstance(answer, NoPermissionError):
        return True
    return isinstance(answer, ResponseError) and any(text in str(answer) for text in _CANNOT)
