"""The bound that the benchmark of slow tools compares with, and its barrier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench import latency
from ops.bench.latency import LEAST_S, MOST_S, TURNS, SlowTool, ideal_use, latency_s
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.ledger.staleness import ReadyUnit, choose
from pipeline.ledger.types import LatePolicy

ROOT = Path(__file__).parents[3]


def config(eta: int, *more: str) -> RunConfig:
    own = (*latency._OVERRIDES, "model.path=ops/demo/tools_model", "run.num_updates=12", f"staleness.eta={eta}", *more)
    return load_config([ROOT / "configs" / "overlap.toml"], own)


def test_a_tool_takes_the_same_time_for_the_same_words_within_its_bounds() -> None:
    found = [latency_s(str(number)) for number in range(2_000)]
    assert found == [latency_s(str(number)) for number in range(2_000)]
    assert min(found) >= LEAST_S and max(found) <= MOST_S
    assert sorted(found)[1_000] == pytest.approx(latency.MEDIAN_S, rel=0.1)


def test_the_bound_is_full_slots_without_a_tool_and_less_the_longer_it_takes_or_the_less_may_run_ahead() -> None:
    slow = [ideal_use(config(eta)) for eta in (0, 4)]
    assert slow[0] < 0.5 < slow[1] <= 1.02
    at_once = [ideal_use(config(eta, "environment.arguments={is_quick=true}")) for eta in (0, 4)]
    assert at_once[1] == pytest.approx(1.0, abs=0.03)
    assert slow[0] < at_once[0] < at_once[1]


@given(
    done=st.lists(st.integers(0, 6), max_size=12), running=st.lists(st.integers(0, 6), max_size=6),
    batch=st.integers(1, 6), eta=st.integers(0, 3),
)  # fmt: skip
def test_the_bounds_learner_claims_as_the_ledger_does(
    done: list[int], running: list[int], batch: int, eta: int
) -> None:
    edge = 3
    ready = [latency._Playing(number, [], edge + age) for number, age in enumerate(done) if age <= eta]
    begun = [latency._Playing(99, [], edge + age) for age in running if age <= eta]
    found = latency._claim(ready, begun, edge + eta, batch, eta)
    expected = None
    if len(ready) >= batch:
        units = [ReadyUnit(str(one.number), one.age) for one in ready]
        ages = sorted(one.age for one in begun)
        expected = choose(
            units, ages, policy_version=edge + eta, eta=eta, needed=batch, surplus_units=0, late=LatePolicy.WAIT
        )
    assert sorted(found) == sorted(map(int, expected or ()))


async def test_behind_the_barrier_nobody_goes_on_before_the_last_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "latency_s", float)
    tools = [SlowTool(barrier=3) for _ in range(3)]
    ended: list[str] = []

    async def play(tool: SlowTool, seconds: str) -> None:
        for turn in range(TURNS):
            step = await tool.step({"role": "assistant", "content": seconds})
            ended.append(f"{turn}")
            assert step.done == (turn == TURNS - 1)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for tool, seconds in zip(tools, ("0", "0.01", "0.1"), strict=True):
            tasks.create_task(play(tool, seconds))
    assert ended == sorted(ended), "in step"
