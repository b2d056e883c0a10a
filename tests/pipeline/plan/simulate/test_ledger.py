"""The simulated ledger takes the decisions that the ledger's oracle takes, which is compared with Redis."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ledger.types import ClaimRefused, LatePolicy, Unit
from pipeline.plan.simulate.ledger import SimulatedLedger
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field
from tests.oracle.ledger.ledger import MemoryLedger
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reference, reward

WINDOW = 2
OTHER = Incarnation(Role.GENERATOR, "generator-1", 1)


def length(name: TrajectoryId) -> int:
    return 1 + (name.group * 7 + name.member * 3) % 5


def accuracy(name: TrajectoryId) -> float:
    return float((name.group % 3 > 0) and name.member % 2)


async def story(seed: int, unit: Unit, eta: int, late: LatePolicy, signal_filter: bool) -> int:
    """Run random operations on both; return how many claims were made."""
    spec = make_spec(
        unit, eta=eta, late=late, signal_filter=signal_filter, fields=frozenset({Field.REWARD, Field.REFERENCE})
    )
    ours, oracle = SimulatedLedger(spec, length, accuracy), MemoryLedger(lambda _: 1, lambda: 0.0)
    await oracle.open(spec)
    stream = random.Random(seed)
    held: dict[TrajectoryId, Incarnation] = {}
    due: list[tuple[ChunkId, Field, int]] = []
    claims: list[tuple[str, list[object]]] = []
    version = num_claims = 0
    for _ in range(400):
        match stream.choice(["lease", "write", "write", "write", "score", "score", "score", "claim"]):
            case "lease":
                who, at = stream.choice([GENERATOR, OTHER]), version - stream.choice([0, 0, 0, 1])
                leases, refusal = ours.lease(3, policy_version=at)
                grant = await oracle.lease(who, max_trajectories=3, policy_version=at)
                assert ([lease.trajectory for lease in grant.leases], grant.refusal) == (leases, refusal)
                held |= dict.fromkeys(leases, who)
            case "write" if held:
                name = stream.choice(sorted(held))
                done, index = ours.trajectories[name].done, ours.trajectories[name].next
                num = min(WINDOW, length(name) - done)
                final = done + num == length(name)
                chunk, fields, continues = ours.write(name, [(version, num)])
                made = make_chunk(name, index, tokens=num, final=final, version=version, context=done)
                assert (await oracle.write_chunk(held[name], made)).keeps_lease is continues
                if not continues:
                    del held[name]
                due += [(chunk, field, num) for field in sorted(fields)]
            case "score" if due:
                chunk, field, num = due.pop(stream.randrange(len(due)))
                ours.score(chunk, field)
                score = reward(accuracy(chunk.trajectory)) if field is Field.REWARD else reference(num)
                await oracle.write_score(SCORER, chunk, score)
            case "claim":
                units, claim = ours.claim(version), await oracle.claim(LEARNER, policy_version=version)
                if isinstance(claim, ClaimRefused):
                    assert units is claim.wait
                    continue
                assert isinstance(units, list) and tuple(map(str, units)) == claim.units
                claims.append((claim.claim_id, [*units]))
                num_claims, version = num_claims + 1, version + 1
                ours.advance(version)
                await oracle.advance(LEARNER, version)
                if stream.random() < 0.5:
                    for _, names in claims:
                        for one in names:
                            ours.end_unit(one, None)  # type: ignore[arg-type]
                    await oracle.settle(LEARNER, tuple(claim_id for claim_id, _ in claims))
                    claims.clear()
        state = oracle.state
        assert (ours.used, [*ours.ready], [*ours.running]) == (state.used, [*state.ready], [*state.running])
        assert ours.running_age == state.running_age
        assert (sorted(ours.trajectories), sorted(ours.chunks)) == (sorted(state.trajectories), sorted(state.chunks))
    return num_claims


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    unit=st.sampled_from(Unit),
    eta=st.integers(1, 3),
    late=st.sampled_from(LatePolicy),
    signal_filter=st.booleans(),
)
def test_leases_windows_scores_and_claims_are_those_of_the_oracle(
    seed: int, unit: Unit, eta: int, late: LatePolicy, signal_filter: bool
):
    asyncio.run(story(seed, unit, eta, late, signal_filter and unit is Unit.GROUP))


@pytest.mark.parametrize("unit", list(Unit))
def test_such_a_story_makes_claims(unit: Unit):
    assert asyncio.run(story(3, unit, 2, LatePolicy.WAIT, False)) > 3
