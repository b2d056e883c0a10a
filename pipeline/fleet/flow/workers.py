"""History and state of one worker: its progress by its own clock, its waits, errors and versions.

A *spell* is a period in which the worker has work, waits for no other worker and finishes nothing; a
long one means that it is stuck. A spell ends when a piece finishes or fails, or when the worker starts
to wait for others. The lengths of spells that ended in progress define what is usual for the role."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isnan, log

from pipeline.fleet.flow.format import Awaited, read_wait
from pipeline.fleet.flow.limits import ErrorTest, UsualLimit
from pipeline.fleet.flow.rows import StateRow
from pipeline.fleet.flow.service import SETTLED_S, RoleService, ServiceSum

_OWN_WORK = frozenset({Awaited.NOTHING, Awaited.UNKNOWN, Awaited.LOCK, Awaited.DISK, Awaited.ENDPOINT, Awaited.START})
_UNCOUNTED_WAITS = frozenset({Awaited.DISK, Awaited.ENDPOINT, Awaited.START})
"""Waits whose time does not count towards the spell of the computation that follows."""
_START_FACTOR = 10.0
"""A start or a first computation may take this many times the usual limit."""
_START_LEAST_S = 120.0
_FIRST_GAPS = 100
_GATHERED_FACTOR = 1.5
"""A mailbox must be this much fuller than those of workers that are gathering a batch."""
_LOAD_STEP = 0.02
_PEERS_FACTOR = 4.0
_RATE_S = 60.0
_LEAST_PIECES = 10
_KEPT_ROWS = 128
_LATE_S = 1.5
_LATE_INTERVALS = 2.2


@dataclass(slots=True)
class RoleTrack:
    """What is usual for the workers of a role."""

    gaps: UsualLimit = field(default_factory=UsualLimit)
    present_spell_s: float = 0.0
    """Median of its workers' current spells, if it has at least three workers."""
    ledger_waits: UsualLimit = field(default_factory=UsualLimit)
    service: RoleService = field(default_factory=RoleService)
    shows_in_flight: bool = False
    """Whether work in flight was ever seen; a column of zeros means nothing."""
    idle_depth: float = 0.0
    """Largest mailbox depth at which a worker waited for input and later made progress: it was
    gathering a batch."""
    moves_version: bool = False
    behind: UsualLimit = field(default_factory=UsualLimit)
    """How long workers took to follow after the fleet had a newer version."""


