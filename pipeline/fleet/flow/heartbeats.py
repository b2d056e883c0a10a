"""Turns the heartbeats of a live run into rows: worker states and link counters.

There are three kinds of links:

* generator > scorer: S comes from the sender's heartbeat; R and D from an earlier heartbeat of the
  receiver, so that R never exceeds S merely because the two report at different moments. Counting
  starts when both ends have been up for a while, so messages of a dead process do not look
  undelivered. Neither do messages that the receiver refused or, by a later sequence number, knows to
  be lost. A receiver whose main loop is or was just blocked is itself the explanation.
* scorer > learner: the ledger carries scores and has each one at once, so this link only shows who
  waits.
* learner > generator: versions as counts. A version counts as sent once the generator should have it
  (``weights.max_generator_lag``) and has had two turns to take it, and as received once it is served.

Times are by the reader's clock: when the registry got the heartbeat. Skewed or jumping clocks on
other hosts therefore change nothing. A silent worker's last row is repeated every tick. A worker that
no longer has a heartbeat has left, and its final row says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Final

from pipeline.fleet.flow.format import FleetNames, fleet_names, wait_word
from pipeline.fleet.flow.rows import LinkRow, StateRow
from pipeline.fleet.peers.heartbeats import expected_s, steps_of
from pipeline.fleet.state import Worker
from pipeline.process.work import ServiceSums
from pipeline.runtime.registry.contract import (
    MAX_LINK_NAME_CHARS,
    OTHER_LINKS,
    LinkReport,
    WaitingFor,
    link_name,
)
from pipeline.weights import TURNS
from protocol.ids import Role

STEP_SHARE: Final = 1e-3
"""What a finished step of long work counts: a small part of a piece, but progress."""
_BLOCKED_MS: Final = 1000.0
"""A main loop whose timer is this late is blocked, whatever it last reported."""
_SETTLING_S: Final = 5.0
"""How long after a process starts its links and first messages take to appear."""
_KEPT_REPORTS: Final = 4
_MAX_REPORT_AGE_S: Final = 0.6
"""Maximum age of the link counters in a heartbeat, relative to the heartbeat."""
_EXCESS_ROWS: Final = 10
"""Within this many rows, the receiver's older count is at least once not ahead of the sender's,
unless it counts too many."""
_SIZE_WEIGHT: Final = 0.05
"""Weight of a new size in the running average of sizes."""
_TURNS_TO_TAKE: Final = 2
"""Two, because the first may have begun before the version was published."""
_SCORERS: Final = frozenset({Role.REWARD, Role.REFERENCE, Role.VALUE, Role.ENVIRONMENT})
_MAIN_WORK: Final = {
    Role.GENERATOR: ("sampling",),
    Role.REWARD: ("judging",),
    Role.REFERENCE: ("scoring", "guidance"),
    Role.VALUE: ("scoring",),
    Role.ENVIRONMENT: ("answering",),
}
"""Kinds of work by which the workers of a role are compared."""
_NO_WORK: Final = ServiceSums()
_NO_REPORT: Final = LinkReport(name="")

Reports = dict[str, LinkReport]


@dataclass(slots=True)
class _LastBeats:
    beat: Worker
    time_s: float
    """When the newest arrived, by the reader's clock."""
    began_s: float
    """When the current incarnation was first seen."""
    blocked_since_s: float | None = None
    """When its main loop became blocked; None while it runs."""
    backlog_until_s: float = -inf
    """After being blocked, its mailbox is stale until this time."""
    reports: deque[tuple[float, Reports]] = field(default_factory=lambda: deque(maxlen=_KEPT_REPORTS))
    work_s: float = 0.0
    """Longest time of one unit of work."""
    size: float = 0.0
    """Cumulative size of its finished work, in units of a typical piece."""
    due: int = -1
    """Version that it should be serving by now."""
    lagging_turns: float | None = None
    """Number of turns when it began to lag; None while it does not."""

    def note(self, beat: Worker) -> None:
        """Record a new heartbeat, which arrived at ``time_s``."""
        if beat.who.epoch != self.beat.who.epoch:
            self.began_s, self.blocked_since_s = self.time_s, None
            self.reports.clear()
        self.beat, self.work_s = beat, max(self.work_s, beat.work.elapsed_s)
        mine = link_name("", beat.who.worker)
        self.reports.append((self.time_s, {link.name: link for link in beat.links if link.name.endswith(mine)}))
        lag_ms = beat.vitals.loop_lag_ms if beat.vitals is not None else 0.0
        if lag_ms >= _BLOCKED_MS:
            began_s = self.time_s - lag_ms / 1e3
            self.blocked_since_s = began_s if self.blocked_since_s is None else self.blocked_since_s
        elif self.blocked_since_s is not None:
            self.backlog_until_s = 2 * self.time_s - self.blocked_since_s
            self.blocked_since_s = None

    def reports_at(self, time_s: float) -> Reports | None:
        """Return the newest reports no later than ``time_s``."""
        return next((reports for at_s, reports in reversed(self.reports) if at_s <= time_s), None)


