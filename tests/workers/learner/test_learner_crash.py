"""Claims about a learner that dies, at every point where it can: nothing is trained on twice,
nothing is lost, nothing ages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from pipeline.observability.history import EvaluationRow
from pipeline.observability.samples import response_samples
from pipeline.runtime.registry.contract import RunState
from pipeline.training.checkpoints import CheckpointFolder, list_checkpoints
from protocol.errors import ConfigError, StorageFailed
from protocol.ids import Incarnation, Role
from tests.oracle.ledger.ledger import MemoryLedger
from tests.workers.dying import BATCH, Reaper, World, chosen

NUM_UPDATES = 5


async def points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: Literal["on", "off"]) -> list[str]:
    reaper = Reaper(None)
    world = World(tmp_path / "whole", monkeypatch, num_updates=NUM_UPDATES, snapshots=snapshots)
    await check(world, reaper)
    assert world.num_lives == 1
    return reaper.points


async def check(world: World, reaper: Reaper) -> None:
    """Run to the end, dying once, and look at all that there is to look at."""
    trained = await world.live_until_done(reaper)
    assert len(trained) == len(set(trained)), "trained on twice"
    assert len(trained) == NUM_UPDATES * BATCH
    audit = await world.ledger.audit()
    assert audit.balances
    assert audit.trajectories.trained == len(trained), "what counts as trained is what the weights were trained on"
    assert set(audit.trajectories.dropped) <= {"cancelled"}, "nothing is lost on the way"
    assert sum(audit.trajectories.in_flight.values()) == 0
    rows = world.rows()
    assert [row.update for row in rows] == list(range(1, NUM_UPDATES + 1))
    versions = [row.policy_version for row in rows]
    assert versions == sorted(set(versions))
    kept = {(sample.update, sample.policy_version) for sample in response_samples(world.folder).read()[0]}
    assert kept == {(row.update, row.policy_version) for row in rows}, "every update has samples, of that update alone"
    assert max(row.staleness_max for row in rows) <= world.eta
    totals = await world.ledger.totals()
    assert totals.policy_version >= versions[-1]
    announced = await world.registry.weights()
    assert announced is not None and world.published[announced.policy_version] == trained


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("snapshots", "in_any_update"),
    [("on", False), *(pytest.param(each, True, marks=pytest.mark.long) for each in ("on", "off"))],
)
async def test_a_learner_killed_at_any_point_trains_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: Literal["on", "off"], in_any_update: bool
) -> None:
    names = await points(tmp_path, monkeypatch, snapshots)
    for needed in ("claim", "step", "snapshot", "flush", "rename", "settle", "announce_weights", "advance", "recover"):
        assert any(needed in name for name in names), f"no point at {needed}"
    # the fourth update ends with the second checkpoint
    for at in range(len(names)) if in_any_update else chosen(names, "before ledger.claim", 4):
        folder = tmp_path / str(at)
        world = World(folder, monkeypatch, num_updates=NUM_UPDATES, snapshots=snapshots)
        try:
            await check(world, Reaper(at))
            if snapshots == "on":
                assert len(world.stepped) <= (NUM_UPDATES + 1) * BATCH, "at most one update is made again"
        except BaseException as error:
            error.add_note(f"killed at point {at} of {len(names)}: {names[at]}")
            raise
        assert world.num_lives == 2
        shutil.rmtree(folder)


async def test_an_evaluation_is_recorded_after_the_next_update_of_a_busy_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=3, num_evaluation_prompts=2)
    assert await world.live(Reaper(None))
    told = [(type(row).__name__[0], row.policy_version) for row in world.history()]
    assert told == [("E", 0), ("U", 1), ("U", 2), ("E", 1), ("U", 3), ("E", 2), ("E", 3)]


async def test_an_evaluation_that_was_recorded_after_its_checkpoint_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open in the checkpoint of version 2, it is recorded with update 3; the learner dies in update
    4."""
    world = World(tmp_path, monkeypatch, num_updates=4, num_evaluation_prompts=2)
    # one step an update; how often the learner looks for work before depends on the machine
    await world.live_until_done(Reaper(3, "before step"))
    assert world.num_lives == 2
    evaluations = [row for row in world.history() if isinstance(row, EvaluationRow)]
    assert len({row.number for row in evaluations}) == len(evaluations)
    updates = [row.policy_version for row in world.rows()]
    # a learner that died before its first checkpoint was on the disk evaluates its start again
    assert [row.policy_version for row in evaluations][-len(updates) :] == updates


async def test_a_disk_that_refuses_checkpoints_stops_no_run_and_settles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=NUM_UPDATES)
    write, tries = CheckpointFolder.write, []

    def refuse_twice(self: CheckpointFolder, version: int, *args: Any) -> Path:
        tries.append((version, world.ledger.state.trained["trajectories"]))
        if len(tries) <= 2:
            raise StorageFailed("no space left on device")
        return write(self, version, *args)

    monkeypatch.setattr(CheckpointFolder, "write", refuse_twice)
    await check(world, Reaper(None))
    assert tries == [(2, 0), (4, 0), (5, 0)]
    assert world.num_lives == 1


