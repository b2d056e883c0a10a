"""What ``headrace status`` shows: a run's state, workers, progress and waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.operator.attached import Attached, workers_of

if TYPE_CHECKING:
    from pipeline.fleet.status import RoleRow, WorkerRow
    from pipeline.ledger.types import Totals
    from pipeline.observability.effective_time import EffectiveTime
    from pipeline.runtime.registry.contract import Fleet, RunState
    from pipeline.training.mirror.layout import MirrorRecord


@dataclass(frozen=True, slots=True)
class StatusReport:
    """A run at one moment, as printed by ``headrace status --json``."""

    run: Path
    state: RunState
    detail: str
    supervisor_pid: int | None
    """None if no supervisor is alive."""
    roles: Sequence[RoleRow]
    """Present and wanted number of workers by role."""
    workers: Sequence[WorkerRow]
    totals: Totals
    """Groups and tokens admitted, trained and dropped."""
    waits: str
    """The worker that everything waits for, in one sentence."""
    clocks: str
    """Workers whose clocks differ from the ledger's, in one sentence; empty if none."""
    demand: str = ""
    """How many generators the learner needs and why; empty if their number is fixed."""
    evicted: Sequence[str] = ()
    """A sentence for each evicted worker or host."""
    effective_time: EffectiveTime | None = None
    """How the time since the start was used; None until a few updates are done."""
    copies: MirrorRecord | None = None
    """The copies in the run's mirror; None if it has none."""
    settings_change: str = ""
    """The newest change of the run's settings and its effect; empty if none."""
    standbys: Sequence[str] = ()
    """A sentence for each standby on this host, with the memory it uses while idle."""
    unreadable: Sequence[str] = ()
    """A sentence for each unreadable entry of the registry."""


async def read_status(at: Attached) -> StatusReport:
    from pipeline.fleet.flow.bottleneck import bottleneck
    from pipeline.fleet.status import clock_words, eviction_words, role_rows, worker_rows
    from pipeline.supervisor.run_folder import supervisor_pid

    queues = await at.ledger.queues()
    # last, because a heartbeat's age counts from the read
    workers = worker_rows(await workers_of(at, queues=queues))
    fleet = await at.registry.fleet()
    state = await at.registry.run_status()
    return StatusReport(
        run=at.run_dir,
        state=state.state,
        detail=state.detail,
        supervisor_pid=supervisor_pid(at.run_dir),
        roles=role_rows(workers, fleet.counts if fleet else None),
        workers=workers,
        totals=await at.ledger.totals(),
        waits=bottleneck(workers),
        clocks=clock_words(workers),
        demand=_demand(fleet),
        evicted=eviction_words(fleet),
        effective_time=_effective_time(at.run_dir),
        copies=_copies(at.run_dir),
        settings_change=_settings_change(at.run_dir),
        standbys=_standbys(at.run_dir),
        unreadable=[f"{entry} cannot be read: {why}" for entry, why in (await at.registry.check_entries()).items()],
    )


def _settings_change(run_dir: Path) -> str:
    from pipeline.observability.settings_changes import in_words, read_effects

    effects = read_effects(run_dir)
    return in_words(effects[-1]) if effects else ""


def _demand(fleet: Fleet | None) -> str:
    from protocol.ids import Role

    if fleet is not None and fleet.is_by_hand:
        count = fleet.counts.get(Role.GENERATOR, 0)
        return f"generators by hand: {count} wanted, whatever the demand; `headrace scale generator=auto` follows demand again"
    return "" if fleet is None else fleet.demand


def _effective_time(run_dir: Path) -> EffectiveTime | None:
    from pipeline.observability.effective_reader import EffectiveTimeReader

    with suppress(OSError):
        return EffectiveTimeReader(run_dir).read()
    return None


def _copies(run_dir: Path) -> MirrorRecord | None:
    if not (run_dir / "mirror.json").is_file():
        return None
    from pipeline.training.mirror.layout import read_record

    return read_record(run_dir)


def _standbys(run_dir: Path) -> list[str]:
    from pipeline.process.records import process_runs, read_reports

    return [report.in_words(name) for name, report in read_reports(run_dir).items() if process_runs(report.pid)]
