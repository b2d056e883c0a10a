"""Rates from counters that are read repeatedly. Does no I/O; the time is an argument.

A process's counter restarts at 0 with each incarnation. A ledger counter goes back when its server
lost its last writes or the learner resumed from an older checkpoint.

Counters give one side of a queue; the other follows from the depth, since
``in - out = change of depth``. It is therefore net of work that leaves without being scored and of
leases that are given back.

    queue                    in                        out
    credit, evaluation_open, parked, again, dead, bytes   neither is counted
    open                     trajectories admitted     in less the growth of its depth
    leased                   out and the growth        the reward queue's in: a finished response
    reward, reference, value out and the growth        ``scored`` of the role's heartbeats
    guidance                 out and the growth        ``guided`` of the reference workers'
    ready                    out and the growth        what the claimed queue receives
    claimed                  out and the growth        credit trained, at checkpoints
    finished                 finished admitted         in less the growth
    finished_claimed         out and the growth        finished trained, at checkpoints
    mailboxes of a role      ``sent`` of the links     ``received`` of the links

The messages sent to a role of more than eight workers are unknown: a sender reports eight links."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pipeline.fleet.state import Worker
from pipeline.fleet.status import queue_rows
from pipeline.ledger.types import QueueStat, Totals
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, OTHER_LINKS, link_name
from protocol.ids import Role
from protocol.printable import printable_line

WINDOW_S = 10.0
"""A rate is the mean over this many last seconds."""
_MAX_READINGS = 64
_MAX_COUNTERS = 8192


class ProcessCount(NamedTuple):
    epoch: int
    """Incarnation of the process."""
    value: float


class ProcessCounters:
    """Sum of one counter over many processes; it never falls, even if they restart."""

    def __init__(self) -> None:
        self.total = 0.0
        """Growth since the first reading."""
        self._seen: dict[str, ProcessCount] = {}
        self._has_begun = False

    def observe(self, readings: Mapping[str, ProcessCount]) -> float:
        """Add the current readings by process; return the total. A process that is new since the last
        call counts from 0."""
        for name, reading in readings.items():
            before = self._seen.pop(name, None)
            if before is None:
                self.total += reading.value if self._has_begun else 0.0
            elif before.epoch != reading.epoch:
                self.total += reading.value
            else:
                # An incarnation that forgets a peer drops that peer's part from its sum.
                self.total += max(0.0, reading.value - before.value)
            self._seen[name] = reading
        while len(self._seen) > _MAX_COUNTERS:
            del self._seen[next(iter(self._seen))]
        self._has_begun = True
        return self.total


class LedgerCounter:
    """Growth of a ledger counter since the first reading, ignoring falls."""

    def __init__(self) -> None:
        self.total = 0.0
        self._value: float | None = None

    def observe(self, value: float) -> float:
        if self._value is not None:
            self.total += max(0.0, value - self._value)
        self._value = value
        return self.total


class Rate:
    """The slope of a total over the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, float]] = deque(maxlen=_MAX_READINGS)

    def observe(self, total: float, now_s: float) -> float | None:
        """Add a total at ``now_s`` (monotonic); return its growth per second, None before the second
        reading."""
        readings = self._readings
        if not readings or now_s > readings[-1][0]:
            readings.append((now_s, total))
        while len(readings) > 2 and readings[1][0] <= now_s - self._window_s:
            readings.popleft()
        (begin_s, begin), (end_s, end) = readings[0], readings[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else None


@dataclass(slots=True)
class Meters:
    counters: dict[str, ProcessCounters | LedgerCounter] = field(
        default_factory=dict[str, ProcessCounters | LedgerCounter]
    )
    rates: dict[str, Rate] = field(default_factory=dict[str, Rate])

    def of_processes(self, name: str, beats: Iterable[Worker], counter: str) -> float:
        """Return the total of a counter in heartbeats."""
        found = {b.who.worker: ProcessCount(b.who.epoch, b.counters[counter]) for b in beats if counter in b.counters}
        return self.sums(name, found)

    def sums(self, name: str, readings: Mapping[str, ProcessCount]) -> float:
        """Return the total of readings by process."""
        meter = self.counters.setdefault(name, ProcessCounters())
        assert isinstance(meter, ProcessCounters)
        return meter.observe(readings)

    def of_ledger(self, name: str, value: float) -> float:
        """Return the growth of a ledger counter."""
        meter = self.counters.setdefault(name, LedgerCounter())
        assert isinstance(meter, LedgerCounter)
        return meter.observe(value)

    def forget(self, name: str) -> None:
        self.counters.pop(name, None)
        self.rates.pop(name, None)

    def rate(self, name: str, total: float, now_s: float) -> float | None:
        return self.rates.setdefault(name, Rate()).observe(total, now_s)


_UNITS: Final = {"open": "trajectories", "parked": "trajectories", "leased": "trajectories", "again": "prompts"} | {
    "evaluation_open": "trajectories",
    "finished": "trajectories",
    "finished_claimed": "trajectories",
    "reward": "chunks",
    "reference": "chunks",
    "value": "chunks",
    "guidance": "chunks",
    "turn": "turns",
    "credit": "credits",
    "ready": "credits",
    "claimed": "credits",
    "dead": "letters",
    "bytes": "bytes",
}
_SCORED: Final = (
    ("reward", Role.REWARD, "scored"),
    ("reference", Role.REFERENCE, "scored"),
    ("value", Role.VALUE, "scored"),
    ("guidance", Role.REFERENCE, "guided"),
    ("turn", Role.ENVIRONMENT, "scored"),
)
"""Each scoring queue with the role that empties it and the counter of what left it."""


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """A queue of the ledger, or all mailboxes of a role together."""

    name: str
    kind: str
    """``ledger`` or ``mailbox``."""
    unit: str
    """Unit of depth and rates: chunks, trajectories, credits, prompts, letters or bytes."""
    depth: int
    """For mailboxes, the messages in flight."""
    limit: int | None
    oldest_age_s: float | None
    """Seconds since its first entry came; None if unknown."""
    waiting_for: str
    """The role that empties it."""
    in_per_s: float | None
    """Entries per second over the last ten seconds; None if not counted, and at the first reading."""
    out_per_s: float | None
    num_refused: int = 0
    """Mailbox messages that could not be read."""
    num_gaps: int = 0
    """Mailbox messages that were lost in transit and sent again through the ledger."""


def ledger_queues(
    meters: Meters, totals: Totals, queues: Sequence[QueueStat], beats: Sequence[Worker], now_s: float
) -> list[QueueOverview]:
    """Return the ledger's queues and their rates at ``now_s`` (monotonic)."""
    depth = {queue.name: queue.depth for queue in queues}
    came: dict[str, float] = {}
    went: dict[str, float] = {}
    for queue, role, counter in _SCORED:
        if queue in depth:
            went[queue] = meters.of_processes(f"scored {queue}", of_role(beats, role), counter)
            came[queue] = went[queue] + depth[queue]
    came["open"] = meters.of_ledger("trajectories", totals.num_trajectories_admitted)
    went["open"] = came["open"] - depth.get("open", 0)
    if Role.REWARD in came:
        went["leased"] = came[Role.REWARD]
        came["leased"] = went["leased"] + depth.get("leased", 0)
    went["claimed"] = meters.of_ledger("credit trained", totals.credit_trained)
    came["claimed"] = went["ready"] = went["claimed"] + depth.get("claimed", 0)
    came["ready"] = went["ready"] + depth.get("ready", 0)
    came["finished"] = meters.of_ledger("finished", totals.num_finished_admitted)
    went["finished"] = came["finished"] - depth.get("finished", 0)
    went["finished_claimed"] = meters.of_ledger("finished trained", totals.num_finished_trained)
    came["finished_claimed"] = went["finished_claimed"] + depth.get("finished_claimed", 0)
    return [
        QueueOverview(
            name=queue.name,
            kind="ledger",
            unit=_UNITS.get(queue.name, "entries"),
            depth=queue.depth,
            limit=queue.limit,
            oldest_age_s=queue.oldest_age_s,
            waiting_for=queue.waiting_for,
            in_per_s=_flow_rate(meters, f"in {queue.name}", came.get(queue.name), now_s),
            out_per_s=_flow_rate(meters, f"out {queue.name}", went.get(queue.name), now_s),
        )
        for queue in queues
    ]


def mailboxes(meters: Meters, beats: Sequence[Worker], now_s: float) -> list[QueueOverview]:
    """Return one row for all mailboxes of each role."""
    role_of = {beat.who.worker: str(beat.who.role) for beat in beats}
    num_of = Counter(role_of.values())
    sent: dict[str, dict[str, ProcessCount]] = {}
    received: dict[str, dict[str, ProcessCount]] = {}
    for beat in beats:
        who, is_from = beat.who, link_name(beat.who.worker, "")
        for link in beat.links:
            receiver = link.name.partition(">")[2]
            is_own = link.name.startswith(is_from)
            if is_own and receiver == OTHER_LINKS:
                continue
            role = _role_of(receiver, role_of) if is_own else str(who.role)
            readings = (sent if is_own else received).setdefault(role, {})
            so_far = readings.get(who.worker, ProcessCount(who.epoch, 0.0)).value
            readings[who.worker] = ProcessCount(who.epoch, so_far + (link.sent if is_own else link.received))
    links = queue_rows(beats, ())
    rows: list[QueueOverview] = []
    for role in sorted(sent.keys() | received.keys()):
        own = [row for row in links if _role_of(row.name.partition(">")[2], role_of) == role]
        came = went = None
        # With more receivers, a sender reports some of them, and not always the same ones.
        if role in sent and num_of[role] <= MAX_NAMED_LINKS:
            came = meters.sums(f"sent {role}", sent[role])
        else:
            meters.forget(f"sent {role}")
        if role in received:
            went = meters.sums(f"received {role}", received[role])
        rows.append(
            QueueOverview(
                name=role,
                kind="mailbox",
                unit="messages",
                depth=sum(row.depth for row in own),
                limit=None,
                oldest_age_s=None,
                waiting_for=role,
                in_per_s=_flow_rate(meters, f"sent {role}", came, now_s),
                out_per_s=_flow_rate(meters, f"received {role}", went, now_s),
                num_refused=sum(row.num_refused for row in own),
                num_gaps=sum(row.num_gaps for row in own),
            )
        )
    return rows


def _flow_rate(meters: Meters, name: str, total: float | None, now_s: float) -> float | None:
    if total is None:
        return None
    rate = meters.rate(name, total, now_s)
    # More may be given back or dropped than moved on.
    return None if rate is None else max(0.0, rate)


def of_role(beats: Iterable[Worker], role: Role) -> list[Worker]:
    return [beat for beat in beats if beat.who.role is role]


def _role_of(receiver: str, role_of: Mapping[str, str]) -> str:
    """Return a receiver's role from its heartbeat, or else from its name."""
    return role_of.get(receiver) or printable_line(receiver.partition("-")[0])
