"""Claims about the workers of one host: one fetches, all map, and another takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from ops.emulated.weights import make_tensor
from pipeline.config.runtime import WeightsSection
from pipeline.runtime.context import ActorContext
from pipeline.weights import PARTS
from protocol.errors import StorageFailed, WeightsDamaged
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.small_disk import small_disk
from tests.transports import zmq_transport
from tests.workers.generator.test_weight_receiver import NUM_WEIGHTS, Backend, Recorder, damage, until
from workers.generator import host_weights
from workers.generator.weight_receiver import WeightReceiver
from workers.learner.weight_publisher import WeightPublisher


class Clock(ManualClock):
    """Time that passes sets no event, as on a real clock."""

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        due_s = self.monotonic() + seconds
        await super().wait(event, seconds)
        if self.monotonic() >= due_s:
            event.clear()


class Worker:
    """A generator's receiver, with its engine."""

    def __init__(self, ctx: ActorContext) -> None:
        self.ctx = ctx
        self.engine = Recorder()
        self.receiver = WeightReceiver(ctx, self.engine)

    async def take(self) -> None:
        await self.receiver.poll()
        await self.receiver.swap()

    async def leave(self) -> None:
        await self.ctx.cancel_spawned()
        self.receiver.close()


class World:
    """A learner, and workers on hosts of their own folders."""

    def __init__(self, tmp_path: Path, tasks: asyncio.TaskGroup, **settings: object) -> None:
        self.clock = Clock()
        self.registry = MemoryRegistry(self.clock)
        self.tasks = tasks
        self.tmp_path = tmp_path
        base = small_config(tmp_path)
        sections = {
            "generation": base.generation.model_copy(update={"engine": "ops.emulated.build:generation"}),
            "learner": base.learner.model_copy(update={"backend": "ops.emulated.build:training"}),
            "weights": WeightsSection(shared_memory=False, path="wire", **settings),  # type: ignore[arg-type]
        }
        self.config = base.model_copy(update=sections)
        self.backend = Backend()
        self.workers: list[Worker] = []

    async def start(self) -> None:
        self.learner = await self.context(Role.LEARNER, "learner", self.tmp_path)
        self.publisher = WeightPublisher(self.learner)
        await self.publisher.start()

    async def context(self, role: Role, name: str, folder: Path) -> ActorContext:
        transport = zmq_transport(f"{name}#1")
        return await context_of(self.config, folder, role, name, self.tasks, self.registry, transport, self.clock)

    async def worker(self, name: str, host: str = "host") -> Worker:
        folder = self.tmp_path / host
        folder.mkdir(exist_ok=True)
        self.workers.append(Worker(await self.context(Role.GENERATOR, name, folder)))
        return self.workers[-1]

    async def publish(self, version: int) -> None:
        self.backend.version = version
        await self.publisher.publish(version, self.backend)  # type: ignore[arg-type]

    def refuse_all(self, *, refuses: bool = True) -> None:
        """Let the learner serve nothing, or serve again."""
        self.publisher._store._max_part_bytes = 0 if refuses else 1 << 22

    def fetched(self, version: int, host: str = "host") -> Path:
        (found,) = (self.tmp_path / host).rglob(f"v{version:08d}.safetensors")
        return found


@asynccontextmanager
async def opened(tmp_path: Path, **settings: object) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as tasks:
        world = World(tmp_path, tasks, **settings)
        await world.start()
        try:
            yield world
        finally:
            for worker in world.workers:
                await worker.leave()
                worker.ctx.close()
            await world.learner.cancel_spawned()
            world.publisher.close()
            world.learner.close()


def check_served(worker: Worker, version: int) -> None:
    np.testing.assert_array_equal(worker.engine.served[version], make_tensor(f"{version:016x}", NUM_WEIGHTS))


async def test_one_worker_fetches_for_its_host_and_the_others_map_that_file(tmp_path: Path) -> None:
    async with opened(tmp_path, delta=False) as world:
        first, second = await world.worker("generator-0"), await world.worker("generator-1")
        for version in (1, 2, 3):
            await world.publish(version)
            await first.take()
            await second.take()
            check_served(first, version)
            check_served(second, version)
        assert first.ctx.counters["weights_bytes"] > 3 * 4 * NUM_WEIGHTS
        assert second.ctx.counters["weights_bytes"] == 3 * world.fetched(3).stat().st_size, (
            "mapped, and nothing fetched"
        )
        assert "relayed_bytes" not in second.ctx.counters


