"""The current state of a connected run, for ``pipeline.fleet.why`` to explain."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.fleet.incidents.records import Incident
    from pipeline.fleet.why.types import Snapshot
    from pipeline.operator.attached import Attached


async def snapshot_of(at: Attached) -> Snapshot:
    from pipeline.fleet.status import eviction_words, worker_rows
    from pipeline.fleet.why.silence import read_exits
    from pipeline.fleet.why.types import CriticNeeds, Snapshot
    from pipeline.operator.attached import workers_of
    from pipeline.supervisor.fleet_plan import wanted_names
    from pipeline.supervisor.run_folder import supervisor_pid
    from protocol.ids import Role

    settings, value = at.settings.supervisor, at.settings.value
    fleet = await at.registry.fleet()
    state = await at.registry.run_status()
    waits = await at.admin.waits()
    totals, queues = await at.ledger.totals(), await at.ledger.queues()
    unwritten = await at.ledger.unwritten()
    # last, because a heartbeat's age counts from the read
    workers = worker_rows(await workers_of(at, queues=queues))
    incidents = await asyncio.to_thread(_open_incidents, at.run_dir)
    return Snapshot(
        run=str(at.run_dir),
        state=state.state,
        detail=state.detail,
        has_supervisor=supervisor_pid(at.run_dir) is not None,
        workers=workers,
        wanted=wanted_names(fleet.counts, fleet.left_out) if fleet else {},
        waits=waits,
        totals=totals,
        queues={queue.name: queue for queue in queues},
        critic=CriticNeeds(value.min_explained_variance, value.pretrain_steps, value.batch_trajectories)
        if fleet is not None and Role.VALUE in fleet.counts
        else None,
        exits=read_exits(at.run_dir, time.time()),
        unwritten=unwritten,
        replaced_after_s=settings.silent_after_s,
        incidents=incidents,
        evicted=eviction_words(fleet),
        now_s=time.time(),
    )


def _open_incidents(run_dir: Path) -> list[Incident]:
    from pipeline.fleet.incidents.records import RunIncidents

    try:
        return [incident for incident in RunIncidents(run_dir).read() if incident.is_open]
    except OSError:
        return []
