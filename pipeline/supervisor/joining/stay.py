"""A joined host that stays for its run: ``headrace fleet join --stay``.

After a run was stopped or has failed, the host waits for `headrace up --resume`, within a bound.
Then it joins again, by the manifest of that start. A run that has finished is not waited for. A
ledger that is away may come back within the bound."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.join_board import JoinBoard
from pipeline.runtime.registry.contract import RunState
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.joining.join import JoinRequest
from pipeline.supervisor.joining.joined_supervisor import JoinOutcome
from protocol.errors import LedgerUnavailable

_POLL_S: Final = 0.2
_ANSWER_S: Final = 2.0


async def join_and_stay(
    request: JoinRequest,
    join: Callable[[], Awaitable[JoinOutcome]],
    *,
    stay_s: float,
    stays: Callable[[JoinOutcome], None] = lambda _: None,
) -> JoinOutcome:
    """Join a run, and again each time that it is resumed within ``stay_s``.

    Args:
        request: Names ledger and run.
        join: Joins once, and returns when the run has ended.
        stay_s: Longest wait for a resume, in seconds; 0: none.
        stays: Called with the outcome before each wait.

    Returns the last join's outcome. Raises what ``join`` raises, and LedgerRefused."""
    while True:
        outcome = await join()
        if not outcome.may_resume or stay_s <= 0:
            return outcome
        stays(outcome)
        if not await _resumed(request, stay_s):
            return outcome


async def _resumed(request: JoinRequest, stay_s: float) -> bool:
    """Wait until the run is running again; return False when it has finished, or at the bound."""
    client = connect(request.ledger_url, timeout_s=_ANSWER_S, patience_s=_ANSWER_S)
    board, registry = JoinBoard(client, request.run), RedisRegistry(client, request.run)
    deadline = time.monotonic() + stay_s
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(LedgerUnavailable):
                status = await registry.run_status()
                if status.state is RunState.FINISHED:
                    return False
                if status.state is RunState.RUNNING and await board.manifest():
                    return True
            await asyncio.sleep(_POLL_S)
    finally:
        await registry.aclose()
        await board.aclose()
    return False
