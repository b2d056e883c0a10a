"""Layer 1: explicit rules on metrics of the catalogue, each with a limit and hysteresis.

A rule looks at each worker alone. A missing sample changes nothing. If many workers of a role are
bad at once, the cause is common and no worker is blamed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.limits import evidence_bound
from pipeline.fleet.peers.frame import Columns, Finding, Frame, RuleResult, first_of_each, of_peers
from pipeline.fleet.peers.groups import Floats, Groups, WorkerArrays, medians
from pipeline.fleet.peers.growth import MemoryGrowth
from pipeline.fleet.peers.rewards import RewardTest
from pipeline.fleet.peers.thresholds import Tuning

LONGER = 1.5
"""Factor by which a hang must exceed the longest pause that its role has had."""
_EDGES_S = np.geomspace(0.25, 7200.0, 96)
_FEWEST = 5
_KNOWN_S = 300.0
"""Total time of a role's workers, in seconds, after which its pauses are known."""
_UNKNOWN_S = 20.0
"""Assumed longest usual pause of a role before that."""
_MOST = 1e5
"""Gaps that are remembered with full weight; older ones fade."""


class Gaps:
    """Histograms of the time between two steps of progress, by role."""

    def __init__(self) -> None:
        self._counts: dict[str, NDArray[np.float64]] = {}

    def add(self, role: str, gaps_s: NDArray[np.float64]) -> None:
        counts = self._counts.setdefault(role, np.zeros(len(_EDGES_S) + 1))
        np.add.at(counts, np.searchsorted(_EDGES_S, gaps_s), 1.0)
        if counts.sum() > _MOST:
            counts *= 0.5

    def usual_s(self, role: str, share: float = 0.99) -> float:
        """Return the quantile ``share`` of a role's gaps, in seconds, rounded up."""
        counts = self._counts.get(role)
        if counts is None or counts.sum() < _FEWEST:
            return _UNKNOWN_S
        return _edge(int(np.searchsorted(np.cumsum(counts), share * counts.sum())))

    def longest_s(self, role: str) -> float:
        """Return the longest known gap of a role, in seconds, rounded up."""
        counts = self._counts.get(role)
        if counts is None or np.sum(counts[:-1] * _EDGES_S) < _KNOWN_S:
            return _UNKNOWN_S
        return _edge(int(np.flatnonzero(counts >= 0.5)[-1]))

    def keep_roles(self, roles: Sequence[str]) -> None:
        self._counts = {role: counts for role, counts in self._counts.items() if role in roles}


def _edge(at: int) -> float:
    return float(_EDGES_S[min(at, len(_EDGES_S) - 1)])


class Stillness:
    """How long each worker has not moved, compared with the usual pauses of its role.

    A pause ends with a move. The time between two samples counts towards it up to its usual length,
    since a worker may have moved unseen."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._gaps = Gaps()
        self._state = state = WorkerArrays()
        state.add("moved_at_s", np.nan, np.float64)
        state.add("seen_at_s", np.nan, np.float64)

    def evaluate(
        self,
        frame: Frame,
        groups: Groups,
        moved: NDArray[np.bool_],
        known: NDArray[np.bool_],
        holds: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Return how long each worker has stood still, and its role's limit, [workers], in seconds.

        ``moved``, ``known`` and ``holds``, [workers]: who moved in this frame, who has a sample,
        who holds work. A worker without work is idle, which is not standing still."""
        state = self._state
        state.align(("",), frame.workers)
        self._gaps.keep_roles(frame.roles)
        moved_at_s, seen_at_s = state["moved_at_s"][0], state["seen_at_s"][0]
        unseen_s = frame.time_s - seen_at_s
        usual_s = medians(np.where(known, unseen_s, np.nan).astype(np.float32))
        paused_s = (seen_at_s - moved_at_s) + np.fmin(unseen_s, LONGER * usual_s)
        limits = np.empty(len(groups.members), np.float32)
        for at, members in enumerate(groups.members):
            role = groups.names[at][0]
            ended = members[moved[members] & np.isfinite(paused_s[members])]
            if len(ended):
                self._gaps.add(role, paused_s[ended])
            usual, longest = self._gaps.usual_s(role), self._gaps.longest_s(role)
            limits[at] = max(self._tuning.hung_s, self._tuning.hung_gaps * usual, LONGER * longest)
        np.copyto(moved_at_s, frame.time_s, where=moved | (known & (~holds | np.isnan(moved_at_s))))
        np.copyto(seen_at_s, frame.time_s, where=known)
        return (frame.time_s - moved_at_s).astype(np.float32), limits[groups.of]


