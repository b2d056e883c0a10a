"""Readers of heartbeats agree on a worker, because each takes its limit from one place."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.runtime import SupervisorSection
from pipeline.fleet.health import HealthKind
from pipeline.fleet.limits import Limits
from pipeline.fleet.state import Worker, read_once
from pipeline.fleet.status import worker_rows
from pipeline.observability.metrics import HeartbeatCollector
from pipeline.operator.ending import _may_live
from pipeline.process.work import LEAST_S
from pipeline.runtime import liveness
from pipeline.runtime.heartbeat import HeartbeatThread
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.training.critic_gate import view_critic
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.generator.generator import Neighbours
from workers.learner.weight_publisher import _is_awaited

ROOT = Path(__file__).resolve().parents[3]


def beat_of(role: Role, silent_s: float) -> Worker:
    who = Incarnation(role, f"{role}-7", 1)
    return Worker(
        who=who, pid=1, host="another", at_s=1000.0, started_s=0.0, progress=1, progress_at_s=1000.0,
        waiting_for=WaitingFor.INPUT, policy_version=0, silent_s=silent_s,
    )  # fmt: skip


def in_status(folder: Path, age_s: float) -> bool:
    (row,) = worker_rows(read_once([beat_of(Role.REWARD, age_s)], Limits(None, 100.0)))
    return row.health is HealthKind.SILENT


def in_metrics(folder: Path, age_s: float) -> bool:
    clock = ManualClock()
    collector = HeartbeatCollector(clock, "a-run")
    collector.update([beat_of(Role.REWARD, age_s - 2.0)], ())
    # a scrape may come later
    asyncio.run(clock.advance(2.0))
    return next(family.samples[0].value == 0.0 for family in collector.collect() if family.name == "headrace_up")


def at_the_critics_gate(folder: Path, age_s: float) -> bool:
    return not view_critic([beat_of(Role.VALUE, age_s)], small_config(folder)).is_live


def for_down(folder: Path, age_s: float) -> bool:
    return not _may_live(beat_of(Role.REWARD, age_s))


def for_the_learner(folder: Path, age_s: float) -> bool:
    return not _is_awaited(beat_of(Role.GENERATOR, age_s))


def for_a_neighbour(folder: Path, age_s: float) -> bool:
    async def look() -> bool:
        async with asyncio.TaskGroup() as tasks:
            clock = ManualClock()
            registry = MemoryRegistry(clock)
            settings = (small_config(folder), folder, Role.GENERATOR, "generator-0", tasks)
            ctx = await context_of(*settings, registry, zmq_transport(), clock)
            await registry.register(Role.GENERATOR, "generator-7")
            assert registry.beat(beat_of(Role.GENERATOR, 0.0))
            await clock.advance(age_s)
            reaches = await Neighbours(ctx).reach_scorers()
            ctx.close()
        return not reaches

    return asyncio.run(look())


@pytest.mark.parametrize(
    "is_silent", [in_status, in_metrics, at_the_critics_gate, for_down, for_the_learner, for_a_neighbour]
)
def test_every_reader_counts_a_worker_as_silent_from_the_same_moment_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: Callable[[Path, float], bool]
) -> None:
    limit_s = liveness.SILENT_AFTER_S
    assert not is_silent(tmp_path, limit_s - 0.5)
    assert is_silent(tmp_path, limit_s + 0.5)
    monkeypatch.setattr(liveness, "SILENT_AFTER_S", limit_s + 10.0)
    assert not is_silent(tmp_path, limit_s + 0.5)


def test_a_worker_is_reported_then_left_out_and_then_replaced() -> None:
    assert 2 * liveness.HEARTBEAT_WITHIN_S < liveness.SILENT_AFTER_S, "one lost heartbeat is no silence"
    assert 4 * liveness.HEARTBEAT_WITHIN_S < liveness.UNLISTED_AFTER_S, "nor are those that a replica lacks"
    assert liveness.UNREACHED_SAID_AFTER_S < liveness.UNREACHED_AFTER_S <= liveness.SILENT_AFTER_S
    assert liveness.HEARTBEAT_WITHIN_S + liveness.STOPPED_AFTER_S >= liveness.SILENT_AFTER_S, (
        "it is seen as silent first"
    )
    assert liveness.SILENT_AFTER_S < liveness.UNLISTED_AFTER_S < liveness.REPLACED_AFTER_S
    assert liveness.REPLACED_AFTER_S <= liveness.RESTARTED_WITHIN_S < LEAST_S


def test_the_supervisor_the_registry_and_the_heartbeat_take_their_limits_from_there() -> None:
    assert SupervisorSection().silent_after_s == liveness.REPLACED_AFTER_S
    assert SupervisorSection().stopped_after_s == liveness.STOPPED_AFTER_S
    assert Limits(stuck_after_s=None, start_timeout_s=1.0).silent_after_s == liveness.REPLACED_AFTER_S
    assert MemoryRegistry().unlisted_after_s == liveness.UNLISTED_AFTER_S
    assert (HeartbeatThread.__init__.__kwdefaults__ or {})["interval_of"](7) == liveness.HEARTBEAT_EVERY_S


@pytest.mark.parametrize(
    ("workers", "silent_after_s", "every_s"),
    [(1, 20.0, 1.0), (250, 20.0, 1.0), (375, 20.0, 1.5), (500, 20.0, 2.0), (5000, 20.0, 2.0), (5000, 4.0, 1.0)],
)
def test_a_large_fleet_sends_heartbeats_more_seldom_within_the_limit_of_silence(
    workers: int, silent_after_s: float, every_s: float
) -> None:
    assert liveness.heartbeat_every_s(workers, 250.0, silent_after_s) == every_s


@given(st.floats(1e9, 2e9), st.floats(1.0, 2.0), st.integers(0, 999))
def test_heartbeats_of_all_workers_come_at_ten_moments_of_a_second(at_s: float, every_s: float, number: int) -> None:
    wait_s = liveness.heartbeat_wait_s(f"generator-{number}", at_s, every_s)
    assert every_s / 2 - 0.06 <= wait_s <= 1.5 * every_s + 0.06
    moments = (at_s + wait_s) / 0.1
    assert abs(moments - round(moments)) < 1e-3
    late_s = 0.004
    again_s = liveness.heartbeat_wait_s(f"generator-{number}", at_s + wait_s + late_s, every_s)
    assert again_s == pytest.approx(every_s - late_s, abs=0.06)


def test_a_moment_gets_its_share_of_a_fleet() -> None:
    waits = [round(liveness.heartbeat_wait_s(f"generator-{n}", 1.5e9, 2.0), 3) for n in range(1000)]
    shares = Counter(waits)
    assert len(shares) == 20
    assert max(shares.values()) < 100
