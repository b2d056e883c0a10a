"""When an analysis begins: the first signs that something stands, before a cause is known.

*Open operation*: a spell of a worker, or a message on a link, longer than max(3 s, twice the 99th
percentile). *Rate*: a role's finished pieces in the last seconds are less than half of the median
of five minutes. *Interval*: a worker whose pieces come regularly is two intervals late. *Rule*: a
suspect of any class. *Watch*: a finding from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from pipeline.flow.fleet import FleetTracks
from pipeline.flow.suspects import FlowSuspect

_RATE_WINDOW_S = 10.0
_PAST_S = 300.0
_LEAST_EXPECTED = 4.0
"""Pieces that the window must let expect, so that half of them is no chance."""
_LEAST_PAST = 20
REMEMBERED_S = 30.0
"""A sign that led to no cause for so long is none of a later one."""
_GONE_S = 3.0
_WATCH = "watch "


class Triggers:
    """Signs that are there, each with the time of its begin."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}
        """Sign -> begin, and when it was last there."""
        self._turned: dict[str, deque[tuple[float, float]]] = {}
        self._rates: dict[str, deque[float]] = {}
        self._workers: dict[str, float] = {}

    @property
    def is_stalled(self) -> bool:
        """Whether some role's rate has halved."""
        return any(sign.startswith("rate ") for sign in self._since)

    def notice(self, now_s: float, fleet: FleetTracks, found: Iterable[FlowSuspect], told: Iterable[str]) -> None:
        """Take one tick's signs in; ``told`` are findings of Watch."""
        signs = {f"{suspect.component} {suspect.symptom}" for suspect in found}
        signs |= {f"open {track.worker}" for track in fleet.live() if track.work_s() > track.limit_s()}
        signs |= {f"{_WATCH}{words}" for words in told}
        signs |= {f"rate {role}" for role in self._fallen(now_s, fleet)}
        for sign in signs:
            since_s, _ = self._since.get(sign, (now_s, now_s))
            self._since[sign] = (since_s, now_s)
        self._since = {
            sign: times
            for sign, times in self._since.items()
            if now_s - times[1] <= (REMEMBERED_S if sign.startswith(_WATCH) else _GONE_S)
        }

    def since_s(self, now_s: float) -> float:
        """Return when the first sign of the present stall came; now, without one."""
        return min((since for since, _ in self._since.values() if now_s - since <= REMEMBERED_S), default=now_s)

    def _fallen(self, now_s: float, fleet: FleetTracks) -> Iterable[str]:
        """Yield roles whose rate has halved."""
        totals: dict[str, float] = {}
        for track in fleet.workers.values():
            grown = track.turned - self._workers.get(track.worker, track.turned)
            self._workers[track.worker] = track.turned
            role = fleet.role_of(track.worker)
            totals[role] = totals.get(role, 0.0) + grown
        self._workers = {name: turned for name, turned in self._workers.items() if name in fleet.workers}
        for role, grown in totals.items():
            past = self._turned.setdefault(role, deque())
            past.append((now_s, grown))
            while past and now_s - past[0][0] > _RATE_WINDOW_S:
                past.popleft()
            rate = sum(count for _, count in past) / _RATE_WINDOW_S
            rates = self._rates.setdefault(role, deque(maxlen=int(_PAST_S)))
            usual = median(rates) if len(rates) >= _LEAST_PAST else 0.0
            if usual * _RATE_WINDOW_S >= _LEAST_EXPECTED and rate < 0.5 * usual:
                yield role
            rates.append(rate)
