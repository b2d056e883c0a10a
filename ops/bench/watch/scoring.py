"""Judges the alarms in a window, and sums up windows.

In a window with one fault its first alarm decides. It is right within the fault's limit; a wrong component, or
an alarm before the onset, counts as false and as a miss. In a window with several faults each is found or
missed, and each wrong worker is one false alarm. In a benign window any alarm is false."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ops.bench.table import Share, quantile
from ops.bench.watch.cases import GRAY_S, Case, Truth


@dataclass(frozen=True, slots=True)
class Alarm:
    """One worker that the watch names."""

    time_s: float
    """Since the window began."""
    worker: str
    kind: str = ""
    metric: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    size: int
    label: str
    index: int
    kinds: tuple[str, ...]
    """Kinds of the faults; empty in a benign window."""
    limits_s: tuple[float, ...]
    delays_s: tuple[float, ...]
    """From each onset to its right alarm: at most 240, or infinite for a miss."""
    num_wrong: int
    """Number of wrong workers named: at most one unless the window has several faults."""
    first: str = ""
    """The first wrong alarm in words: worker, kind, metric and second."""

    @property
    def is_benign(self) -> bool:
        return not self.kinds

    @property
    def num_found(self) -> int:
        """Number of faults that were named within their limits."""
        return sum(delay <= limit for delay, limit in zip(self.delays_s, self.limits_s, strict=True))


def is_decided(truth: Truth, alarms: Sequence[Alarm], now_s: float) -> bool:
    """Whether later alarms cannot change the outcome. Benign windows are watched to their end."""
    if not truth.faults:
        return False
    if len(truth.faults) == 1 and alarms:
        return True
    named = {alarm.worker for alarm in alarms}
    open_until = [fault.onset_s + GRAY_S for fault in truth.faults if fault.worker not in named]
    return not open_until or now_s > max(open_until)


def judge(case: Case, truth: Truth, alarms: Sequence[Alarm]) -> Outcome:
    """Return the outcome of a window's alarms, which are in the order of time."""
    if len(truth.faults) == 1:
        # the first alarm decides; alarms of the same tick come with it
        alarms = [alarm for alarm in alarms if alarm.time_s == alarms[0].time_s]
    delays: list[float] = []
    right = {fault.worker for fault in truth.faults}
    for fault in truth.faults:
        after = [alarm.time_s - fault.onset_s for alarm in alarms if alarm.worker == fault.worker]
        in_time = bool(after) and 0.0 <= after[0] <= GRAY_S
        delays.append(after[0] if in_time else math.inf)
    wrong = [alarm for alarm in alarms if alarm.worker not in right or _is_early(truth, alarm)]
    names = {alarm.worker for alarm in wrong}
    most = len(names) if len(truth.faults) > 1 else min(1, len(names))
    return Outcome(
        case.size,
        case.label,
        case.index,
        tuple(fault.kind.value for fault in truth.faults),
        tuple(fault.limit_s for fault in truth.faults),
        tuple(delays),
        most,
        f"{wrong[0].worker} {wrong[0].kind} {wrong[0].metric} at {wrong[0].time_s:.0f} s" if wrong else "",
    )


def _is_early(truth: Truth, alarm: Alarm) -> bool:
    """Whether the alarm names a faulty worker before its fault."""
    return any(alarm.worker == fault.worker and alarm.time_s < fault.onset_s for fault in truth.faults)


@dataclass(frozen=True, slots=True)
class Summary:
    windows: int
    precision: Share
    recall: Share
    f1: Share
    """2 TP / (2 TP + FP + FN), with Wilson's interval for TP + (FP + FN) / 2 trials."""
    blamed: Share
    """Benign windows with an alarm."""
    delay_s: tuple[float, float, float]
    """Median, P90 and P99, with misses as infinite."""


def summarise(outcomes: Iterable[Outcome]) -> Summary:
    given = list(outcomes)
    benign = [outcome for outcome in given if outcome.is_benign]
    delays = [delay for outcome in given for delay in outcome.delays_s]
    found = sum(outcome.num_found for outcome in given)
    wrong = sum(outcome.num_wrong for outcome in given)
    missed = len(delays) - found
    return Summary(
        len(given),
        Share(found, found + wrong),
        Share(found, len(delays)),
        Share(found, found + (wrong + missed) / 2),
        Share(sum(outcome.num_wrong > 0 for outcome in benign), len(benign)),
        (quantile(delays, 0.5), quantile(delays, 0.9), quantile(delays, 0.99)),
    )
