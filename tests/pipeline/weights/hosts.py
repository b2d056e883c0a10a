"""A learner and several hosts that fetch from it and from one another, in one process, over real
ZeroMQ with CURVE."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from pipeline.runtime.answering import answer_requests
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.host_fetch import HostFetch
from pipeline.weights.host_folder import HostFolder
from pipeline.weights.relay import PartialVersion, Relay
from pipeline.weights.store import StoredWeights, WeightsStore
from pipeline.weights.wire import Base, FetchCounts, WeightsSource
from protocol.channel import Requester
from protocol.messages import BASE_VERSION, Message, WeightsPart, WeightsRequest
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.pipeline.weights.versions import numbers, published, stepped

PART = 4096
LARGEST = 8000
Change = Callable[[WeightsRequest, WeightsPart], WeightsPart]


class Learner:
    """Serves a learner's store."""

    def __init__(self, folder: Path, part_digest: str) -> None:
        self.store = WeightsStore(folder, keep=2, max_part_bytes=LARGEST, part_digest=part_digest, part_bytes=PART)
        self.num_asked = 0
        self.num_bytes = 0

    def answer_now(self, request: Message) -> WeightsPart:
        part = self.store.answer(request)
        self.num_asked += 1
        self.num_bytes += part.data.size
        return part

    async def answer_later(self, request: Message) -> WeightsPart:
        raise AssertionError


class Between:
    """A requester whose answers are changed on their way."""

    def __init__(self, requester: Requester, change: Change) -> None:
        self._requester = requester
        self._change = change

    async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
        answer = await self._requester.request(message, timeout_s=timeout_s, unreached_s=unreached_s)
        assert isinstance(answer, WeightsPart) and isinstance(message, WeightsRequest)
        return self._change(message, answer)

    def close(self) -> None:
        self._requester.close()

    def unreached_s(self) -> float:
        return self._requester.unreached_s()


class Host:
    """A host that fetches and relays."""

    def __init__(self, world: World, name: str, **settings: Any) -> None:
        self.name = name
        self.transport = world.transport(name)
        self.responder = self.transport.responder("tcp://127.0.0.1:*")
        self.folder = HostFolder(world.folder / name, shared_memory=settings.pop("shared_memory", False))
        self.folder.lead()
        self.relay = Relay(RealClock())
        self.change: Change | None = None
        self.is_dead = False
        self.counts = FetchCounts()
        options = {"num_connections": 3, "timeout_s": 5.0} | settings
        self.fetcher = HostFetch(self.folder, self.relay, self._connect, RealClock(), **options)
        self.source = WeightsSource(name, self.responder.endpoint, self.transport.public_key)
        self._serving = world.tasks.create_task(
            answer_requests(self.responder, self.relay, RealClock(), structlog.get_logger())
        )

    def _connect(self, source: WeightsSource) -> Requester:
        requester = self.transport.requester(source.endpoint, server_key=source.public_key)
        return requester if self.change is None else Between(requester, self.change)

    async def fetch(self, wanted: WeightsAnnouncement, *sources: WeightsSource, base: Base | None = None) -> bytes:
        """The bytes that came; ``sources`` in order, the learner last."""
        self.counts = FetchCounts()
        return (await self.fetcher.fetch(wanted, base, sources, self.counts)).read_bytes()

    def holding(self, version: int) -> PartialVersion:
        """Return the parts of a version that this host serves."""
        holding = self.relay._holdings[version == BASE_VERSION]
        assert holding.wanted.policy_version == version
        return holding

    def die(self) -> None:
        """End at once, as a killed process does: connections break."""
        self.is_dead = True
        self._serving.cancel()
        self.transport.close()

    def close(self) -> None:
        self.die()
        self.fetcher.close()
        self.folder.close()


class World:
    def __init__(self, folder: Path, tasks: asyncio.TaskGroup, part_digest: str) -> None:
        self.folder = folder
        self.tasks = tasks
        self._keys = CurveKeys.load_or_create(folder / "keys")
        self._transports: list[ZmqTransport] = []
        self._hosts: list[Host] = []
        self.learner = Learner(folder / "published", part_digest)
        self._transport = self.transport("learner#1")
        self._serving = self._serve()
        self.patterns = numbers(0)

    def _serve(self) -> asyncio.Task[None]:
        self._responder = self._transport.responder("tcp://127.0.0.1:*")
        self.source = WeightsSource("the learner", self._responder.endpoint, self._transport.public_key)
        log = structlog.get_logger()
        return self.tasks.create_task(answer_requests(self._responder, self.learner, RealClock(), log))

    def restart(self) -> None:
        """Let the learner lose its connections and all requests, and serve again at a new endpoint, as workers do:
        libzmq frees the former one some time after it is closed."""
        self._serving.cancel()
        self._responder.close()
        self._serving = self._serve()

    def transport(self, name: str) -> ZmqTransport:
        made = ZmqTransport(name, high_water_mark=16, max_message_bytes=1 << 20, keys=self._keys)
        self._transports.append(made)
        return made

    def host(self, name: str = "host-0", **settings: Any) -> Host:
        self._hosts.append(Host(self, name, **settings))
        return self._hosts[-1]

    def publish(self, version: int, patterns: np.ndarray | None = None) -> StoredWeights:
        """The next version: the result of an optimiser's step on the last one."""
        self.patterns = stepped(self.patterns, version) if patterns is None else patterns
        return self.learner.store.publish(version, published(self.patterns))

    def announced(self, stored: StoredWeights) -> WeightsAnnouncement:
        return self.learner.store.announcement(stored, endpoint=self.source.endpoint)

    def close(self) -> None:
        for host in self._hosts:
            host.close()
        self._serving.cancel()
        for transport in self._transports:
            transport.close()


@asynccontextmanager
async def hosts(tmp_path: Path, *, part_digest: str = "xxh3-128") -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks, part_digest)
        try:
            yield world
        finally:
            world.close()


def as_base(stored: StoredWeights) -> Base:
    return Base(stored.policy_version, stored.digest, stored.segment.data.copy())
