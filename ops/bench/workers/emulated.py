"""One process of many emulated workers, of this source tree or of another.

    python ops/bench/workers/emulated.py URL RUN FIRST END TOTAL SECONDS KIND

*Consumes* a ledger server's TCP address. *Produces* what the workers from FIRST to END send there,
and ``ready`` on stdout once all have registered. *Waits for* the server, and for SECONDS to pass.

Each worker has the connections of a worker's process: one for calls, one that waits for news, one
for heartbeats. It makes the calls that such a process makes without work: ``_watch_run`` of
``pipeline.runtime.worker_process``, ``discover`` of a ``RoleSender`` for each scoring role, and the
look of a ``WeightReceiver``. The learner publishes a version every ten seconds, after a look for
laggards, and looks once a second for a refused one. One scorer's mailbox moves every ten seconds.
The first process has the supervisor's reads, too.

Of the KIND ``pings`` a worker has one connection and sends a PING a second: the floor, which every
sign of life costs. Other KINDs are names of trees.

The script is run by its path, so that ``PYTHONPATH`` decides whose ``pipeline`` it measures."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.runtime.clock import RealClock
from pipeline.runtime.notifications import LOOK_ANYWAY_S, Notifications
from pipeline.runtime.registry.contract import (
    Heartbeat,
    LinkReport,
    Registry,
    Topic,
    WaitingFor,
    WeightsAnnouncement,
)
from pipeline.runtime.registry.redis import RedisHeartbeatWriter, RedisRegistry
from pipeline.runtime.worker_state import WorkerState
from protocol.errors import LedgerUnavailable
from protocol.ids import Incarnation, Role

_LOOK_S = LOOK_ANYWAY_S if LOOK_ANYWAY_S > 2.0 else 1.0
"""A weight receiver's limit without an event; in earlier trees ``weights.poll_s``."""
_EVENT_S = 10.0
_CLOCK = RealClock()
_MAX_STARTING = 32
_COUNTERS = (
    *("sampled_tokens", "chunks", "live", "decode_s", "weight_swaps", "weights_pause_s", "weights_bytes"),
    *("rejected_version", "stale_swaps", "turns", "leases", "refusals", "published_bytes", "resumed"),
)


def role_of(number: int) -> Role:
    """Return a worker's role: of 1,000 one learner, 34 reference and 67 reward workers."""
    if number == 0:
        return Role.LEARNER
    return {1: Role.REFERENCE, 2: Role.REWARD, 17: Role.REWARD}.get(number % 30, Role.GENERATOR)


