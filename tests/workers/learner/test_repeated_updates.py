"""How many updates a learner that dies repeats, with the writer of snapshots as it is: they are
copied and sealed beside the next updates."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import OpenBuffer, SnapshotFolder
from pipeline.training.update_log.records import Origin
from tests.workers.dying import BATCH, Killed, Reaper, World
from workers.learner.restore import RestoredState, restore_learner
from workers.learner.weight_publisher import WeightPublisher
from workers.snapshots import SnapshotWriter

POINTS = ("before step", "after step", "before registry.announce_weights", "after ledger.advance")


class Pace:
    """Seals each snapshot when so many further updates have begun; they wait for that."""

    def __init__(self, world: World, updates_a_seal: int) -> None:
        self._world, self._every = world, updates_a_seal
        self._changed = threading.Condition()
        self._begun: int | None = 0
        self._pending: int | None = None
        self.reaper = Reaper(None)

    def seal(self, folder: SnapshotFolder, *args: Any, num_updates: int, **told: Any) -> None:
        with self._changed:
            self._wait(lambda: self._begun is None or self._begun >= num_updates + self._every)
            if self.reaper.is_dead:
                raise Killed("seal")
        _SEAL(folder, *args, num_updates=num_updates, **told)

    async def keep(self, writer: SnapshotWriter, *args: Any) -> None:
        """Let the update that waits go on once the writer has seen the seal, too."""
        await _KEEP(writer, *args)
        with self._changed:
            self._pending = None
            self._changed.notify_all()

    def place(self, folder: SnapshotFolder, live: LiveState) -> OpenBuffer | None:
        """Take note of a snapshot, on the learner's compute thread."""
        self._pending = len(self._world.stepped) // BATCH
        return _PLACE(folder, live)

    def begin(self, names: list[str]) -> float:
        """Begin the step of the next update; return its gradient norm."""
        del names
        with self._changed:
            begun = self._begun = len(self._world.stepped) // BATCH + 1
            self._changed.notify_all()
            self._wait(lambda: self._pending is None or self._pending + self._every > begun)
        return 1.0

    def end(self) -> None:
        """Hold nothing up any more: the learner is dead, or done."""
        with self._changed:
            self._begun = None
            self._changed.notify_all()

    def _wait(self, until: Any) -> None:
        assert self._changed.wait_for(until, 30.0)


_PLACE, _SEAL, _KEEP = SnapshotFolder.place, SnapshotFolder.seal, SnapshotWriter._keep
_START = WeightPublisher.start_publication


async def publish_at_once(publisher: WeightPublisher, *args: Any) -> None:
    """Announce a version before the next step, so that a death between two steps finds it published."""
    await _START(publisher, *args)
    await publisher.wait()


async def repeated(folder: Path, monkeypatch: pytest.MonkeyPatch, reaper: Reaper, k: int) -> int:
    """Let a learner die, and return how many of its published updates its successor makes again."""
    num_updates = updates_of(k)
    world = World(folder, monkeypatch, num_updates=num_updates, seals_at_once=False)
    section = world.config.checkpoint.model_copy(update={"every_updates": 1000})
    world.config = world.config.model_copy(update={"checkpoint": section})
    pace = Pace(world, k)
    pace.reaper = reaper
    world.norm_of = pace.begin
    scripted: tuple[tuple[Any, str, Any], ...] = (
        (SnapshotFolder, "place", lambda *args: pace.place(*args)),
        (SnapshotFolder, "seal", lambda *args, **told: pace.seal(*args, **told)),
        (SnapshotWriter, "_keep", lambda *args: pace.keep(*args)),
        (WeightPublisher, "start_publication", publish_at_once),
    )
    begun: list[RestoredState] = []

    async def note(ctx: Any) -> RestoredState:
        begun.append(await restore_learner(ctx))
        return begun[-1]

    monkeypatch.setattr("workers.learner.learner.restore_learner", note)
    with monkeypatch.context() as patch:
        for owner, name, by in scripted:
            patch.setattr(owner, name, by)
        try:
            assert not await world.live(reaper)
        finally:
            pace.end()
    published = (await world.ledger.totals()).policy_version
    world.norm_of = lambda names: 1.0
    trained = await world.live_until_done(Reaper(None))
    assert len(trained) == len(set(trained)) == num_updates * BATCH
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == len(trained)
    assert begun[1].origin in (Origin.SNAPSHOT, Origin.START_MODEL)
    return published - int(begun[1].state.get("num_updates", 0))


def updates_of(k: int) -> int:
    """Return a number of updates that ends just before the third snapshot."""
    return 2 * k + 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("k", [1, 2, 3])
async def test_a_dead_learner_repeats_one_update_or_those_of_two_snapshots_less_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Copy and seal take k updates, so that each k-th update has a snapshot."""
    found = [
        await repeated(tmp_path / f"{number} {name}", monkeypatch, Reaper(number, name), k)
        for number in range(updates_of(k))
        for name in POINTS
    ]
    assert (min(found), max(found)) == (0, 2 * k - 1)
