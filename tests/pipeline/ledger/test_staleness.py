"""The staleness bound of pipeline/ledger/staleness.md, on the arithmetic and on a whole ledger with
adversarial timing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.ledger.staleness import Ages, ReadyUnit, choose, credit_limit, is_stale, staleness, unit_weight, urgent
from pipeline.ledger.types import Claim, ClaimWait, LatePolicy, Unit
from pipeline.ledger.validation import check_spec, surplus
from protocol.errors import ConfigError
from tests.oracle.ledger.ledger import MemoryLedger
from tests.pipeline.ledger.builders import GENERATOR, LEARNER, SCORER, make_chunk, make_spec, reward


@pytest.mark.parametrize(
    ("oversampling", "batch", "extra"), [(1.0, 512, 0), (1.5, 512, 256), (1.1, 10, 1), (1.75, 4, 3), (3.0, 8, 16)]
)
def test_the_surplus_is_the_floor_of_what_oversampling_adds(oversampling, batch, extra):
    assert surplus(oversampling, batch) == extra


def test_the_limit_grows_by_one_update_a_version_and_starts_with_eta_more():
    spec = make_spec(eta=2, units_per_update=8)
    assert [credit_limit(spec, version) for version in range(3)] == [24, 32, 40]
    assert (unit_weight(spec), unit_weight(make_spec(Unit.CHUNK))) == (2, 1)


def test_a_unit_is_stale_beyond_eta_and_never_after_a_restart_from_an_older_state():
    assert [is_stale(5, oldest, 2) for oldest in (2, 3, 5, 7)] == [True, False, False, False]
    assert staleness(3, 5) == -2


def chosen(
    ready: list[ReadyUnit[str]], running: list[int], *, policy_version: int, eta: int, needed: int, **rest: Any
) -> list[str] | None:
    """Return the names of an update's units, None while it waits."""
    ages = Counter(unit.oldest_version for unit in ready)
    first = urgent(ages, Counter(running), policy_version=policy_version, eta=eta, needed=needed, **rest)
    return None if first is None else choose(ready, first, edge=policy_version - eta, needed=needed)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3))))
def test_ages_count_what_they_hold(changes: list[tuple[int, int | None]]) -> None:
    ages = Ages[int]()
    for name, version in changes:
        if version is None:
            ages.discard(name)
        else:
            ages[name] = version
        assert ages.counts == Counter(ages.values())


def test_the_oldest_versions_go_first_only_when_their_turn_would_come_too_late():
    ready = [ReadyUnit("a", 3), ReadyUnit("b", 2), ReadyUnit("c", 3), ReadyUnit("d", 2)]
    shared = {"policy_version": 3, "needed": 2, "surplus_units": 0, "late": LatePolicy.WAIT}
    assert chosen(ready, [], eta=1, **shared) == ["b", "d"]
    assert chosen(ready, [], eta=3, **shared) == ["a", "b"]


def test_wait_refuses_while_running_work_has_its_last_turn_and_drop_does_not():
    ready = [ReadyUnit("a", 3), ReadyUnit("b", 3)]
    shared = {"policy_version": 3, "eta": 1, "needed": 2, "surplus_units": 0}
    assert chosen(ready, [2], late=LatePolicy.WAIT, **shared) is None
    assert chosen(ready, [2], late=LatePolicy.DROP, **shared) == ["a", "b"]
    assert chosen(ready, [1, 3], late=LatePolicy.WAIT, **shared) == ["a", "b"], "what is doomed is not waited for"


def test_wait_refuses_when_too_much_old_work_would_be_left_for_the_next_updates():
    ready = [ReadyUnit("young-1", 1), ReadyUnit("young-2", 1)]
    shared = {"policy_version": 1, "eta": 2, "needed": 2, "late": LatePolicy.WAIT}
    assert chosen(ready, [0, 0, 0], surplus_units=0, **shared) is None
    assert chosen(ready, [0, 0, 0], surplus_units=1, **shared) == ["young-1", "young-2"]
    assert chosen(ready, [0, 0], surplus_units=0, **shared) == ["young-1", "young-2"]


