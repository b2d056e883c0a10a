"""Finds scorers whose rewards are wrong without an error: always the same, or unlike those of their
peers.

*Frozen*: more equal rewards in a row than chance explains, given how often the role repeats a
reward. *Apart*: its newest rewards differ by six standard errors from the peers' and from its own
earlier ones. Two scorers always differ from each other, so the one is meant whose own rewards have
changed by six standard errors. Only samples of new work count."""

from __future__ import annotations

import numpy as np

from pipeline.fleet.limits import evidence_bound
from pipeline.fleet.peers.frame import Columns, Frame, RuleResult, of_peers
from pipeline.fleet.peers.groups import TINY, Floats, Groups, WorkerArrays
from pipeline.fleet.peers.thresholds import Tuning

_NEW_S, _OLD_S = 60.0, 600.0
"""Time constants of a worker's newest rewards and of all its rewards, in seconds."""
_FEWEST = 10.0
_LEAST_REPEATS = 0.05
"""Share of repeated rewards that is assumed for every role at least."""
_LEAST_DEVIATION = 0.01
_HOLD_S = 10.0
_SUMS, _FADING = ("weight", "squared_weight", "rest", "squared_rest", "own"), (1.0, 2.0, 1.0, 1.0, 1.0)
"""What is summed up, and how fast it fades: squared weights, from which the effective number of samples of a
weighted mean follows, fade twice as fast."""


class RewardTest:
    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._has_any = False
        self._state = state = WorkerArrays()
        for name in ("last", "done"):
            state.add(name, np.nan)
        for name in ("run", "run_s", "repeats", "pairs"):
            state.add(name, 0.0)
        self._sums = WorkerArrays()
        """Fading sums over the newest rewards and over all."""
        self._sums.add("new", 0.0)
        self._sums.add("old", 0.0)

    def evaluate(self, column: Columns, frame: Frame, groups: Groups, step_s: float) -> RuleResult | None:
        """Add a frame and return the result. Rewards may have any scale."""
        if (reward := column.get("reward_mean")) is None or step_s <= 0.0:
            return None
        self._has_any = self._has_any or bool(np.isfinite(reward).any())
        if not self._has_any:
            return None
        state = self._state
        state.align(("reward_mean",), frame.workers)
        self._sums.align(_SUMS, frame.workers)
        one = {name: state[name][0] for name in ("last", "done", "run", "run_s", "repeats", "pairs")}
        is_known = np.isfinite(reward) & self._is_new_work(column, one["done"], reward, one["last"])
        with np.errstate(invalid="ignore"):
            is_pair = is_known & np.isfinite(one["last"])
            is_same = is_pair & (reward == one["last"])
        one["run"][:] = np.where(is_known, np.where(is_same, one["run"] + 1.0, 0.0), one["run"])
        one["run_s"][:] = np.where(is_known & ~is_same, 0.0, one["run_s"] + np.float32(step_s))
        one["repeats"] += is_same
        one["pairs"] += is_pair
        np.copyto(one["last"], reward, where=is_known)
        bound = evidence_bound(len(frame.workers))
        share = of_peers(((one["repeats"] + 1.0) / (one["pairs"] + 2.0)).astype(np.float32), groups)
        frozen = one["run"] * -np.log(np.clip(share, _LEAST_REPEATS, 1.0 - 1e-6)) / bound
        # only while the peers' rewards vary
        is_moving = of_peers(one["run_s"], groups) < 0.25 * one["run_s"]
        frozen = np.where((groups.sizes() > 1) & (one["run"] >= _FEWEST) & is_moving, frozen, 0.0)
        # a repeated value may be no new sample
        is_sample = is_known & ~is_same if "done" not in column else is_known
        apart = self._apart(reward, is_sample, groups, step_s)
        score = np.maximum(frozen, apart).astype(np.float32)

        def words(at: int) -> str:
            if frozen[at] >= apart[at]:
                return (
                    f"its last {one['run'][at] + 1:.0f} rewards are all {one['last'][at]:g}; those of its peers differ"
                )
            return (
                f"its rewards differ from its peers' and from its own before by {self._tuning.reward_z * apart[at]:.1f}"
                f" standard errors; the limit is {self._tuning.reward_z:g}"
            )

        return RuleResult("reward", "reward_mean", score > 1.0, np.isfinite(reward), score, words, _HOLD_S)

    def _is_new_work(self, column: Columns, before: Floats, reward: Floats, last: Floats) -> np.ndarray:
        """Return which samples are of new work: those with more work done or another reward, or all
        if the work done is not counted."""
        done = column.get("done")
        if done is None:
            return np.ones(len(reward), bool)
        with np.errstate(invalid="ignore"):
            is_new = ~(done == before) | (reward != last)
        np.copyto(before, done, where=np.isfinite(done))
        return is_new

    def _apart(self, reward: Floats, is_known: np.ndarray, groups: Groups, step_s: float) -> Floats:
        """Return the two-sample z of each worker's newest rewards, divided by its limit."""
        with np.errstate(invalid="ignore"):
            # minus the peers at the same moment, since prompts become harder for all
            usual = of_peers(np.where(is_known, reward, np.float32(np.nan)), groups)
            rest = np.where(is_known & np.isfinite(usual), reward - usual, np.float32(np.nan))
        is_used = np.isfinite(rest)
        rest, own = np.where(is_used, rest, np.float32(0.0)), np.where(is_used, reward, np.float32(0.0))
        sample = np.stack([is_used, is_used, rest, rest * rest, own]).astype(np.float32)
        for name, tau_s in (("new", _NEW_S), ("old", _OLD_S)):
            fading = np.exp(-step_s * np.array(_FADING, np.float32) / np.float32(tau_s))
            self._sums[name] = self._sums[name] * fading[:, None] + sample
        new, weight, total, square, own_total = self._sums["new"]
        old, _, old_total, _, own_old_total = self._sums["old"]
        mean = total / (new + TINY)
        variance = np.maximum(square / (new + TINY) - mean * mean, 0.0).astype(np.float32)
        variance = np.maximum(np.maximum(variance, of_peers(variance, groups)), np.float32(_LEAST_DEVIATION**2))
        # all rewards minus the newest ones: what was usual before
        before = np.maximum(old - new, 0.0)
        earlier = (old_total - total) / (before + TINY)
        error = variance * weight / (new * new + TINY)
        by_peers = mean / np.sqrt(error + TINY)
        by_own = (mean - earlier) / np.sqrt(error + variance / (before + TINY))
        z = np.where(by_peers * by_own > 0, np.minimum(np.abs(by_peers), np.abs(by_own)), 0.0)
        change = (own_total / (new + TINY) - (own_old_total - own_total) / (before + TINY)) / np.sqrt(
            error + variance / (before + TINY) + TINY
        )
        z = np.where(groups.sizes() > 2, z, np.minimum(z, np.abs(change)))
        is_enough = (new >= _FEWEST) & (before >= 2.0 * _FEWEST) & (groups.sizes() > 1)
        return np.where(is_enough, z / self._tuning.reward_z, 0.0).astype(np.float32)
