"""Turns heartbeats of a live run into frames: the metrics of every worker at one moment.

Counters stay counters, and the watch derives their rates. ``steps`` counts within a piece of work,
such as the layers of a pass or the tensors that are loaded. Four metrics need more than one
heartbeat:

* ``service_ratio``: seconds per token of the work finished since the last frame, divided by the
role's usual value for that kind of work. The usual value slowly follows the role's median, so
longer responses for all workers change nothing. * ``version_lag``: the published version minus the
served one, for generators only. * ``reward_mean``: mean accuracy of the responses that a reward
worker has judged since the last frame. * ``loss``: of the learner's newest update. It is infinite
while steps were refused as not finite, or not committed, since a heartbeat cannot hold such a
number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.state import Worker
from pipeline.process.work import ServiceSums, standing_limit_s
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.waits import LimitKind
from pipeline.weights import PARTS
from protocol.ids import Role

METRICS: Final = (
    "heartbeat_age_s", "progress", "turns", "steps", "done", "in_flight", "oldest_age_s", "input_depth", "output_depth",
    "loop_lag_ms", "cpu", "rss_bytes", "num_fds", "disk_free_bytes", "disk_free_share", "gpu_util", "gpu_mem_bytes",
    "gpu_power_w", "service_ratio", "errors", "retries", "refused", "version_lag", "clock_ahead_ms", "ledger_rtt_ms",
    "loss", "reward_mean",
)  # fmt: skip
"""Metrics of a live run, in the order of a frame's columns."""
_FOLLOWS: Final = 0.02
"""Rate at which the usual value follows a new median."""
_PAIR: Final = 2
_MOST: Final = math.log(2.0)
"""Largest deviation from the usual value that a single frame contributes."""
_LEAST_TOKENS: Final = 1.0


class FrameMaker:
    """Makes frames from a run's heartbeats. Its memory is bounded by the workers of the last frame."""

    def __init__(self) -> None:
        self._workers: tuple[str, ...] = ()
        self._roles: tuple[str, ...] = ()
        self._sums: dict[str, tuple[int, Mapping[str, ServiceSums]]] = {}
        """Each worker's epoch and sums at the last frame."""
        self._refused_steps: dict[str, float] = {}
        """Each worker's optimiser steps that were not finite, at the last frame."""
        self._judged: dict[str, tuple[int, float, float]] = {}
        """Each worker's epoch, judged responses and sum of accuracies, at the last frame."""
        self._work_s: dict[str, float] = {}
        """Longest time of one piece of work, by worker."""
        self._usual: dict[tuple[Role, str], tuple[float, int]] = {}
        """Natural logarithm of the usual seconds per token, and the number of frames it was learned
        from, by role and kind of work."""

    def frame(self, now_s: float, beats: Sequence[Worker], published: int) -> Frame:
        """Return the frame of this moment.

        Args:
            now_s: the reader's clock, which only grows.
            beats: the last heartbeat of each worker.
            published: newest policy version; -1 for none.
        """
        beats = sorted(beats, key=lambda beat: beat.who.worker)
        workers = tuple(beat.who.worker for beat in beats)
        if workers != self._workers:
            self._workers, self._roles = workers, tuple(str(beat.who.role) for beat in beats)
        values = np.full((len(beats), len(METRICS)), np.nan, np.float32)
        for row, beat in zip(values, beats, strict=True):
            row[:] = [math.nan if value is None else value for value in _row(beat, published)]
        values[:, METRICS.index("service_ratio")] = self._service_ratios(beats)
        values[:, METRICS.index("loss")] = [self._loss(beat) for beat in beats]
        values[:, METRICS.index("reward_mean")] = [self._reward_mean(beat) for beat in beats]
        self._judged = {beat.who.worker: _judged(beat) for beat in beats}
        self._refused_steps = {beat.who.worker: _refused_steps(beat) for beat in beats}
        phases = tuple("starting" if beat.waiting_for.limit is LimitKind.START else "" for beat in beats)
        self._work_s = {
            beat.who.worker: max(self._work_s.get(beat.who.worker, 0.0), beat.work.elapsed_s) for beat in beats
        }
        expected = np.array([expected_s(beat, self._work_s[beat.who.worker]) for beat in beats], np.float32)
        return Frame(now_s, self._workers, self._roles, METRICS, values, phases, expected)

    def _loss(self, beat: Worker) -> float:
        if beat.not_committed or _refused_steps(beat) > self._refused_steps.get(beat.who.worker, math.inf):
            return math.inf
        return beat.counters.get("loss", math.nan)

    def _reward_mean(self, beat: Worker) -> float:
        epoch, number, total = _judged(beat)
        epoch_before, number_before, total_before = self._judged.get(beat.who.worker, (epoch, number, total))
        if epoch != epoch_before or number <= number_before:
            return math.nan
        return (total - total_before) / (number - number_before)

    def _service_ratios(self, beats: Sequence[Worker]) -> NDArray[np.float32]:
        found: dict[tuple[Role, str], list[tuple[int, float, float]]] = {}
        for at, beat in enumerate(beats):
            sums = beat.vitals.service if beat.vitals is not None else {}
            epoch, before = self._sums.get(beat.who.worker, (0, {}))
            self._sums[beat.who.worker] = (beat.who.epoch, sums)
            if epoch != beat.who.epoch:
                continue
            for kind, now in sums.items():
                seconds, tokens = _since(before.get(kind), now)
                if tokens >= _LEAST_TOKENS and seconds > 0.0:
                    found.setdefault((beat.who.role, kind), []).append((at, seconds, tokens))
        for gone in self._sums.keys() - {beat.who.worker for beat in beats}:
            del self._sums[gone]
        taken, expected = np.zeros(len(beats)), np.zeros(len(beats))
        for key, rows in found.items():
            usual = self._learn(key, (seconds / tokens for _, seconds, tokens in rows))
            for at, seconds, tokens in rows:
                taken[at] += seconds
                expected[at] += tokens * usual
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(expected > 0.0, taken / expected, np.nan).astype(np.float32)

    def _learn(self, key: tuple[Role, str], seconds_a_token: Iterable[float]) -> float:
        seen = [math.log(value) for value in seconds_a_token]
        before, number = self._usual.get(key, (float(np.median(seen)), 0))
        # of two workers, only the one nearer to the usual pace counts
        now = min(seen, key=lambda value: abs(value - before)) if len(seen) == _PAIR else float(np.median(seen))
        # a process's first pieces are slow, and must not count as usual for minutes
        share, most = (_FOLLOWS, _MOST) if number * _FOLLOWS >= 1.0 else (1.0 / (number + 1), math.inf)
        self._usual[key] = before + share * max(-most, min(now - before, most)), number + 1
        return math.exp(before)


