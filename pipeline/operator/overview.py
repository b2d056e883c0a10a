"""One snapshot of a run, as ``headrace top`` and the web page show it.

``OverviewReader`` makes five calls to the registry and the ledger, whatever they hold, and reads the
new lines of the run's history and incidents. Its memory between reads is bounded. If the ledger does
not answer, the last snapshot is returned with the reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipeline.fleet.flow.bottleneck import bottleneck
from pipeline.fleet.health import HealthKind
from pipeline.fleet.state import Worker
from pipeline.fleet.status import (
    ROLE_ORDER,
    WorkerRow,
    clock_words,
    eviction_words,
    pause_words,
    role_rows,
    worker_rows,
)
from pipeline.observability.history import HISTORY_NAME, EvaluationRow, HistoryTail, UpdateRow
from pipeline.observability.incidents import IncidentReader, IncidentRow
from pipeline.observability.progress import RunProgress
from pipeline.operator.attached import Connected, workers_of
from pipeline.operator.rates import Meters, QueueOverview, ledger_queues, mailboxes, of_role
from pipeline.runtime.clock import Clock, RealClock
from pipeline.runtime.registry.contract import RunState
from pipeline.supervisor.fleet_plan import wanted_names
from pipeline.supervisor.run_folder import supervisor_pid
from protocol.errors import LedgerError
from protocol.ids import Role
from protocol.printable import printable_line

MAX_UPDATES = 256
MAX_EVALUATIONS = 256


class ProgressReader:
    """Keeps the newest rows of a run's history, and the first evaluation of each set."""

    def __init__(self, run_dir: Path) -> None:
        self._tail = HistoryTail(run_dir / HISTORY_NAME)
        self._updates: list[UpdateRow] = []
        self._first: dict[str, EvaluationRow] = {}
        self._evaluations: list[EvaluationRow] = []

    def read(self, num_wanted: int) -> RunProgress:
        rows = self._tail.read()
        for row in rows:
            if isinstance(row, UpdateRow):
                if self._updates and row.update <= self._updates[-1].update:
                    # A learner that resumed from an older checkpoint has rewritten the file.
                    self._updates = [kept for kept in self._updates if kept.update < row.update]
                self._updates.append(row)
            elif isinstance(row, EvaluationRow):
                if self._first.get(row.set_name, row).number >= row.number:
                    self._first[row.set_name] = row
                self._evaluations = [
                    kept
                    for kept in self._evaluations
                    if (kept.set, kept.number) < (row.set, row.number) or kept.set != row.set
                ]
                self._evaluations.append(row)
        rows.clear()
        del self._updates[:-MAX_UPDATES]
        del self._evaluations[:-MAX_EVALUATIONS]
        kept = {id(row): row for row in (*self._first.values(), *self._evaluations)}
        return RunProgress.of([*kept.values(), *self._updates], num_wanted)


if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.ledger.types import QueueStat, Totals
    from pipeline.operator.attached import Attached
    from pipeline.runtime.registry.contract import Fleet, RunStatus

ANSWER_S = 4.0
"""Time limit for all of the ledger's answers together."""
_NO_PROGRESS = RunProgress(0, 0, (), ())


class _Views(Protocol):
    async def totals(self) -> Totals: ...

    async def queues(self) -> list[QueueStat]: ...


