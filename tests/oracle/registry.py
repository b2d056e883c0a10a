"""The registry in memory: the oracle that the registry in Redis is compared with, and the registry of
unit tests. ``pipeline.runtime.registry.contract`` documents its methods."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pipeline.runtime.clock import Clock, RealClock
from pipeline.runtime.liveness import UNLISTED_AFTER_S
from pipeline.runtime.registry.contract import (
    MAX_FAILURES,
    MAX_REACHING,
    FailureReport,
    Fleet,
    FleetSummary,
    Heartbeat,
    RelayAnnouncement,
    RelayPlace,
    RunState,
    RunStatus,
    Topic,
    WeightsAnnouncement,
    check_grows,
    check_newest,
    is_wanted,
)
from pipeline.runtime.registry.settings_change import SettingsChange
from protocol.ids import Incarnation, Role

_NO_NEWS = "0 "
"""The cursor before the first news."""


@dataclass(slots=True)
class _Worker:
    epoch: int = 0
    role: Role | None = None
    endpoint: tuple[str, str] | None = None
    heartbeat: Heartbeat | None = None
    seen_s: float = float("-inf")
    """By the monotonic clock."""

    def forget(self) -> None:
        self.role = self.endpoint = self.heartbeat = None
        self.seen_s = float("-inf")


@dataclass(slots=True)
class MemoryRegistry:
    """A Registry in plain dictionaries."""

    clock: Clock = field(default_factory=RealClock)
    unlisted_after_s: float = UNLISTED_AFTER_S
    _workers: dict[str, _Worker] = field(default_factory=dict[str, _Worker])
    _fleet: Fleet | None = None
    _settings_changes: list[SettingsChange] = field(default_factory=list[SettingsChange])
    _weights: WeightsAnnouncement | None = None
    _relays: dict[str, tuple[int, RelayAnnouncement]] = field(default_factory=dict[str, tuple[int, RelayAnnouncement]])
    """Worker -> epoch and announcement, in the order in which they came."""
    _failures: list[tuple[float, FailureReport]] = field(default_factory=list[tuple[float, FailureReport]])
    """Times by the monotonic clock, and failures, the newest first."""
    _status: RunStatus = field(default_factory=lambda: RunStatus(RunState.STARTING))
    _notifications: Counter[Topic] = field(default_factory=Counter[Topic])
    _rung: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Return nothing: values are kept as they are."""
        return {}

    async def register(self, role: Role, worker: str) -> Incarnation:
        """Return a new incarnation with the next epoch."""
        epoch = await self.fence(worker)
        self._workers[worker].seen_s = self.clock.monotonic()
        return Incarnation(role=role, worker=worker, epoch=epoch)

    async def fence(self, worker: str) -> int:
        """Fence the present incarnation; return the new epoch."""
        known = self._workers.setdefault(worker, _Worker())
        self._forget(known)
        known.epoch += 1
        return known.epoch

    async def epoch(self, worker: str) -> int:
        """Return the newest epoch; 0 for an unknown worker."""
        return self._workers[worker].epoch if worker in self._workers else 0

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        """Set a mailbox's address. Raises Fenced."""
        known = self._newest(who)
        known.role, known.endpoint = who.role, (endpoint, public_key)
        self._changed(Topic.ENDPOINTS)

    async def endpoints(self, role: Role, *, silent: bool = False) -> dict[str, tuple[str, str]]:
        """Return the endpoints of a role's recently live workers; with ``silent`` all of them."""
        since = -math.inf if silent else self.clock.monotonic() - self.unlisted_after_s
        return {
            name: known.endpoint
            for name, known in self._workers.items()
            if known.role is role and known.endpoint is not None and known.seen_s >= since
        }

    async def depart(self, who: Incarnation, failure: FailureReport | None = None) -> None:
        """Remove endpoint and heartbeat, unless a newer incarnation exists; keep a failure."""
        known = self._workers.get(who.worker)
        if known is not None and known.epoch == who.epoch:
            self._forget(known)
            if failure is not None:
                self._failures = [(self.clock.monotonic(), failure), *self._failures][:MAX_FAILURES]

    async def failures(self) -> list[FailureReport]:
        """Return the newest failures, the newest first."""
        now_s = self.clock.monotonic()
        return [msgspec.structs.replace(failure, ago_s=now_s - at_s) for at_s, failure in self._failures]

    async def heartbeats(self, role: Role | None = None, *, below_version: int | None = None) -> list[Heartbeat]:
        """Return the last heartbeats, by name."""
        now_s = self.clock.monotonic()
        found = [
            msgspec.structs.replace(known.heartbeat, silent_s=now_s - known.seen_s)
            for _, known in sorted(self._workers.items())
            if known.heartbeat is not None
        ]
        return [beat for beat in found if is_wanted(beat, role, below_version)]

    async def heartbeats_of(self, workers: Collection[str]) -> list[Heartbeat]:
        """Return the last heartbeats of these workers, by name."""
        return [beat for beat in await self.heartbeats() if beat.who.worker in workers]

    async def reaching_generators(self) -> dict[str, float]:
        """Return some that reach scorers, and the seconds since their last heartbeats."""
        found = [beat for beat in await self.heartbeats(Role.GENERATOR) if beat.reaches_scorers]
        return {beat.who.worker: beat.silent_s for beat in found[:MAX_REACHING]}

    async def set_fleet(self, fleet: Fleet) -> None:
        """Set the desired fleet."""
        self._fleet = fleet
        self._changed(Topic.RUN)

    async def replace_fleet(self, present: Fleet | None, wanted: Fleet) -> bool:
        """Set the desired fleet if it is still ``present``; None: if none is set."""
        if self._fleet != present:
            return False
        self._fleet = wanted
        self._changed(Topic.RUN)
        return True

    async def fleet(self) -> Fleet | None:
        """Return the desired fleet."""
        return self._fleet

    async def add_settings_change(self, change: SettingsChange) -> bool:
        """Append a change of the settings, if it is the next one."""
        if change.number != len(self._settings_changes) + 1:
            return False
        self._settings_changes.append(change)
        self._changed(Topic.RUN)
        return True

    async def settings_changes(self) -> list[SettingsChange]:
        """Return all changes of the settings."""
        return list(self._settings_changes)

    async def last_settings_change(self) -> SettingsChange | None:
        """Return the last change of the settings."""
        return self._settings_changes[-1] if self._settings_changes else None

    async def announce_weights(self, who: Incarnation, weights: WeightsAnnouncement) -> None:
        """Publish a version; a repeat changes nothing. Raises ValueError and Fenced."""
        self._newest(who)
        if weights == self._weights:
            return
        check_grows(weights, self._weights.policy_version if self._weights else -1)
        self._weights = weights
        self._changed(Topic.WEIGHTS)

    async def weights(self) -> WeightsAnnouncement | None:
        """Return the newest published version."""
        return self._weights

    async def announce_relay(self, who: Incarnation, relay: RelayAnnouncement) -> RelayPlace:
        """Publish a relay; return its place. Raises Fenced."""
        self._newest(who)
        self._relays[who.worker] = who.epoch, relay
        return RelayPlace(list(self._relays).index(who.worker), len(self._relays))

    async def relays(self, who: Incarnation, positions: Sequence[int]) -> list[RelayAnnouncement]:
        """Return the live relays among these places; forget the others."""
        since = self.clock.monotonic() - self.unlisted_after_s
        order = list(self._relays)
        if who.worker in order:
            del order[order.index(who.worker) :]
        found: list[RelayAnnouncement] = []
        for worker in [order[place] for place in positions if 0 <= place < len(order)]:
            epoch, relay = self._relays[worker]
            known = self._workers[worker]
            if known.epoch == epoch and known.seen_s >= since:
                found.append(relay)
            else:
                del self._relays[worker]
        return found

    async def check_entries(self) -> Mapping[str, str]:
        """Return ``unreadable``."""
        return self.unreadable

    async def set_run_status(self, status: RunStatus) -> None:
        """Set the run's state."""
        self._status = status
        self._changed(Topic.RUN)

    async def replace_run_status(self, present: RunStatus, wanted: RunStatus) -> bool:
        """Set the run's state if it is still ``present``."""
        if self._status != present:
            return False
        await self.set_run_status(wanted)
        return True

    async def run_status(self) -> RunStatus:
        """Return the run's state."""
        return self._status

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        """Wait for changes, at most ``timeout_s``."""
        deadline = self.clock.monotonic() + timeout_s
        while True:
            cursors = {topic: self._cursor(topic) for topic in seen}
            found = {topic: cursor for topic, cursor in cursors.items() if cursor not in (seen[topic], _NO_NEWS)}
            left_s = deadline - self.clock.monotonic()
            if found or left_s <= 0.0:
                return found
            self._rung.clear()
            await self.clock.wait(self._rung, left_s)

    def look_again(self) -> None:
        """Do nothing: there is no other server."""

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def writer(self) -> MemoryHeartbeatWriter:
        """Return the blocking side."""
        return MemoryHeartbeatWriter(self)

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when the incarnation is fenced."""
        known = self._workers.get(heartbeat.who.worker)
        if known is None or known.epoch != heartbeat.who.epoch:
            return False
        known.heartbeat = msgspec.structs.replace(heartbeat, clock_ahead_s=heartbeat.at_s - self.clock.time())
        known.seen_s = self.clock.monotonic()
        return True

    def glance(self) -> FleetSummary:
        """Return the fleet's numbers."""
        num_workers = sum(known.seen_s > float("-inf") for known in self._workers.values())
        return FleetSummary(num_workers, len(self._silent()))

    def _silent(self) -> list[str]:
        since = self.clock.monotonic() - self.unlisted_after_s
        mailboxes = sorted(self._workers.items())
        return [name for name, known in mailboxes if known.endpoint is not None and known.seen_s < since]

    def _cursor(self, topic: Topic) -> str:
        silent = self._silent() if topic is Topic.ENDPOINTS else []
        return f"{self._notifications[topic]} {','.join(silent)}"

    def _changed(self, topic: Topic) -> None:
        self._notifications[topic] += 1
        self._rung.set()

    def _forget(self, worker: _Worker) -> None:
        had_endpoint = worker.endpoint is not None
        worker.forget()
        if had_endpoint:
            self._changed(Topic.ENDPOINTS)

    def _newest(self, who: Incarnation) -> _Worker:
        known = self._workers.get(who.worker, _Worker())
        check_newest(who, known.epoch)
        return known


@dataclass(frozen=True, slots=True)
class MemoryHeartbeatWriter:
    """The blocking side of a MemoryRegistry."""

    registry: MemoryRegistry

    @property
    def fleet(self) -> FleetSummary:
        """The fleet now."""
        return self.registry.glance()

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when the incarnation is fenced."""
        return self.registry.beat(heartbeat)

    def close(self) -> None:
        """Do nothing: there is no connection."""
