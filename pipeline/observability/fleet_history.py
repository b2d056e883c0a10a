"""How a fleet spent its time: ``<run_dir>/fleet-history.jsonl``, a row every few seconds.

A row is made from heartbeats and totals that the supervisor reads anyway. By role, it has the share of
time spent on each kind of wait, the tokens and the finished work; for the ledger, its drops and queues.

It is a file of records (``pipeline.files.records``) and bounded: above its limit, pairs of neighbouring
rows are merged. Old rows become coarser than new ones, and even a run of days keeps its whole history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from pipeline.files.records import RecordFile, Schema
from pipeline.fleet.state import Worker
from pipeline.fleet.status import ROLE_ORDER
from pipeline.ledger.types import QueueStat, Totals
from pipeline.process.work import ServiceSums
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.waits import Stage
from protocol.ids import Role

FLEET_HISTORY_NAME: Final = "fleet-history.jsonl"
EVERY_S: Final = 5.0
"""Length of a new row's interval."""
SILENT: Final = "silent"
"""In place of the wait of a worker without a recent heartbeat."""
ABSENT: Final = "absent"
"""In place of the wait of a wanted worker without a heartbeat, whose process is starting."""
_MAX_BYTES = 2 << 20
_MAX_COUNTED = 4096
"""Maximum number of workers, ended ones included, whose counters are remembered."""
_NO_SERVICE: Final[Mapping[str, ServiceSums]] = {}
_MAX_GAP_S = 5.0
"""Longer gaps between two readings count as this much, because what happened between is unknown."""
_TOKENS: Final = {
    Role.GENERATOR: "written_tokens",
    Role.REWARD: "scored_tokens",
    Role.REFERENCE: "scored_tokens",
    Role.VALUE: "scored_tokens",
    Role.ENVIRONMENT: "turn_tokens",
    Role.LEARNER: "trained_tokens",
}
"""The heartbeat counter that measures each role's work."""


class RoleTime(msgspec.Struct, frozen=True):
    """A role's workers during one interval."""

    workers: float
    """Mean number with a heartbeat, or wanted."""
    shares: dict[str, float]
    """Share of the workers' time by wait (``WaitingFor``, ``silent``, ``absent``); sums to 1."""
    tokens: int = 0
    """Tokens written, scored or trained; for reward workers, those of the judged responses."""
    rss_bytes: int = 0
    """Resident memory of all of them, at the end."""
    service: dict[str, ServiceSums] = {}
    """Work finished during the interval, by kind. Empty in rows of older versions."""


