"""Publishing beside training: the learner goes on as soon as the weights are lent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.training.checkpoints import CheckpointFolder
from pipeline.training.snapshots import SnapshotFolder
from pipeline.training.update_log.folder import read_log
from pipeline.training.update_log.records import UpdateOutcome
from pipeline.weights.store import StoredWeights, WeightsStore
from pipeline.weights.tensorfile import Publication
from tests.oracle.registry import MemoryRegistry
from tests.workers.dying import BATCH, Reaper, World, digests_of
from tests.workers.learner.test_weight_publisher import Backend, Bench, _opened
from workers.engines.training.publishing import PublishSettings
from workers.learner import weight_publisher
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
    world = World(tmp_path, monkeypatch, num_updates=4, seals_at_once=False)
    stepped, in_time = threading.Event(), list[bool]()

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


async def test_the_log_has_an_updates_outcome_before_its_version_is_announced_and_before_its_snapshot_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=4, seals_at_once=False, records=True)
    late, stepped, early = list[tuple[str, int]](), threading.Event(), threading.Event()

    def is_bad(names: list[str]) -> bool:
        if len(world.stepped) == 2 * BATCH:
            stepped.set()
        return False

    def logged() -> list[UpdateOutcome | None]:
        return [update.outcome for segment in read_log(tmp_path / "updates") for update in segment.updates]

    def check(what: str, version: int) -> None:
        if version and (len(logged()) < version or logged()[version - 1] is None):
            late.append((what, version))
            early.set()

    announce, seal, keep = MemoryRegistry.announce_weights, SnapshotFolder.seal, CheckpointFolder.write

    async def announced(self: MemoryRegistry, who: Any, weights: WeightsAnnouncement) -> None:
        check("announced", weights.policy_version)
        await announce(self, who, weights)

    def sealed(self: SnapshotFolder, *args: Any, version: int, **kwargs: Any) -> None:
        check("snapshot", version)
        seal(self, *args, version=version, **kwargs)

    def written(self: CheckpointFolder, version: int, save: Callable[[Path], None], state: dict[str, Any]) -> Path:
        def saved(folder: Path) -> None:
            save(folder)
            check("checkpoint", version)

        return keep(self, version, saved, state)

    monkeypatch.setattr(MemoryRegistry, "announce_weights", announced)
    monkeypatch.setattr(SnapshotFolder, "seal", sealed)
    monkeypatch.setattr(CheckpointFolder, "write", written)
    world.is_bad = is_bad
    held_up(monkeypatch, 2, lambda: stepped.wait(LIMIT_S) and early.wait(0.3))
    assert await world.live(Reaper(None))
    assert late == []
    told = [outcome.digests if outcome else None for outcome in logged()]
    assert told == [digests_of(world.stepped[: (version + 1) * BATCH]) for version in range(4)]


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
    monkeypatch.setattr(weight_publisher, "_LOG_S", 0.0)
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


async def test_a_version_is_digested_while_the_weights_are_lent_and_before_it_is_announced(tmp_path: Path) -> None:
    told = list[tuple[int, dict[str, bytes], bool, int]]()
    loop = asyncio.get_running_loop()
    async with _opened(tmp_path) as bench:

        def digested(version: int, digests: dict[str, bytes]) -> None:
            loan = bench.publisher._loan
            assert loan is not None and threading.current_thread() is not threading.main_thread()
            announced = asyncio.run_coroutine_threadsafe(bench.published(), loop).result()
            told.append((version, digests, loan.is_over, announced))

        backend: Any = Backend()
        await bench.publisher.start_publication(1, backend, digested=digested)
        await bench.publisher.wait()
        backend.publishing = PublishSettings(digests=False)
        await bench.publisher.start_publication(2, backend, digested=digested)
        await bench.publisher.wait()
    found = backend.digests()
    assert found and told == [(1, found, False, -1), (2, found, False, 1)]
