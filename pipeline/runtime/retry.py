"""Riding out a ledger that is at its memory limit, for calls that may be repeated.

*Consumes* an idempotent call. *Produces* its result. *Waits for* the ledger to shrink (scorers and
the learner free memory), with growing pauses, until a deadline: then the last error is raised as it
is.

A server that is away is not ridden out here: ``pipeline.ledger.redis.connection`` asks again, and
nothing above it does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.runtime.clock import Clock
from protocol.errors import LedgerFull

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


async def ride_out(
    call: Callable[[], Awaitable[T]], *, clock: Clock, timeout_s: float, on_wait: Callable[[Exception], None]
) -> T:
    """Repeat ``call`` while the ledger is full.

    ``on_wait`` hears of every failure before the pause, so that the worker can say what it waits
    for.

    Raises:
        LedgerFull: nothing changed for ``timeout_s``.
    """
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