class WorkerTrack:
    """One worker. All times but ``arrived_s`` and ``asserted_s`` are by its own clock."""

    def __init__(self, row: StateRow, role: RoleTrack, now_s: float) -> None:
        self.role = role
        self.row = row
        self.wait, self.target = read_wait(row.waiting_for)
        self.first_s = row.time_s
        self.arrived_s = now_s
        """When the newest row arrived, by the reader's clock."""
        self.asserted_s = now_s
        """When any row last arrived, even an old one: the worker has not left."""
        self.progressed_s = row.time_s
        self.num_progressed = 0
        """Number of rows that showed progress."""
        self.waits_since_s = row.time_s
        self.backlog_until_s = row.time_s
        """After a silence, its messages are stale for as long as the silence lasted."""
        self.spell_since_s: float | None = None
        self._work_s = 0.0
        self._usual_in_flight = 0.0
        self.is_blocked = False
        """Whether some of its work waits for room elsewhere."""
        self.service = ServiceSum(row.worker)
        self.errors = ErrorTest()
        self.version_s = row.time_s
        """When its version last changed."""
        self._behind_since_s: float | None = None
        self._behind_version = row.policy_version
        self._spacings: deque[float] = deque(maxlen=15)
        self._interval_s = 1.0
        self._history: deque[tuple[float, float]] = deque(maxlen=_KEPT_ROWS)
        """Arrival by the reader's clock, and pieces finished or failed so far, across restarts."""
        self.turned = 0.0
        self._idle_depth = 0.0
        self._history.append((now_s, 0.0))
        self._see_in_flight(row)

    @property
    def worker(self) -> str:
        return self.row.worker

    @property
    def interval_s(self) -> float:
        return self._interval_s

    @property
    def late_s(self) -> float:
        """How long after a row the next one is overdue."""
        return max(_LATE_S, _LATE_INTERVALS * self._interval_s)

    @property
    def has_work(self) -> bool:
        """Whether it holds work or work waits for it; true if that is unknown."""
        held, queued = self.row.in_flight, self.row.input_depth
        return held > 0 or queued > 0 or not self.role.shows_in_flight or isnan(held)

    @property
    def has_own_work(self) -> bool:
        """Whether it should be making progress without waiting for anyone."""
        if self.is_blocked:
            return False
        if self.wait is Awaited.INPUT:
            return self.row.input_depth > _GATHERED_FACTOR * self.role.idle_depth + 1
        if self.wait is Awaited.LOCK and self.target:
            return False
        if self.wait in (Awaited.NOTHING, Awaited.UNKNOWN):
            return self.has_work
        return self.wait in _OWN_WORK

    def spell_s(self) -> float:
        """Return the length of the current spell; 0 if there is none."""
        return 0.0 if self.spell_since_s is None else self.row.time_s - self.spell_since_s

    def work_s(self) -> float:
        """Return the current spell's length, scaled by the load: with half the usual work in flight,
        pieces finish half as often."""
        return 0.0 if self.spell_since_s is None else self._work_s

    def limit_s(self) -> float:
        """Return the longest normal spell."""
        usual = self.role.gaps.limit_s(self._interval_s)
        if self.wait in (Awaited.NOTHING, Awaited.UNKNOWN):
            usual = max(usual, _PEERS_FACTOR * self.role.present_spell_s)
        if self.wait is Awaited.START:
            return max(_START_LEAST_S, _START_FACTOR * usual)
        if self.row.expected_s > 0:
            usual = max(usual, self.row.expected_s + self._interval_s)
        # A worker that has never finished anything may still be starting, whatever it reports.
        return usual if self.num_progressed else max(4 * usual, 30.0 + usual)

    @property
    def is_stalling(self) -> bool:
        """Whether it may be about to get stuck, which would explain its other symptoms."""
        return self.work_s() > 0.5 * self.limit_s()

    def _load(self) -> float:
        """Return the work in flight relative to the usual, at most 1."""
        held, usual = self.row.in_flight, self._usual_in_flight
        return min(1.0, held / usual) if held > 0 and usual > 0 else 1.0

    def silent_s(self, now_s: float) -> float:
        return now_s - self.arrived_s

    def rate(self, until_s: float) -> float:
        """Return pieces per second over the minute before ``until_s``, by the reader's clock."""
        rows = [(at_s, turned) for at_s, turned in self._history if until_s - _RATE_S <= at_s <= until_s]
        if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
            return 0.0
        return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])

    def block(self, is_blocked: bool) -> None:
        """Record whether some of its work waits for room: blocked downstream is not stuck."""
        self.is_blocked = is_blocked
        if is_blocked:
            self.spell_since_s = None

    def follow_version(self, newest: float) -> None:
        """Record how long a newer version than its own has existed; ``newest`` is the fleet's."""
        row = self.row
        if row.policy_version > self._behind_version:
            # without a start time, it took less time than its rows can show
            since_s = row.time_s if self._behind_since_s is None else self._behind_since_s
            self.role.behind.add_capped(row.time_s - since_s)
        if row.policy_version != self._behind_version:
            self._behind_since_s, self._behind_version = None, row.policy_version
        if self._behind_since_s is None and 0 <= row.policy_version < newest:
            self._behind_since_s = row.time_s

    def behind_s(self) -> float:
        """Return how long a newer version has existed than the one it serves; 0 if none."""
        return 0.0 if self._behind_since_s is None else self.row.time_s - self._behind_since_s

    def past_rate(self, now_s: float) -> float:
        """Return pieces per second in the settled past, by the reader's clock; 0 if there are too few."""
        first_s, first = self._history[0]
        settled = next(((at_s, turned) for at_s, turned in reversed(self._history) if now_s - at_s > SETTLED_S), None)
        if settled is None or settled[1] - first < _LEAST_PIECES:
            return 0.0
        return (settled[1] - first) / (settled[0] - first_s)

    def read(self, row: StateRow, now_s: float, usual_errors: float) -> None:
        """Process a row. An old or repeated one only shows that the worker has not left."""
        self.asserted_s = now_s
        before = self.row
        passed_s = row.time_s - before.time_s
        if passed_s <= 0:
            return
        self.arrived_s = now_s
        if passed_s > self.late_s:
            self.backlog_until_s = row.time_s + passed_s
        self._spacings.append(passed_s)
        if abs(passed_s - self._interval_s) > 0.1 * self._interval_s:
            self._interval_s = sorted(self._spacings)[len(self._spacings) // 2]
        finished, failed = grown(before.done, row.done), grown(before.errors, row.errors)
        self.errors.count(finished, failed, usual_errors)
        load = self._load()
        was_own_work, was_wait = self.has_own_work, (self.wait, self.target)
        self.row = row
        self.wait, self.target = read_wait(row.waiting_for)
        self._see_in_flight(row)
        if (self.wait, self.target) != was_wait or finished + failed > 0:
            if was_wait[0] is Awaited.LEDGER:
                self.role.ledger_waits.add(row.time_s - self.waits_since_s)
            self.waits_since_s = row.time_s
        if row.policy_version != before.policy_version and not isnan(row.policy_version):
            self.version_s = row.time_s
            self.role.moves_version |= not isnan(before.policy_version)
        self.turned += finished + failed
        self._history.append((now_s, self.turned))
        self._follow_spell(finished + failed > 0, was_own_work, was_wait[0], passed_s * load)
        self._follow_service(before, passed_s, finished, was_own_work, now_s)

    def _see_in_flight(self, row: StateRow) -> None:
        self.role.shows_in_flight |= row.in_flight > 0

    def _follow_spell(self, has_progressed: bool, was_own_work: bool, was_wait: Awaited, work_s: float) -> None:
        row = self.row
        self._work_s += work_s
        if self.wait is Awaited.INPUT and row.input_depth > self._idle_depth:
            self._idle_depth = row.input_depth
        if has_progressed:
            self.role.idle_depth = max(self.role.idle_depth, self._idle_depth)
            self._idle_depth = 0.0
            if self.spell_since_s is not None and self.num_progressed:
                self.role.gaps.add(self._work_s)
            elif self.role.gaps.num_seen < _FIRST_GAPS:
                # It took less time than its rows can show.
                self.role.gaps.add(0.0)
            self.progressed_s = row.time_s
            self.num_progressed += 1
            if row.in_flight > 0:
                step = max(_LOAD_STEP, 1 / self.num_progressed)
                self._usual_in_flight += step * (row.in_flight - self._usual_in_flight)
            self.spell_since_s = None
        if not self.has_own_work:
            self.spell_since_s = None
        elif (
            self.spell_since_s is None
            or not was_own_work
            or (self.wait is not was_wait and was_wait in _UNCOUNTED_WAITS)
        ):
            self.spell_since_s, self._work_s = row.time_s, 0.0

    def _follow_service(
        self, before: StateRow, passed_s: float, finished: float, was_own_work: bool, now_s: float
    ) -> None:
        row, service = self.row, self.role.service
        if row.service_s > before.service_s and row.service_size > before.service_size:
            seconds = row.service_s - before.service_s
            self.service.observe(now_s, log(seconds / (row.service_size - before.service_size)), service)
        elif not isnan(row.service_s):
            return
        elif self.has_own_work and was_own_work and self.wait is Awaited.NOTHING and passed_s < 2.5 * self._interval_s:
            self.service.compute(now_s, passed_s * self._load(), finished, service)
        elif self.wait is Awaited.INPUT:
            self.service.rest()
        else:
            self.service.leave()


def grown(before: float, after: float) -> float:
    """Return the growth of a cumulative counter; a smaller value means that it restarted."""
    if isnan(after):
        return 0.0
    if isnan(before) or after < before:
        return max(0.0, after) if not isnan(before) else 0.0
    return after - before