@dataclass(slots=True)
class _LinkCounts:
    """Counters of one link since both of its ends came up."""

    epochs: tuple[int, int]
    """Epochs of sender and receiver."""
    sent_before: int
    arrived_before: int
    ended_before: int
    least_excess: int = 0
    num_rows: int = 0
    """Number of rows that ``least_excess`` covers."""

    def since(self, sent: LinkReport, got: LinkReport) -> tuple[int, int, int]:
        """Return S, R and D from both ends' newest reports.

        Messages in flight when counting began are counted as received only, and damage can make a
        sequence number too large. Both show as a constant excess of R over S, which is subtracted."""
        num_sent = 1 + sent.sent - self.sent_before
        arrived = 1 + max(0, _arrived(got) - self.arrived_before)
        ended = 1 + max(0, _ended(got) - self.ended_before)
        excess = arrived - num_sent
        self.least_excess = min(self.least_excess, excess) if self.num_rows else excess
        self.num_rows += 1
        if self.num_rows == _EXCESS_ROWS:
            self.arrived_before += max(0, self.least_excess)
            self.ended_before += max(0, self.least_excess)
            self.num_rows = 0
        num_received = min(num_sent, arrived)
        return num_sent, num_received, min(num_received, ended)


class RowMaker:
    """Converts heartbeats to rows. Memory is bounded by the workers of the last tick."""

    def __init__(self, *, max_lag: int = 2, swaps_in_windows: bool = True) -> None:
        """``max_lag``: versions a generator may be behind. ``swaps_in_windows``: whether it takes
        weights in the middle of a window; if not, its lag means nothing."""
        self._max_lag, self._swaps_in_windows = max_lag, swaps_in_windows
        self._seen: dict[str, _LastBeats] = {}
        self._usual_tokens: dict[Role, float] = {}
        """Tokens per piece of work, by role."""
        self._counts: dict[str, _LinkCounts] = {}

    def rows(self, now_s: float, beats: Sequence[Worker], published: int) -> tuple[list[StateRow], list[LinkRow]]:
        """Return the rows of this tick.

        Args:
            now_s: The reader's clock; never goes back.
            beats: The last heartbeat of each worker.
            published: Newest policy version, -1 if none."""
        for beat in beats:
            self._record(now_s, beat)
        there = {beat.who.worker for beat in beats}
        left = [_departed(seen, now_s) for name, seen in self._seen.items() if name not in there]
        self._seen = {name: seen for name, seen in self._seen.items() if name in there}
        names = fleet_names([(beat.who.worker, beat.who.role) for beat in beats])
        states = [self._state(seen, names, published) for seen in self._seen.values()]
        return [*states, *left], list(self._links(names, published))

    def _record(self, now_s: float, beat: Worker) -> None:
        arrived_s = now_s - beat.silent_s
        seen = self._seen.get(beat.who.worker)
        if seen is None:
            seen = self._seen[beat.who.worker] = _LastBeats(beat, arrived_s, arrived_s)
        elif (beat.who.epoch, beat.at_s, beat.turns) == (seen.beat.who.epoch, seen.beat.at_s, seen.beat.turns):
            return
        else:
            seen.time_s = max(arrived_s, seen.time_s + 1e-3)
            if beat.who.epoch == seen.beat.who.epoch:
                seen.size += self._size(beat.who.role, _service(seen.beat), _service(beat))
        seen.note(beat)

    def _size(self, role: Role, before: ServiceSums, now: ServiceSums) -> float:
        """Return the work done between two heartbeats in units of a typical piece, counted by pieces
        or by tokens, whichever is more.

        A decode step takes about as long for a few live trajectories as for many, and the cost of
        judging a response may follow either measure. A truly slow worker is slow by both."""
        pieces, tokens = now.pieces - before.pieces, now.size - before.size
        if pieces <= 0:
            return 0.0
        usual = self._usual_tokens.get(role, tokens / pieces)
        self._usual_tokens[role] = usual + _SIZE_WEIGHT * (tokens / pieces - usual)
        return max(float(pieces), tokens / usual if usual > 0 else 0.0)

    def _state(self, seen: _LastBeats, names: FleetNames, published: int) -> StateRow:
        beat, vitals = seen.beat, seen.beat.vitals
        role = beat.who.role
        word = wait_word(
            role, beat.waiting_for, beat.detail, names,
            is_behind=beat.policy_version < published, knows_disk=beat.storing.slowest_s > 0,
        )  # fmt: skip
        held = beat.held
        if seen.blocked_since_s is not None and beat.waiting_for in (WaitingFor.INPUT, WaitingFor.CREDIT):
            word, held = "compute", max(1, held)
        # a worker that waits for input is gathering a batch or has nothing to do
        depth = 0 if beat.waiting_for is WaitingFor.INPUT or vitals is None else vitals.input_depth
        serves = role is not Role.GENERATOR or self._swaps_in_windows
        return StateRow(
            time_s=seen.time_s,
            worker=beat.who.worker,
            role=str(role),
            waiting_for=word,
            done=beat.progress + STEP_SHARE * steps_of(beat),
            in_flight=held,
            oldest_age_s=nan if vitals is None else vitals.oldest_age_s,
            input_depth=nan if depth is None else depth,
            output_depth=nan if vitals is None or vitals.output_depth is None else vitals.output_depth,
            errors=nan if vitals is None else vitals.errors,
            policy_version=beat.policy_version if serves and beat.policy_version >= 0 else nan,
            service_s=_service(beat).seconds,
            service_size=seen.size,
            expected_s=expected_s(beat, seen.work_s) or nan,
        )

    def _links(self, names: FleetNames, published: int) -> Iterator[LinkRow]:
        short = {name[:MAX_LINK_NAME_CHARS]: name for name in names.workers}
        there = set[str]()
        for name, seen in self._seen.items():
            role = seen.beat.who.role
            mine = link_name(name, "")
            for report in seen.beat.links:
                receiver = short.get(report.name[len(mine) :]) if report.name.startswith(mine) else None
                if receiver is not None and not report.produced:
                    there.add(report.name)
                    yield from self._messages(seen, report, self._seen[receiver])
            if role in _SCORERS and names.learner:
                count = seen.beat.progress
                yield LinkRow(seen.time_s, name, names.learner, count, count, count, count)
            if role is Role.GENERATOR and names.learner:
                yield self._versions(seen, names.learner, published)
        self._counts = {name: counts for name, counts in self._counts.items() if name in there}

    def _messages(self, seen: _LastBeats, sent: LinkReport, receiver: _LastBeats) -> Iterator[LinkRow]:
        reports = receiver.reports_at(seen.time_s - _MAX_REPORT_AGE_S)
        others = link_name(OTHER_LINKS, receiver.beat.who.worker)
        # The receiver reports this link under "others", or has no heartbeat old enough.
        if reports is None or (sent.name not in reports and others in reports):
            return
        settled_s = max(seen.began_s, receiver.began_s) + _SETTLING_S
        if seen.time_s < max(settled_s, receiver.backlog_until_s) or receiver.blocked_since_s is not None:
            return
        got = reports.get(sent.name, _NO_REPORT)
        epochs = (seen.beat.who.epoch, receiver.beat.who.epoch)
        counts = self._counts.get(sent.name)
        if counts is None or counts.epochs != epochs:
            counts = self._counts[sent.name] = _LinkCounts(epochs, sent.sent, _arrived(got), _ended(got))
        num_sent, num_received, num_done = counts.since(sent, got)
        yield LinkRow(
            seen.time_s, seen.beat.who.worker, receiver.beat.who.worker,
            num_sent, num_sent, num_received, num_done, got.oldest_age_s,
        )  # fmt: skip

    def _versions(self, seen: _LastBeats, learner: str, published: int) -> LinkRow:
        served = seen.beat.policy_version
        due = published - self._max_lag + 1
        turns = seen.beat.counters.get(TURNS, 0.0)
        if served < 0 or served >= due or not self._swaps_in_windows:
            seen.lagging_turns = None
        elif seen.lagging_turns is None or turns < seen.lagging_turns:
            seen.lagging_turns = turns
        elif turns - seen.lagging_turns >= _TURNS_TO_TAKE:
            seen.due = max(seen.due, due)
        seen.due = max(seen.due, served)
        # A generator that is starting serves no version, but has not gone back.
        taken = served + 1 if served >= 0 else nan
        return LinkRow(seen.time_s, learner, seen.beat.who.worker, seen.due + 1, seen.due + 1, taken, taken)


def _departed(seen: _LastBeats, now_s: float) -> StateRow:
    """Return the final row of a worker that left, so that it is neither silent nor waited for."""
    return StateRow(
        max(now_s, seen.time_s + 1e-3), seen.beat.who.worker, str(seen.beat.who.role), "left",
        done=seen.beat.progress + STEP_SHARE * steps_of(seen.beat), in_flight=0,
    )  # fmt: skip


def _arrived(got: LinkReport) -> int:
    """Return how many messages are no longer in flight: received, refused or lost."""
    return got.received + got.refused + got.gaps


def _ended(got: LinkReport) -> int:
    return got.done + got.refused + got.gaps


def _service(beat: Worker) -> ServiceSums:
    """Return the finished work by which workers of a role are compared; zero for a learner, which
    has no peers."""
    service = beat.vitals.service if beat.vitals is not None else {}
    done = _NO_WORK
    for kind in _MAIN_WORK.get(beat.who.role, ()):
        one = service.get(kind, _NO_WORK)
        done = done.plus(one.pieces, one.seconds, one.size)
    return done
