"""A step that is not finite is made again: the same result blames its data, which leaves the ledger
by name; another blames the machine."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from pipeline.algorithms.assemble import NonFiniteUnit
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.observability.history import RefusedRow
from pipeline.runtime.flow_ring import FlowRingReader, FlowRingWriter, LinkState
from pipeline.runtime.message_record import MessageOutcome, key_of
from pipeline.runtime.open_messages import FlowRecorder
from protocol.errors import Diverged, StepDiffered
from protocol.ids import TrajectoryId
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import LEARNER, make_chunk
from tests.pipeline.runtime.ring_records import Ended, read
from tests.workers.dying import BATCH, Reaper, World
from workers.learner.claims import BadData, ClaimedChunks
from workers.learner.policy_update import PolicyUpdate, Prepared

POISON = "t.2.0"
"""A response of the second update's first group."""


async def test_data_that_makes_a_step_not_finite_becomes_dead_letters_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def is_bad(names: list[str]) -> bool:
        asked.append(names)
        return POISON in names

    world = World(tmp_path, monkeypatch, num_updates=4, num_minibatches=2, is_bad=is_bad)
    with capture_logs():
        trained = await world.live_until_done(Reaper(None))
    assert world.num_lives == 1
    bad = ["t.2.0", "t.2.1"]
    assert asked.count(bad) == 2, "the step is made again once, from the same responses in the same order"
    assert not set(bad) & set(trained) and len(trained) == len(set(trained)) == 4 * BATCH - len(bad)
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == len(trained)
    assert audit.trajectories.dropped["non_finite"] == len(bad)
    [letter] = await world.ledger.dead_letters()
    assert (letter.chunk, letter.role, letter.prompt) == ("t.2.0.0", "learner", 2)
    assert (
        "update 2" in letter.error and "loss nan, gradient norm inf" in letter.error and "its units: 2" in letter.error
    )
    rows = world.rows()
    assert [row.update for row in rows] == [1, 2, 3, 4]
    assert [row.num_refused_steps for row in rows] == [0, 1, 0, 0]
    assert math.isnan(rows[1].loss) and math.isinf(rows[1].grad_norm), "the history has them"
    assert '"loss": "NaN"' in (tmp_path / "history.jsonl").read_text()


async def test_the_units_of_every_step_that_was_refused_in_an_update_count_as_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[set[str]] = []
    blame = BadData.blame

    async def noted(*arguments: Any) -> set[str]:
        told.append(await blame(*arguments))
        return told[-1]

    monkeypatch.setattr(BadData, "blame", noted)
    # an update has four steps, each on one response
    bad = {"t.2.0", "t.2.1", "t.3.1"}
    world = World(tmp_path, monkeypatch, num_updates=3, num_minibatches=4, is_bad=lambda names: bool(bad & {*names}))
    with capture_logs():
        trained = await world.live_until_done(Reaper(None))
    assert told == [set(), {"2", "3"}, set()], "spans and flow records say so of these units"
    letters = await world.ledger.dead_letters()
    assert sorted(letter.chunk for letter in letters) == ["t.2.0.0", "t.3.0.0"], "each unit is dropped once"
    assert not bad & set(trained) and "t.3.0" in trained


