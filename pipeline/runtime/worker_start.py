"""Opens a worker's ledger connection, transport, flow records and host figures when it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from structlog.typing import FilteringBoundLogger

from pipeline.config.schema import RunConfig
from pipeline.ledger.address import read_address
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.disk import disk_trouble
from pipeline.runtime.context import ActorContext
from pipeline.runtime.flow_ring import FlowRingWriter, flow_folder
from pipeline.runtime.host_watch import HostWatch
from pipeline.runtime.registry.settings_change import standing
from protocol.errors import ConfigError
from protocol.hosts import advertised
from protocol.ids import Incarnation, Role
from protocol.zeromq import CurveKeys, ZmqTransport

if TYPE_CHECKING:
    import redis.asyncio


def connect_worker(config: RunConfig, run_dir: Path, url: str, worker: str) -> redis.asyncio.Redis:
    """Return a client with the configured limits for an outage and for a full disk."""
    settings = config.ledger
    address = read_address(run_dir)
    folder = run_dir / "ledger"
    # the folder does not exist on other hosts
    is_seen = address is not None and address.is_embedded and folder.is_dir()
    return connect(
        url,
        patience_s=settings.outage_timeout_s,
        disk_patience_s=settings.disk_timeout_s,
        disk_trouble=(lambda: disk_trouble(folder, is_refused=False)) if is_seen else str,
        client_name=worker,
    )


def open_ring(config: RunConfig, run_dir: Path, who: Incarnation, log: FilteringBoundLogger) -> FlowRingWriter | None:
    """Return the worker's flow ring; None if ``supervisor.flow_records`` is off or there is no room."""
    if not config.supervisor.flow_records:
        return None
    try:
        return FlowRingWriter(flow_folder(run_dir), who)
    except (OSError, ConfigError) as error:
        log.warning("no_flow_records", reason=str(error), action="`headrace run trace` lacks this worker's messages")
        return None


def begin_vitals(ctx: ActorContext, ledger: RedisLedger) -> HostWatch:
    """Have heartbeats report the host's figures and the ledger's response times. Returns the watch, to be
    stopped at the end."""
    role, judge = ctx.who.role, ctx.config.reward.model
    uses_gpu = role is not Role.ENVIRONMENT and (role is not Role.REWARD or judge is not None)
    watch = HostWatch(ctx.run_dir, uses_gpu=uses_gpu)
    signs = ctx.worker_state.signs
    signs.ledger, signs.host = ledger.connection, watch.latest
    # a loop that is blocked from its first turn on lags too
    signs.lag.expect(0.0)
    watch.start()
    return watch


def open_transport(config: RunConfig, run_dir: Path, who: Incarnation) -> ZmqTransport:
    wire = config.wire
    keys = CurveKeys.load_or_create(run_dir / "keys") if wire.transport == "tcp" else None
    max_bytes = wire.max_message_mb << 20
    # one thread cannot encrypt weights between hosts fast enough
    is_heavy = keys is not None and who.role in (Role.LEARNER, Role.GENERATOR)
    num_io_threads = min(config.weights.num_connections, os.cpu_count() or 1) if is_heavy else 1
    return ZmqTransport(
        str(who),
        high_water_mark=wire.high_water_mark,
        max_message_bytes=max_bytes,
        keys=keys,
        advertise_host=advertised(wire.advertise_host),
        num_io_threads=num_io_threads,
    )


async def hear_settings(ctx: ActorContext, *, is_taken: bool) -> None:
    """Offer the last change of the run's settings to the actor; with ``is_taken``, apply it now.

    A worker that gave up changes is offered none until they are rolled back: the last change may contain
    their values, and the worker's report must not be lost."""
    change = await ctx.registry.last_settings_change()
    if change is None:
        return
    failed = ctx.worker_state.settings.failed
    if failed and any(one.number == failed for one in standing(await ctx.registry.settings_changes())):
        return
    try:
        ctx.offer_settings(change)
    except ConfigError as error:
        ctx.log.error("settings_refused", number=change.number, reason=str(error))
    if is_taken:
        ctx.take_settings()
