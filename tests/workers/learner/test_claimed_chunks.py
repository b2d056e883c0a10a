"""The learner's flow records of a claim with a unit that it drops."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.runtime.flow_recorder import FlowRecorder
from pipeline.runtime.flow_ring import Completion, FlowRingReader, FlowRingWriter, LinkState, MessageOutcome, key_of
from protocol.ids import TrajectoryId
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import LEARNER, make_chunk
from workers.learner.claimed_chunks import ClaimedChunks


def unit(group: int) -> ClaimedUnit:
    chunks = [make_chunk(TrajectoryId("t", group, member), tokens=3 + member) for member in range(2)]
    return ClaimedUnit(str(group), tuple((ScoredChunk(chunk, {}),) for chunk in chunks))


async def test_chunks_of_a_dropped_unit_are_not_recorded_as_trained_on(tmp_path: Path) -> None:
    clock = ManualClock()
    with closing(FlowRingWriter(tmp_path / "flow", LEARNER)) as ring, closing(FlowRingReader(ring.path)) as reader:
        flow = FlowRecorder(clock, ring)
        chunks = ClaimedChunks("learner", clock, flow)
        for version in (1, 2):
            chunks.claimed([unit(0), unit(1)], version)
            assert flow.record(ring), "states are recorded while a claim is open"
            await clock.advance(1.0)
            chunks.begun()
            await clock.advance(4.0)
            chunks.trained()
            await clock.advance(0.5)
            chunks.published({"1"})
            assert not flow.record(ring)
        records = reader.read()
    found = [one for one in records if isinstance(one, Completion)]
    assert {one.num_open for one in records if isinstance(one, LinkState)} == {4}
    for version in (1, 2):
        mine = {one.key: one for one in found if one.policy_version == version}
        assert {key: one.outcome for key, one in mine.items()} == {
            key_of(str(make_chunk(TrajectoryId("t", group, member)).id)): outcome
            for group, outcome in ((0, MessageOutcome.STORED), (1, MessageOutcome.UNSTORED))
            for member in range(2)
        }
        assert {(one.waited_s, one.service_s, one.storing_s) for one in mine.values()} == {(1.0, 4.0, 0.5)}
        assert sorted(one.size for one in mine.values()) == [3, 3, 4, 4]
