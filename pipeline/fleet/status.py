"""The state of the fleet as rows, for ``headrace status``, ``headrace ledger queues`` and the views."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.fleet.health import HealthKind
from pipeline.fleet.state import Worker
from pipeline.process.work import WorkReport
from pipeline.runtime.liveness import clock_differs
from pipeline.runtime.registry.contract import (
    OTHER_LINKS,
    Eviction,
    LinkReport,
    RunStatus,
    WaitingFor,
    link_name,
)
from protocol.ids import Role
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.ledger.types import Pause, QueueStat, Totals
    from pipeline.runtime.registry.contract import Fleet

_A_MOMENT_S = 2.0
_MAX_CLOCKS = 4
"""Maximum number of hosts named in the sentence about clocks."""
_LEAST_SHARE = 0.02
"""Minimum share done for an estimate of the remaining time."""
ROLE_ORDER = (
    Role.LEARNER,
    Role.GENERATOR,
    Role.ENVIRONMENT,
    Role.REWARD,
    Role.REFERENCE,
    Role.VALUE,
    Role.OBSERVER,
    Role.SUPERVISOR,
)


@dataclass(frozen=True, slots=True)
class WorkerRow:
    worker: str
    role: Role
    epoch: int
    pid: int
    host: str
    health: HealthKind
    waiting_for: WaitingFor
    detail: str
    policy_version: int
    progress: int
    since_progress_s: float
    """Time since work last advanced or began."""
    since_heartbeat_s: float
    uptime_s: float
    rss_bytes: int
    counters: Mapping[str, float]
    work: WorkRow | None = None
    """Current work, if it takes longer than a moment."""
    storing: WorkRow | None = None
    """Disk write in progress during ``work``."""
    unreached: str = ""
    """Unreachable mailboxes, in words."""
    refused: str = ""
    """Why the disk refuses writes, in words."""
    clock_ahead_s: float = 0.0
    """Its host's clock minus the ledger's."""
    unwell_s: float = 0.0
    """For how long it has not been well."""
    evidence: str = ""
    """Why it is not well."""


@dataclass(frozen=True, slots=True)
class WorkRow:
    """Progress of a long piece of work."""

    kind: str
    share: float
    """Share done, from 0 to 1."""
    elapsed_s: float
    remaining_s: float | None
    """Estimate from the rate so far; None without a rate."""
    per_s: float | None
    unit: str

    def in_words(self) -> str:
        """Return a phrase: ``update 40 %, 85 tokens/s, 2:10 left``."""
        parts = [f"{self.kind} {100 * self.share:.0f} %"]
        if self.per_s is not None:
            parts.append(f"{self.per_s:,.{1 if self.per_s < 10 else 0}f} {self.unit}/s")
        if self.remaining_s is not None:
            parts.append(f"{in_minutes(self.remaining_s)} left")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment, as its supervisor shows it."""

    status: RunStatus
    workers: Sequence[Worker]
    totals: Totals
    absent: tuple[str, ...] = ()
    """Wanted workers that are being restarted."""


def in_minutes(seconds: float) -> str:
    """Format a duration as ``2:10`` or ``1:02:10``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@dataclass(frozen=True, slots=True)
class RoleRow:
    """Number of live and wanted workers of a role."""

    role: Role
    num_live: int
    num_wanted: int | None
    """None if there is no fleet."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    name: str
    kind: str
    """``ledger`` or ``link``."""
    depth: int
    limit: int | None
    oldest_age_s: float | None
    waiting_for: str
    """The role or worker that consumes it."""
    num_refused: int = 0
    num_gaps: int = 0


def worker_rows(workers: Iterable[Worker]) -> list[WorkerRow]:
    """Return one row for each worker, by role and name."""
    rows = list(map(_worker_row, workers))
    return sorted(rows, key=lambda row: (ROLE_ORDER.index(row.role), len(row.worker), row.worker))


def _worker_row(beat: Worker) -> WorkerRow:
    return WorkerRow(
        worker=printable_line(beat.who.worker),
        role=beat.who.role,
        epoch=beat.who.epoch,
        pid=beat.pid,
        host=printable_line(beat.host),
        health=beat.health.kind,
        waiting_for=beat.waiting_for,
        detail=printable_line(beat.detail),
        policy_version=beat.policy_version,
        progress=beat.progress,
        since_progress_s=beat.unmoved_s,
        since_heartbeat_s=beat.silent_s,
        uptime_s=max(0.0, beat.at_s - beat.started_s + beat.silent_s),
        rss_bytes=beat.rss_bytes,
        counters=beat.counters,
        work=work_row(beat.work),
        storing=work_row(beat.storing),
        unreached=printable_line(beat.unreached),
        refused=printable_line(beat.refused),
        clock_ahead_s=beat.clock_ahead_s,
        unwell_s=beat.health.since_s,
        evidence=beat.health.evidence,
    )


