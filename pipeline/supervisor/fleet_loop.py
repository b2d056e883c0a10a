"""The loop of a supervisor, of a run's as of a joined host's: observe, decide, act, five times a
second.

    reap exits ──> turn ──> poll (every half second, and after an exit) ──> carry out the plan
                            read ledger and heartbeats, decide

The first SIGINT, SIGTERM, or SIGHUP of a closing terminal drains the fleet, and a second SIGINT or
SIGTERM ends it at once. Neither needs the ledger to answer."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Final

import structlog

from pipeline.runtime.process_setup import leave_terminals, obeying
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.pulse import Pulse

_TICK_S: Final = 0.2
_POLL_EVERY_S: Final = 0.5
"""Interval between reads of the ledger. Each reads all heartbeats, and silence is measured in
seconds."""
_CUT_EVERY_S: Final = 1.0

log = structlog.get_logger(__name__)


class FleetLoop:
    """Carries out one host's plan until it is down.

    Args:
        fleet: The host's workers.
        pulse: Touched at every turn.
        stopping: Log event of the first signal.
        on_stop: Called at every signal that counts."""

    def __init__(self, fleet: HostFleet, pulse: Pulse, *, stopping: str, on_stop: Callable[[], None]) -> None:
        self._fleet, self._pulse = fleet, pulse
        self._stopping, self._on_stop = stopping, on_stop
        self.num_signals = 0
        self.is_ready = False
        """Whether work can be done here, for probes."""
        self._next_poll_s = self._next_cut_s = 0.0

    def signals(self) -> AbstractContextManager[None]:
        """Handle signals within the block."""
        return obeying(self._on_signal)

    async def run(
        self,
        *,
        poll: Callable[[float], Awaitable[bool]],
        exited: Callable[[Exit, float], object],
        turn: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Turn until the fleet is to end and every process is gone.

        Args:
            poll: Reads the ledger and acts on it at a monotonic time; returns whether the fleet is to end.
            exited: Records an exit.
            turn: Called at every turn; does not block."""
        is_ending, plan = False, self._fleet.plan
        while True:
            now = time.monotonic()
            ended = self._fleet.processes.reap()
            for exit_ in ended:
                exited(exit_, now)
            turn(now)
            if now >= self._next_cut_s:
                self._next_cut_s = now + _CUT_EVERY_S
                await asyncio.to_thread(self._fleet.processes.bound_outputs)
            if ended or now >= self._next_poll_s:
                self._next_poll_s = now + _POLL_EVERY_S
                is_ending = await poll(now)
            if is_ending:
                self._fleet.executor.act(plan.stop(now))
            self._fleet.executor.act(plan.due(now))
            if is_ending and plan.is_down:
                self._pulse.mark_ended()
                return
            self._pulse.beat(now, is_ready=self.is_ready)
            await asyncio.sleep(_TICK_S)

    def _on_signal(self, number: signal.Signals, terminals: tuple[int, ...]) -> None:
        if number is signal.SIGHUP:
            leave_terminals(terminals)
            if self.num_signals:
                # shell and kernel both send it when a terminal closes, so a second one means nothing
                return
        self.num_signals += 1
        self._next_poll_s = 0.0
        self._on_stop()
        if self.num_signals == 1:
            log.warning(self._stopping, how="drains to a window boundary; a second Ctrl-C ends at once")
        else:
            self._fleet.processes.kill_all()
