"""The synthetic fleet: the truth is what is in the signal, and frames have nothing of it."""

from __future__ import annotations

import dataclasses
from itertools import islice

import numpy as np
import pytest

from ops.bench.watch.cases import BENIGN, SINGLE, WINDOW_S, Case, Control
from ops.bench.watch.fleet import SyntheticFleet
from ops.bench.watch.roster import EARLIEST_S, LATEST_S
from pipeline.fleet.peers.frame import Frame

SIZE = 16
SIGNAL = {
    "killed": "heartbeat_age_s",
    "hung": "oldest_age_s",
    "slow x4": "service_ratio",
    "leak": "rss_bytes",
    "errors": "errors",
    "corrupt": "refused",
    "stale": "version_lag",
    "disk": "disk_free_bytes",
    "clock": "clock_ahead_ms",
    "link": "ledger_rtt_ms",
}
"""The metric that shows each kind of fault most directly."""
COUNTERS = frozenset({"errors", "refused"})
ONSET = 150
"""Earlier than in the benchmark, so that the test is short."""


def column(frames: list[Frame], worker: str, metric: str) -> np.ndarray:
    first = frames[0]
    return np.array([frame.values[first.workers.index(worker), first.metrics.index(metric)] for frame in frames])


def change(frames: list[Frame], worker: str, metric: str) -> float:
    """Return how far a worker's metric moves by two minutes after the onset."""
    series = column(frames, worker, metric).astype(np.float64)
    if metric in COUNTERS:
        series = np.diff(series, prepend=series[0])
    before, after = series[ONSET - 120 : ONSET], series[ONSET + 60 :]
    return abs(float(np.nanmean(after) - np.nanmean(before))) if np.isfinite(after).any() else 0.0


@pytest.mark.parametrize("label", list(SIGNAL))
def test_a_fault_is_in_the_faulty_worker_s_signal_and_most_of_all_there(label: str) -> None:
    opened = SyntheticFleet(Case("dev", SIZE, label, 3))
    (fault,) = opened.truth.faults
    assert fault.kind == label.split()[0]
    assert EARLIEST_S <= fault.onset_s <= LATEST_S
    fault = dataclasses.replace(fault, onset_s=float(ONSET))
    opened.truth = dataclasses.replace(opened.truth, faults=(fault,))
    frames = list(islice(opened.frames(), ONSET + 150))
    roles = dict(zip(frames[0].workers, frames[0].roles, strict=True))
    role = roles[fault.worker]
    peers = [worker for worker, name in roles.items() if name == role and worker != fault.worker]
    moved = {worker: change(frames, worker, SIGNAL[label]) for worker in (fault.worker, *peers)}
    assert moved[fault.worker] > 2.0 * max((moved[worker] for worker in peers), default=0.0)


@pytest.mark.parametrize("label", SINGLE)
def test_before_its_onset_a_fault_leaves_no_trace(label: str) -> None:
    opened, healthy = (SyntheticFleet(Case("dev", 8, label, 5)) for _ in range(2))
    (fault,) = opened.truth.faults
    opened.truth = dataclasses.replace(opened.truth, faults=(dataclasses.replace(fault, onset_s=25.0),))
    healthy.truth = dataclasses.replace(healthy.truth, faults=())
    same = [
        np.array_equal(one.values, other.values, equal_nan=True)
        for one, other in islice(zip(opened.frames(), healthy.frames(), strict=True), 40)
    ]
    assert all(same[:25])
    # a stale worker shows with the next version
    if label != "stale":
        assert not all(same)


def test_a_window_is_fifteen_minutes_a_frame_a_second_and_repeats_exactly() -> None:
    case = Case("dev", 8, BENIGN, 1)
    one = list(SyntheticFleet(case).frames())
    assert len(one) == WINDOW_S
    assert np.allclose(np.diff([frame.time_s for frame in one]), 1.0)
    *_, again = islice(SyntheticFleet(case).frames(), 100)
    np.testing.assert_array_equal(one[99].values, again.values)
    assert all(frame.workers is one[0].workers for frame in one)


def test_workers_come_and_go_when_roles_are_scaled_and_none_is_faulty() -> None:
    opened = SyntheticFleet(Case("dev", SIZE, Control.SCALE, 0))
    assert opened.truth.faults == ()
    fleets = list(dict.fromkeys(frame.workers for frame in opened.frames()))
    sizes = [len(workers) for workers in fleets]
    assert len(sizes) == 3
    assert sizes[0] == SIZE < sizes[1] > sizes[2]


@pytest.mark.parametrize(
    ("control", "metric", "factor"),
    [(Control.REDIS, "ledger_rtt_ms", 5.0), (Control.TOOL, "oldest_age_s", 1.4)],
)
def test_a_control_is_common_to_a_role(control: Control, metric: str, factor: float) -> None:
    opened = SyntheticFleet(Case("dev", 32, control, 2))
    begin_s = 60.0
    opened._begin_s, opened._end_s = begin_s, 300.0
    frames = list(islice(opened.frames(), int(begin_s) + 60))
    strained = "reward" if control is Control.TOOL else "generator"
    at = [place for place, role in enumerate(frames[0].roles) if role == strained]
    metric_at = frames[0].metrics.index(metric)
    values = np.array([frame.values[at, metric_at] for frame in frames])
    before, during = (np.nanmean(part, axis=0) for part in (values[: int(begin_s)], values[-50:]))
    assert (during > factor * before).mean() > 0.8


def test_test_seeds_make_other_windows_than_development_seeds() -> None:
    dev, test = (SyntheticFleet(Case(split, 8, "leak", 0)) for split in ("dev", "test"))
    assert dev.truth != test.truth
    assert not np.array_equal(next(dev.frames()).values, next(test.frames()).values)
