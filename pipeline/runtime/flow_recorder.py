"""Writes a worker's flow records: a completion for each message, and states while some are open.

Inboxes and outboxes report to it. The records go to the worker's ring
(``pipeline.runtime.flow_ring``). States are recorded every 100 ms while a message is open, else
never. Without a ring all of it does nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pipeline.runtime.clock import Clock
from pipeline.runtime.flow_ring import Completion, FlowRingWriter, LinkSide, LinkState
from pipeline.runtime.notifications import LOOK_ANYWAY_S

STATES_EVERY_S = 0.1


class FlowRecorder:
    """One worker's side of its ring. The main loop alone uses it."""

    def __init__(self, clock: Clock, ring: FlowRingWriter | None = None) -> None:
        self._clock, self._ring = clock, ring
        self._sources: list[Callable[[float], Sequence[LinkState]]] = []
        self._worker: Callable[[float], LinkState | None] = lambda _: None
        self._opened = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether there is a ring."""
        return self._ring is not None

    def watch(self, states: Callable[[float], Sequence[LinkState]]) -> None:
        """Record ``states(now_s)``, the ends with open messages, while there are any."""
        self._sources.append(states)

    def watch_worker(self, state: Callable[[float], LinkState]) -> None:
        """Record the worker's own state beside theirs."""
        self._worker = state

    def opened(self) -> None:
        """Have states recorded from now on."""
        self._opened.set()

    def complete(self, done: Completion) -> None:
        """Record a message's end."""
        if self._ring is not None:
            self._ring.complete(done)

    async def run(self) -> None:
        """Record states until cancelled."""
        while self._ring is not None:
            await self._clock.wait(self._opened, LOOK_ANYWAY_S)
            self._opened.clear()
            while self.record(self._ring):
                await self._clock.sleep(STATES_EVERY_S)

    def record(self, ring: FlowRingWriter) -> bool:
        """Record the present states; return whether any message is open."""
        now_s = self._clock.monotonic()
        states = [state for source in self._sources for state in source(now_s)]
        for state in states:
            ring.state(state)
        if states and (worker := self._worker(now_s)) is not None:
            ring.state(worker)
        return bool(states)

    def close(self) -> None:
        """Write no more."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()


def state_of(
    now_s: float, link: str, end: LinkSide, counts: tuple[int, int, int], since_s: Sequence[float]
) -> LinkState | None:
    """Return the state of one end whose open messages have been there ``since_s``; None without
    any."""
    if not since_s:
        return None
    return LinkState(now_s, link, end, counts, len(since_s), max(0.0, now_s - min(since_s)), -1)