class FleetRow(msgspec.Struct, frozen=True):
    """One interval of a fleet. The ledger's numbers are totals since the run began."""

    at_s: float
    """End of the interval, in seconds since 1970."""
    span_s: float
    roles: dict[str, RoleTime] = {}
    num_groups_admitted: int = 0
    num_groups_dropped: dict[str, int] = {}
    num_tokens_generated: int = 0
    num_tokens_trained: int = 0
    num_ready_units: int = 0
    num_running: int = 0
    queues: dict[str, int] = {}
    """Depth of each queue at the end."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.at_s) and self.span_s > 0.0):
            raise ValueError(f"an interval ends at {self.at_s} s after {self.span_s} s; expected a length above 0")

    def followed_by(self, later: FleetRow) -> FleetRow:
        """Merge this interval with the one after it."""
        names = dict.fromkeys([*self.roles, *later.roles])
        span_s = self.span_s + later.span_s
        parts = ((self, self.span_s / span_s), (later, later.span_s / span_s))
        return replace(later, span_s=span_s, roles={name: _merged(name, parts) for name in names})


def _merged(name: str, parts: Sequence[tuple[FleetRow, float]]) -> RoleTime:
    there = [(row.roles[name], weight) for row, weight in parts if name in row.roles]
    time = {wait: 0.0 for span, _ in there for wait in span.shares}
    for span, weight in there:
        for wait, share in span.shares.items():
            time[wait] += weight * span.workers * share
    whole = sum(time.values())
    return RoleTime(
        workers=round(sum(weight * span.workers for span, weight in there), 3),
        shares={wait: round(value / whole, 4) for wait, value in time.items()} if whole else {},
        tokens=sum(span.tokens for span, _ in there),
        rss_bytes=there[-1][0].rss_bytes,
        service=_summed(span.service for span, _ in there),
    )


def _summed(services: Iterable[Mapping[str, ServiceSums]]) -> dict[str, ServiceSums]:
    found = dict[str, ServiceSums]()
    for service in services:
        for kind, one in service.items():
            found[kind] = found.get(kind, ServiceSums()).plus(one.pieces, one.seconds, one.size)
    return found


class FleetMeter:
    """Accumulates readings of heartbeats into rows. Does no I/O; times are arguments."""

    def __init__(self, now_s: float) -> None:
        """``now_s``: monotonic time at which the first interval begins."""
        self._began_s = self._seen_s = now_s
        self._first_s = now_s
        self._time: dict[Role, dict[str, float]] = {}
        self._tokens: dict[Role, int] = {}
        self._rss: dict[Role, int] = {}
        self._service: dict[Role, dict[str, ServiceSums]] = {}
        self._counted: dict[str, tuple[int, float, Mapping[str, ServiceSums]]] = {}
        """Epoch of each worker, its counter and its finished work at the last reading."""

    def observe(self, beats: Iterable[Worker], now_s: float, wanted: Mapping[str, Role] | None = None) -> None:
        """Add a reading of the heartbeats at ``now_s``. ``wanted`` are the workers that run or start,
        with their roles; those without a heartbeat count as absent."""
        step_s = min(max(0.0, now_s - self._seen_s), _MAX_GAP_S)
        self._seen_s = now_s
        missing = dict(wanted or {})
        rss = dict[Role, int]()
        for beat in beats:
            role = beat.who.role
            missing.pop(beat.who.worker, None)
            wait = SILENT if beat.is_silent else str(beat.waiting_for)
            time = self._time.setdefault(role, {})
            time[wait] = time.get(wait, 0.0) + step_s
            rss[role] = rss.get(role, 0) + beat.rss_bytes
            num_tokens, service = self._new_work(beat, now_s)
            self._tokens[role] = self._tokens.get(role, 0) + num_tokens
            self._service[role] = _summed([self._service.get(role, {}), service])
        for role in missing.values():
            time = self._time.setdefault(role, {})
            time[ABSENT] = time.get(ABSENT, 0.0) + step_s
        # keep the last value of roles whose workers have ended
        self._rss |= rss
        while len(self._counted) > _MAX_COUNTED:
            del self._counted[next(iter(self._counted))]

    def _new_work(self, beat: Worker, now_s: float) -> tuple[int, dict[str, ServiceSums]]:
        """Return a worker's tokens and finished work since the last reading."""
        count = beat.counters.get(_TOKENS.get(beat.who.role, ""), 0.0)
        service = beat.vitals.service if beat.vitals is not None else {}
        # removed and added again, so that the longest unseen are forgotten first
        epoch, before, served = self._counted.pop(beat.who.worker, (0, 0.0, _NO_SERVICE))
        if epoch == 0 and beat.at_s - beat.started_s > now_s - self._first_s:
            # It is older than this meter, so an earlier supervisor has counted it.
            before, served = count, service
        elif epoch != beat.who.epoch:
            before, served = 0.0, _NO_SERVICE
        self._counted[beat.who.worker] = (beat.who.epoch, count, service)
        new = {
            kind: ServiceSums(now.pieces - was.pieces, round(now.seconds - was.seconds, 3), now.size - was.size)
            for kind, now in service.items()
            if now.pieces > (was := served.get(kind, ServiceSums())).pieces
        }
        return round(max(0.0, count - before)), new

    def is_due(self, now_s: float, every_s: float = EVERY_S) -> bool:
        """Return whether the interval is complete."""
        return now_s - self._began_s >= every_s

    def finish_row(self, totals: Totals, queues: Iterable[QueueStat], now_s: float, at_s: float) -> FleetRow:
        """Return the interval's row and begin the next one. ``at_s`` is the wall-clock time."""
        span_s = max(now_s - self._began_s, 1e-3)
        roles = {str(role): self._span(role, time, span_s) for role, time in self._time.items()}
        self._began_s, self._time, self._tokens, self._rss, self._service = now_s, {}, {}, {}, {}
        return FleetRow(
            at_s=round(at_s, 3),
            span_s=round(span_s, 3),
            roles=roles,
            num_groups_admitted=totals.num_groups_admitted,
            num_groups_dropped=dict(totals.num_groups_dropped),
            num_tokens_generated=totals.num_tokens_generated,
            num_tokens_trained=totals.num_tokens_trained,
            num_ready_units=totals.num_ready_units,
            num_running=totals.num_running,
            queues={queue.name: queue.depth for queue in queues},
        )

    def _span(self, role: Role, time: Mapping[str, float], span_s: float) -> RoleTime:
        whole = sum(time.values())
        return RoleTime(
            workers=round(whole / span_s, 3),
            shares={wait: round(value / whole, 4) for wait, value in time.items() if value} if whole else {},
            tokens=self._tokens.get(role, 0),
            rss_bytes=self._rss.get(role, 0),
            service=self._service.get(role, {}),
        )