@given(
    eta=st.integers(0, 4),
    needed=st.integers(1, 4),
    late=st.sampled_from(LatePolicy),
    lags=st.lists(st.integers(0, 4), min_size=4, max_size=20),
    running=st.lists(st.integers(0, 4), max_size=8),
)
def test_a_choice_has_the_right_size_in_order_of_admission_and_nothing_twice(eta, needed, late, lags, running):
    ready = [ReadyUnit(f"{number:02}", 10 - min(lag, eta)) for number, lag in enumerate(lags)]
    found = chosen(
        ready,
        [10 - lag for lag in running],
        policy_version=10,
        eta=eta,
        needed=needed,
        surplus_units=0,
        late=late,
    )
    if found is None:
        assert late is LatePolicy.WAIT
        assert running
    else:
        assert len(found) == needed
        assert found == sorted(set(found))


def test_a_specification_that_could_hang_is_refused():
    faults = {"group_size": 0, "eta": -1, "oversampling": 0.5, "lease_s": 0.0, "max_attempts": 0}
    for name, wrong in faults.items():
        change: dict[str, Any] = {name: wrong}
        with pytest.raises(ConfigError):
            check_spec(make_spec(**change))
    with pytest.raises(ConfigError, match="at least 2 members"):
        check_spec(make_spec(group_size=1, signal_filter=True))


async def _story(unit: Unit, eta: int, seed: int, late: LatePolicy, signal: bool) -> tuple[int, dict[str, int]]:
    """Train 12 updates with random progress of everything; return the worst staleness and the
    drops."""
    dice = random.Random(seed)
    now = 0.0
    ledger = MemoryLedger(lambda worker: 0, lambda: now)
    spec = make_spec(unit, eta=eta, late=late, signal_filter=signal and unit is Unit.GROUP, lease_s=1e9)
    await ledger.open(spec)
    version, worst, held, pending = 0, 0, {}, []
    for _ in range(20_000):
        if version == 12:
            break
        step = dice.random()
        if step < 0.3:
            for lease in (await ledger.lease(GENERATOR, max_trajectories=dice.randint(1, 4))).leases:
                # sampled from now on, under the published version
                held[lease.trajectory] = (lease.next_index, version)
        elif step < 0.6 and held:
            trajectory = dice.choice(sorted(held))
            index, began = held.pop(trajectory)
            chunk = make_chunk(trajectory, index, tokens=1, final=dice.random() < 0.4, version=began, context=index)
            if (await ledger.write_chunk(GENERATOR, chunk)).keeps_lease:
                held[trajectory] = (index + 1, version)
            if chunk.finish_reason.is_final:
                pending.append(chunk.id)
        elif step < 0.9 and pending:
            await ledger.write_score(
                SCORER, pending.pop(dice.randrange(len(pending))), reward(float(dice.random() < 0.7))
            )
        else:
            claim = await ledger.claim(LEARNER, policy_version=version)
            if not isinstance(claim, Claim):
                assert claim.wait is not ClaimWait.STARVED
                continue
            for claimed in await ledger.fetch(claim):
                chunks = [scored.chunk for trajectory in claimed.trajectories for scored in trajectory]
                worst = max(worst, version - min(chunk.oldest_version for chunk in chunks))
            await ledger.settle(LEARNER, (claim.claim_id,))
            version += 1
            await ledger.advance(LEARNER, version)
    assert version == 12, "the pipeline hangs"
    audit = await ledger.audit()
    assert audit.balances
    return worst, audit.tokens.dropped


@settings(max_examples=30, deadline=None)
@given(
    unit=st.sampled_from(Unit),
    eta=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    late=st.sampled_from(LatePolicy),
    signal=st.booleans(),
)
def test_staleness_is_bounded_and_under_wait_nothing_is_thrown_away_for_its_age(unit, eta, seed, late, signal):
    worst, dropped = asyncio.run(_story(unit, eta, seed, late, signal))
    assert worst <= eta
    if late is LatePolicy.WAIT:
        assert dropped.keys() <= {"no_signal"}


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_eta_0_is_the_synchronous_baseline(seed):
    assert asyncio.run(_story(Unit.GROUP, 0, seed, LatePolicy.WAIT, signal=True))[0] == 0
