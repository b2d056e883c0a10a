"""A learner with a critic: it trains on nothing before the gate opens, and on everything from then
on, also when it was started again."""

from __future__ import annotations

from pathlib import Path

import pytest

import workers.learner.learner
from pipeline.config.learning import ValueSection, algorithm_settings
from pipeline.ledger.types import DropReason, Unit
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.training.critic_gate import GATE_OPEN
from protocol.ids import Role
from protocol.trajectory import Field
from tests.pipeline.ledger.builders import GENERATOR, SCORER, make_chunk, make_spec, reward, value
from tests.workers.dying import BATCH, GROUP_SIZE, Reaper, World


class CriticWorld(World):
    """A world whose units have values, and whose value worker opens its gate after some batches."""

    opens_after = 2 * BATCH
    """Trajectories that are dropped before; -1 for never."""
    most_dropped = 250 * BATCH
    """How many batches a machine drops between two looks at the critic depends on its speed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = frozenset({Field.REWARD, Field.VALUE})
        sizes = {"group_size": GROUP_SIZE, "units_per_update": BATCH, "eta": self.eta, "lease_s": 1e6}
        self.spec = make_spec(Unit.TRAJECTORY, fields=fields, value_training=True, scoring_deadline_s=1e6, **sizes)
        algorithm = algorithm_settings(name="ppo", group_size=GROUP_SIZE, groups_per_update=BATCH // GROUP_SIZE)
        sections = {"algorithm": algorithm, "value": ValueSection(pretrain_steps=10)}
        self.config = self.config.model_copy(update=sections)
        self.monkeypatch.setattr(workers.learner.learner, "_CRITIC_EVERY_S", 0.01)

    async def num_dropped(self) -> int:
        return (await self.ledger.audit()).trajectories.dropped.get(DropReason.VALUE_WARMUP, 0)

    async def sample(self) -> None:
        while (grant := await self.ledger.lease(GENERATOR, max_trajectories=64)).leases:
            for lease in grant.leases:
                chunk = make_chunk(lease.trajectory, version=self.ledger.state.version)
                await self.ledger.write_chunk(GENERATOR, chunk)
                await self.ledger.write_score(SCORER, chunk.id, reward(lease.trajectory.member % 2))
                await self.ledger.write_score(SCORER, chunk.id, value())
        assert await self.num_dropped() <= self.most_dropped, "the learner waits for its critic"
        await self.beat(0 <= self.opens_after <= await self.num_dropped())

    async def beat(self, is_open: bool) -> None:
        who, now = await self.registry.register(Role.VALUE, "value"), self.registry.clock.time()
        self.registry.beat(
            Heartbeat(
                who=who,
                pid=1,
                host="here",
                at_s=now,
                started_s=now,
                progress=1,
                progress_at_s=now,
                waiting_for=WaitingFor.INPUT,
                counters={GATE_OPEN: float(is_open)},
            )
        )


async def test_nothing_is_trained_on_before_the_critic_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = CriticWorld(tmp_path, monkeypatch, num_updates=3, snapshots="off")
    assert await world.live(Reaper(None))
    dropped = await world.num_dropped()
    assert dropped >= world.opens_after
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == 3 * BATCH == len(world.stepped)
    early = {f"t.{group}.{member}" for group in range(dropped // GROUP_SIZE) for member in range(GROUP_SIZE)}
    assert not early.intersection(world.stepped)
    assert [row.update for row in world.rows()] == [1, 2, 3]


@pytest.mark.parametrize("snapshots", ["on", "off"])
async def test_a_critic_that_was_good_is_waited_for_no_more_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: str
) -> None:
    """Its value worker may be gone meanwhile, or begin anew with a closed gate."""
    world = CriticWorld(tmp_path, monkeypatch, num_updates=6, snapshots="on" if snapshots == "on" else "off")
    # its fourth update is made, and the checkpoint has two
    assert not await world.live(Reaper(3, "after step"))
    dropped = world.most_dropped = await world.num_dropped()
    world.opens_after = -1
    await world.beat(False)
    assert await world.live(Reaper(None))
    assert await world.num_dropped() == dropped >= 2 * BATCH
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == 6 * BATCH
