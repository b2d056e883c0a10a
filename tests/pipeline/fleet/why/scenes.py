"""Moments of runs, made by hand: heartbeats, the ledger's answers, and the right explanation."""

from __future__ import annotations

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import WorkerRow
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.types import Cause, CriticNeeds, Outlook, Snapshot
from pipeline.ledger.admin import Holder, Lack, Place, WaitedTrajectory, WaitedUnit, Waits
from pipeline.ledger.types import LatePolicy, QueueStat, Totals, Unit
from pipeline.runtime.registry.contract import RunState, WaitingFor
from protocol.ids import Role
from protocol.trajectory import Field

CRITIC = CriticNeeds(min_explained_variance=0.1, pretrain_steps=50, batch_trajectories=32)
FLEET = {"learner": Role.LEARNER, "generator-1": Role.GENERATOR, "generator-2": Role.GENERATOR, "reward-0": Role.REWARD}
CRITIC_FLEET = FLEET | {"value": Role.VALUE}


def worker(
    name: str,
    at: WaitingFor = WaitingFor.INPUT,
    detail: str = "",
    *,
    health: HealthKind = HealthKind.LIVE,
    for_s: float = 0.5,
    epoch: int = 1,
    version: int = 4,
    **counters: float,
) -> WorkerRow:
    """``for_s``: since the last heartbeat of a silent one, since the last progress of any other."""
    return WorkerRow(
        worker=name,
        role=Role(name.partition("-")[0]),
        epoch=epoch,
        pid=1,
        host="h",
        health=health,
        waiting_for=at,
        detail=detail,
        policy_version=version,
        progress=1,
        since_progress_s=for_s,
        since_heartbeat_s=for_s if health is HealthKind.SILENT else 0.3,
        uptime_s=100.0,
        rss_bytes=1,
        counters=counters,
        unwell_s=0.0 if health is HealthKind.LIVE else for_s,
    )


def silent(name: str, for_s: float = 12.0, **more: object) -> WorkerRow:
    return worker(name, WaitingFor.COMPUTE, health=HealthKind.SILENT, for_s=for_s, **more)  # type: ignore[arg-type]


def trajectory(name: str, place: Place = Place.LEASED, holder: str = "generator-2#1", *lacks: Lack) -> WaitedTrajectory:
    return WaitedTrajectory(name, place, holder if place is Place.LEASED else "", 2, 512, 12.0, lacks)


def lack(
    field: Field = Field.REWARD, *, overdue_s: float = -3.0, num_failures: int = 0, chunk: str = "t.81.4.1"
) -> Lack:
    return Lack(field, 1, chunk, 12.0, overdue_s, num_failures)


def unit(name: str, *trajectories: WaitedTrajectory, complete: int = 7, oldest: int | None = 3) -> WaitedUnit:
    return WaitedUnit(name, oldest, complete, trajectories)


def waits(
    *units: WaitedUnit, ready: int = 29, running: int | None = None, kind: Unit = Unit.GROUP, **more: object
) -> Waits:
    settings = {
        "late": LatePolicy.WAIT,
        "num_parked": 0,
        "num_claimed": 0,
        "holders": (Holder("generator-2#1", 3, 0, 8.0),),
    }
    settings |= {"num_evaluation_open": 0, "num_evaluation_unscored": 0}
    return Waits(
        unit=kind,
        group_size=8,
        eta=1,
        policy_version=4,
        num_needed=32,
        num_ready=ready,
        num_running=max(32, len(units)) if running is None else running,
        units=units,
        **(settings | more),  # type: ignore[arg-type]
    )


def totals(**more: object) -> Totals:
    settings: dict[str, object] = {"credit_used": 90, "credit_limit": 100, "is_closed": False, "is_exhausted": False}
    settings |= {"policy_version": 4, "num_ready_units": 0, "num_running": 0, "num_groups_admitted": 1000}
    settings |= {"num_groups_dropped": {}, "num_tokens_generated": 0, "num_tokens_trained": 0}
    return Totals(**(settings | more))  # type: ignore[arg-type]


def queues(**depths: int) -> dict[str, QueueStat]:
    return {name: QueueStat(name, depth, 100 if name == "bytes" else None, None, "") for name, depth in depths.items()}


def scene(workers: list[WorkerRow], view: Waits | None = None, **more: object) -> Snapshot:
    """A running, supervised fleet: the learner waits for input and all are well by default."""
    rows = {row.worker: row for row in (worker("learner"), worker("reward-0"))}
    rows |= {name: worker(name, WaitingFor.COMPUTE) for name in ("generator-1", "generator-2")}
    rows |= {row.worker: row for row in workers}
    for name in more.pop("without", ()):  # type: ignore[attr-defined]
        rows.pop(name, None)
    settings: dict[str, object] = {"wanted": FLEET, "totals": totals(), "queues": {}, "has_supervisor": True}
    settings |= {"state": RunState.RUNNING, "detail": ""}
    return Snapshot(run="runs/demo", workers=list(rows.values()), waits=view or waits(), **(settings | more))  # type: ignore[arg-type]


AWAITED = waits(unit("81", trajectory("t.81.4")), running=3)


def root(s: Snapshot) -> tuple[Cause, str, Outlook]:
    chain = explain(s).chains[0]
    return chain.cause, chain.who, chain.outlook