@pytest.mark.parametrize(("snapshots", "given_up"), [("off", {"rolled_back": 2 * BATCH}), ("on", {})])
async def test_after_a_damaged_checkpoint_what_it_held_is_counted_as_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: Literal["on", "off"], given_up: dict[str, int]
) -> None:
    """With a snapshot of the same update, nothing is."""
    world = World(tmp_path, monkeypatch, num_updates=4, snapshots=snapshots)
    await world.live(Reaper(None))
    newest = world.root / "000002.version-4"
    (newest / "weights.json").write_text("[]")
    world.config = world.config.model_copy(update={"run": world.config.run.model_copy(update={"num_updates": 6})})
    trained = await world.live_until_done(Reaper(None))
    assert len(trained) == len(set(trained)) == 6 * BATCH
    audit = await world.ledger.audit()
    assert audit.balances
    assert audit.trajectories.trained == len(trained)
    assert {reason: count for reason, count in audit.trajectories.dropped.items() if reason != "cancelled"} == given_up
    assert (world.root / f"damaged-{newest.name}").is_dir() is (snapshots == "off")
    assert [row.update for row in world.rows()] == [1, 2, 3, 4, 5, 6]


async def test_claims_in_memory_are_settled_by_the_next_checkpoint_and_by_nothing_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead before any checkpoint, then again in the next update: the host ends, and all comes
    back."""
    world = World(tmp_path, monkeypatch, num_updates=4)
    world.config = world.config.model_copy(
        update={"checkpoint": world.config.checkpoint.model_copy(update={"every_updates": 4})}
    )
    assert not await world.live(Reaper(2, "before step"))
    assert not await world.live(Reaper(0, "before step"))
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == 0
    assert len(set(world.stepped)) == len(world.stepped) == 2 * BATCH
    shutil.rmtree(tmp_path / "snapshots")
    trained = await world.live_until_done(Reaper(None))
    assert len(trained) == len(set(trained)) == 4 * BATCH
    assert (await world.ledger.audit()).trajectories.trained == 4 * BATCH


async def test_a_learner_on_a_snapshot_writes_a_checkpoint_with_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=4)
    world.config = world.config.model_copy(
        update={"checkpoint": world.config.checkpoint.model_copy(update={"every_updates": 100})}
    )
    await world.live_until_done(Reaper(2, "before step"))
    kept = [checkpoint.version for checkpoint in list_checkpoints(world.root)]
    assert kept == [4, 5], "versions 1 and 2; 2 again as 3; its first update's; the end's"


async def test_a_snapshot_whose_claims_the_ledger_lost_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=4)
    assert not await world.live(Reaper(3, "before step"))
    lost = [*world.ledger.state.claims][-2]
    assert await world.ledger.return_claim(Incarnation(Role.LEARNER, "learner", 1), lost) == 2
    with capture_logs() as logs:
        trained = await world.live_until_done(Reaper(None))
    assert len(trained) == len(set(trained)) == 4 * BATCH
    refused = [(line["snapshot"], line["reason"]) for line in logs if line["event"] == "snapshot refused"]
    assert [name for name, _ in refused] == ["snapshot of version 3 by learner#1"]
    assert f"first {lost}" in refused[0][1]


async def test_a_learner_with_a_checkpoint_refuses_a_ledger_that_does_not_know_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=4)
    await world.live(Reaper(None))
    world.ledger = MemoryLedger(lambda worker: world.epochs.get(worker, 0))
    with pytest.raises(ExceptionGroup) as ended:
        await world.live(Reaper(None))
    [refused] = ended.value.exceptions
    assert isinstance(refused, ConfigError)
    assert "no record of this run, but 000002.version-4" in str(refused) and "ledger.url" in str(refused)


async def test_a_run_without_updates_evaluates_its_start_model_and_samples_no_training_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=0, num_evaluation_prompts=2)
    assert await world.live(Reaper(None))
    assert [(type(row).__name__, row.policy_version) for row in world.history()] == [("EvaluationRow", 0)]
    assert [sample.kind for sample in response_samples(world.folder).read()[0]] == ["evaluation", "evaluation"]
    assert (await world.ledger.audit()).groups.admitted == 0
    status = await world.registry.run_status()
    assert status is not None and status.state is RunState.FINISHED


async def test_a_run_stops_early_when_its_evaluations_improve_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=9, num_evaluation_prompts=2, evaluation={"patience": 2})
    world.accuracy_of = lambda version: float(version >= 1)
    assert await world.live(Reaper(None))
    # an evaluation is recorded with the update after it
    assert [row.update for row in world.rows()] == [1, 2, 3, 4]
    status = await world.registry.run_status()
    assert status is not None and status.state is RunState.FINISHED
    assert "no better than 100.0 % at version 1" in status.detail


async def test_the_best_evaluations_checkpoint_is_kept_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=7, num_evaluation_prompts=2, evaluation={"keep_best": True})
    world.accuracy_of = lambda version: {1: 0.5, 3: 1.0}.get(version, 0.0)
    assert await world.live(Reaper(None))
    kept = sorted(int(path.name.rpartition("-")[2]) for path in world.root.iterdir() if path.name[0].isdigit())
    assert kept == [3, 6, 7]
