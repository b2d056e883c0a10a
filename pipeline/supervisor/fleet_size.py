"""How many workers a configuration requests, and how many one supervisor may have.

    most workers = fleet.max_workers, else min(16 per core, one per 256 MiB of memory), never below 8

All of the supervisor's workers count but the observer, which computes next to nothing. A computing
worker takes far more than 256 MiB: the limit keeps a typing error from taking the machine down, and
is no recommendation."""

from __future__ import annotations

from collections.abc import Container, Mapping

import structlog

from pipeline.config.gpus import check_gpus
from pipeline.config.schema import RunConfig
from pipeline.runtime.machine import Machine, this_machine
from protocol.errors import ConfigError
from protocol.ids import Role

WORKERS_PER_CORE = 16
BYTES_PER_WORKER = 256 << 20
LEAST_WORKERS = 8

log = structlog.get_logger(__name__)


def desired_counts(config: RunConfig) -> dict[Role, int]:
    counts = {Role.LEARNER: 1, Role.GENERATOR: config.fleet.generator, Role.REWARD: config.fleet.reward}
    if config.has_reference:
        counts[Role.REFERENCE] = config.fleet.reference
    if config.has_environment:
        counts[Role.ENVIRONMENT] = config.fleet.environment
    if config.declaration.has_critic:
        counts[Role.VALUE] = 1
    if config.observer.enabled:
        counts[Role.OBSERVER] = 1
    return counts


def most_counts(config: RunConfig) -> dict[Role, int]:
    """Return the largest number of workers of each role that autoscaling may lead to."""
    generators = config.fleet.max_generators
    return desired_counts(config) | ({} if generators is None else {Role.GENERATOR: generators})


def most_workers(configured: int | None, machine: Machine) -> int:
    """Return the limit on a supervisor's workers: the setting, else what the machine can bear."""
    if configured is not None:
        return configured
    borne = min(WORKERS_PER_CORE * machine.num_cores, machine.memory_bytes // BYTES_PER_WORKER)
    return max(LEAST_WORKERS, borne)


def check_fleet_size(
    counts: Mapping[Role, int], configured: int | None, machine: Machine, launched: Container[str] = ()
) -> None:
    """Raise ConfigError if the fleet is too large for this machine. ``launched``: roles whose
    workers run elsewhere and do not count."""
    counts = {role: count for role, count in counts.items() if role not in launched and role is not Role.OBSERVER}
    limit, wanted = most_workers(configured, machine), sum(counts.values())
    if wanted <= limit:
        return
    wish = ", ".join(f"{count} {role}" for role, count in counts.items())
    memory = f"one per {BYTES_PER_WORKER >> 20} MiB of its {machine.memory_bytes >> 20} MiB of memory"
    source = f"{WORKERS_PER_CORE} per core on {machine.num_cores} cores, and {memory}"
    raise ConfigError(
        f"the fleet has {wanted} workers ({wish}); expected at most {limit} on this machine: "
        f"{source if configured is None else 'the value of fleet.max_workers'}; start the others on other hosts, "
        "request fewer, or set fleet.max_workers"
    )


class SizeGuard:
    """Refuses fleets too large for this machine, since clients may not have checked."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._limit, self._elsewhere = config, config.fleet.max_workers, config.launch.elsewhere
        self._refused: Mapping[Role, int] | None = None

    def allows(self, counts: Mapping[Role, int]) -> bool:
        if counts == self._refused:
            return False
        try:
            check_fleet_size(counts, self._limit, this_machine(), self._elsewhere)
            check_gpus(self._config, counts)
        except ConfigError as error:
            log.error("fleet_refused", reason=str(error), action="the fleet stays as it is")
            self._refused = counts
            return False
        self._refused = None
        return True
