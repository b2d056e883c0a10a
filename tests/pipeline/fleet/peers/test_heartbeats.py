"""Heartbeats become frames: every number in its column, and what is not known as no sample."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.peers.frame import CATALOGUE, Finding, Frame
from pipeline.fleet.peers.heartbeats import METRICS, FrameMaker
from pipeline.fleet.peers.watcher import Watch
from pipeline.fleet.state import Worker
from pipeline.process.work import ServiceSums, WorkReport
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import Vitals
from pipeline.weights import PARTS
from protocol.ids import Incarnation, Role


def beat(worker: str = "reward-0", role: Role = Role.REWARD, *, epoch: int = 1, **more: object) -> Worker:
    known: dict[str, object] = {
        "pid": 1,
        "host": "host",
        "at_s": 5.0,
        "started_s": 0.0,
        "progress": 7,
        "progress_at_s": 4.0,
    }
    known |= {"waiting_for": WaitingFor.INPUT} | more
    return Worker(who=Incarnation(role, worker, epoch), **known)  # type: ignore[arg-type]


def value(frame: Frame, worker: str, metric: str) -> float:
    return float(frame.values[frame.workers.index(worker), frame.metrics.index(metric)])


def test_every_number_of_a_heartbeat_is_in_its_column() -> None:
    vitals = Vitals(
        loop_lag_ms=1.0, cpu=2.0, num_fds=3, disk_free_bytes=4, disk_free_share=0.5, gpu_util=0.6, gpu_mem_bytes=7,
        gpu_power_w=8.0, service={"score": ServiceSums(9, 1.0, 10.0), "more": ServiceSums(2, 1.0, 10.0)}, errors=12,
        retries=13, refused=14, ledger_rtt_ms=15.0, oldest_age_s=16.0, input_depth=17, output_depth=18,
    )  # fmt: skip
    one = beat(
        "generator-0", Role.GENERATOR, silent_s=19.0, turns=20, held=21, rss_bytes=22, policy_version=3,
        clock_ahead_s=0.025, vitals=vitals, work=WorkReport(steps=30), storing=WorkReport(steps=2),
        counters={PARTS: 1.0},
    )  # fmt: skip
    frame = FrameMaker().frame(1.0, [one], published=5)
    expected = {
        "loop_lag_ms": 1, "cpu": 2, "num_fds": 3, "disk_free_bytes": 4, "disk_free_share": 0.5, "gpu_util": 0.6,
        "gpu_mem_bytes": 7, "gpu_power_w": 8, "done": 11, "errors": 12, "retries": 13, "refused": 14,
        "ledger_rtt_ms": 15, "oldest_age_s": 16, "input_depth": 17, "output_depth": 18, "heartbeat_age_s": 19,
        "turns": 20, "steps": 33, "in_flight": 21, "rss_bytes": 22, "version_lag": 2, "clock_ahead_ms": 25, "progress": 7,
        "service_ratio": math.nan, "loss": math.nan, "reward_mean": math.nan,
    }  # fmt: skip
    assert set(expected) == set(METRICS) <= set(CATALOGUE)
    found = {name: value(frame, "generator-0", name) for name in METRICS}
    assert found == pytest.approx(expected, nan_ok=True)


def test_what_a_heartbeat_does_not_know_is_no_sample() -> None:
    frame = FrameMaker().frame(1.0, [beat(vitals=None), beat("reward-1", vitals=Vitals())], published=5)
    for metric in ("done", "num_fds", "disk_free_share", "gpu_util", "version_lag", "service_ratio", "input_depth"):
        assert math.isnan(value(frame, "reward-0", metric)), metric
        assert math.isnan(value(frame, "reward-1", metric)), metric
    assert value(frame, "reward-0", "progress") == 7.0


def test_a_refused_step_is_an_infinite_loss_until_the_next_frame_without_one() -> None:
    maker, seen = FrameMaker(), list[float]()
    for refused, loss in ((2.0, 0.5), (2.0, 0.4), (3.0, None), (3.0, 0.3)):
        counters = {"refused_steps": refused} | ({} if loss is None else {"loss": loss})
        seen.append(value(maker.frame(1.0, [beat("learner", Role.LEARNER, counters=counters)], 5), "learner", "loss"))
    assert seen == pytest.approx([0.5, 0.4, math.inf, 0.3])


def test_a_step_that_was_not_committed_is_an_infinite_loss_as_long_as_it_is_reported() -> None:
    maker, seen = FrameMaker(), list[float]()
    for words in ("", "a step of update 3 was not finite", ""):
        told = msgspec.structs.replace(beat("learner", Role.LEARNER, counters={"loss": 0.5}), not_committed=words)
        seen.append(value(maker.frame(1.0, [told], 5), "learner", "loss"))
    assert seen == pytest.approx([0.5, math.inf, 0.5])


def test_a_generator_without_weights_lags_by_nothing() -> None:
    frame = FrameMaker().frame(1.0, [beat("generator-0", Role.GENERATOR)], published=5)
    assert math.isnan(value(frame, "generator-0", "version_lag"))


@dataclass
class Fleet:
    """Reward workers that take so many seconds a token."""

    paces: dict[str, float]
    maker: FrameMaker = field(default_factory=FrameMaker)
    sums: dict[str, ServiceSums] = field(default_factory=dict[str, ServiceSums])

    def frame(self, tokens: dict[str, float], epochs: dict[str, int] | None = None) -> Frame:
        beats: list[Worker] = []
        for name, pace in self.paces.items():
            size = tokens.get(name, 0.0)
            if size:
                self.sums[name] = self.sums.get(name, ServiceSums()).plus(1, size * pace, size)
            vitals = Vitals(service={"score": self.sums.get(name, ServiceSums())})
            beats.append(beat(name, epoch=(epochs or {}).get(name, 1), vitals=vitals))
        return self.maker.frame(0.0, beats, -1)


def test_a_worker_is_slow_by_the_time_of_its_tokens_and_not_by_their_number() -> None:
    fleet = Fleet({"reward-0": 0.01, "reward-1": 0.01, "reward-2": 0.04})
    frame = fleet.frame({})
    for size in (100.0, 900.0, 50.0):
        frame = fleet.frame({"reward-0": size, "reward-1": 10.0 * size, "reward-2": size})
    ratios = [value(frame, name, "service_ratio") for name in fleet.paces]
    assert ratios == pytest.approx([1.0, 1.0, 4.0], rel=0.01)


def test_slow_first_pieces_are_not_usual_for_minutes() -> None:
    fleet, tokens = Fleet({"reward-0": 0.2, "reward-1": 0.2}), {"reward-0": 100.0, "reward-1": 100.0}
    for _ in range(3):
        fleet.frame(tokens)
    fleet.paces = dict.fromkeys(tokens, 0.01)
    ratios = [value(fleet.frame(tokens), "reward-0", "service_ratio") for _ in range(30)]
    assert 0.7 < ratios[-1] <= 1.0


def test_one_of_two_workers_that_is_slow_hardly_moves_what_is_usual() -> None:
    fleet, tokens = Fleet({"reward-0": 0.01, "reward-1": 0.01}), {"reward-0": 100.0, "reward-1": 100.0}
    for _ in range(60):
        fleet.frame(tokens)
    fleet.paces["reward-1"] = 3.0
    frame = fleet.frame(tokens)
    for second in range(30):
        # the other one finishes a piece now and then
        frame = fleet.frame(tokens if second % 3 else {"reward-1": 100.0})
    assert value(frame, "reward-0", "service_ratio") > 0.8
    assert value(frame, "reward-1", "service_ratio") > 240


def test_work_that_is_held_while_others_must_act_is_no_hang() -> None:
    waits = {WaitingFor.WEIGHTS: 0, WaitingFor.CREDIT: 0, WaitingFor.COMPUTE: 4, WaitingFor.ROOM: 4}
    for kind, expected in waits.items():
        frame = FrameMaker().frame(1.0, [beat(waiting_for=kind, held=4, vitals=Vitals())], published=-1)
        assert value(frame, "reward-0", "in_flight") == expected, kind


def test_without_finished_work_there_is_no_ratio() -> None:
    fleet = Fleet({"reward-0": 0.01, "reward-1": 0.01})
    fleet.frame({"reward-0": 10.0})
    frame = fleet.frame({"reward-0": 10.0})
    assert value(frame, "reward-0", "service_ratio") == pytest.approx(1.0)
    assert math.isnan(value(frame, "reward-1", "service_ratio"))


def test_a_restarted_worker_is_not_charged_with_the_sums_of_the_one_before() -> None:
    fleet = Fleet({"reward-0": 0.01, "reward-1": 0.01})
    fleet.frame({"reward-0": 100.0, "reward-1": 100.0})
    fleet.frame({"reward-0": 100.0, "reward-1": 100.0})
    fleet.sums["reward-0"] = ServiceSums()
    frame = fleet.frame({"reward-0": 5.0, "reward-1": 100.0}, {"reward-0": 2})
    assert math.isnan(value(frame, "reward-0", "service_ratio"))
    assert value(fleet.frame({"reward-0": 5.0}, {"reward-0": 2}), "reward-0", "service_ratio") == pytest.approx(1.0)


def test_the_names_of_a_fleet_that_stays_are_the_same_object() -> None:
    maker = FrameMaker()
    first, second = (maker.frame(float(n), [beat("b"), beat("a")], -1) for n in (1, 2))
    assert first.workers is second.workers
    assert first.roles is second.roles
    assert first.workers == ("a", "b")


@given(st.permutations(["reward-0", "reward-1", "reward-2"]))
def test_the_order_of_heartbeats_changes_nothing(names: list[str]) -> None:
    beats = [beat(name, silent_s=float(name[-1])) for name in names]
    frame = FrameMaker().frame(1.0, beats, -1)
    assert np.array_equal(frame.values[:, 0], [0.0, 1.0, 2.0])


def test_the_mean_reward_is_of_the_responses_judged_since_the_last_frame() -> None:
    def mean(maker: FrameMaker, at_s: float, judged: float, accuracy: float, *, epoch: int = 1) -> float:
        counters = {"judged": judged, "judged_accuracy": accuracy}
        return value(maker.frame(at_s, [beat(counters=counters, epoch=epoch)], published=0), "reward-0", "reward_mean")

    maker = FrameMaker()
    assert math.isnan(mean(maker, 1.0, 100.0, 40.0))
    assert mean(maker, 2.0, 108.0, 42.0) == 0.25
    assert math.isnan(mean(maker, 3.0, 108.0, 42.0))
    assert mean(maker, 4.0, 109.0, 43.0) == 1.0
    assert math.isnan(mean(maker, 5.0, 110.0, 43.0, epoch=2))


def test_a_reward_worker_whose_verdicts_are_always_the_same_is_named_in_a_live_fleet() -> None:
    maker, watch, generator = FrameMaker(), Watch(), np.random.default_rng(7)
    sums, found = [0.0, 0.0, 0.0], list[Finding]()
    for second in range(200):
        for at in range(3):
            sums[at] += 8.0 if at == 1 and second >= 60 else float(generator.binomial(8, 0.4))
        beats = [
            beat(f"reward-{at}", counters={"judged": 8.0 * (second + 1), "judged_accuracy": sums[at]}, silent_s=0.3)
            for at in range(3)
        ]
        found += watch.tick(maker.frame(float(second), beats, published=0))
    assert {(one.worker, one.kind) for one in found} == {("reward-1", "reward")}
    assert min(one.alarm_s for one in found) <= 120.0
