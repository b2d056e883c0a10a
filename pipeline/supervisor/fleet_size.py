"""How many workers a configuration requests, and how many a supervisor may have.

    most workers = fleet.max_workers, else min(16 a core, one for each 256 MiB of memory), never below 8

All of the supervisor's workers count but the observer, which computes next to nothing. A computing
worker takes far more than 256 MiB. The bound
keeps a typing error from taking the machine down; it is no recommendation."""

from __future__ import annotations

from collections.abc import Container, Mapping

import structlog

from pipeline.config.schema import RunConfig
from pipeline.runtime.machine import Machine, this_machine
from protocol.errors import ConfigError
from protocol.ids import Role

WORKERS_PER_CORE = 16
BYTES_PER_WORKER = 256 << 20
LEAST_WORKERS = 8

log = structlog.get_logger(__name__)


def desired_counts(config: RunConfig) -> dict[Role, int]:
    """Return how many workers of each role the configuration requests."""
    counts = {Role.LEARNER: 1, Role.GENERATOR: config.fleet.generator, Role.REWARD: config.fleet.reward}
    if config.has_reference:
        counts[Role.REFERENCE] = config.fleet.reference
    if config.declaration.has_critic:
        counts[Role.VALUE] = 1
    if config.observer.enabled:
        counts[Role.OBSERVER] = 1
    return counts


def most_counts(config: RunConfig) -> dict[Role, int]:
    """Return the largest number of workers of each role that the configuration leads to."""
    generators = config.fleet.max_generators
    return desired_counts(config) | ({} if generators is None else {Role.GENERATOR: generators})


def most_workers(configured: int | None, machine: Machine) -> int:
    """Return the most workers of a supervisor: the setting, else the machine's limit."""
    if configured is not None:
        return configured
    borne = min(WORKERS_PER_CORE * machine.num_cores, machine.memory_bytes // BYTES_PER_WORKER)
    return max(LEAST_WORKERS, borne)


def check_fleet_size(
    counts: Mapping[Role, int], configured: int | None, machine: Machine, launched: Container[str] = ()
) -> None:
    """Raise ConfigError for a fleet that is too large, with the limit and its source. ``launched``:
    roles of workers on other hosts, which do not count."""
    counts = {role: count for role, count in counts.items() if role not in launched and role is not Role.OBSERVER}
    limit, wanted = most_workers(configured, machine), sum(counts.values())
    if wanted <= limit:
        return
    wish = ", ".join(f"{count} {role}" for role, count in counts.items())
    memory = f"{machine.memory_bytes >> 20} MiB of memory one for each {BYTES_PER_WORKER >> 20} MiB"
    source = f"{machine.num_cores} cores bear {WORKERS_PER_CORE} each, {memory}"
    raise ConfigError(
        f"the fleet has {wanted} workers ({wish}); expected at most {limit} on this machine: "
        f"{source if configured is None else 'fleet.max_workers is that'}; start the others on other hosts, "
        "request fewer, or set fleet.max_workers"
    )


class SizeGuard:
    """Refuses fleets that are too large for this machine; clients may not have checked."""

    def __init__(self, config: RunConfig) -> None:
        self._limit, self._elsewhere = config.fleet.max_workers, config.launch.elsewhere
        self._refused: Mapping[Role, int] | None = None

    def allows(self, counts: Mapping[Role, int]) -> bool:
        """Return whether a fleet fits; a refusal is logged once."""
        if counts == self._refused:
            return False
        try:
            check_fleet_size(counts, self._limit, this_machine(), self._elsewhere)
        except ConfigError as error:
            log.error("fleet_refused", reason=str(error), action="the fleet stays as it is")
            self._refused = counts
            return False
        self._refused = None
        return True
