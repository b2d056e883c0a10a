"""Claims about weights that cross hosts: over real ZeroMQ with CURVE, in bounded parts, as deltas,
under faults."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.store import StoredWeights, WeightsStore, fetched_folder
from pipeline.weights.wire import Base, FetchCounts, FetchFolder, WireFetch
from protocol.channel import Requester
from protocol.errors import WeightsDamaged, WeightsRejected
from protocol.messages import BASE_VERSION, Message, WeightsPart
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.pipeline.weights.versions import numbers, published, stepped

PART = 5000
LARGEST = 8000


class World:
    """A learner's shelf with its endpoint, and another worker that fetches."""

    def __init__(self, tmp_path: Path) -> None:
        self.store = WeightsStore(tmp_path / "published", keep=2, max_part_bytes=LARGEST)
        self.folder = FetchFolder(tmp_path, "generator-0", shared_memory=False)
        self.patterns = numbers(0)
        self.endpoint = ""
        self.requester: Any = None
        self.received = FetchCounts()

    def publish(self, version: int, patterns: np.ndarray | None = None) -> StoredWeights:
        """The next version: the result of an optimiser's step on the last one."""
        self.patterns = stepped(self.patterns, version) if patterns is None else patterns
        return self.store.publish(version, published(self.patterns))

    def announced(self, stored: StoredWeights) -> WeightsAnnouncement:
        return self.store.announcement(stored, endpoint=self.endpoint)

    async def fetch(
        self, announced: WeightsAnnouncement, base: Base | None = None, requester: Requester | None = None
    ) -> bytes:
        fetch = WireFetch(announced, requester or self.requester, max_part_bytes=PART, timeout_s=5.0)
        self.received = fetch.received
        return (await fetch.fetch(self.folder, base)).read_bytes()


