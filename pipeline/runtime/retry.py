"""Waits while the ledger is full, for calls that may be repeated.

Scorers and the learner free its memory. Only ``pipeline.ledger.redis.connection`` waits for a server that is
down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.runtime.clock import Clock
from protocol.errors import LedgerFull

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


async def retry_while_full(
    call: Callable[[], Awaitable[T]], *, clock: Clock, timeout_s: float, on_wait: Callable[[Exception], None]
) -> T:
    """Repeat ``call`` while the ledger is full; ``on_wait`` receives each failure before the pause.

    Raises:
        LedgerFull: The ledger was full for ``timeout_s``."""
    deadline = clock.monotonic() + timeout_s
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except LedgerFull as error:
            if clock.monotonic() + pause > deadline:
                raise
            on_wait(error)
        await clock.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