async def test_a_worker_waits_for_the_one_that_fetches_and_for_nothing_older(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        first, second = await world.worker("generator-0"), await world.worker("generator-1")
        await world.publish(1)
        await first.take()
        await world.publish(2)
        looking = world.tasks.create_task(second.receiver.poll())
        await until(lambda: world.clock.num_sleepers > 0)
        await first.take()
        await world.clock.advance(0.1)
        await looking
        await second.receiver.swap()
        check_served(second, 2)


async def test_every_worker_of_a_host_reports_parts_that_come_and_waits_while_they_do(tmp_path: Path) -> None:
    async with opened(tmp_path, fetch_timeout_s=2.0) as world:
        first, second = await world.worker("generator-0"), await world.worker("generator-1")
        await world.publish(1)
        await first.take()
        assert first.ctx.counters[PARTS] == 1.0, "these weights are one part"
        await world.publish(2)
        assert second.receiver._host is None
        num_others = world.clock.num_sleepers
        looking = world.tasks.create_task(second.receiver.poll())
        leader = first.receiver._host
        assert leader is not None
        for number in range(1, 5):
            # it looks for the file on a thread in between
            await until(lambda: world.clock.num_sleepers > num_others)
            leader._note_part()
            await world.clock.advance(1.5)
            await until(lambda number=number: second.ctx.counters.get(PARTS) == number)
        await until(lambda: world.clock.num_sleepers > num_others)
        await world.clock.advance(2.5)
        await looking
        assert not second.receiver.has_newer
        assert second.ctx.counters[PARTS] == 4.0


async def test_when_the_worker_that_fetches_leaves_another_takes_its_place_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as world:
        first, second = await world.worker("generator-0"), await world.worker("generator-1")
        await world.publish(1)
        await first.take()
        await second.take()
        await world.publish(2)
        await first.take()
        await first.leave()
        await second.take()
        check_served(second, 2)
        assert second.ctx.counters["weights_bytes"] == 2 * world.fetched(2).stat().st_size, "adopted, not fetched"
        assert "generator-1" in world.registry._relays
        monkeypatch.setattr(host_weights, "width", lambda *_, **__: 1)
        world.refuse_all()
        far = await world.worker("generator-2", "far")
        await far.take()
        check_served(far, 2)


async def test_a_host_fetches_from_one_that_came_before_it_not_from_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_weights, "width", lambda *_, **__: 1)
    async with opened(tmp_path, delta=False) as world:
        near, far = await world.worker("generator-0", "near"), await world.worker("generator-1", "far")
        for version in (1, 2):
            await world.publish(version)
            await near.take()
            world.refuse_all()
            await far.take()
            check_served(far, version)
            world.refuse_all(refuses=False)


async def test_a_host_that_only_dials_out_serves_no_one_and_asks_the_learner(tmp_path: Path) -> None:
    async with opened(tmp_path, relay=False) as world:
        near, far = await world.worker("generator-0", "near"), await world.worker("generator-1", "far")
        await world.publish(1)
        for worker in (near, far):
            await worker.take()
            check_served(worker, 1)
        assert not world.registry._relays


async def test_a_version_whose_learner_has_left_is_not_there_and_no_error_of_the_settings(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        worker = await world.worker("generator-0")
        await world.publish(0)
        await world.registry.depart(world.learner.who)
        wanted = await world.registry.weights()
        assert wanted is not None
        with pytest.raises(FileNotFoundError, match="the learner that served version 0 has left"):
            await worker.receiver._fetch(wanted)
        await worker.take()
        assert not worker.engine.served


async def test_a_damaged_file_of_the_host_is_fetched_again_by_one_and_refused_by_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        first, second = await world.worker("generator-0"), await world.worker("generator-1")
        await world.publish(1)
        await first.take()
        damage(world.fetched(1))
        with pytest.raises(WeightsDamaged, match="its bytes have changed since"):
            await second.receiver.poll()
        await first.leave()
        await world.clock.advance(2.0)
        await second.take()
        check_served(second, 1)


async def test_a_host_without_room_for_weights_says_so_and_the_others_take_them(tmp_path: Path) -> None:
    with small_disk(tmp_path / "full") as disk:
        async with opened(tmp_path) as world:
            full, other = await world.worker("generator-0", "full"), await world.worker("generator-1", "other")
            await world.publish(1)
            disk.leave(2)
            with pytest.raises(
                StorageFailed, match=r"no room for \d+ bytes of version 1 \(.*/full/.*No space left.*\); make room"
            ):
                await full.take()
            await other.take()
            check_served(other, 1)
            disk.leave(20)
            await full.take()
            check_served(full, 1)
