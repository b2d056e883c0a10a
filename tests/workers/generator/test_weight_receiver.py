"""Claims about taking weights: verified beside decoding, swapped at once, and never served when
their bytes are not right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.emulated.generation import EmulatedEngine
from ops.emulated.law import LengthLaw, TokenLaw
from ops.emulated.weights import TENSOR, make_tensor, publish_tensors
from pipeline.config.runtime import WeightsSection
from pipeline.runtime.context import ActorContext
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.weights.tensorfile import Publication
from protocol.errors import DeadlineExceeded, ParityFailed, WeightsDamaged
from protocol.ids import Role
from protocol.messages import WeightsPart, WeightsRequest
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.generator.weight_receiver import WeightReceiver
from workers.learner.weight_publisher import WeightPublisher

NUM_WEIGHTS = 5000


class Recorder(EmulatedEngine):
    """An emulated engine that keeps the tensors that it was given."""

    def __init__(self) -> None:
        super().__init__(
            num_slots=4,
            lengths=LengthLaw("constant", median_tokens=6.0, tail=1.0),
            tokens=TokenLaw.of(32, {1}),
            vocabulary=32,
            positions=4096,
            num_weights=NUM_WEIGHTS,
        )
        self.served: dict[int, np.ndarray] = {}
        self.staged: list[int] = []

    def stage_weights(self, tensors: Any, policy_version: int) -> None:
        super().stage_weights(tensors, policy_version)
        self.staged.append(policy_version)

    def load_weights(self, tensors: Any, policy_version: int) -> None:
        super().load_weights(tensors, policy_version)
        self.served[policy_version] = tensors[TENSOR].copy()


class Backend:
    """The part of a training backend that publishing reads."""

    version = 0

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield TENSOR, make_tensor(f"{self.version:016x}", NUM_WEIGHTS)

    def base_publication(self) -> None:
        return None

    def publication(self, base_digest: str | None = None) -> Publication:
        return publish_tensors(self.tensors())


class Large(Backend):
    """Three megabytes of weights."""

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield TENSOR, np.zeros(3 << 18, np.float32)


class World:
    """A learner's publisher, and a generator's taker, in one process."""

    def __init__(
        self, learner: ActorContext, generator: ActorContext, clock: ManualClock, backend: Any, engine: Recorder
    ) -> None:
        self.clock = clock
        self.backend = backend
        self.publisher = WeightPublisher(learner)
        self.ctx = generator
        self.learner = learner
        self.engine = engine
        self.taker = WeightReceiver(generator, engine)

    async def publish(self, version: int) -> Path:
        self.backend.version = version
        await self.publisher.publish(version, self.backend)
        announced = await self.learner.registry.weights()
        assert announced is not None
        return Path(announced.path)

    async def take(self) -> None:
        await self.taker.poll()
        await self.taker.swap()

    def beat(self, **counters: float) -> None:
        now = self.clock.time()
        who = self.ctx.who
        assert isinstance(self.learner.registry, MemoryRegistry)
        self.learner.registry.beat(
            Heartbeat(
                who=who, pid=1, host="h", at_s=now, started_s=0.0, progress=1, progress_at_s=now,
                waiting_for=WaitingFor.QUARANTINE, counters=counters,
            )
        )  # fmt: skip


@asynccontextmanager
async def opened(
    tmp_path: Path, *, backend: Any = None, engine: Recorder | None = None, **settings: Any
) -> AsyncIterator[World]:
    """Emulated ends, or a backend and an engine that know torch."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    base = small_config(tmp_path)
    emulated = {
        "generation": base.generation.model_copy(update={"engine": "ops.emulated.build:generation"}),
        "learner": base.learner.model_copy(update={"backend": "ops.emulated.build:training"}),
    }
    sections = {"weights": WeightsSection(shared_memory=False, **settings), **(emulated if backend is None else {})}
    config = base.model_copy(update=sections)
    async with asyncio.TaskGroup() as tasks:
        surroundings = (tasks, registry)
        learner = await context_of(
            config, tmp_path, Role.LEARNER, "learner", *surroundings, zmq_transport("learner#1"), clock
        )
        generator = await context_of(
            config, tmp_path, Role.GENERATOR, "generator-0", *surroundings, zmq_transport(), clock
        )
        world = World(learner, generator, clock, backend or Backend(), engine or Recorder())
        await world.publisher.start()
        try:
            yield world
        finally:
            await learner.cancel_spawned()
            world.publisher.close()
            world.taker.close()
            learner.close()
            generator.close()


def damage(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)


