"""All that ``headrace doctor`` finds: of this host, and of a configuration on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pipeline.algorithms.batching import tokens_at_once
from pipeline.config.schema import RunConfig
from pipeline.preflight.checks import diagnose
from pipeline.preflight.findings import CheckFinding
from pipeline.preflight.host import HostFacts, clock_difference_s, disk_of, free_ports
from pipeline.preflight.host_rules import (
    judge_clock,
    judge_disk,
    judge_gpu_memory,
    judge_host,
    judge_metrics_port,
    judge_ports,
    judge_ranks,
    num_ports,
)
from pipeline.preflight.memory_needs import Shape, is_cpu, needs, shapes_of
from pipeline.preflight.model_folder import read_model_config
from pipeline.supervisor.fleet_size import desired_counts
from protocol.errors import DataError
from protocol.hosts import numeric

SMALL_FLEET: Final = 8
"""Workers of a fleet when no configuration is given."""


def examine(host: HostFacts, config: RunConfig | None) -> dict[str, Sequence[CheckFinding]]:
    """Return findings by heading: of the host, and with a configuration of a run on it."""
    if config is None:
        return {"machine": judge_host(host, num_workers=SMALL_FLEET)}
    counts = desired_counts(config)
    here = {role: number for role, number in counts.items() if role not in config.launch.elsewhere}
    machine = judge_host(host, num_workers=sum(here.values()))
    machine.append(judge_clock(clock_difference_s(config.ledger.url)))
    if config.wire.transport == "tcp" and config.wire.ports is not None:
        first, _, last = config.wire.ports.partition("-")
        ports = range(int(first), min(int(last or first), 65535) + 1)
        machine += judge_ports(config, here, free_ports(numeric(config.wire.host), ports, num_ports(here)))
    if (port := config.supervisor.metrics_port) is not None:
        is_free = free_ports(numeric(config.supervisor.metrics_host), [port], 1) == 1
        machine.append(judge_metrics_port(port, is_free=is_free))
    shapes = _shapes(config)
    of_host = needs(config, shapes[0], counts, shapes[1], on_cpu=is_cpu) if shapes else []
    machine.append(judge_disk(config, of_host, disk_of(config.run.dir)))
    if shapes:
        # a GPU holds what a CPU would with the same batches
        of_devices = needs(_with_gpu_batches(config), shapes[0], counts, shapes[1], on_cpu=lambda _: True)
        machine += judge_gpu_memory(config, of_devices, host.torch)
    return {"machine": machine, "configuration": [*diagnose(config), *judge_ranks(config, host.torch)]}


def _with_gpu_batches(config: RunConfig) -> RunConfig:
    """Return a configuration with the micro-batches that GPUs have where none are set."""
    learner, value = (
        section.model_copy(update={"micro_batch_tokens": tokens_at_once(section.micro_batch_tokens, on_cpu=False)})
        for section in (config.learner, config.value)
    )
    return config.model_copy(update={"learner": learner, "value": value})


def _shapes(config: RunConfig) -> tuple[Shape, Shape | None] | None:
    try:
        return shapes_of(config, read_model_config(config.model.path))
    except DataError:
        # the configuration's checks report it
        return None
