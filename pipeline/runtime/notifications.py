"""Subscriptions to changes of the registry: a subscriber sleeps until a topic has changed.

    learner announces ─> registry.notifications returns ─> the topic's events are set
                      ─> each subscriber clears its own, and reads

An event means that the topic may have changed; the subscriber reads what did. A superfluous event does no
harm. One connection waits for all topics, up to a time limit or until it is lost, and then reads each topic's
position, so that a server that lost its last writes is noticed too. Heartbeats notice silent mailboxes, and a
different server behind a connection that does not seem lost. Every subscriber also reads after
``LOOK_ANYWAY_S``; if a thousand workers polled every two seconds, that would load the server more than their
heartbeats."""

from __future__ import annotations

import asyncio
from typing import Final

from pipeline.runtime.clock import Clock
from pipeline.runtime.registry.contract import FleetSummary, Registry, Topic
from protocol.errors import LedgerError

LOOK_ANYWAY_S: Final = 30.0
"""A subscriber reads after this time even without an event."""
_LISTEN_S: Final = 20.0
_AGAIN_S: Final = 1.0


class Notifications:
    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._fleet = FleetSummary(num_connects=1)
        self._events: dict[Topic, list[asyncio.Event]] = {topic: [] for topic in Topic}

    def subscribe(self, topic: Topic) -> asyncio.Event:
        """Return one subscriber's event, which is set at every change of ``topic``. Clear it before reading."""
        event = asyncio.Event()
        self._events[topic].append(event)
        return event

    async def watch(self) -> None:
        """Set events until cancelled. A server that is down sets none; subscribers notice that when they
        read."""
        seen = dict.fromkeys(Topic, "")
        while True:
            try:
                found = await self._registry.notifications(seen, timeout_s=_LISTEN_S)
            except LedgerError:
                await self._clock.sleep(_AGAIN_S)
                continue
            seen |= found
            for topic in found:
                self._notify(topic)

    def update_fleet(self, fleet: FleetSummary) -> None:
        """Record the answer to a heartbeat. Called on the loop."""
        before, self._fleet = self._fleet, fleet
        if fleet.num_silent != before.num_silent:
            self._notify(Topic.ENDPOINTS)
        if fleet.num_connects != before.num_connects:
            self._registry.look_again()

    def _notify(self, topic: Topic) -> None:
        for event in self._events[topic]:
            event.set()