class Rules:
    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.standstill = Stillness(tuning)
        """How long no work has progressed."""
        self.stillness = Stillness(tuning)
        """How long the main loop has not moved either."""
        self._held = held = WorkerArrays()
        held.add("bad_s", 0.0)
        held.add("frames", 0.0)
        held.add("good", 0.0)
        held.add("is_on", 0.0)
        held.add("since_s", np.nan, np.float64)
        self._own = own = WorkerArrays()
        for name in ("finished_age_s", "done", "progress", "steps", "turns", "errors", "refused"):
            own.add(name, np.nan)
        for name in ("free_then", "usual_norm", "norm"):
            own.add(name, np.nan)
        for name in ("evidence", "error_rate", "refusals", "falling_s", "num_norms", "num_large"):
            own.add(name, 0.0)
        own.add("free_at_s", np.nan, np.float64)
        self._growth = MemoryGrowth(tuning)
        self._rewards = RewardTest(tuning)
        self.ceased = Gaps()
        """Usual times between two finished pieces of work, by role."""
        self._workers: tuple[str, ...] = ()
        self._usual: dict[str, float] = {}
        self._time_s = math.nan

    def tick(self, frame: Frame, groups: Groups) -> list[Finding]:
        column = {name: frame.values[:, at] for at, name in enumerate(frame.metrics)}
        self._workers = frame.workers
        self._held.align(_KINDS, frame.workers)
        self._own.align(("",), frame.workers)
        self.ceased.keep_roles(frame.roles)
        step_s = frame.time_s - self._time_s
        self._time_s = frame.time_s
        step_s = min(step_s, self.tuning.max_step_s) if step_s > 0 else 0.0
        found = list[Finding]()
        results = [
            rule(self, column, frame, groups, step_s)
            for rule in (_silent, _hung, _errors, _refused, _stale, _disk, _clock, _numeric)
        ]
        results.append(self._growth.evaluate(column, frame, groups))
        results.append(self._rewards.evaluate(column, frame, groups, step_s))
        for result in results:
            if result is not None:
                found += self._hold(result, frame, groups, step_s)
        return found

    def is_on(self, kind: str, worker: str) -> bool:
        """Return whether a rule's finding about a worker of the last frame still holds."""
        if kind not in _KINDS or worker not in self._workers:
            return False
        return bool(self._held["is_on"][_KINDS.index(kind)][self._workers.index(worker)])

    def _hold(self, result: RuleResult, frame: Frame, groups: Groups, step_s: float) -> list[Finding]:
        """Apply hysteresis to a rule's result, and ignore what is common to many workers."""
        held, at = self._held, _KINDS.index(result.kind)
        bad, known = result.is_bad & result.is_known, result.is_known
        near = bad if result.is_near is None else result.is_near & result.is_known
        if not (near.any() or held["frames"][at].any() or held["is_on"][at].any()):
            held["good"][at] += known
            return []
        counts, sizes = groups.shares(first_of_each(near, result.shared)[None, :])
        allowed = np.maximum(np.ceil(self.tuning.common_share * sizes), 1)
        is_common = (counts[0] > allowed)[groups.of]
        if result.kind == "silent" or result.shared is not None:
            is_common |= np.count_nonzero(near) > max(1, math.ceil(self.tuning.common_share * len(bad)))
        known = known & ~is_common
        bad_s, frames, good = held["bad_s"][at], held["frames"][at], held["good"][at]
        started = bad & known & (frames == 0)
        since_s = held["since_s"][at]
        lasted_s = result.lasted_s if result.lasted_s is not None else np.float32(step_s)
        np.copyto(since_s, frame.time_s - np.asarray(lasted_s, np.float64), where=started)
        bad_s[:] = np.where(known, np.where(bad, bad_s + np.float32(step_s), 0.0), bad_s)
        frames[:] = np.where(known, np.where(bad, frames + 1, 0.0), frames)
        good[:] = np.where(known, np.where(bad, 0.0, good + 1), good)
        least_frames = 3 if result.hold_s > 0 else 1
        alarms = bad & known & (bad_s >= result.hold_s) & (frames >= least_frames) & (held["is_on"][at] == 0)
        was_on = held["is_on"][at] > 0
        held["is_on"][at][alarms] = 1.0
        if result.shared is not None:
            alarms &= ~np.isin(result.shared, result.shared[was_on])
            alarms = first_of_each(alarms, result.shared)
        held["is_on"][at][(good >= _GOOD_FRAMES) & (held["is_on"][at] > 0)] = 0.0
        return [
            Finding(
                frame.workers[one], frame.roles[one], float(since_s[one]), frame.time_s, result.kind, result.metric,
                max(1.0, min(float(result.score[one]), _MOST_SCORE)), result.sentence(one),
            )
            for one in np.flatnonzero(alarms).tolist()
        ]  # fmt: skip

    def follow(self, name: str, now: float, step_s: float) -> float:
        """Return a slow average of a number of the fleet, which falls at once and rises over five
        minutes."""
        old = self._usual.get(name, now)
        if math.isfinite(now):
            old += (now - old) * (1.0 if now < old else min(1.0, step_s / 300.0))
        self._usual[name] = old
        return old

    def own(self, name: str) -> NDArray[np.float32]:
        return self._own[name][0]

    def increase(self, name: str, now: Floats) -> Floats:
        """Return how much a counter has grown since its last sample; NaN without one, or after a
        restart."""
        last = self.own(name)
        with np.errstate(invalid="ignore"):
            grown = now - last
            np.copyto(last, now, where=np.isfinite(now))
            return np.where(grown >= 0, grown, np.float32(np.nan))