def work_row(report: WorkReport) -> WorkRow | None:
    """Return a heartbeat's work if it takes longer than a moment, else None."""
    if not report.kind or report.elapsed_s < _A_MOMENT_S:
        return None
    remaining_s = report.remaining_s if report.share >= _LEAST_SHARE else None
    return WorkRow(report.kind, report.share, report.elapsed_s, remaining_s, report.per_s, report.unit)


def clock_words(workers: Iterable[WorkerRow]) -> str:
    """Return a sentence about workers whose clocks differ from the ledger's; empty if none."""
    by_host: dict[str, list[WorkerRow]] = {}
    for row in workers:
        if clock_differs(row.clock_ahead_s):
            by_host.setdefault(row.host, []).append(row)
    if not by_host:
        return ""
    named = [_clock_phrase(host, rows) for host, rows in sorted(by_host.items())]
    more = f"; and {len(named) - _MAX_CLOCKS} more hosts" if len(named) > _MAX_CLOCKS else ""
    return (
        f"clocks differ from the ledger's: {'; '.join(named[:_MAX_CLOCKS])}{more}. Work is not affected; times in logs and "
        "histories are. Set these clocks (NTP)"
    )


def _clock_phrase(host: str, rows: list[WorkerRow]) -> str:
    ahead_s = rows[0].clock_ahead_s
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{rows[0].worker}{more} on {host} by {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"


def role_rows(workers: Iterable[WorkerRow], wanted: Mapping[Role, int] | None) -> list[RoleRow]:
    """Count the live workers of every wanted or present role."""
    live = [row.role for row in workers if row.health is not HealthKind.SILENT]
    roles = [role for role in ROLE_ORDER if role in live or (wanted and role in wanted)]
    return [RoleRow(role, live.count(role), None if wanted is None else wanted.get(role, 0)) for role in roles]


def queue_rows(workers: Iterable[Worker], queues: Sequence[QueueStat]) -> list[QueueRow]:
    """Return the ledger's queues, then the links with their messages in flight.

    A worker with many peers reports some links individually and the rest as a sum. A link that only its
    receiver reports shows the sender's sum, with nothing in flight."""
    ledger = [QueueRow(q.name, "ledger", q.depth, q.limit, q.oldest_age_s, q.waiting_for) for q in queues]
    beats = list(workers)
    received = {link.name for beat in beats for link in beat.links if not _is_sender(beat, link)}
    sums: dict[str, list[int]] = {}
    # messages that any worker of a role may take
    waiting = [link for beat in beats for link in beat.links if link.produced and (link.open or link.refused)]
    for beat in beats:
        for link in beat.links:
            if link.produced:
                continue
            others = link_name(OTHER_LINKS, link.name.partition(">")[2])
            # Senders that are not reported belong to the receiver's sum of the others.
            name = others if link.name not in received and others in received else link.name
            totals = sums.setdefault(name, [0, 0, 0, 0])
            for index, value in enumerate((link.sent, link.received, link.refused, link.gaps)):
                totals[index] += value
    links = [
        # The difference is negative if one end has restarted with its counters at 0.
        QueueRow(name, "link", _in_flight(name, sent, got), None, None, name.partition(">")[2], refused, gaps)
        for name, (sent, got, refused, gaps) in sorted(sums.items())
    ] + [
        QueueRow(
            *(link.name, "link", link.open, None, link.oldest_age_s if link.open else None),
            *(link.name.partition(">")[2], link.refused, 0),
        )
        for link in sorted(waiting, key=lambda link: link.name)
    ]
    return ledger + links


def _in_flight(name: str, sent: int, received: int) -> int:
    return 0 if name.endswith(link_name("", OTHER_LINKS)) else max(0, sent - received)


def _is_sender(beat: Worker, link: LinkReport) -> bool:
    return link.name.startswith(link_name(beat.who.worker, ""))


def pause_words(pause: Pause, *, has_ended: bool = False) -> str:
    """Describe an operator's pause, with the local time it began."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(pause.since_s))
    why = f": {printable_line(pause.reason)}" if pause.reason else ""
    return (
        f"admission {'was' if has_ended else 'is'} paused by an operator since {since}, {printable_line(pause.by)}{why}"
    )


def eviction_words(fleet: Fleet | None) -> tuple[str, ...]:
    """Return a sentence for each evicted worker or host: when, by whom, and how to undo it."""
    return () if fleet is None else tuple(map(_evicted, fleet.evictions))


def _evicted(one: Eviction) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at_s))
    named, back = (f"host {one.host}", f"--host {one.host}") if one.host else (one.worker, one.worker)
    words = f"{named} is evicted by {one.by} since {since}: {one.reason}; `headrace fleet readmit {back}` takes it back"
    return printable_line(words)


def doing(row: WorkerRow) -> str:
    """Describe a worker's work or wait, with the progress of long work."""
    parts = [row.detail, row.work.in_words() if row.work else "", row.storing.in_words() if row.storing else ""]
    details = "; ".join(part for part in parts if part)
    return f"{row.waiting_for}{f': {details}' if details else ''}"
