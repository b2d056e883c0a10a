"""Begins a worker's reports beside its work: host figures, ledger answers, flow records.

A worker whose host has no room for a ring works without one, and logs the reason."""

from __future__ import annotations

from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.runtime.context import ActorContext
from pipeline.runtime.flow_ring import FlowRingWriter, flow_folder
from pipeline.runtime.host_watch import HostWatch
from protocol.errors import ConfigError
from protocol.ids import Incarnation, Role


def open_ring(config: RunConfig, run_dir: Path, who: Incarnation, log: FilteringBoundLogger) -> FlowRingWriter | None:
    """Return the worker's ring; None where ``supervisor.flow_records`` is off or there is no
    room."""
    if not config.supervisor.flow_records:
        return None
    try:
        return FlowRingWriter(flow_folder(run_dir), who)
    except (OSError, ConfigError) as error:
        log.warning("no_flow_records", reason=str(error), action="`headrace run trace` lacks this worker's messages")
        return None


def begin_vitals(ctx: ActorContext, ledger: RedisLedger) -> HostWatch:
    """Have heartbeats report the host and the ledger's answers; return the watch to stop at the
    end."""
    uses_gpu = ctx.who.role is not Role.REWARD or ctx.config.reward.model is not None
    watch = HostWatch(ctx.run_dir, uses_gpu=uses_gpu)
    signs = ctx.worker_state.signs
    signs.ledger, signs.host = ledger.connection, watch.latest
    # A loop that stands still from its first turn on lags, too.
    signs.lag.expect(0.0)
    watch.start()
    return watch