@asynccontextmanager
async def over_tcp(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    keys = CurveKeys.load_or_create(tmp_path / "keys")
    limits = {"high_water_mark": 4, "max_message_bytes": 1 << 20, "keys": keys}
    learner, generator = ZmqTransport("learner#1", **limits), ZmqTransport("generator-0#1", **limits)
    responder = learner.responder("tcp://127.0.0.1:*")
    world.endpoint = responder.endpoint
    world.requester = generator.requester(responder.endpoint, server_key=learner.public_key)

    async def answer(message: Message) -> Message:
        return await asyncio.to_thread(world.store.answer, message)

    async def serve() -> None:
        while True:
            await responder.serve_one(answer, timeout_s=5.0)

    try:
        async with asyncio.TaskGroup() as tasks:
            server = tasks.create_task(serve())
            yield world
            server.cancel()
    finally:
        learner.close()
        generator.close()
        world.folder.close()


def as_base(stored: StoredWeights) -> Base:
    return Base(stored.policy_version, stored.digest, stored.segment.data.copy())


class Between:
    """Stands before a requester and does something at every answer."""

    def __init__(self, requester: Requester, change: Callable[[int, WeightsPart], WeightsPart]) -> None:
        self._requester = requester
        self._change = change
        self.num_requests = 0

    async def request(self, message: Message, *, timeout_s: float) -> Message:
        answer = await self._requester.request(message, timeout_s=timeout_s)
        self.num_requests += 1
        assert isinstance(answer, WeightsPart)
        return self._change(self.num_requests, answer)

    def close(self) -> None:
        self._requester.close()

    def unreached_s(self) -> float:
        return self._requester.unreached_s()


async def test_a_whole_version_comes_in_bounded_parts_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:
        stored = world.publish(3)
        assert await world.fetch(world.announced(stored)) == stored.path.read_bytes()
        assert world.received == FetchCounts(num_bytes=stored.num_bytes)
        folder = fetched_folder(tmp_path, shared_memory=False)
        assert folder.stat().st_mode & 0o777 == 0o700


async def test_the_base_of_adapters_comes_like_a_version_and_a_second_one_takes_its_place(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:
        for seed in (1, 2):
            stored = world.publish(BASE_VERSION, numbers(seed))
            assert await world.fetch(world.announced(stored)) == stored.path.read_bytes()
            assert world.received == FetchCounts(num_bytes=stored.num_bytes)
        kept = fetched_folder(tmp_path, shared_memory=False) / "generator-0"
        assert [path.name for path in kept.iterdir()] == ["base.safetensors"]


async def test_versions_follow_one_another_as_deltas_that_are_a_fraction_of_them(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:
        base = as_base(world.publish(1))
        for version in range(2, 7):
            stored = world.publish(version)
            assert await world.fetch(world.announced(stored), base) == stored.path.read_bytes()
            assert world.received.num_deltas == 1
            assert world.received.num_refreshes == 0
            assert world.received.num_bytes < stored.num_bytes / 8
            base = as_base(stored)
        kept = list((fetched_folder(tmp_path, shared_memory=False) / "generator-0").iterdir())
        assert len(kept) == 2, "the newest version, and a file to fill next"


async def test_after_a_gap_the_whole_version_comes(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:
        base = as_base(world.publish(1))
        world.publish(2)
        # and the learner forgets the first
        stored = world.publish(3)
        assert await world.fetch(world.announced(stored), base) == stored.path.read_bytes()
        assert world.received == FetchCounts(num_bytes=stored.num_bytes)


async def test_a_base_that_was_damaged_shows_in_the_digest_and_the_whole_version_comes(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:
        base = as_base(world.publish(1))
        base.data[-1] ^= 64
        stored = world.publish(2)
        assert await world.fetch(world.announced(stored), base) == stored.path.read_bytes()
        assert (world.received.num_deltas, world.received.num_refreshes) == (1, 1)


async def test_a_delta_from_another_version_of_that_number_is_refused_for_the_whole(
    tmp_path: Path,
) -> None:
    async with over_tcp(tmp_path) as world:
        base = as_base(world.publish(1))
        stored = world.publish(2)
        other = Base(base.policy_version, "xxh3-128:other", base.data)
        assert await world.fetch(world.announced(stored), other) == stored.path.read_bytes()
        assert world.received.num_refreshes == 1


async def test_a_delta_whose_bytes_are_damaged_costs_a_refresh_and_nothing_else(tmp_path: Path) -> None:
    def damage(number: int, part: WeightsPart) -> WeightsPart:
        if part.base < 0 or number != 2:
            return part
        data = part.data.copy()
        data[: data.size // 2] ^= 255
        return msgspec.structs.replace(part, data=data)

    async with over_tcp(tmp_path) as world:
        base = as_base(world.publish(1))
        stored = world.publish(2)
        fetched = await world.fetch(world.announced(stored), base, Between(world.requester, damage))
        assert fetched == stored.path.read_bytes()
        assert world.received.num_refreshes == 1


async def test_a_whole_version_of_a_wrong_digest_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:
        stored = world.publish(3)
        # where it lies, after it was digested
        stored.segment.data[-1] ^= 1
        with pytest.raises(WeightsDamaged, match=stored.digest):
            await world.fetch(world.announced(stored))
        assert list((fetched_folder(tmp_path, shared_memory=False) / "generator-0").iterdir()) == []


async def test_a_version_that_is_forgotten_while_it_travels_is_given_up(tmp_path: Path) -> None:
    async with over_tcp(tmp_path) as world:

        def forget(number: int, part: WeightsPart) -> WeightsPart:
            if number == 3:
                world.publish(4)
                world.publish(5)
            return part

        announced = world.announced(world.publish(3))
        with pytest.raises(FileNotFoundError, match="take the newest announcement"):
            await world.fetch(announced, None, Between(world.requester, forget))


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 7},
        {"version": 9},
        {"total_bytes": 1 << 50},
        {"total_bytes": 10},
        {"base": 1, "total_bytes": 1 << 50},
        {"base": 0},
    ],
)
async def test_answers_that_make_no_sense_are_refused_before_anything_is_allocated(
    tmp_path: Path, lie: dict[str, int]
) -> None:
    async with over_tcp(tmp_path) as world:
        base = as_base(world.publish(1))
        stored = world.publish(2)
        liar = Between(world.requester, lambda _, part: msgspec.structs.replace(part, **lie))
        with pytest.raises(WeightsRejected):
            await world.fetch(world.announced(stored), base, liar)


def test_folders_of_killed_workers_are_removed_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    parent = fetched_folder(tmp_path, shared_memory=False)
    living = FetchFolder(tmp_path, "generator-0", shared_memory=False)
    for name in ("generator-dead", "generator-held", "generator-starting"):
        (parent / name).mkdir()
        (parent / name / "v1").write_bytes(b"x")
        if name != "generator-starting":
            os.utime(parent / name, (1e9, 1e9))
    os.utime(parent / "generator-0", (1e9, 1e9))
    fd = os.open(parent / "generator-held", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    other = FetchFolder(tmp_path, "generator-1", shared_memory=False)
    kept = {"generator-0", "generator-1", "generator-held", "generator-starting"}
    assert {folder.name for folder in parent.iterdir()} == kept
    os.close(fd)
    living.close()
    other.close()
    assert {folder.name for folder in parent.iterdir()} == {"generator-held", "generator-starting"}
