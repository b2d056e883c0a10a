"""A synthetic fleet: every metric is its role's level with autocorrelated noise, regimes, bursts and common
movements.

Nothing flows between its workers. A worker's signals are correlated because they share latent processes: AR(1)
noise by channel, a regime (usual, light, long), and a part from its host and its role. Noise is normal or
heavy-tailed, by window. Faults and controls strain a worker: they act on its pace, time of work, latency and so
on, and the metrics follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ops.bench.watch.cases import WINDOW_S, Case, Control, Fault, Kind, Truth
from ops.bench.watch.roster import BURST_S, CALM_S, EARLIEST_S, LATEST_S, Roster, draw_roster, draw_truth
from pipeline.fleet.peers.frame import Frame

Floats = NDArray[np.float32]
Places = NDArray[np.int64]

METRICS: Final = (
    "heartbeat_age_s", "progress", "turns", "done", "in_flight", "oldest_age_s", "input_depth", "output_depth",
    "loop_lag_ms", "cpu", "rss_bytes", "num_fds", "disk_free_bytes", "disk_free_share", "gpu_util", "gpu_mem_bytes",
    "gpu_power_w", "tokens_per_s", "service_ratio", "errors", "retries", "refused", "version_lag", "clock_ahead_ms",
    "ledger_rtt_ms",
)  # fmt: skip
_START_S: Final = 1000.0
"""The reader's clock when a window begins."""


@dataclass(frozen=True, slots=True)
class _Usual:
    """The levels of a role."""

    work_s: float
    """Seconds of one piece of work."""
    at_once: float
    tokens_per_s: float
    depth: float
    cpu: float
    rss: float
    gpu: float
    """Usual duty; 0 without a GPU."""


_USUAL: Final = {
    "generator": _Usual(1.6, 8.0, 2400.0, 0.0, 0.55, 9.0e9, 0.88),
    "reward": _Usual(0.35, 4.0, 5200.0, 2.5, 0.65, 1.2e9, 0.0),
    "reference": _Usual(0.5, 3.0, 9000.0, 2.0, 0.35, 6.0e9, 0.6),
    "value": _Usual(0.6, 3.0, 8000.0, 3.0, 0.45, 7.0e9, 0.65),
    "learner": _Usual(2.2, 1.0, 16000.0, 6.0, 0.7, 2.2e10, 0.93),
}
_MIX: Final = ({"generator": 0.0, "reward": 0.2, "reference": 0.12, "value": 0.06, "learner": 0.01},
               {"generator": 0.0, "reward": 0.35, "reference": 0.0, "value": 0.0, "learner": 0.02})  # fmt: skip
"""Shares of the roles; the first role has the rest."""
_LEAST: Final = (
    {"generator": 2, "reward": 2, "reference": 1, "value": 0, "learner": 1},
    {"generator": 2, "reward": 2, "reference": 0, "value": 0, "learner": 1},
)
_CHANNELS: Final = ("pace", "cpu", "rtt", "lag", "memory", "depth", "service", "power")
_REGIMES: Final = np.array([[1.0, 1.0], [0.7, 0.8], [1.1, 2.2]], dtype=np.float32)
"""Pace and age of work, by regime: usual, light, long."""
_NEW_SHARE: Final = 0.25
"""Share of a role that joins, and that leaves, in the control of scale."""


class Strain:
    """Factors and offsets that act on each worker's usual values at one tick."""

    def __init__(self, number: int) -> None:
        def ones() -> Floats:
            return np.ones(number, dtype=np.float32)

        def zeros() -> Floats:
            return np.zeros(number, dtype=np.float32)

        self.pace, self.service, self.rtt, self.lag = ones(), ones(), ones(), ones()
        self.cpu, self.depth, self.age, self.gpu, self.tokens = ones(), ones(), ones(), ones(), ones()
        self.output, self.held_s, self.lag_ms, self.beat_s = zeros(), zeros(), zeros(), zeros()
        self.errors, self.retries, self.refused, self.memory = zeros(), zeros(), zeros(), zeros()
        self.clock_ms = zeros()
        self.turning = ones()
        self.is_dead = np.zeros(number, dtype=np.bool_)


