"""Publishing beside training: the learner goes on as soon as the weights are lent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.weights.store import StoredWeights, WeightsStore
from pipeline.weights.tensorfile import Publication
from tests.workers.dying import BATCH, Reaper, World
from tests.workers.learner.test_weight_publisher import Backend, Bench, _opened
from workers.learner.learner import Learner

LIMIT_S = 30.0

Publish = Callable[[WeightsStore, int, Publication], StoredWeights]


def held_up(monkeypatch: pytest.MonkeyPatch, held: int, until: Callable[[], object]) -> list[int]:
    """Let the writing of version ``held`` wait for ``until``; return the versions whose writing began."""
    publish, begun = WeightsStore.publish, list[int]()

    def late(store: WeightsStore, version: int, publication: Publication) -> StoredWeights:
        begun.append(version)
        if version == held:
            until()
        return publish(store, version, publication)

    monkeypatch.setattr(WeightsStore, "publish", late)
    return begun


async def test_the_next_step_begins_while_the_version_before_is_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, stepped, in_time = World(tmp_path, monkeypatch, num_updates=4), threading.Event(), list[bool]()

    def is_bad(names: list[str]) -> bool:
        if len(world.stepped) == 2 * BATCH:
            stepped.set()
        return False

    world.is_bad = is_bad
    begun = held_up(monkeypatch, 2, lambda: in_time.append(stepped.wait(LIMIT_S)))
    assert await world.live(Reaper(None))
    assert in_time == [True]
    assert begun == [0, 1, 2, 3, 4], "every version is published, in order"
    announced = await world.registry.weights()
    assert announced is not None and announced.policy_version == 4
    assert (await world.ledger.totals()).policy_version == 4
    assert world.published[2] == world.stepped[: 2 * BATCH]


async def test_a_version_that_cannot_be_written_ends_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=9)

    def fail() -> None:
        raise OSError(28, "no space left on device")

    held_up(monkeypatch, 2, fail)
    with pytest.raises(ExceptionGroup) as ended:
        await world.live(Reaper(None))
    assert [str(error) for error in ended.value.exceptions] == ["[Errno 28] no space left on device"]
    assert len(world.stepped) <= 3 * BATCH
    announced = await world.registry.weights()
    assert announced is not None and announced.policy_version == 1


async def test_a_learner_that_is_told_to_stop_announces_its_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, kept, at_end = World(tmp_path, monkeypatch, num_updates=9), threading.Event(), list[int]()
    loop = asyncio.get_running_loop()
    keep, drain = Learner._keep, Learner.drain
    learners = list[Learner]()

    async def keep_and_tell(self: Learner) -> None:
        await keep(self)
        kept.set()

    async def drain_and_look(self: Learner) -> None:
        await drain(self)
        announced = await world.registry.weights()
        at_end.append(-1 if announced is None else announced.policy_version)

    async def run(self: Learner, run: Any = Learner.run) -> None:
        learners.append(self)
        await run(self)

    def is_bad(names: list[str]) -> bool:
        if len(world.stepped) == 2 * BATCH:
            loop.call_soon_threadsafe(learners[0].ctx.draining.set)
        return False

    for name, changed in (("_keep", keep_and_tell), ("drain", drain_and_look), ("run", run)):
        monkeypatch.setattr(Learner, name, changed)
    world.is_bad = is_bad
    held_up(monkeypatch, 3, lambda: kept.wait(LIMIT_S))
    assert await world.live(Reaper(None))
    assert at_end == [3]


async def start(bench: Bench, version: int) -> None:
    await bench.publisher.start_publication(version, Backend())  # pyright: ignore[reportArgumentType]


async def test_a_version_waits_for_the_one_before_and_a_stop_for_its_limit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, begun = threading.Event(), list[int]()
    has_begun, overlapped = threading.Event(), list[bool]()

    def first() -> None:
        may_end.wait(LIMIT_S)
        overlapped.append(has_begun.wait(1.0))

    begun = held_up(monkeypatch, 1, first)
    async with _opened(tmp_path) as bench, asyncio.TaskGroup() as tasks:
        await start(bench, 1)
        await bench.publisher.wait(0.01)
        assert (await bench.published(), begun) == (-1, [1])
        lend = bench.publisher._lend

        def told(*args: Any) -> Any:
            has_begun.set()
            return lend(*args)

        monkeypatch.setattr(bench.publisher, "_lend", told)
        second = tasks.create_task(start(bench, 2))
        may_end.set()
        await second
        await bench.publisher.wait()
        assert overlapped == [False]
        assert (await bench.published(), begun) == (2, [1, 2])
