"""The memory of one worker: its progress by its own clock, its waits, errors and versions.

A *spell* is a time in which the worker has work, waits for no other worker and finishes
nothing. Its length is the sign of a stuck worker. A spell ends with a finished or failed piece, or
with a wait for others. Lengths of spells that ended with progress are the role's usual ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isnan, log

from pipeline.flow.format import Awaited, read_wait
from pipeline.flow.limits import ErrorTest, UsualLimit
from pipeline.flow.rows import StateRow
from pipeline.flow.service import SETTLED_S, RoleService, ServiceSum

_OWN_WORK = frozenset({Awaited.NOTHING, Awaited.UNKNOWN, Awaited.LOCK, Awaited.DISK, Awaited.ENDPOINT, Awaited.START})
_BESIDE = frozenset({Awaited.DISK, Awaited.ENDPOINT, Awaited.START})
"""Their time is not that of the computation after them."""
_START_FACTOR = 10.0
"""A start, and a first computation, may take so many times the usual limit."""
_START_LEAST_S = 120.0
_FIRST_GAPS = 100
_GATHERED_FACTOR = 1.5
"""A mailbox must be so much fuller than those of workers that gather a batch."""
_LOAD_STEP = 0.02
_PEERS_FACTOR = 4.0
_RATE_S = 60.0
_LEAST_PIECES = 10
_KEPT_ROWS = 128
_LATE_S = 1.5
_LATE_INTERVALS = 2.2


@dataclass(slots=True)
class RoleTrack:
    """Usual figures of the workers of a role."""

    gaps: UsualLimit = field(default_factory=UsualLimit)
    """Lengths of spells."""
    present_spell_s: float = 0.0
    """Median of its workers' present spells, of three workers or more."""
    ledger_waits: UsualLimit = field(default_factory=UsualLimit)
    service: RoleService = field(default_factory=RoleService)
    shows_in_flight: bool = False
    """Whether work in flight was ever seen: a column of zeros means nothing."""
    idle_depth: float = 0.0
    """Largest depth of a mailbox at which a worker waited for input and later made progress: it
    gathers a batch."""
    moves_version: bool = False
    """Whether a version ever changed."""
    behind: UsualLimit = field(default_factory=UsualLimit)
    """Times from a newer version in the fleet until a worker serves another one."""


