"""Which GPUs of a host each worker computes on: what ``fleet.gpus`` says, dealt out in order."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.schema import RunConfig
from protocol.errors import ConfigError
from protocol.ids import Role


def gpus_each(config: RunConfig, role: Role) -> int:
    """Return on how many GPUs a worker of the role computes."""
    if role is Role.GENERATOR and config.generation.engine == "vllm":
        return config.generation.vllm.tensor_parallel_size * config.generation.vllm.data_parallel_size
    if role is Role.REFERENCE and config.scores_with_vllm:
        return config.reference.vllm.tensor_parallel_size
    return {Role.LEARNER: config.learner.ranks, Role.VALUE: config.value.ranks}.get(role, 1)


def gpus_of(config: RunConfig, role: Role, number: int) -> tuple[int, ...]:
    """Return the GPUs of a role's worker of this number; empty if it sees all."""
    given: tuple[int, ...] = getattr(config.fleet.gpus, role, ())
    if not given:
        return ()
    each = gpus_each(config, role)
    # a worker in the place of an evicted one has a number beyond the fleet's, and gets its GPUs
    first = number * each % len(given)
    return given[first : first + each]


def check_gpus(config: RunConfig, counts: Mapping[Role, int]) -> None:
    """Raise ConfigError if ``fleet.gpus`` has not as many GPUs as so many workers need, or names GPUs for a role that
    cannot use them."""
    devices = {
        Role.LEARNER: ("model.device", config.model.device),
        Role.VALUE: ("value.device", config.value.device),
        Role.GENERATOR: ("generation.device", config.generation.device),
        Role.REFERENCE: ("reference.device", config.reference.device),
    }
    for role, (name, device) in devices.items():
        given: tuple[int, ...] = getattr(config.fleet.gpus, role)
        if not given or not counts.get(role):
            continue
        if device not in ("auto", "cuda"):
            raise ConfigError(
                f"fleet.gpus.{role} is {list(given)}, but {name} is {device}; set it to auto: a worker sees its own GPUs alone"
            )
        if role in config.launch.elsewhere:
            raise ConfigError(
                f"fleet.gpus.{role} is {list(given)}, but launch.roles has {role}, whose workers run elsewhere: leave one out"
            )
        each = gpus_each(config, role)
        if len(given) < counts[role] * each or len(given) % each:
            raise ConfigError(
                f"fleet.gpus.{role} has {len(given)} GPUs; expected {counts[role] * each} for {counts[role]} {role} of {each} "
                f"each, or a larger multiple of {each}. A GPU may be named twice, for two workers that share it"
            )
        spare = "standby_learner" if role is Role.LEARNER else "standby"
        if (wanted := getattr(config.fleet, spare)) not in (0, "auto", "off"):
            raise ConfigError(
                f"fleet.{spare} is {wanted}, and fleet.gpus.{role} is set; leave one out: a standby would be on the wrong GPU"
            )
