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
from protocol.ids import Incarnation, Role

METRICS: Final = (
    "heartbeat_age_s", "progress", "turns", "steps", "done", "in_flight", "oldest_age_s", "input_depth", "output_depth",
    "loop_lag_ms", "cpu", "rss_bytes", "num_fds", "disk_free_bytes", "disk_free_share", "gpu_util", "gpu_mem_bytes",
    "gpu_power_w", "service_ratio", "errors", "retries", "refused", "version_lag", "clock_ahead_ms", "ledger_rtt_ms",
    "loss", "reward_mean",
)  # fmt: skip
"""Metrics of a live run, in the order of a frame's columns."""
_OF_VITALS: Final = (
    "oldest_age_s", "input_depth", "output_depth", "loop_lag_ms", "cpu", "num_fds", "disk_free_bytes",
    "disk_free_share", "gpu_util", "gpu_mem_bytes", "gpu_power_w", "errors", "retries", "refused",
)  # fmt: skip
_COUNTED: Final = ("refused_steps", "judged", "judged_accuracy")
_NO_WORK: Final = ServiceSums()
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
        self._before: dict[Incarnation, Worker] = {}
        """The heartbeats of the last frame."""
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
            found = _values(beat, published) | self._grown(beat)
            row[:] = [math.nan if (value := found.get(name)) is None else value for name in METRICS]
        values[:, METRICS.index("service_ratio")] = self._service_ratios(beats)
        self._before = {beat.who: beat for beat in beats}
        phases = tuple("starting" if beat.waiting_for.limit is LimitKind.START else "" for beat in beats)
        self._work_s = {
            beat.who.worker: max(self._work_s.get(beat.who.worker, 0.0), beat.work.elapsed_s) for beat in beats
        }
        expected = np.array([expected_s(beat, self._work_s[beat.who.worker]) for beat in beats], np.float32)
        return Frame(now_s, self._workers, self._roles, METRICS, values, phases, expected)

    def _grown(self, beat: Worker) -> dict[str, float]:
        """Return the metrics that need the last heartbeat, too."""
        before = self._before.get(beat.who, beat)
        grown = {name: beat.counters.get(name, 0.0) - before.counters.get(name, 0.0) for name in _COUNTED}
        is_refused = bool(beat.not_committed) or grown["refused_steps"] > 0.0
        found = {"loss": math.inf if is_refused else beat.counters.get("loss", math.nan)}
        if grown["judged"] > 0.0:
            found["reward_mean"] = grown["judged_accuracy"] / grown["judged"]
        return found

    def _service_ratios(self, beats: Sequence[Worker]) -> NDArray[np.float32]:
        found: dict[tuple[Role, str], list[tuple[int, float, float]]] = {}
        for at, beat in enumerate(beats):
            if (last := self._before.get(beat.who)) is None:
                continue
            before = _sums(last)
            for kind, now in _sums(beat).items():
                since = before.get(kind, _NO_WORK)
                seconds, tokens = now.seconds - since.seconds, now.size - since.size
                if tokens >= _LEAST_TOKENS and seconds > 0.0:
                    found.setdefault((beat.who.role, kind), []).append((at, seconds, tokens))
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


def _sums(beat: Worker) -> Mapping[str, ServiceSums]:
    return beat.vitals.service if beat.vitals is not None else {}


def _values(beat: Worker, published: int) -> dict[str, float | None]:
    """Return the metrics that one heartbeat has."""
    is_serving = beat.who.role is Role.GENERATOR and beat.policy_version >= 0
    found: dict[str, float | None] = {
        "heartbeat_age_s": beat.silent_s,
        "progress": beat.progress,
        "turns": beat.turns,
        "steps": steps_of(beat),
        "rss_bytes": beat.rss_bytes or None,
        "version_lag": max(0, published - beat.policy_version) if is_serving else None,
        "clock_ahead_ms": 1000.0 * beat.clock_ahead_s,
    }
    if (vitals := beat.vitals) is not None:
        found |= {name: getattr(vitals, name) for name in _OF_VITALS}
        found["in_flight"] = 0 if beat.waiting_for.may_hold else beat.held
        found["done"] = sum(sums.pieces for sums in vitals.service.values()) if vitals.service else None
        found["ledger_rtt_ms"] = vitals.ledger_rtt_ms or None
    return found
