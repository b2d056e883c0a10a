"""Finds workers whose memory grows steadily while that of their peers does not.

Memory that is filled once, that rises and falls, or that grows for the whole role is not a leak.
The growth over a minute is compared with the peers' and with this worker's usual growth. Growth
counts as usual only once it has ended, so a leak in a worker's first minutes does not become usual.
A leak must last longer there, since memory is being filled."""

from __future__ import annotations

import math

import numpy as np

from pipeline.fleet.peers.frame import Columns, Frame, RuleResult, of_peers
from pipeline.fleet.peers.groups import Floats, Groups, WorkerArrays
from pipeline.fleet.peers.thresholds import Tuning

_NUM = 12
"""Blocks over which growth is measured; 6 if samples are rare."""
_USUAL_TIMES = 6.5
"""A leak is this many times as large as the variation of a worker's growth."""
_LEAST_SHARE = 0.015
"""A leak is at least this share of a worker's memory."""
_NUM_BAD = 3
"""Consecutive blocks in which a leak must be seen, plus one for each doubling of a large fleet."""
_FEW_WORKERS = 128
_EARLY_S, _LONGER_S = 120.0, 30.0
"""Time in which growth of any size that has ended counts as usual, and how much longer a leak must
last in it."""
_EARLY_SHARE = 0.4
"""While growth goes on in that time, this share of a leak's least growth counts as usual."""
_ENDED_SHARE = 0.5
"""Growth has ended when less than this share of its largest value remains."""
_ENDED_TIMES = 1.5
"""A leak exceeds the largest steady growth that ended by itself this many times."""
_LEAST_PART = 1.0 / 6.0
"""Least share of the growth in each third of the time, since memory that jumps once does not
leak."""