@dataclass
class Worker:
    """One emulated worker."""

    url: str
    run: str
    number: int
    _beats: RedisHeartbeatWriter = field(init=False)
    _state: WorkerState = field(init=False)

    async def start(self) -> None:
        """Register, and open a scorer's mailbox."""
        self.registry = RedisRegistry(connect(self.url, timeout_s=30.0, patience_s=120.0), self.run)
        role = role_of(self.number)
        self.who: Incarnation = await self.registry.register(role, f"{role}-{self.number}")
        self._state = WorkerState(self.who, _CLOCK)
        self._state.counters.update(dict.fromkeys(_COUNTERS, 1000000.0 + self.number))
        self._state.links = tuple(
            LinkReport(name=f"{self.who.worker}>reward-{n}", sent=12_345 + n) for n in range(2, 242, 30)
        )
        self._state.policy_version = 1
        self._state.waiting_for(WaitingFor.COMPUTE, "")
        self._beats = RedisHeartbeatWriter(self.url, self.run)
        if role is not Role.GENERATOR:
            await self.open()

    async def open(self) -> None:
        """Set the address of a mailbox; a repeat is a change to its readers."""
        place = f"tcp://10.{self.number >> 8}.{self.number & 255}.1:{40_000 + int(time.time()) % 9_000}"
        await self.registry.set_endpoint(self.who, place, public_key="k" * 40)

    def beat(self) -> None:
        """Write a heartbeat, on the thread of heartbeats."""
        self._state.progress()
        self._beats.beat(self._state.heartbeat())

    async def live(self, tasks: asyncio.TaskGroup) -> None:
        """Start what a worker's process does beside its work."""
        notifications = Notifications(self.registry, _CLOCK)
        tasks.create_task(notifications.watch())
        tasks.create_task(self._watch_run(notifications.subscribe(Topic.RUN)))
        if self.who.role is Role.GENERATOR:
            for role in (Role.REWARD, Role.REFERENCE):
                tasks.create_task(self._discover(role, notifications.subscribe(Topic.ENDPOINTS)))
            tasks.create_task(self._look(notifications.subscribe(Topic.WEIGHTS)))
        elif self.who.role is Role.LEARNER:
            tasks.create_task(self._publish())
        elif self.number == 2:
            tasks.create_task(self._move())

    async def _watch_run(self, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            await self.registry.run_status()
            await _CLOCK.wait(changed, LOOK_ANYWAY_S)

    async def _discover(self, role: Role, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            await self.registry.endpoints(role)
            await _CLOCK.wait(changed, LOOK_ANYWAY_S)

    async def _look(self, announced: asyncio.Event) -> None:
        while True:
            announced.clear()
            newest = await self.registry.weights()
            if newest is not None and newest.policy_version > self._state.policy_version:
                self._state.policy_version = newest.policy_version
            await _CLOCK.wait(announced, _LOOK_S)

    async def _publish(self) -> None:
        version, next_s = 1, _CLOCK.monotonic() + _EVENT_S
        while True:
            await _CLOCK.sleep(1.0)
            await laggards(self.registry, version)
            if _CLOCK.monotonic() >= next_s:
                version, next_s = version + 1, next_s + _EVENT_S
                file = WeightsAnnouncement(
                    policy_version=version, digest="xxh3-128:0", path="/w", num_bytes=1, host="h", endpoint="tcp://h:1"
                )
                await self.registry.announce_weights(self.who, file)

    async def _move(self) -> None:
        while True:
            await _CLOCK.sleep(_EVENT_S)
            await self.open()


async def laggards(registry: Registry, version: int) -> list[Heartbeat]:
    """Read generators below a version; from trees without an index, all heartbeats."""
    if "below_version" in inspect.signature(registry.heartbeats).parameters:
        return await registry.heartbeats(Role.GENERATOR, below_version=version)
    return await registry.heartbeats()


async def supervise(url: str, run: str) -> None:
    """Read what a supervisor reads: ``Supervisor._look``, twice a second."""
    client = connect(url, timeout_s=30.0, patience_s=120.0)
    registry, ledger = RedisRegistry(client, run), RedisLedger(client, run)
    while True:
        for _ in range(2):
            await ledger.check()
            await registry.heartbeats()
            await registry.run_status()
            await registry.fleet()
            await _CLOCK.sleep(0.5)
        await ledger.queues()


def keep_beating(beats: Sequence[Callable[[], object]], ended: threading.Event) -> None:
    """Call each once a second, evenly spread; what is late is not made up for."""
    while not ended.is_set():
        began = time.monotonic()
        for place, beat in enumerate(beats):
            left_s = began + place / len(beats) - time.monotonic()
            if left_s > 0:
                ended.wait(left_s)
            # as a worker's thread: the next one is tried in a second
            with contextlib.suppress(LedgerUnavailable, redis.RedisError):
                beat()
        ended.wait(max(0.0, began + 1.0 - time.monotonic()))


async def main(url: str, run: str, first: int, end: int, total: int, seconds: float) -> None:
    """Live as the workers from ``first`` to ``end`` of ``total``."""
    workers = [Worker(url, run, number) for number in range(first, end)]
    gate = asyncio.Semaphore(_MAX_STARTING)

    async def start(worker: Worker) -> None:
        async with gate:
            await worker.start()

    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(start(worker))
    ended = threading.Event()
    beating = threading.Thread(target=keep_beating, args=([worker.beat for worker in workers], ended), daemon=True)
    beating.start()
    print("ready", flush=True)
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for place, worker in enumerate(workers):
                # as processes that began one after the other
                await asyncio.sleep(2.0 / total if place % 2 else 0.0)
                await worker.live(tasks)
            if first == 0:
                tasks.create_task(supervise(url, run))
    except TimeoutError:
        ended.set()
    beating.join(5.0)


def ping(url: str, number: int, seconds: float) -> None:
    """Send a PING a second over each of ``number`` connections."""
    clients = [redis.Redis.from_url(url, socket_timeout=5.0) for _ in range(number)]
    ended = threading.Event()
    pinging = threading.Thread(target=keep_beating, args=([client.ping for client in clients], ended), daemon=True)
    pinging.start()
    print("ready", flush=True)
    pinging.join(seconds)
    ended.set()


if __name__ == "__main__":
    first, end, total = map(int, sys.argv[3:6])
    if sys.argv[7] == "pings":
        ping(sys.argv[1], end - first, float(sys.argv[6]))
        sys.exit()
    asyncio.run(main(sys.argv[1], sys.argv[2], first, end, total, float(sys.argv[6])))
