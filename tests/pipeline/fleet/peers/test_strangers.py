"""Claims about fleets unlike ours: other names, units, intervals, lengths, sizes and loads.

Every fleet has autocorrelated noise, hosts that differ for ever, a load that shifts for all, and
workers that join late. One worker becomes odd, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from pipeline.fleet.peers.frame import Frame
from tests.pipeline.fleet.peers.fleets import findings


@dataclass(frozen=True)
class Stranger:
    """One fleet."""

    num: int
    step_s: float
    length_s: float
    levels: dict[str, float]
    odd: str
    by: float
    lost: float = 0.0
    """Share of samples that are missing."""
    is_in_roles: bool = False


MESH = {"p99_latency_us": 18_000.0, "rx_gbit": 42.0, "sm_clock_mhz": 1700.0}
FARM = {"frames_rendered_per_min": 55.0, "fan_rpm": 4200.0, "cpu": 11.0, "rss_bytes": 6e9}
PUMPS = {"pressure_bar": 3.1, "flow_l_s": 0.02}

FLEETS = {
    "network cards, 5 s, 40 minutes": Stranger(24, 5.0, 2400.0, MESH, "p99_latency_us", 1.7),
    "render farm, 10 s, lossy": Stranger(12, 10.0, 3000.0, FARM, "frames_rendered_per_min", 0.5, lost=0.1),
    "pumps, 15 s, two hours": Stranger(6, 15.0, 7200.0, PUMPS, "flow_l_s", 0.5),
    "network cards, 1 s, six minutes": Stranger(16, 1.0, 360.0, MESH, "sm_clock_mhz", 0.6),
    "a thousand, 15 s": Stranger(1000, 15.0, 1800.0, PUMPS, "pressure_bar", 1.8),
    "two roles, 5 s": Stranger(20, 5.0, 1800.0, MESH, "rx_gbit", 0.45, is_in_roles=True),
}  # fmt: skip


def frames(one: Stranger, seed: int, *, is_odd: bool) -> Iterator[Frame]:
    """Yield the frames of a fleet; its worker 3 becomes odd after half of the time."""
    draw = np.random.default_rng(seed)
    names = tuple(f"n{at:04d}" for at in range(one.num))
    roles = tuple("ab"[at % 2] if one.is_in_roles else "" for at in range(one.num))
    metrics = tuple(one.levels)
    usual = np.array([one.levels[name] for name in metrics]) * np.exp(draw.normal(0, 0.1, (one.num, len(metrics))))
    noise, keep = np.zeros_like(usual), np.exp(-one.step_s / 20.0)
    first = np.where(draw.random(one.num) < 0.15, 0.2 * one.length_s, 0.0)
    first[3] = 0.0
    column, there = metrics.index(one.odd), np.arange(0)
    shown: tuple[str, ...] = ()
    of_shown: tuple[str, ...] = ()
    for at in range(int(one.length_s / one.step_s)):
        now_s = at * one.step_s
        noise = keep * noise + np.sqrt(1 - keep**2) * 0.05 * draw.standard_normal(usual.shape)
        load = 1.0 + 0.4 * np.sin(2 * np.pi * now_s / one.length_s) + (0.3 if now_s > 0.7 * one.length_s else 0.0)
        values = usual * np.exp(noise) * load
        if is_odd and now_s >= 0.5 * one.length_s:
            values[3, column] *= one.by
        values[draw.random(values.shape) < one.lost] = np.nan
        here = np.flatnonzero(first <= now_s)
        if len(here) != len(there):
            there, shown, of_shown = here, tuple(names[k] for k in here), tuple(roles[k] for k in here)
        yield Frame(now_s, shown, of_shown, metrics, values[there].astype(np.float32))


@pytest.mark.parametrize("name", FLEETS)
def test_the_odd_worker_of_a_strange_fleet_is_named_and_no_other(name: str) -> None:
    one = FLEETS[name]
    found = findings(frames(one, 1, is_odd=True))
    assert [(each.worker, each.metric) for each in found] == [("n0003", one.odd)]
    assert 0.0 <= found[0].alarm_s - 0.5 * one.length_s <= 240.0


@pytest.mark.parametrize("name", FLEETS)
def test_a_healthy_strange_fleet_has_no_odd_worker(name: str) -> None:
    assert findings(frames(FLEETS[name], 2, is_odd=False)) == []