class MemoryGrowth:
    """Growth of each worker's memory over the last minute, in blocks of a few seconds."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._state = state = WorkerArrays()
        state.add("sum", 0.0, np.float64)
        state.add("count", 0.0)
        state.add("known_s", 0.0)
        state.add("square", 0.0, np.float64)
        state.add("num_bad", 0.0)
        state.add("pending", 0.0, np.float64)
        state.add("ended", 0.0, np.float64)
        state.add("is_named", 0.0)
        state.add("blocks", np.nan, np.float64, lead=(_NUM + 1,))
        self._num_ended = 0
        self._begun_s = math.nan

    def evaluate(self, column: Columns, frame: Frame, groups: Groups) -> RuleResult | None:
        """Add a frame; return a result at the end of a block."""
        if (size := column.get("rss_bytes")) is None:
            return None
        state, tuning = self._state, self._tuning
        state.align(("rss_bytes",), frame.workers)
        is_known = np.isfinite(size)
        state["sum"][0] += np.where(is_known, size, 0.0)
        state["count"][0] += is_known
        if math.isnan(self._begun_s):
            self._begun_s = frame.time_s
        block_s = min(frame.time_s - self._begun_s, tuning.max_step_s)
        if block_s < tuning.block_s - 1e-6:
            return None
        self._begun_s = frame.time_s
        with np.errstate(invalid="ignore", divide="ignore"):
            state["blocks"][self._num_ended % (_NUM + 1), 0] = state["sum"][0] / state["count"][0]
        state["sum"][:] = 0.0
        state["count"][:] = 0.0
        self._num_ended += 1
        return self._judge(groups, block_s)

    def _judge(self, groups: Groups, block_s: float) -> RuleResult:
        state, tuning = self._state, self._tuning
        num = min(_NUM, max(_NUM // 2, 3 * math.ceil(tuning.leak_s / block_s / 3.0)))
        now, late, early, then = (
            state["blocks"][(self._num_ended - 1 - back) % (_NUM + 1), 0] for back in (0, num // 3, 2 * num // 3, num)
        )
        growth = now - then
        with np.errstate(invalid="ignore"):
            is_steady = np.minimum(np.minimum(now - late, late - early), early - then) >= _LEAST_PART * growth
            peers = np.nan_to_num(of_peers(growth.astype(np.float32), groups))
            excess = growth - np.maximum(peers, 0.0)
            is_known = np.isfinite(growth)
            known_s, square = state["known_s"][0], state["square"][0]
            usual = np.sqrt(square)
            roles = groups.quantiles(usual.astype(np.float32)[None, :], 0.5)[0][groups.of]
            least = np.maximum(tuning.leak_bytes, _LEAST_SHARE * then)
            limit = np.maximum(least, _USUAL_TIMES * np.maximum(usual, roles))
            limit = np.maximum(limit, _ENDED_TIMES * self._ended(block_s))
            is_rising = (growth > 0.0) & (now - late >= _LEAST_PART * growth)
            is_going_on = is_known & is_rising & (excess > least)
            is_large = is_known & is_steady & (excess > limit) & (known_s >= num * block_s)
        num_bad = state["num_bad"][0]
        num_bad[:] = np.where(is_known, np.where(is_large, num_bad + 1.0, 0.0), num_bad)
        share = np.where(is_known & ~is_large & ~is_going_on, block_s / np.clip(known_s, 60.0, tuning.memory_s), 0.0)
        with np.errstate(invalid="ignore"):
            # growth that goes on is not usual yet: a leak must not become usual while it is small
            early = np.where(is_rising, _EARLY_SHARE * tuning.leak_bytes, limit)
            most = np.where(known_s < _EARLY_S, early, 0.08 * tuning.leak_bytes)
            most = np.maximum(2.0 * usual, most)
            seen = np.square(np.clip(excess, 0.0, most))
            square[:] = np.where(share > 0.0, square + np.minimum(share, 1.0) * (seen - square), square)
        more = np.where(known_s < _EARLY_S, math.ceil(_LONGER_S / block_s), 0)
        num_needed = _NUM_BAD + max(0, round(math.log2(len(growth) / _FEW_WORKERS))) + more
        is_bad = num_bad >= num_needed
        self._follow(excess, is_known, is_steady, is_going_on, is_bad)
        known_s += np.where(is_known, np.float32(block_s), np.float32(0.0))
        long_s = num * block_s

        def words(at: int) -> str:
            return (
                f"its memory has grown steadily by {excess[at] / 1e6:.0f} MB more than its peers' in {long_s:.0f} s;"
                f" the limit is {limit[at] / 1e6:.0f} MB"
            )

        lasted: Floats = np.full(len(growth), long_s, np.float32)
        score = np.nan_to_num(excess / limit)
        return RuleResult(
            "leak", "rss_bytes", is_bad, is_known, score, words, is_near=is_large, lasted_s=lasted
        )  # fmt: skip

    def _ended(self, block_s: float) -> np.ndarray:
        """Return each worker's largest steady growth that ended by itself, which fades with time."""
        ended = self._state["ended"][0]
        ended *= 0.5 ** (block_s / self._tuning.record_s)
        return ended

    def _follow(
        self,
        excess: np.ndarray,
        is_known: np.ndarray,
        is_steady: np.ndarray,
        is_going_on: np.ndarray,
        is_bad: np.ndarray,
    ) -> None:
        """Remember this block's steady growth, which becomes usual once it has ended without being
        a leak."""
        state = self._state
        pending, ended, is_named = state["pending"][0], state["ended"][0], state["is_named"][0]
        # a leak that noise interrupts has not ended
        is_over = is_known & ~is_going_on & (excess < _ENDED_SHARE * pending)
        np.maximum(ended, pending, out=ended, where=is_over & (is_named == 0))
        is_named[:] = np.where(is_over, 0.0, np.maximum(is_named, is_bad))
        grown = np.where(is_going_on & is_steady, np.maximum(pending, excess), pending)
        pending[:] = np.where(is_over, 0.0, grown)
