"""How many workers a configuration asks for, and how many a supervisor may have.

*Consumes* a configuration or a wish, and the machine's cores and memory. *Produces* counts by role,
or a refusal. *Waits for* nothing.

    most workers = fleet.max_workers, else min(16 a core, one for each 256 MiB of memory), and never below 8

Every worker of the supervisor counts, the learner too. A worker that computes takes far more than
256 MiB: the bound keeps a slip of the finger from taking the machine down, it does not say that so
many are of use.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.schema import RunConfig, declaration
from pipeline.runtime.machine import Machine
from protocol.errors import ConfigError
from protocol.ids import Role

WORKERS_PER_CORE = 16
BYTES_PER_WORKER = 256 << 20
LEAST_WORKERS = 8


def desired_counts(config: RunConfig) -> dict[Role, int]:
    """Return how many workers of each role the configuration asks for."""
    counts = {Role.LEARNER: 1, Role.GENERATOR: config.fleet.generator, Role.REWARD: config.fleet.reward}
    if config.needs_reference:
        counts[Role.REFERENCE] = config.fleet.reference
    if declaration(config).has_critic:
        counts[Role.VALUE] = 1
    return counts


def most_workers(configured: int | None, machine: Machine) -> int:
    """Return how many workers one supervisor may have: the setting, else what the machine bears."""
    if configured is not None:
        return configured
    borne = min(WORKERS_PER_CORE * machine.num_cores, machine.memory_bytes // BYTES_PER_WORKER)
    return max(LEAST_WORKERS, borne)


def check_fleet_size(counts: Mapping[Role, int], configured: int | None, machine: Machine) -> None:
    """Refuse a fleet that is too large. Raises ConfigError with the limit and where
    it comes from.
    """
    limit, asked = most_workers(configured, machine), sum(counts.values())
    if asked <= limit:
        return
    wish = ", ".join(f"{count} {role}" for role, count in counts.items())
    source = (
        "fleet.max_workers is that"
        if configured is not None
        else f"{machine.num_cores} cores bear {WORKERS_PER_CORE} each, {machine.memory_bytes >> 20} MiB of memory one for each "
        f"{BYTES_PER_WORKER >> 20} MiB"
    )
    raise ConfigError(
        f"{asked} workers are asked for ({wish}); expected at most {limit} on this machine: {source}; ask for fewer, start the "
        "others on other hosts, or set fleet.max_workers"
    )