@pytest.mark.parametrize("spikes", ["drop", "train"])
async def test_a_spike_is_made_again_and_its_units_are_dropped_or_trained_on_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spikes: str
) -> None:
    asked: list[list[str]] = []

    def norm_of(names: list[str]) -> float:
        asked.append(names)
        return 6.0 if {"t.2.0", "t.16.0"} & set(names) else 1.0

    world = World(
        tmp_path,
        monkeypatch,
        num_updates=10,
        num_minibatches=2,
        norm_of=norm_of,
        learner={"spike_factor": 5.0, "spikes": spikes},
    )
    # killed after eight updates, so that its successor measures by the steps that it did not make
    with capture_logs():
        trained = await world.live_until_done(Reaper(8, "before batch"))
    assert world.num_lives == 2 and asked.count(["t.2.0", "t.2.1"]) == 1, "the first steps of a run are no spikes"
    bad = ["t.16.0", "t.16.1"]
    assert asked.count(bad) == 2
    audit = await world.ledger.audit()
    letters = await world.ledger.dead_letters()
    if spikes == "train":
        assert set(bad) <= set(trained) and len(trained) == len(set(trained)) == 10 * BATCH
        assert "non_finite" not in audit.trajectories.dropped and not letters
        return
    assert not set(bad) & set(trained) and len(trained) == len(set(trained)) == 10 * BATCH - len(bad)
    assert audit.balances and audit.trajectories.dropped["non_finite"] == len(bad)
    [letter] = letters
    assert (
        "update 9" in letter.error
        and "was a spike twice" in letter.error
        and "gradient norm 6, above inf or 5" in letter.error
        and "its units: 16" in letter.error
    )


async def test_a_step_that_differs_the_second_time_is_committed_by_a_successor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[str] = []

    def fails_once(names: list[str]) -> bool:
        if POISON in names and not failed:
            failed.append(POISON)
            return True
        return False

    world = World(tmp_path, monkeypatch, num_updates=4, is_bad=fails_once)
    with pytest.raises(BaseExceptionGroup) as caught:
        await world.live(Reaper(None))
    [error] = caught.value.exceptions
    assert (
        isinstance(error, StepDiffered)
        and str(error).startswith(f"host {socket.gethostname()} has a faulty memory or device")
        and "loss nan" in str(error)
    )
    assert max(world.published) == 1, "nothing of the step is published"
    trained = await world.live_until_done(Reaper(None))
    assert len(trained) == len(set(trained)) == 4 * BATCH and POISON in trained
    audit = await world.ledger.audit()
    assert audit.balances and "non_finite" not in audit.trajectories.dropped
    assert await world.ledger.dead_letters() == []


@pytest.mark.parametrize(
    "name", [None, "before ledger.drop", "before ledger.return_claim", "after ledger.return_claim"]
)
async def test_an_update_whose_steps_were_all_refused_publishes_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    asked: list[list[str]] = []

    def is_bad(names: list[str]) -> bool:
        asked.append(names)
        return POISON in names

    world = World(tmp_path, monkeypatch, num_updates=4, is_bad=is_bad)
    with capture_logs():
        trained = await world.live_until_done(Reaper(0 if name else None, name))
    assert world.num_lives == (2 if name else 1)
    assert asked.count(["t.2.0", "t.2.1", "t.3.0", "t.3.1"]) == (4 if name == "before ledger.drop" else 2)
    assert len(trained) == len(set(trained)) == 4 * BATCH and POISON not in trained
    # so no version admits more than it trained: staleness.md, (1)
    updates = [len(names) // BATCH for _, names in sorted(world.published.items())]
    assert updates == sorted(set(updates)) if name is None else set(updates) == {*range(5)}
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == 4 * BATCH
    assert audit.trajectories.dropped["non_finite"] == BATCH
    assert [row.update for row in world.rows()] == [1, 2, 3, 4]
    refused = [row for row in world.history() if isinstance(row, RefusedRow)]
    if name is None:
        assert [(row.update, row.policy_version, row.num_refused_steps) for row in refused] == [(2, 1, 1)]
        assert math.isnan(refused[0].loss) and refused[0].num_trajectories == BATCH


async def test_claims_without_a_finite_response_make_no_version_and_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(updates: PolicyUpdate, units: Sequence[ClaimedUnit]) -> Prepared:
        return Prepared([], [NonFiniteUnit(unit.name, "its log-probs") for unit in units])

    monkeypatch.setattr(PolicyUpdate, "prepare", prepare)
    world = World(tmp_path, monkeypatch, num_updates=9)
    with pytest.raises(BaseExceptionGroup) as caught:
        await world.live(Reaper(None))
    [error] = caught.value.exceptions
    assert isinstance(error, Diverged) and "3 claims in a row led to no step" in str(error)
    assert set(world.published) == {0} and world.rows() == []
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.dropped["non_finite"] == 3 * BATCH


@pytest.mark.parametrize("is_at_first", [True, False], ids=["then right ones", "always"])
async def test_claims_of_which_no_token_trains_have_no_signal_make_no_version_and_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_at_first: bool
) -> None:
    """As with a rule that imitates right responses, of which a batch has none."""
    world = World(tmp_path, monkeypatch, num_updates=4)
    algorithm = world.config.algorithm.model_copy(update={"max_generation_batches": 2})
    world.config = world.config.model_copy(update={"algorithm": algorithm})
    prepare = PolicyUpdate.prepare

    def without_loss(updates: PolicyUpdate, units: Sequence[ClaimedUnit]) -> Prepared:
        prepared = prepare(updates, units)
        if is_at_first and units[0].name not in ("0", "4"):
            return prepared
        return Prepared([replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in prepared.samples], [])

    monkeypatch.setattr(PolicyUpdate, "prepare", without_loss)
    assert await world.live(Reaper(None))
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.dropped["no_signal"] == 2 * BATCH
    num_updates = 4 if is_at_first else 0
    assert [row.update for row in world.rows()] == [*range(1, num_updates + 1)]
    assert [*world.published] == [*range(num_updates + 1)]
    assert audit.trajectories.trained == num_updates * BATCH == len(world.stepped)
    status = await world.registry.run_status()
    assert (
        status is not None and ("4 groups in a row held no token that grpo trains on" in status.detail) != is_at_first
    )