class OverviewSource(Connected, Protocol):
    """What an ``OverviewReader`` needs of a connected run; ``Attached`` implements it."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def config(self) -> RunConfig: ...

    @property
    def ledger(self) -> _Views: ...


@dataclass(frozen=True, slots=True)
class RoleOverview:
    """The workers of a role, summed up."""

    role: Role
    num_live: int
    num_wanted: int | None
    """None before the fleet is set."""
    num_unwell: int
    """Silent or stuck."""
    waiting_for: Mapping[str, int]
    """Number of workers by what they wait for; ``compute`` means working."""


@dataclass(frozen=True, slots=True)
class VersionsOverview:
    """Policy versions, and how stale the training samples were."""

    published: int
    """The version that admission counts from."""
    sampling: Mapping[int, int]
    """Number of generators by the version they sample with; -1 for none yet."""
    staleness_mean: float | None = None
    """Versions between the learner and each trained token, in the newest update; None before it."""
    staleness_max: int | None = None
    max_staleness: int | None = None
    """The limit, ``staleness.eta``."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Amounts per second over the last ten seconds; None at the first read."""

    sampled_tokens: float | None = None
    written_tokens: float | None = None
    """Tokens that entered the ledger."""
    trained_tokens: float | None = None
    """From the learner's heartbeats, so it grows in steps of one update."""
    admitted_groups: float | None = None
    dropped_groups: float | None = None