def steps_of(beat: Worker) -> float:
    """Return the steps within pieces of work: of computations, of writes to the disk, and of
    versions being received."""
    return beat.work.steps + beat.storing.steps + beat.counters.get(PARTS, 0.0)


def expected_s(beat: Worker, work_s: float) -> float:
    """Return how long a worker may compute without progress; 0 if it does not compute. ``work_s``
    is its longest work so far, which counts between two tasks, too."""
    return standing_limit_s(beat.work.slowest_s, work_s) if beat.waiting_for is WaitingFor.COMPUTE else 0.0


def _judged(beat: Worker) -> tuple[int, float, float]:
    return beat.who.epoch, beat.counters.get("judged", 0.0), beat.counters.get("judged_accuracy", 0.0)


def _refused_steps(beat: Worker) -> float:
    return beat.counters.get("refused_steps", 0.0)


def _since(before: ServiceSums | None, now: ServiceSums) -> tuple[float, float]:
    if before is None:
        return now.seconds, now.size
    return now.seconds - before.seconds, now.size - before.size


def _row(beat: Worker, published: int) -> tuple[float | None, ...]:
    """Return one worker's values in the order of ``METRICS``, with None for missing samples."""
    vitals = beat.vitals
    held = 0 if beat.waiting_for.may_hold else beat.held
    is_serving = beat.who.role is Role.GENERATOR and beat.policy_version >= 0
    own: tuple[float | None, ...] = (beat.silent_s, beat.progress, beat.turns, steps_of(beat))
    lag = max(0, published - beat.policy_version) if is_serving else None
    ahead_ms = 1000.0 * beat.clock_ahead_s
    if vitals is None:
        return (*own, *[None] * 7, beat.rss_bytes or None, *[None] * 10, lag, ahead_ms, None, None, None)
    done = sum(sums.pieces for sums in vitals.service.values()) if vitals.service else None
    return (
        *own, done, held, vitals.oldest_age_s, vitals.input_depth, vitals.output_depth,
        vitals.loop_lag_ms, vitals.cpu, beat.rss_bytes or None, vitals.num_fds, vitals.disk_free_bytes,
        vitals.disk_free_share, vitals.gpu_util, vitals.gpu_mem_bytes, vitals.gpu_power_w,
        None, vitals.errors, vitals.retries, vitals.refused, lag, ahead_ms, vitals.ledger_rtt_ms or None, None,
        None,
    )  # fmt: skip
