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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import redis

from pipeline.config.running import SupervisorSection
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.connection import PipelinedConnection
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.runtime import liveness
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
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.registry.redis_heartbeats import RedisHeartbeatWriter
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
        links = tuple(LinkReport(name=f"{self.who.worker}>reward-{n}", sent=12_345 + n) for n in range(2, 242, 30))
        if hasattr(self._state, "signs"):
            self._report(links)
        else:
            # an earlier tree
            self._state.links = links  # pyright: ignore[reportAttributeAccessIssue]
        self._state.policy_version = 1
        self._state.waiting_for(WaitingFor.COMPUTE, "")
        self._beats = RedisHeartbeatWriter(self.url, self.run)
        if role is not Role.GENERATOR:
            await self.open()

    def _report(self, links: tuple[LinkReport, ...]) -> None:
        """Have heartbeats with all that a working worker on a GPU reports."""
        from pipeline.runtime.gpus import GpuState
        from pipeline.runtime.host_watch import HostState

        state, gpu = self._state, GpuState(0.97, 71 << 30, 655.3)
        state.set_links((*links, LinkReport(name=f"{self.who.worker}>reward", produced=98_760, open=1)))
        state.signs.host = lambda: HostState(45, 1_234_567_890_123, 0.6543, gpu)
        state.work.served("sampling", seconds=12_345.678, size=24_000_000, pieces=123_456)
        state.signs.output_depth, state.held, state.signs.begun_s = 3, 8, _CLOCK.monotonic()

    async def open(self) -> None:
        """Set the address of a mailbox; a repeat is a change to its readers."""
        place = f"tcp://10.{self.number >> 8}.{self.number & 255}.1:{40_000 + int(time.time()) % 9_000}"
        await self.registry.set_endpoint(self.who, place, public_key="k" * 40)

    async def beat(self) -> float:
        """Write a heartbeat, on the loop of heartbeats; return the seconds until the next one."""
        self._state.progress()
        await _send(self._beats, self._state.heartbeat())
        if not hasattr(liveness, "heartbeat_wait_s"):
            # an earlier tree
            return 1.0
        fleet = self._beats.fleet
        every_s = liveness.heartbeat_every_s(fleet.num_workers, SupervisorSection().heartbeats_per_s)
        return liveness.heartbeat_wait_s(self.who.worker, fleet.at_s, every_s)

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


async def _send(beats: RedisHeartbeatWriter, heartbeat: Heartbeat) -> None:
    if hasattr(beats, "send"):
        await beats.send(heartbeat)
        return
    # An earlier tree: its writers have a loop each, so they wait for one another.
    await asyncio.to_thread(beats.beat, heartbeat)


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


async def keep_beating(beats: Sequence[Callable[[], Awaitable[float]]]) -> None:
    """Await each, evenly spread at first, and again after the seconds that it returned.

    Each worker waits for itself, as a process of its own does."""

    async def repeat(beat: Callable[[], Awaitable[float]], due: float) -> None:
        while True:
            await asyncio.sleep(due - time.monotonic())
            every_s = 1.0
            # as a worker's thread: the next one is tried a little later
            with contextlib.suppress(LedgerUnavailable, redis.RedisError):
                every_s = await beat()
            # what is late is not made up for
            due = time.monotonic() + every_s

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for place, beat in enumerate(beats):
            tasks.create_task(repeat(beat, began + place / len(beats)))


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
    beats = [worker.beat for worker in workers]
    # ends with the process
    threading.Thread(target=lambda: asyncio.run(keep_beating(beats)), daemon=True).start()
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
        pass


async def ping(url: str, number: int, seconds: float) -> None:
    """Send a PING a second over each of ``number`` connections."""
    clients = [connect(url, timeout_s=5.0) for _ in range(number)]

    async def beat(connection: PipelinedConnection) -> float:
        await connection.ask("PING")
        return 1.0

    connections = [PipelinedConnection(client) for client in clients]
    print("ready", flush=True)
    async with asyncio.timeout(seconds):
        await keep_beating([partial(beat, connection) for connection in connections])


if __name__ == "__main__":
    first, end, total = map(int, sys.argv[3:6])
    if sys.argv[7] == "pings":
        with contextlib.suppress(TimeoutError):
            asyncio.run(ping(sys.argv[1], end - first, float(sys.argv[6])))
        sys.exit()
    asyncio.run(main(sys.argv[1], sys.argv[2], first, end, total, float(sys.argv[6])))