@dataclass(frozen=True, slots=True)
class RunOverview:
    run: Path
    name: str
    at_s: float
    """When it was read, in seconds since 1970."""
    state: RunState
    detail: str
    supervisor_pid: int | None
    """None if no supervisor is alive."""
    is_over: bool
    """The run has ended: no supervisor and no live worker."""
    trouble: str = ""
    """Why the ledger's part is out of date; empty if it is not."""
    trouble_s: float = 0.0
    """Seconds since the ledger last answered."""
    is_paused: bool = False
    """Whether a person has stopped the admission of new work."""
    pause: str = ""
    """Since when and why it is paused, in words."""
    roles: tuple[RoleOverview, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    absent: tuple[str, ...] = ()
    """Wanted workers without a heartbeat."""
    queues: tuple[QueueOverview, ...] = ()
    totals: Totals | None = None
    """The ledger's counters, including credit; None before the first answer."""
    versions: VersionsOverview = VersionsOverview(0, {})
    rates: Rates = Rates()
    progress: RunProgress = _NO_PROGRESS
    """Updates done, reward, accuracy, held-out accuracy, pace."""
    waits: str = ""
    """The worker that everything waits for, in one sentence."""
    incidents: tuple[IncidentRow, ...] = ()
    """The newest incidents, oldest first."""
    clocks: str = ""
    """Workers whose clocks differ from the ledger's, in one sentence; empty if none."""
    demand: str = ""
    """How many generators the learner needs and why; empty if their number is fixed."""
    evicted: tuple[str, ...] = ()
    """A sentence for each evicted worker or host."""


class OverviewReader:
    """Reads snapshots of one connected run, one at a time."""

    def __init__(self, at: OverviewSource | Attached, *, clock: Clock | None = None) -> None:
        self._at = at
        self._clock = clock or RealClock()
        self._meters = Meters()
        self._history = ProgressReader(at.run_dir)
        self._incidents = IncidentReader(at.run_dir)
        self._last: RunOverview | None = None
        self._answered_s = self._clock.monotonic()

    async def read(self) -> RunOverview:
        """Return the current snapshot. If the ledger does not answer, this does not raise: it returns
        the last snapshot with ``trouble`` set."""
        progress, incidents, pid, eta = await asyncio.to_thread(self._files)
        try:
            async with asyncio.timeout(ANSWER_S):
                picture = await self._answers()
        except (LedgerError, TimeoutError) as error:
            picture = self._last or RunOverview(
                self._at.run_dir, self._at.settings.run.name, 0.0, RunState.STARTING, "", pid, is_over=False
            )
            words = str(error) if isinstance(error, LedgerError) else f"no answer within {ANSWER_S:g} s"
            since_s = self._clock.monotonic() - self._answered_s
            picture = replace(picture, trouble=printable_line(words), trouble_s=since_s)
        else:
            self._last, self._answered_s = picture, self._clock.monotonic()
        last = progress.last
        versions = replace(
            picture.versions,
            staleness_mean=None if last is None else last.staleness_mean,
            staleness_max=None if last is None else last.staleness_max,
            max_staleness=eta,
        )
        is_alive = any(row.health is not HealthKind.SILENT for row in picture.workers) and not picture.trouble
        return replace(
            picture,
            at_s=self._clock.time(),
            supervisor_pid=pid,
            is_over=pid is None and not is_alive,
            progress=progress,
            incidents=incidents,
            versions=versions,
        )

    def _files(self) -> tuple[RunProgress, tuple[IncidentRow, ...], int | None, int]:
        config = self._at.config
        progress = self._history.read(config.run.num_updates)
        return progress, self._incidents.read(), supervisor_pid(self._at.run_dir), config.staleness.eta

    async def _answers(self) -> RunOverview:
        at = self._at
        status = await at.registry.run_status()
        fleet = await at.registry.fleet()
        totals = await at.ledger.totals()
        queues = await at.ledger.queues()
        # Last, because a heartbeat's age counts from the read.
        workers = await workers_of(at, queues=queues)
        return self._picture(status, fleet, totals, queues, workers)

    def _picture(
        self,
        status: RunStatus,
        fleet: Fleet | None,
        totals: Totals,
        queues: Sequence[QueueStat],
        beats: Sequence[Worker],
    ) -> RunOverview:
        now_s, workers = self._clock.monotonic(), worker_rows(beats)
        counts = fleet.counts if fleet else None
        there = {beat.who.worker for beat in beats}
        wanted = wanted_names(fleet.counts, fleet.left_out) if fleet else {}
        generators = [row for row in workers if row.role is Role.GENERATOR]
        return RunOverview(
            run=self._at.run_dir,
            name=self._at.settings.run.name,
            at_s=self._clock.time(),
            state=status.state,
            detail=printable_line(status.detail),
            supervisor_pid=None,
            is_over=False,
            roles=_roles(workers, counts),
            is_paused=totals.paused is not None,
            pause="" if totals.paused is None else pause_words(totals.paused),
            workers=tuple(workers),
            absent=tuple(name for name in wanted if name not in there) if status.state is RunState.RUNNING else (),
            queues=(*ledger_queues(self._meters, totals, queues, beats, now_s), *mailboxes(self._meters, beats, now_s)),
            totals=totals,
            versions=VersionsOverview(totals.policy_version, dict(Counter(row.policy_version for row in generators))),
            rates=self._rates(totals, beats, now_s),
            waits=bottleneck(workers),
            clocks=clock_words(workers),
            demand="" if fleet is None else printable_line(fleet.demand),
            evicted=eviction_words(fleet),
        )

    def _rates(self, totals: Totals, beats: Sequence[Worker], now_s: float) -> Rates:
        meters = self._meters
        sampled = meters.of_processes("sampled", of_role(beats, Role.GENERATOR), "sampled_tokens")
        trained = meters.of_processes("trained", of_role(beats, Role.LEARNER), "trained_tokens")
        written = meters.of_ledger("written", totals.num_tokens_generated)
        admitted = meters.of_ledger("admitted", totals.num_groups_admitted)
        dropped = meters.of_ledger("dropped", sum(totals.num_groups_dropped.values()))
        return Rates(
            sampled_tokens=meters.rate("sampled", sampled, now_s),
            written_tokens=meters.rate("written", written, now_s),
            trained_tokens=meters.rate("trained", trained, now_s),
            admitted_groups=meters.rate("admitted", admitted, now_s),
            dropped_groups=meters.rate("dropped", dropped, now_s),
        )


def _roles(workers: Sequence[WorkerRow], wanted: Mapping[Role, int] | None) -> tuple[RoleOverview, ...]:
    of_role = {role: [row for row in workers if row.role is role] for role in ROLE_ORDER}
    return tuple(
        RoleOverview(
            role=row.role,
            num_live=row.num_live,
            num_wanted=row.num_wanted,
            num_unwell=sum(worker.health is not HealthKind.LIVE for worker in of_role[row.role]),
            waiting_for=dict(Counter(str(worker.waiting_for) for worker in of_role[row.role])),
        )
        for row in role_rows(workers, wanted)
    )