def thinned(rows: Sequence[FleetRow]) -> Iterator[FleetRow]:
    """Merge the rows in pairs of neighbours. Rows with a gap between them, in which nothing ran, are not
    merged."""
    held: FleetRow | None = None
    for row in rows:
        if held is None:
            held = row
        elif row.at_s - row.span_s > held.at_s + max(row.span_s, held.span_s):
            yield held
            held = row
        else:
            yield held.followed_by(row)
            held = None
    if held is not None:
        yield held


_SCHEMA: Final[Schema[FleetRow]] = Schema(FleetRow)


def fleet_history(run_dir: Path, *, max_bytes: int = _MAX_BYTES) -> RecordFile[FleetRow]:
    return RecordFile(run_dir / FLEET_HISTORY_NAME, _SCHEMA, max_bytes=max_bytes, compact=thinned)


IN_WORDS: dict[str, str] = {
    WaitingFor.COMPUTE: "computing",
    WaitingFor.COMPILE: "first computation",
    WaitingFor.INPUT: "input",
    WaitingFor.ROOM: "room at scorers",
    WaitingFor.CREDIT: "credit",
    WaitingFor.ENDPOINT: "a judge's endpoint",
    WaitingFor.LEDGER: "the ledger",
    WaitingFor.WEIGHTS: "weights",
    WaitingFor.QUARANTINE: "a good copy of the weights",
    WaitingFor.DISK: "the disk",
    WaitingFor.STARTING: "its start",
    WaitingFor.DRAINING: "the end of its drain",
    WaitingFor.STOPPED: "nothing: stopped",
    SILENT: "nothing: silent",
    ABSENT: "its next process",
}
"""Each wait in words, in display order."""


@dataclass(frozen=True, slots=True)
class RoleUse:
    """A role over a whole run."""

    role: str
    workers: float
    """Mean number over the whole run."""
    compute_share: float
    """Share of its workers' time spent computing, from 0 to 1."""
    waits: dict[str, float]
    """Share of their time by wait, largest first."""
    tokens_per_s: float
    """Tokens written, scored or trained per second, over the whole run."""
    num_tokens: int

    def waits_in_words(self, most: int = 4) -> str:
        """Return the longest waits: ``credit 31 %, weights 4 %``."""
        large = [(wait, share) for wait, share in self.waits.items() if share >= 0.005]
        named = [f"{IN_WORDS.get(wait, wait)} {100 * share:.0f} %" for wait, share in large[:most]]
        return ", ".join(named) or "nothing for long"


def role_uses(rows: Sequence[FleetRow]) -> list[RoleUse]:
    """Return how each role used its time, over all rows."""
    whole_s = sum(row.span_s for row in rows)
    time: dict[str, dict[str, float]] = {}
    tokens: dict[str, int] = {}
    for row in rows:
        for name, span in row.roles.items():
            tokens[name] = tokens.get(name, 0) + span.tokens
            of_role = time.setdefault(name, {})
            for wait, share in span.shares.items():
                of_role[wait] = of_role.get(wait, 0.0) + row.span_s * span.workers * share
    return [_use(name, time[name], tokens[name], whole_s) for name in in_order(time)]


def _use(name: str, time: dict[str, float], num_tokens: int, whole_s: float) -> RoleUse:
    all_s = sum(time.values()) or 1.0
    shares = {wait: value / all_s for wait, value in sorted(time.items(), key=lambda item: -item[1])}
    at_work = [shares.pop(wait, 0.0) for wait in WaitingFor if wait.stage is Stage.COMPUTING]
    return RoleUse(name, sum(time.values()) / whole_s, sum(at_work), shares, num_tokens / whole_s, num_tokens)


def in_order(roles: dict[str, object] | dict[str, dict[str, float]] | set[str]) -> list[str]:
    """Sort the names of roles into display order."""
    known = [str(role) for role in ROLE_ORDER]
    return sorted(roles, key=lambda name: (known.index(name) if name in known else len(known), name))


def at_most(rows: Sequence[FleetRow], most: int) -> list[FleetRow]:
    """Merge neighbouring rows until they are few enough to draw."""
    found = list(rows)
    while len(found) > most and len(merged := list(thinned(found))) < len(found):
        found = merged
    return found