class WorkerTrack:
    """One worker's memory. All times but ``arrived_s`` and ``asserted_s`` are by its own clock."""

    def __init__(self, row: StateRow, role: RoleTrack, now_s: float) -> None:
        self.role = role
        self.row = row
        self.wait, self.target = read_wait(row.waiting_for)
        self.first_s = row.time_s
        self.arrived_s = now_s
        """When the newest row came, by the reader's clock."""
        self.asserted_s = now_s
        """When any row came, an old one too: its worker has not left."""
        self.progressed_s = row.time_s
        self.num_progressed = 0
        """Rows with progress."""
        self.waits_since_s = row.time_s
        """Since when it waits for the same."""
        self.backlog_until_s = row.time_s
        """After a silence it has messages as old as the silence, for as long."""
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
        """Arrival by the reader's clock, and pieces finished or failed so far, restarts bridged."""
        self.turned = 0.0
        self._idle_depth = 0.0
        self._history.append((now_s, 0.0))
        self._note_wait(row)

    @property
    def worker(self) -> str:
        """Its name."""
        return self.row.worker

    @property
    def interval_s(self) -> float:
        """Usual time between two rows."""
        return self._interval_s

    @property
    def late_s(self) -> float:
        """Time after a row from which the next one is overdue."""
        return max(_LATE_S, _LATE_INTERVALS * self._interval_s)

    @property
    def has_work(self) -> bool:
        """Whether it holds work, or work waits for it; also when that is not known."""
        held, queued = self.row.in_flight, self.row.input_depth
        return held > 0 or queued > 0 or not self.role.shows_in_flight or isnan(held)

    @property
    def has_own_work(self) -> bool:
        """Whether it should make progress by itself now."""
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
        """Return the length of the present spell, 0 without one."""
        return 0.0 if self.spell_since_s is None else self.row.time_s - self.spell_since_s

    def work_s(self) -> float:
        """Return the present spell in seconds of the usual work in flight. With half of it pieces
        are finished half as often."""
        return 0.0 if self.spell_since_s is None else self._work_s

    def limit_s(self, *, is_stalled: bool = False) -> float:
        """Return the longest spell that is not odd. ``is_stalled``: the whole fleet's rate fell."""
        gaps = self.role.gaps
        usual = gaps.stalled_limit_s(self._interval_s) if is_stalled else gaps.limit_s(self._interval_s)
        if self.wait in (Awaited.NOTHING, Awaited.UNKNOWN):
            usual = max(usual, _PEERS_FACTOR * self.role.present_spell_s)
        if self.wait is Awaited.START:
            return max(_START_LEAST_S, _START_FACTOR * usual)
        if self.row.expected_s > 0:
            usual = max(usual, self.row.expected_s + self._interval_s)
        # A worker that never finished anything may still be starting, whatever its word is.
        return usual if self.num_progressed else max(4 * usual, 30.0 + usual)

    @property
    def is_stalling(self) -> bool:
        """Whether it is about to be stuck: other signs of it may follow from that."""
        return self.work_s() > 0.5 * self.limit_s()

    def _load(self) -> float:
        """Return its work in flight over the usual, at most 1: of fewer pieces one ends rarely."""
        held, usual = self.row.in_flight, self._usual_in_flight
        return min(1.0, held / usual) if held > 0 and usual > 0 else 1.0

    def silent_s(self, now_s: float) -> float:
        """Return the reader's seconds since its newest row."""
        return now_s - self.arrived_s

    def rate(self, until_s: float) -> float:
        """Return pieces a second in the minute before ``until_s``, by the reader's clock."""
        rows = [(at_s, turned) for at_s, turned in self._history if until_s - _RATE_S <= at_s <= until_s]
        if len(rows) < 2 or rows[-1][0] <= rows[0][0]:
            return 0.0
        return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])

    def block(self, is_blocked: bool) -> None:
        """Note whether some of its work waits for room: blocked downstream is not stuck."""
        self.is_blocked = is_blocked
        if is_blocked:
            self.spell_since_s = None

    def follow_version(self, newest: float) -> None:
        """Record for how long a newer version than its own has existed; ``newest`` is the fleet's."""
        row = self.row
        if row.policy_version > self._behind_version:
            # without a begin it was quicker than its rows show
            since_s = row.time_s if self._behind_since_s is None else self._behind_since_s
            self.role.behind.add_capped(row.time_s - since_s)
        if row.policy_version != self._behind_version:
            self._behind_since_s, self._behind_version = None, row.policy_version
        if self._behind_since_s is None and 0 <= row.policy_version < newest:
            self._behind_since_s = row.time_s

    def behind_s(self) -> float:
        """Return how long a newer version has been there while it serves the same; 0 for none."""
        return 0.0 if self._behind_since_s is None else self.row.time_s - self._behind_since_s

    def past_rate(self, now_s: float) -> float:
        """Return pieces a second of the time that is settled, by the reader's clock; 0: too few."""
        first_s, first = self._history[0]
        settled = next(((at_s, turned) for at_s, turned in reversed(self._history) if now_s - at_s > SETTLED_S), None)
        if settled is None or settled[1] - first < _LEAST_PIECES:
            return 0.0
        return (settled[1] - first) / (settled[0] - first_s)

    def read(self, row: StateRow, now_s: float, usual_errors: float) -> None:
        """Take a newer row in. An older one, or the same again, only means that it has not left."""
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
        self._note_wait(row)
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

    def _note_wait(self, row: StateRow) -> None:
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
                # It was quicker than its rows show.
                self.role.gaps.add(0.0)
            self.progressed_s = row.time_s
            self.num_progressed += 1
            if row.in_flight > 0:
                step = max(_LOAD_STEP, 1 / self.num_progressed)
                self._usual_in_flight += step * (row.in_flight - self._usual_in_flight)
            self.spell_since_s = None
        if not self.has_own_work:
            self.spell_since_s = None
        elif self.spell_since_s is None or not was_own_work or (self.wait is not was_wait and was_wait in _BESIDE):
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
    """Return how much a cumulative counter has grown. A smaller one has restarted."""
    if isnan(after):
        return 0.0
    if isnan(before) or after < before:
        return max(0.0, after) if not isnan(before) else 0.0
    return after - before
