"""Draws workers, messages, updates, versions and incidents as trace events.

Input comes in order of time, and the messages of one worker in the order of their ends. The number of
pending arrows is bounded."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from pipeline.fleet.incidents.records import Incident
from pipeline.observability.history import UPDATE_PARTS, UpdateRow
from pipeline.observability.timeline.trace_events import LEAST_US, Moment, Slice, TraceEventWriter, microseconds
from pipeline.runtime.message_record import MessageOutcome
from protocol.ids import Role

LATE_US: Final = 32_000_000
_LOOK_HOLDS_US: Final = 3_000_000


class Interval(NamedTuple):
    """A period in which a main loop reported the same word."""

    begin_us: int
    end_us: int
    word: str


class WaitTrack:
    """A worker's main loop over time, merged from two sources into one word at each moment.

    *Waits* are intervals, exact to a tenth of a second, recorded while the worker has something open.
    *Looks* are the words of heartbeats, one a second; each holds until the next one where no wait is known.
    Waits arrive up to ``LATE_US`` after their start, so looks are held back for as long."""

    def __init__(self) -> None:
        self._waits: deque[Interval] = deque()
        self._looks: deque[tuple[int, str]] = deque()
        self._drawn_us = -1
        self._present: Interval | None = None
        """The newest stretch, which may still grow."""

    def wait(self, begin_us: int, end_us: int, word: str) -> None:
        """Add a wait; waits come in the order of their ends."""
        self._waits.append(Interval(begin_us, end_us, word))

    def look(self, at_us: int, word: str) -> None:
        """Add a look; looks come in order of time, and repeats are ignored."""
        if not self._looks or at_us > self._looks[-1][0]:
            self._looks.append((at_us, word))

    def until(self, now_us: int) -> Iterator[Interval]:
        """Yield the stretches that are final at ``now_us``: those that begin ``LATE_US`` before."""
        yield from self._settled(now_us - LATE_US)

    def rest(self) -> Iterator[Interval]:
        """Yield all remaining stretches."""
        yield from self._settled(None)
        if self._present is not None:
            yield self._present
            self._present = None

    def _settled(self, limit_us: int | None) -> Iterator[Interval]:
        while (begin_us := self._next_us()) is not None and (limit_us is None or begin_us < limit_us):
            if self._waits and begin_us == self._waits[0].begin_us:
                yield from self._draw(self._waits.popleft())
                continue
            at_us, word = self._looks.popleft()
            ends = [at_us + _LOOK_HOLDS_US]
            ends += [self._looks[0][0]] if self._looks else []
            ends += [self._waits[0].begin_us] if self._waits else []
            yield from self._draw(Interval(at_us, max(at_us, min(ends)), word))

    def _next_us(self) -> int | None:
        begins = [self._waits[0].begin_us] if self._waits else []
        begins += [self._looks[0][0]] if self._looks else []
        return min(begins, default=None)

    def _draw(self, found: Interval) -> Iterator[Interval]:
        begin_us = max(found.begin_us, self._drawn_us)
        if found.end_us <= begin_us:
            return
        self._drawn_us = found.end_us
        before = self._present
        if before is not None and before.word == found.word and before.end_us == begin_us:
            self._present = before._replace(end_us=found.end_us)
            return
        if before is not None:
            yield before
        self._present = Interval(begin_us, found.end_us, found.word)


MAX_LANES: Final = 64


class Lanes:
    """Assigns stretches to lanes so that no two in a lane overlap.

    Stretches come in the order of their ends, so a lane is free for any that begins after its last end."""

    def __init__(self) -> None:
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, begin: int, end: int) -> int | None:
        """Return a lane for the stretch, from 0; None if all ``MAX_LANES`` are taken.

        Of the free lanes it is the one that became free last, so that few lanes are needed."""
        free = [(last, -lane) for lane, last in enumerate(self._ends) if last <= begin]
        if free:
            lane = -max(free)[1]
            self._ends[lane] = end
            return lane
        if len(self._ends) >= MAX_LANES:
            return None
        self._ends.append(end)
        return len(self._ends) - 1


LEARNER: Final = str(Role.LEARNER)
_LOOP, _SECOND, _FIRST_LANE = 1, 2, 3
_ORDER: Final = {str(role): place for place, role in enumerate(dict.fromkeys((Role.LEARNER, Role.GENERATOR, *Role)), 1)}
_MAX_CHUNKS: Final = 100_000
"""Maximum number of pending arrows of each kind; the oldest are dropped first."""
_VERSION_HOLDS_US: Final = 5_000_000
_INCIDENTS: Final = "incidents"
_SENDERS: Final = frozenset({MessageOutcome.SENT.name.lower(), MessageOutcome.GIVEN_UP.name.lower()})
_STORED: Final = MessageOutcome.STORED.name.lower()

K = TypeVar("K")


class MessageRow(NamedTuple):
    """A row of the table ``messages``; fields without a default must be there. The key fits into a float exactly."""

    time_s: float
    worker: str
    outcome: str
    key: float
    link: str = ""
    size: float = 0.0
    waited_s: float = 0.0
    service_s: float = 0.0
    storing_s: float = 0.0
    policy_version: float = -1.0


class WaitRow(NamedTuple):
    """A row of the table ``waits``."""

    worker: str
    begin_s: float
    end_s: float
    wait: str = ""


class StateLook(NamedTuple):
    """The part of a row of the table ``states`` that is drawn."""

    time_s: float
    worker: str
    waiting_for: str = ""
    policy_version: float = -1.0


_OF_UPDATE = {
    "prepare_s": "prepare", "logprob_s": "log-probs", "step_s": "steps", "record_s": "record", "publish_s": "publish",
}  # fmt: skip


@dataclass(slots=True)
class TimelineReport:
    """What a timeline contains."""

    num_events: int = 0
    num_workers: int = 0
    num_updates: int = 0
    num_messages: int = 0
    num_not_drawn: int = 0
    """Messages for which their worker had no lane left."""
    num_skipped: int = 0
    """Damaged files of ``observed``, and damaged lines of the history."""
    without_messages: tuple[str, ...] = ()
    """Workers with states but without recorded messages or waits."""


@dataclass(slots=True)
class _Serving:
    version: int
    begin_us: int
    last_us: int


class Drawing:
    def __init__(self, events: TraceEventWriter, *, from_us: int = 0) -> None:
        """``from_us``: leave out what ended earlier."""
        self._events, self._from_us = events, from_us
        self.report = TimelineReport()
        self._workers: dict[str, tuple[int, str]] = {}
        """Process number and role of each worker."""
        self._loops: dict[str, WaitTrack] = {}
        self._lanes: dict[str, Lanes] = {}
        self._serving: dict[str, _Serving] = {}
        self._with_states, self._with_records = set[str](), set[str]()
        """Workers with a state; workers with a message or wait."""
        self._updates: dict[int, tuple[Slice, Moment]] = {}
        """By version: its update, and when its publishing began."""
        self._updated_us = 0
        self._sent: OrderedDict[tuple[float, str], Moment] = OrderedDict()
        self._scored: OrderedDict[float, Moment] = OrderedDict()

    def update(self, row: UpdateRow) -> None:
        """Draw an update of the learner, and its wait for the batch."""
        end_us = microseconds(row.at_s)
        parts = {part: microseconds(getattr(row, part)) for part in UPDATE_PARTS}
        # what is not named lies between the parts
        save_us = max(end_us - microseconds(row.seconds), self._updated_us)
        wait_us = min(save_us + parts["save_s"], end_us)
        begin_us = min(wait_us + parts["wait_s"], end_us)
        if end_us < max(self._from_us, begin_us):
            return
        pid, _ = self._worker(LEARNER)
        self._events.track(pid, _SECOND, "updates")
        for name, from_us, until_us in (("save", save_us, wait_us), ("wait for a batch", wait_us, begin_us)):
            if until_us - from_us >= LEAST_US:
                self._events.slice(pid, _SECOND, name, name.split()[0], from_us, until_us)
        told = {
            "policy_version": row.policy_version, "trajectories": row.num_trajectories,
            "trained_tokens": row.num_trained_tokens, "reward": row.reward, "accuracy": row.accuracy,
            "loss": row.loss, "grad_norm": row.grad_norm, "staleness_max": row.staleness_max,
        }  # fmt: skip
        drawn = self._events.slice(pid, _SECOND, f"update {row.update}", "update", begin_us, end_us, told)
        at_us = begin_us
        for part, name in _OF_UPDATE.items():
            until_us = min(at_us + parts[part], drawn.end_us)
            if until_us - at_us >= LEAST_US:
                self._events.slice(pid, _SECOND, name, "update", at_us, until_us)
            at_us = until_us
        published = Moment(pid, _SECOND, min(max(end_us - parts["publish_s"], begin_us) + 1, drawn.end_us - 1))
        self._updates[row.policy_version] = (drawn, published)
        self._updated_us = drawn.end_us
        self.report.num_updates += 1

    def wait(self, row: WaitRow) -> None:
        self._with_records.add(row.worker)
        self._loop(row.worker).wait(microseconds(row.begin_s), microseconds(row.end_s), row.wait)

    def look(self, row: StateLook) -> None:
        """Add a heartbeat's word, and the version that a generator serves."""
        at_us = microseconds(row.time_s)
        self._with_states.add(row.worker)
        if row.waiting_for:
            self._loop(row.worker).look(at_us, row.waiting_for)
        if self._worker(row.worker)[1] != Role.GENERATOR or not row.policy_version >= 0:
            return
        version, before = int(row.policy_version), self._serving.get(row.worker)
        if before is not None and before.version == version and at_us - before.last_us <= _VERSION_HOLDS_US:
            before.last_us = max(at_us, before.last_us)
            return
        if before is not None:
            self._served(row.worker, before, min(max(at_us, before.last_us), before.last_us + _VERSION_HOLDS_US))
        self._serving[row.worker] = _Serving(version, at_us, at_us)

    def message(self, row: MessageRow) -> None:
        """Draw a message at one end of its link, and the arrow that ends here."""
        self._with_records.add(row.worker)
        pid, role = self._worker(row.worker)
        if role == LEARNER:
            self._claimed(row)
            return
        end_us = microseconds(row.time_s)
        if end_us < self._from_us:
            return
        is_sender = row.outcome in _SENDERS
        begin_us = microseconds(row.time_s - row.waited_s - row.service_s - row.storing_s)
        end_us = max(end_us, begin_us + LEAST_US)
        lanes = self._lanes.setdefault(row.worker, Lanes())
        lane = lanes.take(begin_us, end_us)
        if lane is None:
            self.report.num_not_drawn += 1
            return
        tid = _FIRST_LANE + lane
        self._events.track(pid, tid, f"messages {lane + 1}")
        told = {
            "link": row.link, "outcome": row.outcome, "tokens": row.size, "policy_version": row.policy_version,
            "waited_ms": 1e3 * row.waited_s, "service_ms": 1e3 * row.service_s, "storing_ms": 1e3 * row.storing_s,
        }  # fmt: skip
        kind = "send" if is_sender else "message"
        drawn = self._events.slice(pid, tid, f"{kind} {row.link}".strip(), kind, begin_us, end_us, told)
        self.report.num_messages += 1
        if is_sender:
            _remember(self._sent, (row.key, row.link), drawn.last)
            return
        work_us = min(begin_us + microseconds(row.waited_s), end_us)
        done_us = min(work_us + microseconds(row.service_s), end_us)
        if done_us - work_us >= LEAST_US:
            self._events.slice(pid, tid, "work", kind, work_us, done_us)
        if sent := self._sent.pop((row.key, row.link), None):
            self._events.flow("chunk", "chunk", sent, Moment(pid, tid, max(drawn.first.at_us, sent.at_us)))
        if row.outcome == _STORED:
            _remember(self._scored, row.key, drawn.last)

    def settle(self, at_s: float) -> None:
        """Draw what is final, given that everything up to ``at_s`` has been added."""
        for worker, loop in self._loops.items():
            self._draw_loop(worker, loop, microseconds(at_s))

    def end(self, incidents: Sequence[Incident], now_s: float) -> None:
        """Draw the rest. Open incidents end at ``now_s``."""
        for worker, loop in self._loops.items():
            self._draw_loop(worker, loop, None)
        for worker, serving in self._serving.items():
            self._served(worker, serving, serving.last_us)
        self._serving.clear()
        lanes = Lanes()
        spans = [(max(now_s, one.since_s) if one.ended_s is None else one.ended_s, one) for one in incidents]
        for end_s, one in sorted(spans, key=lambda span: span[0]):
            begin_us, end_us = microseconds(one.since_s), microseconds(end_s)
            end_us = max(end_us, begin_us + LEAST_US)
            if end_us < self._from_us or (lane := lanes.take(begin_us, end_us)) is None:
                continue
            pid = self._events.process(_INCIDENTS)
            self._events.track(pid, lane + 1, f"incidents {lane + 1}")
            causes = [f"{cause.component}: {cause.kind}" for cause in one.causes]
            told = {"number": one.number, "kinds": list(one.kinds), "sentence": one.sentence, "causes": causes}
            name = f"{one.component}: {one.kind}"
            self._events.slice(pid, lane + 1, name, "incident", begin_us, end_us, told)
        self.report.without_messages = tuple(sorted(self._with_states - self._with_records))
        self.report.num_workers = len(self._workers)
        self.report.num_events = self._events.num_events

    def _claimed(self, row: MessageRow) -> None:
        scored, found = self._scored.pop(row.key, None), self._updates.get(int(row.policy_version))
        if scored is None or found is None or row.outcome != _STORED:
            return
        update, _ = found
        self._events.flow(
            "claim", "claim", scored, Moment(update.pid, update.tid, max(update.first.at_us, scored.at_us))
        )

    def _served(self, worker: str, serving: _Serving, end_us: int) -> None:
        if end_us < self._from_us:
            return
        pid, _ = self._worker(worker)
        self._events.track(pid, _SECOND, "weights")
        name = f"version {serving.version}"
        drawn = self._events.slice(pid, _SECOND, name, "weights", serving.begin_us, end_us)
        if found := self._updates.get(serving.version):
            self._events.flow("weights", "weights", found[1], drawn.first)

    def _draw_loop(self, worker: str, loop: WaitTrack, now_us: int | None) -> None:
        pid, _ = self._worker(worker)
        for one in loop.rest() if now_us is None else loop.until(now_us):
            if one.end_us >= self._from_us and one.end_us - one.begin_us >= LEAST_US:
                self._events.track(pid, _LOOP, "main loop")
                self._events.slice(pid, _LOOP, one.word or "unknown", "loop", one.begin_us, one.end_us)

    def _loop(self, worker: str) -> WaitTrack:
        return self._loops.setdefault(worker, WaitTrack())

    def _worker(self, worker: str) -> tuple[int, str]:
        found = self._workers.get(worker)
        if found is None:
            stem, _, number = worker.rpartition("-")
            role = stem if stem in _ORDER else worker
            order = 10_000 * _ORDER.get(role, 50) + (int(number) % 10_000 if number.isdecimal() else 0)
            found = self._workers[worker] = (self._events.process(worker, order=order), role)
        return found


def _remember(ends: OrderedDict[K, Moment], key: K, moment: Moment) -> None:
    ends[key] = moment
    ends.move_to_end(key)
    while len(ends) > _MAX_CHUNKS:
        ends.popitem(last=False)
