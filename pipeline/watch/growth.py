"""A worker whose memory grows steadily, while that of its peers does not.

Memory that is filled once, rises and falls in turn, or grows for the whole role, is no leak. The
growth over a minute is compared with the peers' and with what this worker's growth usually is."""

from __future__ import annotations

import math

import numpy as np

from pipeline.watch.arrays import WorkerArrays
from pipeline.watch.frame import Frame
from pipeline.watch.groups import Floats, Groups
from pipeline.watch.sightings import Columns, Sighting, of_peers
from pipeline.watch.tuning import Tuning

_NUM = 12
"""Blocks over which growth is measured; 6 where samples are rare."""
_USUAL_TIMES = 6.5
"""A leak grows so many times as much as a worker's growth varies."""
_LEAST_SHARE = 0.015
"""Of a worker's memory, which it grows at least."""
_NUM_BAD = 3
"""Blocks in a row in which a leak is seen; of larger fleets one more for each doubling."""
_FEW_WORKERS = 128
_EARLY_S = 120.0
"""Time in which all growth is taken for usual."""
_LEAST_PART = 1.0 / 6.0
"""Of the growth in each third of the time: memory that jumps once does not leak."""


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
        state.add("blocks", np.nan, np.float64, lead=(_NUM + 1,))
        self._num_ended = 0
        self._begun_s = math.nan

    def look(self, column: Columns, frame: Frame, groups: Groups) -> Sighting | None:
        """Take a frame; return a sighting at the end of a block."""
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

    def _judge(self, groups: Groups, block_s: float) -> Sighting:
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
            is_large = is_known & is_steady & (excess > limit) & (known_s >= num * block_s)
        num_bad = state["num_bad"][0]
        num_bad[:] = np.where(is_known, np.where(is_large, num_bad + 1.0, 0.0), num_bad)
        share = np.where(is_known & ~is_large, block_s / np.clip(known_s, 60.0, tuning.memory_s), 0.0)
        with np.errstate(invalid="ignore"):
            # a leak must not become usual while it is small
            most = np.where(known_s < _EARLY_S, limit, np.maximum(2.0 * usual, 0.08 * tuning.leak_bytes))
            seen = np.square(np.clip(excess, 0.0, most))
            square[:] = np.where(share > 0.0, square + np.minimum(share, 1.0) * (seen - square), square)
        known_s += np.where(is_known, np.float32(block_s), np.float32(0.0))
        long_s = num * block_s

        def words(at: int) -> str:
            return (
                f"its memory has grown steadily by {excess[at] / 1e6:.0f} MB more than its peers' in {long_s:.0f} s;"
                f" the limit is {limit[at] / 1e6:.0f} MB"
            )

        num_needed = _NUM_BAD + max(0, round(math.log2(len(growth) / _FEW_WORKERS)))
        lasted: Floats = np.full(len(growth), long_s, np.float32)
        score = np.nan_to_num(excess / limit)
        return Sighting(
            "leak", "rss_bytes", num_bad >= num_needed, is_known, score, words, is_near=is_large, lasted_s=lasted
        )  # fmt: skip
