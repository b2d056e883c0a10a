"""The second fleet: items of work flow from rollouts through verifiers and scorers to trainers, and
the metrics are counted from what happens to them.

Sizes have a heavy tail. Mailboxes are bounded, so a slow worker makes others wait. Credit bounds
the work in the system. Trainers update in step and publish versions, which rollouts fetch. Workers
of a host share its disk, clock and noisy neighbours. Noise comes from the items, not from a model
of the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ops.bench.watch.cases import WINDOW_S, Case, Control, Kind, Truth
from ops.bench.watch.pools import Array, Counts, Pool, spread
from ops.bench.watch.roster import BURST_S, CALM_S, EARLIEST_S, LATEST_S, Roster, Suits, draw_roster, draw_truth
from pipeline.watch.frame import Frame

METRICS: Final = (
    "heartbeat_age_s", "progress", "turns", "done", "in_flight", "oldest_age_s", "input_depth", "output_depth",
    "loop_lag_ms", "cpu", "rss_bytes", "num_fds", "disk_free_bytes", "gpu_util", "gpu_power_w", "tokens_per_s",
    "service_ratio", "errors", "retries", "refused", "version_lag", "clock_ahead_ms", "ledger_rtt_ms", "reward_mean",
    "loss", "grad_norm", "kv_cache_share",
)  # fmt: skip
"""The last one is in no catalogue."""
ROLES: Final = ("rollout", "verifier", "scorer", "trainer")
SUITS: Final = Suits(
    serving=("rollout",),
    receiving=("verifier", "scorer"),
    erring=("rollout", "verifier", "scorer"),
    slow=ROLES,
    is_disk_of_host=True,
    is_clock_of_host=True,
)
_START_S: Final = 50_000.0
_MIX: Final = {"rollout": 0.0, "verifier": 0.18, "scorer": 0.12, "trainer": 0.02}
_LEAST: Final = {"rollout": 3, "verifier": 2, "scorer": 1, "trainer": 1}
_SLOTS: Final = {"rollout": 12, "verifier": 8, "scorer": 4, "trainer": 1}
_OPEN: Final = 6
"""Slots of a rollout worker that are open at usual load."""
_TOKEN_S: Final = 1.0 / 150.0
"""Of one token in a slot of a rollout worker."""
_UPDATE_S: Final = 7.0
_UPDATE_EVERY_S: Final = 10.0
_NEW_SHARE: Final = 0.25
_RSS: Final = {"rollout": 1.1e10, "verifier": 8e8, "scorer": 5e9, "trainer": 2.5e10}
_HAS_GPU: Final = {"rollout": True, "verifier": False, "scorer": True, "trainer": True}


class WorkItemFleet:
    """A window of the second fleet."""

    def __init__(self, case: Case) -> None:
        rng = self._rng = case.random("work items")
        first = draw_roster(_MIX, _LEAST, case.size, rng)
        self.truth: Truth = draw_truth(case, first, SUITS)
        self._begin_s = float(rng.uniform(EARLIEST_S, LATEST_S))
        self._end_s = self._begin_s + float(rng.uniform(60.0, 240.0))
        self._num_new = 0
        self._roster = self._with_newcomers(first) if self.truth.control is Control.SCALE else first
        self._draw_constants()

    def _with_newcomers(self, first: Roster) -> Roster:
        number = self._num_new = max(1, int(_NEW_SHARE * len(first.of_role("rollout"))))
        has = len(first.of_role("rollout"))
        # before the other roles, so that each role's places stay together
        names = tuple(f"rollout-{has + place}" for place in range(number))
        hosts = first.hosts.max() + 1 + np.arange(number)
        return Roster(
            first.workers[:has] + names + first.workers[has:],
            first.roles[:has] + ("rollout",) * number + first.roles[has:],
            np.concatenate([first.hosts[:has], hosts, first.hosts[has:]]),
        )

    def _draw_constants(self) -> None:
        rng, roster = self._rng, self._roster
        n = self._n = len(roster.workers)
        num_hosts = int(roster.hosts.max()) + 1
        self._of = {role: roster.of_role(role) for role in ROLES}
        self._pools = {role: Pool(len(self._of[role]), _SLOTS[role]) for role in ROLES}
        self._place = {name: place for place, name in enumerate(roster.workers)}
        self._host_speed = np.exp(rng.normal(0.0, rng.uniform(0.03, 0.12), num_hosts))
        self._own_speed = np.exp(rng.normal(0.0, 0.03, n))
        self._tail = float(rng.uniform(0.6, 0.95))
        self._tool_share, self._tool_s = float(rng.uniform(0.2, 0.4)), float(rng.uniform(0.5, 1.2))
        self._neighbour_until, self._neighbour_by = np.full(num_hosts, -CALM_S), np.ones(num_hosts)
        self._wire_until, self._wire_by = np.full(num_hosts, -CALM_S), np.ones(num_hosts)
        self._host_rtt_ms = np.exp(rng.normal(np.log(0.6), 0.25, num_hosts))
        self._disk_free = rng.choice([4e11, 9e11], num_hosts) * rng.uniform(0.35, 0.9, num_hosts)
        self._clock_ms = rng.normal(0.0, 12.0, num_hosts)
        self._clock_drift = rng.normal(0.0, 0.01, num_hosts)
        has = len(self._of["rollout"]) - self._num_new
        self._batch = max(8, round(has * _OPEN / 3.4 * _UPDATE_EVERY_S))
        self._in_system, self._ready, self._verified, self._scored = 0, 0, 0, 0
        self._again = {"verifier": 0, "scorer": 0}
        self._outbox = np.zeros(len(self._of["rollout"]), dtype=np.int64)
        self._turn = 0
        self._is_updating, self._version, self._published_s = False, 0, -100.0
        self._pause_until = 0.0
        self._served = np.zeros(len(self._of["rollout"]), dtype=np.int64)
        self._fetched_s = np.zeros(len(self._of["rollout"]))
        count = ("progress", "turns", "done", "errors", "retries", "refused")
        self._count = {name: np.floor(rng.uniform(0.0, 2e4, n)) for name in count[:5]} | {"refused": np.zeros(n)}
        self._beat_at = rng.uniform(0.0, 1.0, n)
        self._heap, self._heap_limit = rng.uniform(0.0, 1e8, n), rng.uniform(6e7, 2.5e8, n)
        self._cache = rng.uniform(1e8, 6e8, n)
        self._fds = rng.integers(25, 120, n).astype(np.float64)
        self._usual_rss = np.array([_RSS[role] for role in roster.roles]) * np.exp(rng.normal(0.0, 0.05, n))
        self._has_gpu = np.array([_HAS_GPU[role] for role in roster.roles])
        self._group = rng.random(n)
        self._good = float(rng.uniform(0.3, 0.7))
        self._is_given_up: set[str] = set()
        self._arrived = np.zeros(n, dtype=np.int64)

    def frames(self) -> Iterator[Frame]:
        """Yield a frame a second; each call goes on where the last ended."""
        shown = self._shown(0.0)
        names, roles = self._named(shown)
        was, phases = self._evaluating(-1.0), ("train",) * len(shown)
        for second in range(WINDOW_S):
            now = float(second)
            here = self._shown(now)
            evaluating = self._evaluating(now)
            if not (np.array_equal(here, shown) and np.array_equal(evaluating, was)):
                shown, was = here, evaluating
                names, roles = self._named(shown)
                phases = tuple("evaluate" if evaluating[place] else "train" for place in shown)
            values = self._tick(now)[shown]
            yield Frame(_START_S + now, names, roles, METRICS, values, phases)

    def _named(self, shown: Counts) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (
            tuple(self._roster.workers[place] for place in shown),
            tuple(self._roster.roles[place] for place in shown),
        )

    def _is_new(self) -> NDArray[np.bool_]:
        places, end = np.arange(self._n), len(self._of["rollout"])
        return (places >= end - self._num_new) & (places < end)

    def _is_leaving(self) -> NDArray[np.bool_]:
        is_rollout = np.arange(self._n) < len(self._of["rollout"])
        is_asked = (self.truth.control is Control.SCALE) & (self._group < _NEW_SHARE)
        return is_rollout & is_asked & ~self._is_new()

    def _shown(self, now: float) -> Counts:
        gone = (self._is_new() & (now < self._begin_s)) | (self._is_leaving() & (now >= self._end_s + 15.0))
        return np.flatnonzero(~gone)

    def _evaluating(self, now: float) -> NDArray[np.bool_]:
        is_on = self.truth.control is Control.EVALUATION and self._begin_s <= now < self._end_s
        return is_on & (self._group < 0.35) & (np.arange(self._n) < len(self._of["rollout"]))

    def _is_on(self, control: Control, now: float) -> bool:
        return self.truth.control is control and self._begin_s <= now < self._end_s

    # ---- a second of work

    def _tick(self, now: float) -> NDArray[np.float32]:
        speed = self._speed(now)
        rtt_ms = self._rtt_ms(now)
        self._fetch(now, rtt_ms)
        self._arrived[:] = 0
        self._grant(now)
        self._work(now, speed, rtt_ms)
        failed = self._failed(now)
        self._deliver(now, failed)
        self._update(now)
        return self._measure(now, speed, rtt_ms, failed)

    def _speed(self, now: float) -> Array:
        """Return each worker's speed, 1 as a rule, 0 when it does not work at all."""
        rng, hosts = self._rng, self._roster.hosts
        begin = (self._neighbour_until + CALM_S <= now) & (rng.random(len(self._host_speed)) < 1.0 / 1200.0)
        number = int(begin.sum())
        self._neighbour_until[begin] = now + rng.integers(BURST_S[0], BURST_S[1] + 1, number)
        self._neighbour_by[begin] = rng.uniform(0.5, 0.85, number)
        neighbour = np.where(self._neighbour_until > now, self._neighbour_by, 1.0)
        speed = (self._host_speed * neighbour)[hosts] * self._own_speed
        new = self._is_new()
        speed[new & (now < self._begin_s + 20.0 + 25.0 * self._group)] = 0.0
        rollouts = np.arange(self._n) < len(self._of["rollout"])
        swapping = np.zeros(self._n, dtype=np.bool_)
        swapping[self._of["rollout"]] = (now - self._fetched_s >= 0.0) & (now - self._fetched_s < 1.0)
        speed[swapping] *= 0.5
        if now < self._pause_until:
            speed[rollouts] = 0.0
        if self._is_on(Control.GC, now):
            speed[(self._group < 0.3) & self._collects(now)] = 0.0
        if self._is_on(Control.LOAD, now):
            speed[rollouts] *= 0.65
        for fault in self.truth.faults:
            if now < fault.onset_s:
                continue
            at = [self._place[name] for name in fault.workers]
            if fault.kind is Kind.KILLED:
                speed[at] = 0.0
            elif fault.kind is Kind.HUNG:
                # it takes work, and ends none
                speed[at] = 1e-12
            elif fault.kind is Kind.SLOW:
                speed[at] /= fault.intensity
        return speed

    def _collects(self, now: float) -> NDArray[np.bool_]:
        return ((now + 1000.0 * self._group) % 45.0) < 2.0

    def _rtt_ms(self, now: float) -> Array:
        rng = self._rng
        begin = (self._wire_until + CALM_S <= now) & (rng.random(len(self._wire_by)) < 1.0 / 1500.0)
        number = int(begin.sum())
        self._wire_until[begin] = now + rng.integers(BURST_S[0], BURST_S[1] + 1, number)
        self._wire_by[begin] = rng.uniform(1.5, 5.0, number)
        host = self._host_rtt_ms * np.where(self._wire_until > now, self._wire_by, 1.0)
        rtt = host[self._roster.hosts] * rng.gamma(5.0, 0.2, self._n)
        if self._is_on(Control.REDIS, now):
            rtt *= 60.0
        for fault in self.truth.faults:
            if fault.kind is Kind.LINK and now >= fault.onset_s:
                rtt[[self._place[name] for name in fault.workers]] *= fault.intensity
        return rtt

    def _fetch(self, now: float, rtt_ms: Array) -> None:
        """Let rollout workers take the newest version, each when its fetch has ended."""
        at = self._of["rollout"]
        takes = 0.5 + 2.5 * self._group[at] + 0.05 * rtt_ms[at]
        due = (self._served < self._version) & (now >= self._published_s + takes)
        for fault in self.truth.faults:
            if fault.kind in (Kind.STALE, Kind.HUNG, Kind.KILLED) and now >= fault.onset_s:
                for name in fault.workers:
                    if self._place[name] < len(at):
                        due[self._place[name]] = False
        self._served[due] = self._version
        self._fetched_s[due] = now

    def _grant(self, now: float) -> None:
        """Give rollout workers credit for new items."""
        pool = self._pools["rollout"]
        free = max(0, 4 * self._batch - self._in_system)
        wish = np.minimum(pool.slots, np.maximum(0, 16 - self._outbox)) * 2
        if now >= self._end_s:
            wish[self._is_leaving()[self._of["rollout"]]] = 0
        pool.queue[:] = spread(min(free, int(wish.sum())), wish, self._turn)

    def _work(self, now: float, speed: Array, rtt_ms: Array) -> None:
        tokens_by = 1.0
        long_until = self._begin_s + 200.0 * self._group + 80.0
        hard = self._is_on(Control.LONG_TAIL, now) & (self._group * 7.0 % 1.0 < 0.25) & (now < long_until)
        evaluating = self._evaluating(now)
        tool_s = self._tool_s * (5.0 if self._is_on(Control.TOOL, now) else 1.0)

        def draw_rollout(who: Counts) -> tuple[Array, Array, Array]:
            tokens = np.minimum(6000.0, self._rng.lognormal(np.log(350.0), self._tail, len(who)) * tokens_by)
            tokens *= np.where(hard[who], 4.0, 1.0) * np.where(evaluating[who], 1.6, 1.0)
            return self._items(0.05 + tokens * _TOKEN_S, tokens, rtt_ms[who])

        def draw_verifier(who: Counts) -> tuple[Array, Array, Array]:
            tokens = np.minimum(6000.0, self._rng.lognormal(np.log(350.0), self._tail, len(who)))
            uses_tool = self._rng.random(len(who)) < self._tool_share
            tool = np.where(uses_tool, self._rng.exponential(tool_s, len(who)), 0.0)
            expected = 0.15 + 0.0005 * tokens + self._tool_share * self._tool_s
            work, _, _ = self._items(0.15 + 0.0005 * tokens, tokens, rtt_ms[self._of["verifier"][who]])
            return work + tool, expected, tokens

        def draw_scorer(who: Counts) -> tuple[Array, Array, Array]:
            tokens = np.minimum(6000.0, self._rng.lognormal(np.log(350.0), self._tail, len(who)))
            return self._items(0.05 + 0.0004 * tokens, tokens, rtt_ms[self._of["scorer"][who]])

        def draw_trainer(who: Counts) -> tuple[Array, Array, Array]:
            sums = self._rng.normal(1.0, 0.5 / np.sqrt(self._batch / max(1, len(self._of["trainer"]))), len(who))
            expected = _UPDATE_S * np.clip(sums, 0.5, 2.0)
            return self._items(expected, np.full(len(who), 480.0 * self._batch), rtt_ms[self._of["trainer"][who]])

        open_slots = np.full(len(self._of["rollout"]), _OPEN * (2 if self._is_on(Control.LOAD, now) else 1))
        draws = {"rollout": draw_rollout, "verifier": draw_verifier, "scorer": draw_scorer, "trainer": draw_trainer}
        for role, draw in draws.items():
            pool, at = self._pools[role], self._of[role]
            slots = open_slots if role == "rollout" else np.full(pool.number, pool.slots)
            before = pool.in_flight.sum()
            pool.advance(now, speed[at], slots, draw)
            if role == "rollout":
                self._in_system += int(pool.in_flight.sum() - before + pool.ended.sum())
                pool.queue[:] = 0

    def _items(self, expected: Array, tokens: Array, rtt_ms: Array) -> tuple[Array, Array, Array]:
        work = expected * self._rng.lognormal(0.0, 0.12, len(expected)) + 0.003 * rtt_ms
        return work, expected, tokens

    def _failed(self, now: float) -> Counts:
        """Return how many of the items that ended in this second have failed."""
        ended = np.concatenate([self._pools[role].ended for role in ROLES])
        share = np.full(self._n, 0.003)
        for fault in self.truth.faults:
            if fault.kind is Kind.ERRORS and now >= fault.onset_s:
                share[[self._place[name] for name in fault.workers]] = fault.intensity
        share[self._of["trainer"]] = 0.0
        return self._rng.binomial(ended, share)

    def _deliver(self, now: float, failed: Counts) -> None:
        """Bring finished items to the mailboxes of the next roles."""
        rollouts = self._of["rollout"]
        made = self._pools["rollout"].ended - failed[rollouts]
        evaluating = self._evaluating(now)[rollouts]
        self._in_system -= int(failed[rollouts].sum() + made[evaluating].sum())
        self._outbox += np.where(evaluating, 0, made)
        can_send = self._outbox.copy()
        for fault in self.truth.faults:
            for name in fault.workers if now >= fault.onset_s else ():
                place = self._place[name]
                if fault.kind is Kind.LINK and place < len(can_send):
                    can_send[place] = min(can_send[place], int(self._rng.random() < 0.7))
                if fault.kind in (Kind.KILLED, Kind.HUNG) and place < len(can_send):
                    can_send[place] = 0
        number = int(can_send.sum())
        for role in ("verifier", "scorer"):
            number = min(number, int(self._pools[role].room().sum()) - self._again[role])
        number = max(0, number)
        self._outbox -= spread(number, can_send, self._turn)
        self._turn += number
        for role in ("verifier", "scorer"):
            self._receive(role, number, now)
        for role in ("verifier", "scorer"):
            at = self._of[role]
            self._again[role] += int(failed[at].sum())
            well = int((self._pools[role].ended - failed[at]).sum())
            if role == "verifier":
                self._verified += well
            else:
                self._scored += well
        self._requeue(now)
        both = min(self._verified, self._scored)
        self._verified, self._scored = self._verified - both, self._scored - both
        self._ready += both

    def _receive(self, role: str, number: int, now: float) -> None:
        pool, at = self._pools[role], self._of[role]
        given = spread(number + self._again[role], pool.room(), self._turn)
        self._again[role] += number - int(given.sum())
        for fault in self.truth.faults:
            if fault.kind is Kind.CORRUPT and now >= fault.onset_s:
                for name in fault.workers:
                    place = self._place[name]
                    if self._roster.roles[place] == role:
                        bad = int(self._rng.binomial(given[place - at[0]], fault.intensity))
                        given[place - at[0]] -= bad
                        self._count["refused"][place] += bad
                        self._again[role] += bad
        pool.queue += given
        self._arrived[at] = given

    def _requeue(self, now: float) -> None:
        """Give the work of a worker that was killed to others, after its lease."""
        for fault in self.truth.faults:
            for name in fault.workers if fault.kind is Kind.KILLED and now >= fault.onset_s + 10.0 else ():
                if name in self._is_given_up:
                    continue
                self._is_given_up.add(name)
                place, role = self._place[name], self._roster.roles[self._place[name]]
                number = self._pools[role].give_up(int(place - self._of[role][0]))
                if role in self._again:
                    self._again[role] += number
                elif role == "rollout":
                    self._in_system -= number

    def _update(self, now: float) -> None:
        """Begin an update when there is enough work; publish when all trainers have ended it."""
        pool = self._pools["trainer"]
        if self._is_updating and not pool.in_flight.any() and not pool.queue.any():
            self._is_updating = False
            self._version += 1
            self._published_s = now + 1.0
            self._in_system -= self._batch
            if self._is_on(Control.WEIGHT_SYNC, now):
                self._pause_until = now + 1.0 + float(self._rng.uniform(8.0, 12.0))
            if self._version % 5 == 0:
                self._disk_free[self._roster.hosts[self._of["trainer"][0]]] -= 4e9 * (1 if self._version % 10 else -1)
        if not self._is_updating and self._ready >= self._batch:
            self._ready -= self._batch
            pool.queue += 1
            self._is_updating = True

    # ---- what the workers report of it

    def _measure(self, now: float, speed: Array, rtt_ms: Array, failed: Counts) -> NDArray[np.float32]:
        rng, n, pools = self._rng, self._n, self._pools

        def over_roles(field: str) -> Array:
            return np.concatenate([getattr(pools[role], field) for role in ROLES]).astype(np.float64)

        ended, in_flight = over_roles("ended"), over_roles("in_flight")
        busy, moved = over_roles("busy"), over_roles("moved_tokens")
        took, should = over_roles("took_s"), over_roles("should_take_s")
        age = np.concatenate([pools[role].oldest_age_s(now + 1.0) for role in ROLES])
        busy[self._of["rollout"]] *= _SLOTS["rollout"] / _OPEN
        count = self._count
        working = np.minimum(1.0, busy)
        count["progress"] += np.rint(moved / 64.0 + ended)
        count["turns"] += rng.poisson(15.0 + 4.0 * ended)
        count["done"] += ended - failed
        count["errors"] += failed
        count["retries"] += failed + rng.poisson(0.005 + 0.0005 * rtt_ms)
        self._heap += 2e5 * ended + rng.uniform(0.0, 5e4, n)
        self._heap[self._heap > self._heap_limit] *= 0.2
        rss = self._usual_rss + self._heap + self._cache * (1.0 - np.exp(-(now + 200.0) / 400.0))
        rss += 2e6 * in_flight
        lag = rng.gamma(2.0, 1.0, n) * (1.0 + 2.0 * working)
        cpu = 0.08 + working * np.where(self._has_gpu, 0.5, 1.4) * np.minimum(1.0, 0.6 + 0.4 * speed)
        cpu = cpu * rng.normal(1.0, 0.04, n)
        gpu = np.clip(working * 0.9 * rng.normal(1.0, 0.02, n), 0.0, 1.0)
        power = 80.0 + 480.0 * gpu * np.minimum(1.0, speed) ** 0.7 * rng.normal(1.0, 0.02, n)
        beat = ((now + 1.0 - self._beat_at) % 1.0) + rng.gamma(2.0, 0.02, n)
        beat[rng.random(n) < 0.003] += 1.0
        self._disk_free -= rng.uniform(0.0, 6e5, len(self._disk_free))
        clock = (self._clock_ms + self._clock_drift * now)[self._roster.hosts] + rng.normal(0.0, 2.0, n)
        version_lag = np.full(n, np.nan)
        version_lag[self._of["rollout"]] = self._version - self._served
        loading = self._is_new() & (speed == 0.0)
        version_lag[loading] = np.nan
        rss[loading] *= 0.1 + 0.85 * min(1.0, (now - self._begin_s) / 40.0)
        if self._is_on(Control.GC, now):
            collecting = (self._group < 0.3) & self._collects(now)
            lag[collecting] += rng.uniform(900.0, 2100.0, int(collecting.sum()))
            beat[collecting] += 1.0
        cache = np.full(n, np.nan)
        cache[self._of["rollout"]] = (pools["rollout"].tokens * (pools["rollout"].left > 0.0)).sum(axis=1) / 4e4
        reward, loss, norm = self._learning(ended)
        depth = np.concatenate([pools[role].queue for role in ROLES]).astype(np.float64)
        output = np.zeros(n)
        output[self._of["rollout"]] = self._outbox
        values = {
            "heartbeat_age_s": beat,
            **count,
            "in_flight": in_flight,
            "oldest_age_s": age,
            "input_depth": depth,
            "output_depth": output,
            "loop_lag_ms": lag,
            "cpu": cpu,
            "rss_bytes": rss,
            "num_fds": self._fds + rng.binomial(6, 0.3, n),
            "disk_free_bytes": self._disk_free[self._roster.hosts],
            "gpu_util": np.where(self._has_gpu, gpu, np.nan),
            "gpu_power_w": np.where(self._has_gpu, power, np.nan),
            "tokens_per_s": moved,
            "service_ratio": np.divide(took, should, out=np.full(n, np.nan), where=should > 0.0),
            "version_lag": version_lag,
            "clock_ahead_ms": clock,
            "ledger_rtt_ms": rtt_ms,
            "reward_mean": reward,
            "loss": loss,
            "grad_norm": norm,
            "kv_cache_share": cache,
        }
        table = np.column_stack([values[name] for name in METRICS]).astype(np.float32)
        self._report(table, now)
        return table

    def _learning(self, ended: Array) -> tuple[Array, Array, Array]:
        rng, n = self._rng, self._n
        reward, loss, norm = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
        at = self._of["verifier"]
        judged = ended[at].astype(np.int64)
        self._good = float(np.clip(self._good + rng.normal(0.0, 0.002), 0.1, 0.9))
        good = rng.binomial(judged, self._good)
        reward[at] = np.divide(good, judged, out=np.full(len(at), np.nan), where=judged > 0)
        loss[self._of["trainer"]] = 0.1 + rng.normal(0.0, 0.02)
        norm[self._of["trainer"]] = np.exp(rng.normal(-1.0, 0.15))
        return reward, loss, norm

    def _report(self, table: NDArray[np.float32], now: float) -> None:
        """Let faults act on the reports themselves."""
        for fault in self.truth.faults:
            since = now - fault.onset_s
            if since < 0.0:
                continue
            at = np.array([self._place[name] for name in fault.workers])

            def add(name: str, amount: float, at: Counts = at) -> None:
                table[at, METRICS.index(name)] += amount

            match fault.kind:
                case Kind.KILLED:
                    add("heartbeat_age_s", since)
                    table[at, 1:] = np.nan
                case Kind.HUNG:
                    self._report_hung(table, at, fault.variant, since)
                case Kind.LEAK:
                    add("rss_bytes", fault.intensity * since)
                case Kind.DISK:
                    host = self._roster.hosts[at[0]]
                    free = self._disk_free[host]
                    self._disk_free[host] = max(0.0, free - free / max(1.0, fault.intensity - since))
                case Kind.CLOCK:
                    add("clock_ahead_ms", fault.intensity * since if fault.variant == "drift" else fault.intensity)
                case Kind.LINK:
                    self._count["retries"][at] += self._rng.poisson(0.7, len(at))
                case _:
                    pass

    def _report_hung(self, table: NDArray[np.float32], at: Counts, variant: str, since: float) -> None:
        count = self._count
        table[at, METRICS.index("cpu")] = 1.0 if variant == "spin" else 0.03
        has_gpu = self._has_gpu[at]
        table[at, METRICS.index("gpu_util")] = np.where(has_gpu, 1.0 if variant == "spin" else 0.0, np.nan)
        if variant != "compute":
            place = METRICS.index("turns")
            if not hasattr(self, "_turns_at_hang"):
                self._turns_at_hang = count["turns"][at].copy()
            count["turns"][at] = self._turns_at_hang
            table[at, place] = self._turns_at_hang
            table[at, METRICS.index("loop_lag_ms")] = 1000.0 * since