async def test_a_version_is_brought_near_its_engine_before_decoding_stands_still_for_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.publish(0)
        await world.taker.poll()
        assert world.engine.staged == [0] and not world.engine.served
        await world.taker.swap()
        assert world.engine.staged == [0] and list(world.engine.served) == [0]


@pytest.mark.parametrize("path", ["auto", "wire"])
async def test_every_version_is_served_as_it_was_published_whichever_way_it_came(tmp_path: Path, path: str) -> None:
    async with opened(tmp_path, path=path) as world:
        for version in range(1, 8):
            await world.publish(version)
            await world.take()
            expected = make_tensor(f"{version:016x}", NUM_WEIGHTS)
            np.testing.assert_array_equal(world.engine.served[version], expected)
        assert world.ctx.counters["weight_swaps"] == 7
        assert world.ctx.counters["weights_pause_s"] > 0.0
        assert world.ctx.counters["weights_bytes"] >= 7 * 4 * NUM_WEIGHTS
        assert world.ctx.policy_version == 7


async def test_a_version_is_verified_before_the_swap_which_only_puts_it_in(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.publish(1)
        await world.taker.poll()
        assert world.taker.has_newer
        assert world.engine.policy_version == -1
        await world.publish(2)
        await world.taker.poll()
        await world.taker.swap()
        assert list(world.engine.served) == [2], "a newer one took the place of one that was not served yet"
        await world.taker.swap()
        assert world.ctx.counters["weight_swaps"] == 1


async def test_damaged_bytes_are_told_and_never_served_and_the_next_version_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        await world.publish(1)
        await world.take()
        damage(await world.publish(2))
        with pytest.raises(WeightsDamaged, match="as it was published"):
            await world.taker.poll()
        assert world.ctx.counters["rejected_version"] == 2
        assert not world.taker.has_newer
        # not at once again
        await world.taker.poll()
        await world.publish(3)
        await world.take()
        assert list(world.engine.served) == [1, 3]
        assert world.ctx.counters["rejected_version"] == -1


async def test_what_was_refused_beside_decoding_is_raised_at_the_next_swap(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        damage(await world.publish(1))
        world.ctx.spawn("weights", world.taker.watch())
        while world.ctx.counters["rejected_version"] < 0:
            await asyncio.sleep(0.001)
            await world.clock.advance(0.05)
        with pytest.raises(WeightsDamaged):
            await world.taker.swap()
        world.ctx.draining.set()
        await world.ctx.cancel_spawned()


async def test_a_version_is_brought_once_it_is_announced_and_a_lost_notice_costs_one_look(tmp_path: Path) -> None:
    async with opened(tmp_path, poll_s=8.0) as world:
        await world.publish(1)
        world.ctx.spawn("weights", world.taker.watch())
        await until(lambda: world.taker.has_newer)
        await world.taker.swap()
        notifications = world.ctx.tasks.create_task(world.ctx.notifications.watch())
        # the weight receiver, and its listener
        await until(lambda: world.clock.num_sleepers == 2)
        await world.publish(2)
        # and time stood still
        await until(lambda: world.taker.has_newer)
        await world.taker.swap()
        notifications.cancel()
        await until(lambda: world.clock.num_sleepers == 1)
        await world.publish(3)
        await world.clock.advance(LOOK_ANYWAY_S - 0.1)
        assert not world.taker.has_newer
        await world.clock.advance(0.1)
        await until(lambda: world.taker.has_newer)
        await world.taker.swap()
        assert list(world.engine.served) == [1, 2, 3]
        world.ctx.draining.set()
        await world.ctx.cancel_spawned()


async def until(condition: Callable[[], bool]) -> None:
    """Let threads and tasks run until something is so; the test's own time limit ends one that
    never is."""
    while not condition():  # noqa: ASYNC110 - some of it happens on threads
        await asyncio.sleep(0.001)


async def test_bytes_that_are_wrong_because_a_newer_version_took_their_place_blame_nobody(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        damage(await world.publish(1))
        found = world.taker._map

        def overtaken(announcement: Any) -> Any:
            mapped = found(announcement)
            if announcement.policy_version == 1:
                asyncio.run_coroutine_threadsafe(world.publish(2), loop).result(10)
            return mapped

        loop = asyncio.get_running_loop()
        world.taker._map = overtaken  # pyright: ignore[reportAttributeAccessIssue]
        await world.take()
        assert world.ctx.counters["rejected_version"] == -1
        await world.take()
        assert list(world.engine.served) == [2]


async def test_the_learner_mends_a_damaged_version_that_was_refused_and_it_is_served_then(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        path = await world.publish(1)
        damage(path)
        with pytest.raises(WeightsDamaged):
            await world.taker.poll()
        await world.publisher.repair(1, world.backend)
        assert path.read_bytes()[-1] == make_mended(1) ^ 1, "nobody said yet that it was refused"
        world.beat(rejected_version=1)
        await world.clock.advance(2.0)
        await world.publisher.repair(1, world.backend)  # pyright: ignore[reportArgumentType]
        await world.take()
        np.testing.assert_array_equal(world.engine.served[1], make_tensor(f"{1:016x}", NUM_WEIGHTS))


def make_mended(version: int) -> int:
    """The last byte of a version as it should be."""
    return make_tensor(f"{version:016x}", NUM_WEIGHTS).tobytes()[-1]


async def test_weights_that_have_moved_on_cannot_mend_a_version(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        damage(await world.publish(1))
        world.beat(rejected_version=1)
        world.backend.version = 2
        with pytest.raises(WeightsDamaged, match="now give"):
            await world.publisher.repair(1, world.backend)  # pyright: ignore[reportArgumentType]


async def test_an_intact_version_is_not_published_again_because_one_generator_refused_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        path = await world.publish(1)
        number = path.stat().st_ino
        world.beat(rejected_version=1)
        await world.publisher.repair(1, world.backend)  # pyright: ignore[reportArgumentType]
        assert path.stat().st_ino == number


async def test_a_file_only_generator_does_not_ask_and_one_whose_file_is_gone_waits(tmp_path: Path) -> None:
    async with opened(tmp_path, path="file") as world:
        (await world.publish(1)).unlink()
        await world.take()
        assert world.engine.policy_version == -1
        assert world.ctx.counters["rejected_version"] == -1
        await world.publish(2)
        await world.take()
        assert world.engine.policy_version == 2


async def test_a_learner_answers_with_parts_of_its_own_setting_whatever_a_request_asks_for(tmp_path: Path) -> None:
    async with opened(tmp_path, path="wire", max_part_mb=2) as world:
        world.backend = Large()
        await world.publish(1)
        announced = await world.learner.registry.weights()
        assert announced is not None
        requester = world.ctx.transport.requester(announced.endpoint)
        try:
            part = await requester.request(WeightsRequest(version=1, offset=0, max_bytes=1 << 40), timeout_s=5.0)
        finally:
            requester.close()
        assert isinstance(part, WeightsPart)
        assert part.data.size == 2 << 20
        assert part.total_bytes > 3 << 20


class Cut:
    """The learner's endpoint seen from a host that does not reach it: every request shakes no hand
    for a second, then ends."""

    async def request(self, message: object, *, timeout_s: float, unreached_s: float | None = None) -> Any:
        raise DeadlineExceeded("no answer")

    def unreached_s(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


async def test_a_learner_that_weights_cannot_be_fetched_from_is_named_until_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, path="wire") as world:

        def said() -> str:
            world.ctx.refresh_links()
            return world.ctx.worker_state.heartbeat().unreached

        await world.publish(1)
        announced = await world.learner.registry.weights()
        assert announced is not None
        with monkeypatch.context() as cut:
            cut.setattr(world.ctx.transport, "requester", lambda endpoint, server_key="": Cut())
            await world.taker.poll()
            assert said() == "", "a handshake may take a moment"
            await world.clock.advance(6.0)
            await world.taker.poll()
            assert said() == f"learner at {announced.endpoint} (no answer for 7 s)", "all requests are one attempt"
        await world.take()
        assert world.engine.policy_version == 1
        assert said() == ""


class Keeps(Recorder):
    """An engine that reports new weights, and serves the old ones."""

    def unserved(self, tensors: Any) -> list[str]:
        first = next(iter(self.served.values()))
        return [name for name, tensor in tensors.items() if not np.array_equal(tensor, first)]


async def test_an_engine_that_keeps_old_weights_leaves_and_its_version_is_what_it_serves(tmp_path: Path) -> None:
    async with opened(tmp_path, engine=Keeps()) as world:
        await world.publish(0)
        await world.take()
        await world.publish(1)
        with pytest.raises(ParityFailed, match=r"was given version 1 but still serves old weights \(1 of 1 tensors"):
            await world.take()
        assert world.ctx.policy_version == 0
        assert world.ctx.counters["stale_swaps"] == 1


async def test_an_update_that_changes_nothing_is_no_false_alarm(tmp_path: Path) -> None:
    async with opened(tmp_path, engine=Keeps()) as world:
        await world.publish(0)
        await world.take()
        # the same weights, under the next number
        await world.publisher.publish(1, world.backend)
        await world.take()
        assert world.ctx.policy_version == 1
        assert "stale_swaps" not in world.ctx.counters