class SyntheticFleet:
    """A window: its truth, and frames that do not reveal it."""

    def __init__(self, case: Case) -> None:
        rng = case.random("regimes")
        self._rng = rng
        form = int(rng.integers(len(_MIX)))
        mix = {name: share for name, share in _MIX[form].items() if share or name == "generator"}
        first = draw_roster(mix, _LEAST[form], case.size, rng)
        self.truth: Truth = draw_truth(case, first)
        self._begin_s, self._end_s = _span(rng)
        self._num_new = 0
        self._roster = self._with_newcomers(first) if self.truth.control is Control.SCALE else first
        self._draw_constants()

    def _with_newcomers(self, first: Roster) -> Roster:
        places = first.of_role("generator")
        number = self._num_new = max(1, int(_NEW_SHARE * len(places)))
        names = tuple(f"generator-{len(places) + place}" for place in range(number))
        hosts = first.hosts.max() + 1 + np.arange(number)
        return Roster(first.workers + names, first.roles + ("generator",) * number, np.append(first.hosts, hosts))

    def _draw_constants(self) -> None:
        rng, roster = self._rng, self._roster
        n = self._n = len(roster.workers)
        self._names = list(dict.fromkeys(roster.roles))
        self._role = np.array([self._names.index(name) for name in roster.roles])
        usual = [_USUAL[name] for name in self._names]

        def of_role(field: str) -> Floats:
            return np.array([getattr(each, field) for each in usual], dtype=np.float32)[self._role]

        self._work_s, self._at_once, self._tokens = of_role("work_s"), of_role("at_once"), of_role("tokens_per_s")
        self._depth, self._cpu, self._rss, self._gpu = of_role("depth"), of_role("cpu"), of_role("rss"), of_role("gpu")
        channels = len(_CHANNELS)
        self._phi = rng.uniform(0.55, 0.97, channels).astype(np.float32)
        self._sigma = rng.uniform(0.04, 0.16, channels).astype(np.float32)
        self._is_heavy = bool(rng.random() < 0.5)
        host_sigma, own_sigma = rng.uniform(0.02, 0.12), rng.uniform(0.02, 0.1)
        hosts = rng.normal(0.0, host_sigma, (roster.hosts.max() + 1, channels))
        self._offset = (hosts[roster.hosts] + rng.normal(0.0, own_sigma, (n, channels))).astype(np.float32)
        self._latent = rng.normal(0.0, 1.0, (n, channels)).astype(np.float32) * self._sigma
        self._common = np.zeros((len(self._names), channels), dtype=np.float32)
        self._regime = rng.integers(0, len(_REGIMES), n)
        self._counters = {
            name: np.floor(rng.uniform(0.0, 5e4, n)) for name in ("progress", "turns", "done", "errors", "retries")
        }
        self._counters["refused"] = np.zeros(n)
        self._disk_size = rng.choice([2.5e11, 5e11, 1e12], n)
        self._disk_free = self._disk_size * rng.uniform(0.3, 0.9, n)
        self._clock_ms = rng.normal(0.0, rng.uniform(2.0, 25.0), n)
        self._fds = rng.integers(30, 90, n).astype(np.float64)
        self._saw_s, self._saw_at = rng.uniform(30.0, 240.0, n), rng.uniform(0.0, 240.0, n)
        self._saw_bytes = rng.uniform(2e7, 2e8, n)
        self._burst_left, self._burst_kind = np.full(n, -200), np.zeros(n, dtype=np.int64)
        self._burst_by = np.ones(n, dtype=np.float32)
        self._version_s = float(rng.uniform(8.0, 20.0))
        self._delay_s = rng.exponential(float(rng.uniform(0.5, 3.0)), n)
        self._beat_at = rng.uniform(0.0, 1.0, n)
        self._missing_until = np.zeros(n)
        self._group = rng.random(n)
        """Selects the workers that a control strains."""
        self._gc_at = rng.uniform(0.0, 40.0, n)
        self._place = {name: place for place, name in enumerate(roster.workers)}

    def frames(self) -> Iterator[Frame]:
        """Yield a frame a second; each call continues where the last ended."""
        shown = self._shown(0.0)
        workers, roles = self._named(shown)
        for second in range(WINDOW_S):
            now = float(second)
            here = self._shown(now)
            if not np.array_equal(here, shown):
                shown = here
                workers, roles = self._named(shown)
            values = self._tick(now)[shown]
            yield Frame(_START_S + now, workers, roles, METRICS, values, self._phases(now, shown))

    def _named(self, shown: Places) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (
            tuple(self._roster.workers[place] for place in shown),
            tuple(self._roster.roles[place] for place in shown),
        )

    def _shown(self, now: float) -> Places:
        """Return the indices of the workers that are in the fleet."""
        every = np.arange(self._n)
        if self.truth.control is not Control.SCALE:
            return every
        new, leaving = self._is_new(), self._is_leaving()
        return every[~((new & (now < self._begin_s)) | (leaving & (now >= self._end_s + 10.0)))]

    def _is_new(self) -> NDArray[np.bool_]:
        return np.arange(self._n) >= self._n - self._num_new

    def _is_leaving(self) -> NDArray[np.bool_]:
        return (self._role == 0) & ~self._is_new() & (self._group < _NEW_SHARE)

    def _phases(self, now: float, shown: Places) -> tuple[str, ...] | None:
        if self.truth.control is not Control.EVALUATION:
            return None
        is_evaluating = self._evaluates() & (self._begin_s <= now < self._end_s)
        return tuple("evaluate" if is_evaluating[place] else "train" for place in shown)

    def _evaluates(self) -> NDArray[np.bool_]:
        return (self._role == 0) & (self._group < 0.4)

    def _tick(self, now: float) -> Floats:
        rng, n = self._rng, self._n
        noise = rng.standard_normal((n, len(_CHANNELS)), dtype=np.float32)
        if self._is_heavy:
            noise *= np.where(rng.random((n, 1), dtype=np.float32) < 0.02, np.float32(3.5), np.float32(0.93))
        self._latent = self._phi * self._latent + np.sqrt(1.0 - self._phi**2) * self._sigma * noise
        self._common = 0.985 * self._common + rng.normal(0.0, 0.015, self._common.shape).astype(np.float32)
        level = np.exp(self._latent + self._offset + self._common[self._role])
        change = rng.random(n) < 1.0 / 45.0
        self._regime[change] = rng.choice(len(_REGIMES), int(change.sum()), p=[0.7, 0.15, 0.15])
        strain = Strain(n)
        strain.pace *= _REGIMES[self._regime, 0]
        strain.age *= _REGIMES[self._regime, 1]
        self._burst(strain)
        self._synchronise(strain, now)
        self._control(strain, now)
        for fault in self.truth.faults:
            if now >= fault.onset_s:
                self._break(strain, fault, now)
        return self._measure(strain, {name: level[:, place] for place, name in enumerate(_CHANNELS)}, now)

    def _burst(self, strain: Strain) -> None:
        rng = self._rng
        begin = (self._burst_left <= -CALM_S) & (rng.random(self._n) < 1.0 / 900.0)
        number = int(begin.sum())
        if number:
            self._burst_left[begin] = rng.integers(BURST_S[0], BURST_S[1] + 1, number)
            self._burst_kind[begin] = rng.integers(0, 5, number)
            self._burst_by[begin] = rng.uniform(1.3, 2.6, number)
        active = np.flatnonzero(self._burst_left > 0)
        self._burst_left -= 1
        kind, by = self._burst_kind[active], self._burst_by[active]
        strain.cpu[active[kind == 0]] *= by[kind == 0]
        strain.rtt[active[kind == 1]] *= by[kind == 1] ** 2
        strain.lag[active[kind == 2]] *= by[kind == 2] ** 2
        slow = active[kind == 3]
        strain.service[slow] *= by[kind == 3]
        strain.pace[slow] /= by[kind == 3]
        strain.depth[active[kind == 4]] *= by[kind == 4] ** 2

    def _synchronise(self, strain: Strain, now: float) -> None:
        """Every new version makes the generators pause, each at its own moment."""
        since = (now % self._version_s) - self._delay_s % self._version_s
        pausing = (self._role == 0) & (since >= 0.0) & (since < 1.5)
        strain.pace[pausing] *= 0.5

    def _control(self, strain: Strain, now: float) -> None:
        if not self._begin_s <= now < self._end_s + 10.0:
            return
        first = self._role == 0
        is_on = now < self._end_s
        match self.truth.control:
            case Control.LONG_TAIL if is_on:
                begins = self._begin_s + self._group * 200.0
                few = first & (self._group * 7.0 % 1.0 < 0.25) & (begins <= now) & (now < begins + 90.0)
                strain.age[few] *= 6.0
                strain.pace[few] *= 0.3
                strain.tokens[few] /= 0.32
            case Control.WEIGHT_SYNC:
                for begin in np.arange(self._begin_s, self._end_s, 75.0):
                    since = now - begin - 4.0 * self._group
                    stopped = first & (since >= 0.0) & (since < 12.0)
                    strain.pace[stopped] *= 0.02
                    strain.held_s[stopped] += since[stopped].astype(np.float32)
                    strain.gpu[stopped] *= 0.05
            case Control.GC if is_on:
                few = (self._group < 0.3) & (((now - self._gc_at) % 40.0) < 2.0)
                strain.pace[few] *= 0.05
                strain.lag_ms[few] += self._rng.uniform(1200.0, 2200.0, int(few.sum())).astype(np.float32)
                strain.beat_s[few] += 0.9
                strain.turning[few] = 0.05
            case Control.REDIS if is_on:
                strain.rtt *= 10.0
                strain.pace *= 0.55
                strain.age *= 1.6
                strain.retries += 0.1
            case Control.LOAD if is_on:
                strain.depth *= 3.0
                strain.pace *= 1.25
                strain.cpu *= 1.3
                strain.age *= 1.4
            case Control.EVALUATION if is_on:
                some = self._evaluates()
                strain.pace[some] *= 0.45
                strain.age[some] *= 2.0
                strain.gpu[some] *= 0.7
                strain.tokens[some] *= 1.3
            case Control.SCALE:
                self._scale(strain, now)
            case Control.TOOL if is_on:
                users = np.array([name == "reward" for name in self._names])[self._role]
                strain.service[users] *= 2.5
                strain.age[users] *= 3.0
                strain.pace[users] *= 0.4
                strain.cpu[users] *= 0.6
            case _:
                pass

    def _scale(self, strain: Strain, now: float) -> None:
        new, leaving = self._is_new(), self._is_leaving()
        loading_s = 20.0 + 25.0 * self._group
        loading = new & (now < self._begin_s + loading_s)
        strain.pace[loading] = 0.0
        strain.gpu[loading] *= 0.02
        left = (1.0 - (now - self._begin_s) / loading_s)[loading]
        strain.memory[loading] -= (0.95 * left * self._rss[loading]).astype(np.float32)
        if now >= self._end_s:
            strain.pace[leaving] *= max(0.0, 1.0 - (now - self._end_s) / 8.0)

    def _break(self, strain: Strain, fault: Fault, now: float) -> None:
        since, by = now - fault.onset_s, fault.intensity
        at = self._place[fault.worker]
        match fault.kind:
            case Kind.KILLED:
                strain.beat_s[at] += since
                strain.is_dead[at] = True
            case Kind.HUNG:
                strain.pace[at] = 0.0
                strain.held_s[at] += since
                strain.depth[at] *= 1.0 + 0.1 * since
                strain.gpu[at] = 1.0 if fault.variant == "spin" else 0.02
                strain.cpu[at] = 1.5 if fault.variant == "spin" else 0.05
                if fault.variant != "compute":
                    strain.turning[at] = 0.0
                    strain.lag_ms[at] += 1000.0 * since
            case Kind.SLOW:
                strain.service[at] *= by
                strain.pace[at] /= by
                strain.age[at] *= by
                strain.depth[at] *= by**1.5
                strain.gpu[at] *= 0.75 + 0.25 / by
            case Kind.LEAK:
                strain.memory[at] += by * since
            case Kind.ERRORS:
                strain.errors[at] += 3.0 * by
                strain.retries[at] += by
            case Kind.CORRUPT:
                strain.refused[at] += 3.0 * by
            case Kind.STALE:
                # _lag shows it: the version is not applied
                pass
            case Kind.DISK:
                free = self._disk_free[at]
                self._disk_free[at] = np.maximum(0.0, free - free / max(1.0, by - since))
            case Kind.CLOCK:
                strain.clock_ms[at] += by * since if fault.variant == "drift" else by
            case Kind.LINK:
                strain.rtt[at] *= by
                strain.pace[at] *= 0.6
                strain.output[at] += np.minimum(12.0, 0.4 * since)
                strain.retries[at] += 0.5

    def _lag(self, now: float) -> Floats:
        """Return the published version less the served one."""
        published = np.floor(now / self._version_s)
        taken = np.floor((now - self._delay_s) / self._version_s)
        for fault in self.truth.faults:
            if fault.kind is Kind.STALE and now >= fault.onset_s:
                place = self._place[fault.worker]
                taken[place] = np.floor((fault.onset_s - self._delay_s[place]) / self._version_s)
        return np.where(self._role == 0, published - taken, np.nan).astype(np.float32)

    def _measure(self, strain: Strain, level: dict[str, Floats], now: float) -> Floats:
        rng, n = self._rng, self._n
        pace = strain.pace * level["pace"]
        rate = pace * self._at_once / self._work_s
        done = rng.poisson(rate)
        stopped = strain.pace == 0.0
        age = self._work_s * level["service"] * strain.age * rng.gamma(6.0, 1.0 / 6.0, n) + strain.held_s
        beat = ((now - self._beat_at) % 1.0) + rng.exponential(0.05, n) + strain.beat_s
        late = rng.random(n) < 0.002
        beat[late] += 1.0
        utilised = np.clip(self._gpu * strain.gpu * np.minimum(1.1, 0.3 + 0.7 * pace) * level["power"], 0.0, 1.0)
        has_gpu = self._gpu > 0.0
        saw = ((now + self._saw_at) % self._saw_s) / self._saw_s
        self._disk_free -= rng.uniform(0.0, 4e5, n)
        count = self._counters
        count["progress"] += rng.poisson(3.0 * rate)
        count["turns"] += np.rint(rng.normal(20.0, 1.5, n) * strain.turning)
        count["done"] += done
        count["errors"] += rng.poisson(0.004 + strain.errors * np.minimum(1.0, 2.0 * strain.pace))
        count["retries"] += rng.poisson(0.01 * strain.rtt + strain.retries)
        count["refused"] += rng.poisson(0.0002 + strain.refused)
        service = level["service"] * strain.service * rng.gamma(30.0, 1.0 / 30.0, n)
        ready = np.where(stopped & self._is_loading(now), np.nan, 1.0)
        values = {
            "heartbeat_age_s": beat,
            **count,
            "in_flight": np.where(stopped & (strain.held_s == 0.0), 0.0, np.rint(self._at_once * level["depth"])),
            "oldest_age_s": np.where(stopped & (strain.held_s == 0.0), 0.0, age),
            "input_depth": rng.poisson(self._depth * strain.depth * level["depth"]),
            "output_depth": rng.poisson(0.3 * level["depth"] + strain.output),
            "loop_lag_ms": 2.0 * level["lag"] * strain.lag * rng.gamma(2.0, 0.5, n) + strain.lag_ms,
            "cpu": self._cpu * level["cpu"] * strain.cpu * (0.4 + 0.6 * np.minimum(1.2, strain.pace)),
            "rss_bytes": self._rss * level["memory"] ** 0.05 + self._saw_bytes * saw + strain.memory,
            "num_fds": self._fds + rng.poisson(1.0, n),
            "disk_free_bytes": self._disk_free,
            "disk_free_share": self._disk_free / self._disk_size,
            "gpu_util": np.where(has_gpu, utilised, np.nan),
            "gpu_mem_bytes": np.where(has_gpu, 6.0e10 * level["memory"] ** 0.1, np.nan),
            "gpu_power_w": np.where(has_gpu, 90.0 + 560.0 * utilised * level["power"] ** 0.5, np.nan),
            "tokens_per_s": self._tokens * pace * strain.tokens * level["power"],
            "service_ratio": np.where(done > 0, service, np.nan),
            "version_lag": self._lag(now) * ready,
            "clock_ahead_ms": self._clock_ms + strain.clock_ms + rng.normal(0.0, 1.0, n),
            "ledger_rtt_ms": 0.8 * level["rtt"] * strain.rtt * rng.gamma(4.0, 0.25, n),
        }
        table = np.column_stack([values[name] for name in METRICS]).astype(np.float32)
        self._lose(table, strain, now)
        return table

    def _is_loading(self, now: float) -> NDArray[np.bool_]:
        if self.truth.control is not Control.SCALE:
            return np.zeros(self._n, dtype=np.bool_)
        return self._is_new() & (now < self._begin_s + 60.0)

    def _lose(self, table: Floats, strain: Strain, now: float) -> None:
        """Drop samples: single ones, a few seconds of a worker, and all of a dead one."""
        rng = self._rng
        table[:, 1:][rng.random((self._n, table.shape[1] - 1), dtype=np.float32) < 0.002] = np.nan
        gap = rng.random(self._n) < 1.0 / 3000.0
        self._missing_until[gap] = now + rng.integers(1, 7, int(gap.sum()))
        silent = (self._missing_until > now) | strain.is_dead
        table[silent, 1:] = np.nan


def _span(rng: np.random.Generator) -> tuple[float, float]:
    begin = float(rng.uniform(EARLIEST_S, LATEST_S))
    return begin, begin + float(rng.uniform(60.0, 240.0))
