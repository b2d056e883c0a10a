"""The source of a worker's mailboxes and links, by its run's ``[wire]``."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config.schema import RunConfig
from protocol.hosts import advertised
from protocol.ids import Incarnation, Role
from protocol.zeromq import CurveKeys, ZmqTransport


def open_transport(config: RunConfig, run_dir: Path, who: Incarnation) -> ZmqTransport:
    """Return the source of a worker's mailboxes and links, as ``[wire]`` sets it."""
    wire = config.wire
    keys = CurveKeys.load_or_create(run_dir / "keys") if wire.transport == "tcp" else None
    max_bytes = wire.max_message_mb << 20
    # weights between hosts are more than one thread encrypts
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