_KINDS = ("silent", "hung", "errors", "refused", "stale", "disk", "clock", "numeric", "leak", "reward")
_GOOD_FRAMES = 5
"""Good frames in a row after which the same finding can be made again."""
_MOST_SCORE = 1000.0


def _silent(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """The last heartbeat is too old, compared with the fleet's usual interval."""
    if (age_s := column.get("heartbeat_age_s")) is None:
        return _ceased(rules, column, frame, groups, step_s)
    known = np.isfinite(age_s)
    usual = rules.follow("age", float(np.quantile(age_s[known], 0.75)) if known.any() else math.nan, step_s)
    limit = max(rules.tuning.silent_s, 4.0 * usual if math.isfinite(usual) else 0.0)
    words = lambda at: f"no heartbeat for {age_s[at]:.1f} s; the limit is {limit:.1f} s"  # noqa: E731
    with np.errstate(invalid="ignore"):
        return RuleResult(
            "silent",
            "heartbeat_age_s",
            age_s > limit,
            known,
            age_s / limit,
            words,
            is_near=age_s > 0.6 * limit,
            lasted_s=age_s,
        )


def _ceased(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """In a table of finished work: a worker finishes no more pieces, while its peers do."""
    if (age_s := column.get("finished_age_s")) is None:
        return None
    before_s, known = rules.own("finished_age_s"), np.isfinite(age_s)
    limits = np.empty(len(groups.members), np.float32)
    for at, members in enumerate(groups.members):
        role = groups.names[at][0]
        ended = members[age_s[members] < before_s[members]]
        rules.ceased.add(role, before_s[ended].astype(np.float64) + step_s)
        usual_s, longest_s = rules.ceased.usual_s(role), rules.ceased.longest_s(role)
        limits[at] = max(rules.tuning.silent_s, rules.tuning.hung_gaps * usual_s, LONGER * longest_s)
    np.copyto(before_s, age_s, where=known)
    limit = limits[groups.of]
    if (longest_s := column.get("longest_piece_s")) is not None:
        # it may be working on its longest piece so far
        limit = np.maximum(limit, np.float32(LONGER) * longest_s)
    words = lambda at: (  # noqa: E731
        f"has finished no piece of work for {age_s[at]:.0f} s, while its peers have; the limit is {limit[at]:.0f} s"
    )
    bad = (age_s > limit) & (groups.sizes() > 1)
    return RuleResult(
        "silent", "finished_age_s", bad, known, age_s / limit, words, is_near=age_s > 0.6 * limit, lasted_s=age_s
    )


def _hung(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """It holds work, but neither finishes any nor progresses. If the main loop does not move
    either, the usual pauses of both apply, which are shorter."""
    counters = [name for name in ("progress", "steps", "done") if name in column]
    if not counters or not ("in_flight" in column or "oldest_age_s" in column):
        return None
    moved = np.zeros(len(frame.workers), bool)
    known = np.zeros(len(frame.workers), bool)
    for name in counters:
        grown = rules.increase(name, column[name])
        known |= np.isfinite(column[name])
        # a counter that was reset has moved, too
        moved |= np.isfinite(column[name]) & ~(grown == 0)
    in_flight, oldest_s = column.get("in_flight"), column.get("oldest_age_s")
    with np.errstate(invalid="ignore"):
        holds = np.ones(len(frame.workers), bool) if in_flight is None else in_flight > 0
    stood_s, limit = rules.standstill.evaluate(frame, groups, moved, known, holds)
    if (turns := column.get("turns")) is not None:
        stirred = moved | (np.isfinite(turns) & ~(rules.increase("turns", turns) == 0))
        still_s, shorter = rules.stillness.evaluate(frame, groups, stirred, known, holds)
        is_still = still_s > shorter
        stood_s, limit = np.where(is_still, still_s, stood_s), np.where(is_still, shorter, limit)
    if frame.expected_s is not None:
        limit = np.maximum(limit, frame.expected_s)
    with np.errstate(invalid="ignore"):
        bad = (stood_s > limit) & holds
        if oldest_s is not None:
            bad &= ~(oldest_s <= np.minimum(limit, stood_s))
        near = (stood_s > 0.5 * limit) & holds

    def words(at: int) -> str:
        age = "" if oldest_s is None else f", the oldest for {oldest_s[at]:.0f} s"
        held = "" if in_flight is None else f" with {in_flight[at]:.0f} pieces of work in flight{age}"
        return f"no progress for {stood_s[at]:.0f} s{held}; the limit of this role is {limit[at]:.0f} s"

    return RuleResult("hung", counters[0], bad, known, stood_s / limit, words, is_near=near, lasted_s=stood_s)


def _errors(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """Wald's sequential test of this worker's error rate against its role's usual one.

    The evidence is the log-likelihood ratio of Poisson counts. One frame contributes at most
    ``error_clip``."""
    if "errors" not in column or step_s <= 0.0:
        return None
    tuning = rules.tuning
    count = rules.increase("errors", column["errors"])
    rate = rules.own("error_rate")
    known = np.isfinite(count)
    with np.errstate(invalid="ignore"):
        rate += np.where(known, (count / np.float32(step_s) - rate) * np.float32(min(1.0, step_s / 60.0)), 0.0)
    usual = of_peers(rate, groups)
    low = np.fmax(usual, np.float32(tuning.error_rate))
    high = np.maximum(np.float32(0.4), 4.0 * low)
    num = np.where(known, count, np.float32(0.0))
    gain = (num * np.log(high / low) - (high - low) * np.float32(step_s)).astype(np.float32)
    evidence = rules.own("evidence")
    bound = evidence_bound(len(frame.workers))
    raised = np.clip(evidence + np.minimum(gain, np.float32(tuning.error_clip)), 0.0, 3.0 * bound)
    np.copyto(evidence, raised.astype(np.float32), where=known)

    def words(at: int) -> str:
        return (
            f"{rate[at]:.2g} errors a second; {low[at]:.2g} are usual in its role, and {high[at]:.2g} are too many:"
            f" evidence {evidence[at]:.0f} of {bound:.0f}"
        )

    return RuleResult("errors", "errors", evidence > bound, known, evidence / np.float32(bound), words)


def _refused(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """Messages on its links were refused because of checksum or schema."""
    if "refused" not in column:
        return None
    count = rules.increase("refused", column["refused"])
    known = np.isfinite(count)
    recent = rules.own("refusals")
    recent *= np.float32(math.exp(-step_s / 10.0))
    recent += np.where(known, count, np.float32(0.0))
    usual = of_peers(recent, groups)
    limit = np.maximum(np.float32(2.5), 5.0 * usual)
    words = lambda at: (  # noqa: E731
        f"about {recent[at]:.0f} messages refused in 10 s, by checksum or schema; the limit is {limit[at]:.0f}"
    )
    return RuleResult("refused", "refused", recent >= limit, known, recent / limit, words)


def _stale(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """The served policy version is too far behind, both absolutely and compared with its role."""
    if (lag := column.get("version_lag")) is None:
        return None
    usual = of_peers(lag, groups)
    limit = np.fmax(np.float32(rules.tuning.max_version_lag), usual + np.float32(2.0))
    words = lambda at: f"serves a policy {lag[at]:.0f} versions old; the limit is {limit[at]:.0f}"  # noqa: E731
    with np.errstate(invalid="ignore"):
        return RuleResult("stale", "version_lag", lag > limit, np.isfinite(lag), lag / limit, words, 5.0)


def _disk(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """Little disk space is free, or it shrinks so fast that the disk will soon be full."""
    share, free = column.get("disk_free_share"), column.get("disk_free_bytes")
    num = len(frame.workers)
    bad, known, score = np.zeros(num, bool), np.zeros(num, bool), np.ones(num, np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        if share is not None:
            known |= np.isfinite(share)
            is_low = share < rules.tuning.disk_share
            bad |= is_low
            score = np.where(is_low, np.float32(rules.tuning.disk_share) / np.maximum(share, 1e-3), score)
        left_s = np.full(num, np.inf, np.float32)
        if free is not None:
            known |= np.isfinite(free)
            then, at_s, falling_s = rules.own("free_then"), rules.own("free_at_s"), rules.own("falling_s")
            is_due = np.isfinite(free) & ~(frame.time_s - at_s < 10.0)
            rate = (then - free) / (frame.time_s - at_s)
            left = np.where(rate > 0, free / rate, np.inf).astype(np.float32)
            soon = is_due & (left < rules.tuning.disk_left_s)
            falling_s[:] = np.where(is_due, np.where(soon, falling_s + (frame.time_s - at_s), 0.0), falling_s)
            np.copyto(then, free, where=is_due)
            np.copyto(at_s, frame.time_s, where=is_due)
            is_falling = falling_s >= 60.0
            left_s = np.where(is_falling, np.where(is_due, left, np.float32(rules.tuning.disk_left_s)), left_s)
            bad |= is_falling
            score = np.where(is_falling, np.fmax(score, np.float32(rules.tuning.disk_left_s) / left_s), score)

    def words(at: int) -> str:
        if math.isfinite(left_s[at]):
            limit_min = rules.tuning.disk_left_s / 60.0
            return f"its disk is full in about {left_s[at] / 60.0:.0f} min; the limit is {limit_min:.0f} min"
        seen = math.nan if share is None else share[at]
        return f"{seen:.1%} of its disk is free; the limit is {rules.tuning.disk_share:.0%}"

    if not known.any():
        return None
    name = "disk_free_share" if share is not None else "disk_free_bytes"
    shared = None if free is None else _alike(free, bad, _SAME_DISK)
    return RuleResult("disk", name, bad, known, score.astype(np.float32), words, 5.0, shared=shared)


def _alike(values: Floats, bad: NDArray[np.bool_], share: float) -> NDArray[np.intp]:
    """Return a number for each worker; bad workers with about the same value get the same number."""
    order = np.argsort(np.where(bad, values, np.float32(np.nan)))
    ordered = np.where(bad[order], values[order], np.float32(np.nan))
    is_next = ~(np.abs(np.diff(ordered, prepend=np.float32(np.nan))) <= share * np.abs(ordered))
    numbers = np.empty(len(values), np.intp)
    numbers[order] = np.cumsum(is_next)
    return numbers


def _clock(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """Its clock differs from those of most of the fleet.

    Old heartbeats are ignored: after a pause of the ledger they would look like a slow clock."""
    if (ahead_ms := column.get("clock_ahead_ms")) is None:
        return None
    if (age_s := column.get("heartbeat_age_s")) is not None:
        with np.errstate(invalid="ignore"):
            is_old = age_s > _FRESH_STEPS * max(1.0, step_s)
        ahead_ms = np.where(is_old, np.float32(np.nan), ahead_ms)
    usual = float(medians(ahead_ms)) if len(ahead_ms) > 2 else 0.0
    off_ms = np.abs(ahead_ms - np.float32(usual))
    if (rtt_ms := column.get("ledger_rtt_ms")) is not None:
        # a slow answer delays the heartbeat that carries the clock
        off_ms = np.maximum(off_ms - np.nan_to_num(rtt_ms), np.float32(0.0))
    limit = rules.tuning.clock_ms
    words = lambda at: (  # noqa: E731
        f"its clock differs by {off_ms[at]:.0f} ms from those of most workers; the limit is {limit:.0f} ms"
    )
    with np.errstate(invalid="ignore"):
        bad = off_ms > limit
    score = (off_ms / np.float32(limit)).astype(np.float32)
    # workers of a host share its clock; if very many differ, the reader's clock may be wrong
    is_host = np.count_nonzero(bad) <= _HOST_SHARE * len(bad)
    shared = _alike(ahead_ms - np.float32(usual), bad, _SAME_CLOCK) if is_host else None
    return RuleResult("clock", "clock_ahead_ms", bad, np.isfinite(off_ms), score, words, 5.0, shared=shared)


def _numeric(rules: Rules, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
    """Its loss or gradient norm is not finite, or the norm is far above its usual one."""
    names = [name for name in ("loss", "grad_norm") if name in column]
    if not names:
        return None
    num = len(frame.workers)
    infinite, known, large = np.zeros(num, bool), np.zeros(num, bool), np.zeros(num, bool)
    for name in names:
        infinite |= np.isinf(column[name])
        known |= ~np.isnan(column[name])
    norm, usual = column.get("grad_norm"), rules.own("usual_norm")
    if norm is not None:
        last, count, num_large = rules.own("norm"), rules.own("num_norms"), rules.own("num_large")
        with np.errstate(invalid="ignore"):
            is_step = np.isfinite(norm) & ~(norm == last)
            far = is_step & (count >= _FEWEST_NORMS) & (norm > rules.tuning.norm_factor * usual)
            num_large[:] = np.where(is_step, np.where(far, num_large + 1, 0.0), num_large)
            # a running median of about fifty steps: a step up or down by two per cent
            nearer = usual * np.where(norm > usual, np.float32(1.04), np.float32(1.0 / 1.04))
            early = usual + (norm - usual) / np.maximum(count + 1, 1)
            new = np.where(np.isnan(usual), norm, np.where(count < _FEWEST_NORMS, early, nearer))
            usual[:] = np.where(is_step & ~far, new, usual)
            count += is_step
            np.copyto(last, norm, where=is_step)
        large = num_large >= 2
    bad = infinite | large

    def words(at: int) -> str:
        if infinite[at]:
            return "its loss or gradient norm is not a finite number"
        assert norm is not None
        factor = rules.tuning.norm_factor
        return f"gradient norm {norm[at]:.3g} in two steps; usual is {usual[at]:.3g}, the limit {factor:g} times that"

    score = np.where(infinite, _MOST_SCORE, 2.0).astype(np.float32)
    name = "grad_norm" if norm is not None else names[0]
    return RuleResult("numeric", name, bad, known, score.astype(np.float32), words)


_FRESH_STEPS = 1.5
"""Largest age of a heartbeat whose clock is judged, in seconds or frames."""
_SAME_DISK = 1e-4
"""Largest relative difference in free bytes between two workers on the same disk."""
_SAME_CLOCK = 0.02
"""Largest relative difference between the errors of two workers with the same clock."""
_HOST_SHARE = 0.1
"""Largest share of a fleet that has the same clock."""
_FEWEST_NORMS = 10
"""Steps before a gradient norm is compared with the usual one."""
