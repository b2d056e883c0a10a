"""The part of the control plane that a sample belongs to.

A part is None where the sample stands for the devices' own work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

LEDGER: Final = "ledger, clients"
SERVER: Final = "ledger, server"
WIRE: Final = "wire"
HEARTBEAT: Final = "heartbeat and registry"
METRICS: Final = "metrics"
SUPERVISOR: Final = "supervisor"
ROLES: Final = "roles"
LOOP: Final = "event loop and sockets"
OBSERVER: Final = "observer"
PARTS: Final = (LEDGER, SERVER, WIRE, HEARTBEAT, METRICS, SUPERVISOR, OBSERVER, ROLES, LOOP)

_PLACES: Final = (
    ("workers/engines/", None),
    # the learner's arithmetic
    ("pipeline/algorithms/", None),
    ("pipeline/rewards/", None),
    ("ops/", None),
    ("protocol/", WIRE),
    ("pipeline/ledger/", LEDGER),
    ("pipeline/runtime/registry", HEARTBEAT),
    ("pipeline/runtime/notifications", HEARTBEAT),
    ("pipeline/runtime/heartbeat", HEARTBEAT),
    ("pipeline/runtime/worker_state", HEARTBEAT),
    ("pipeline/runtime/vital_signs", HEARTBEAT),
    ("pipeline/runtime/host_watch", HEARTBEAT),
    ("pipeline/runtime/flow_", WIRE),
    ("pipeline/runtime/open_messages", WIRE),
    ("pipeline/observability/metrics", METRICS),
    # a sample with only this beneath it is asyncio's own
    ("pipeline/runtime/worker_process", LOOP),
    ("pipeline/runtime/clock", LOOP),
)


def role_of(argv: Sequence[str]) -> str:
    """Return ``generator``, ``supervisor`` ...; empty for helpers of a worker, such as a process
    that verifies."""
    if "workers" in argv:
        return argv[argv.index("workers") + 1]
    return "supervisor" if "pipeline.cli" in argv or any(word.endswith("headrace") for word in argv) else ""


def part_of(role: str, place: str) -> str | None:
    """Return the part that ``thread:file`` belongs to."""
    thread, _, file = place.partition(":")
    if not role:
        return None
    if role == "observer":
        return OBSERVER
    if thread.startswith("thread ZMQ"):
        return WIRE
    if thread == "heartbeat":
        return HEARTBEAT
    if role == "supervisor":
        return METRICS if thread != "main" or "observability/metrics" in file else SUPERVISOR
    for prefix, part in _PLACES:
        if file.startswith(prefix):
            return part
    if thread == "compute" and not file:
        # between two turns of an engine
        return None
    return ROLES if file else LOOP


def by_part(role: str, microseconds: Mapping[str, float]) -> dict[str, float]:
    """Return microseconds by part, without samples that belong to none."""
    sums: dict[str, float] = {}
    for place, spent in microseconds.items():
        part = part_of(role, place)
        if part is not None:
            sums[part] = sums.get(part, 0.0) + spent
    return sums
