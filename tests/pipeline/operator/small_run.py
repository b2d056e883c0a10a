"""A run without processes: its folder, its ledger and its registry in memory, and a clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.config.load import write_resolved
from pipeline.config.resolved import LightConfig, read_light
from pipeline.config.schema import RunConfig
from pipeline.operator.overview import OverviewReader
from pipeline.runtime.registry.contract import Fleet, Heartbeat, LinkReport, RunState, RunStatus, WaitingFor
from pipeline.supervisor.run_folder import prepare_run_dir
from protocol.ids import Incarnation, Role
from tests.manual_clock import ManualClock
from tests.oracle.ledger.admin import MemoryAdmin
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.op_config import op_config

COUNTS = {Role.LEARNER: 1, Role.GENERATOR: 2, Role.REWARD: 1}
GUEST = "reward-hostb-x3f9a1-0"
"""A worker of a joined host."""


@dataclass
class SmallRun:
    """The parts of a run that an ``OverviewReader`` needs."""

    run_dir: Path
    settings: LightConfig
    config: RunConfig
    ledger: MemoryLedger
    registry: MemoryRegistry
    clock: ManualClock

    @property
    def admin(self) -> MemoryAdmin:
        """An operator's side of the ledger."""
        return MemoryAdmin(self.ledger, lambda _: 0)

    def reader(self) -> OverviewReader:
        return OverviewReader(self, clock=self.clock)

    async def beat(
        self,
        role: Role,
        worker: str,
        *,
        epoch: int = 1,
        waiting_for: WaitingFor = WaitingFor.COMPUTE,
        detail: str = "",
        version: int = 0,
        links: tuple[LinkReport, ...] = (),
        **counters: float,
    ) -> Heartbeat:
        """Have a worker's heartbeat arrive now."""
        while await self.registry.epoch(worker) < epoch:
            await self.registry.register(role, worker)
        beat = Heartbeat(
            who=Incarnation(role, worker, epoch),
            pid=1,
            host="host",
            at_s=self.clock.time(),
            started_s=0.0,
            progress=1,
            progress_at_s=self.clock.time(),
            waiting_for=waiting_for,
            detail=detail,
            policy_version=version,
            rss_bytes=1 << 20,
            counters=counters,
            links=links,
        )
        assert self.registry.beat(beat)
        return beat


async def small_run(folder: Path, *overrides: str, fleet: dict[Role, int] | None = None, **changes: object) -> SmallRun:
    """Make a run that is running. ``changes``: of the ledger's specification."""
    config = op_config(folder, *overrides)
    run_dir = prepare_run_dir(config, resume=False)
    write_resolved(config, run_dir)
    clock = ManualClock()
    ledger, registry = MemoryLedger(lambda _: 0, clock.time), MemoryRegistry(clock)
    await ledger.open(make_spec(**changes))  # type: ignore[arg-type]
    counts = {Role.LEARNER: 1, Role.GENERATOR: 1, Role.REWARD: 1} if fleet is None else fleet
    await registry.set_fleet(Fleet(counts))
    await registry.set_run_status(RunStatus(RunState.RUNNING))
    return SmallRun(run_dir, read_light(run_dir), config, ledger, registry, clock)