async def test_batches_that_are_bad_one_after_the_other_end_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=9, is_bad=lambda names: "t.0.0" not in names)
    with pytest.raises(BaseExceptionGroup) as caught:
        await world.live(Reaper(None))
    [error] = caught.value.exceptions
    assert isinstance(error, Diverged)
    assert "3 optimiser steps in a row were not finite (loss nan, gradient norm inf), each of them twice" in str(error)
    assert len(await world.ledger.dead_letters()) == 4, "two groups of each batch before the last one"
    assert (await world.ledger.audit()).balances


def unit(group: int) -> ClaimedUnit:
    chunks = [make_chunk(TrajectoryId("t", group, member), tokens=3 + member) for member in range(2)]
    return ClaimedUnit(str(group), tuple((ScoredChunk(chunk, {}),) for chunk in chunks))


async def test_chunks_of_a_dropped_unit_are_not_recorded_as_trained_on(tmp_path: Path) -> None:
    clock = ManualClock()
    with closing(FlowRingWriter(tmp_path / "flow", LEARNER)) as ring, closing(FlowRingReader(ring.path)) as reader:
        flow = FlowRecorder(clock, ring)
        chunks = ClaimedChunks("learner", clock, flow)
        for version in (1, 2):
            chunks.claimed([unit(0), unit(1)], 10 + version, version)
            assert flow.record(ring), "states are recorded while a claim is open"
            await clock.advance(1.0)
            chunks.begun()
            await clock.advance(4.0)
            chunks.trained()
            await clock.advance(0.5)
            chunks.published({"1"})
            assert not flow.record(ring)
        records = read(reader)
    found = [one for one in records if isinstance(one, Ended)]
    assert {one.num_open for one in records if isinstance(one, LinkState)} == {4}
    for version in (1, 2):
        mine = {one.key: one for one in found if one.policy_version == version}
        assert {key: one.outcome for key, one in mine.items()} == {
            key_of(make_chunk(TrajectoryId("t", group, member)).id): outcome
            for group, outcome in ((0, MessageOutcome.STORED), (1, MessageOutcome.UNSTORED))
            for member in range(2)
        }
        assert {(one.waited_s, one.service_s, one.storing_s) for one in mine.values()} == {(1.0, 4.0, 0.5)}
        assert sorted(one.size for one in mine.values()) == [3, 3, 4, 4]
