# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Checks whether vLLM accepts a run's models and arguments.

No weights are read and nothing is computed. Only vLLM knows its architectures and arguments, and
importing it takes seconds: ``headrace config check`` runs this as a process, which reads a resolved
configuration file and ends with code 0, or 2 with vLLM's own reason on standard error; ``headrace
up`` asks a worker's process, which has to import vLLM anyway (``workers.early``)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.process.exit_codes import ExitCode
from protocol.errors import ConfigError
from workers.engines.generation.vllm.arguments import arguments_of, scoring_arguments
from workers.engines.generation.vllm.build import prepare_environment
from workers.engines.model.loading import resolve_device


def check(config: RunConfig) -> None:
    """Raise ConfigError with vLLM's own reason if it cannot build a configuration's engines."""
    generation, reference = config.generation, config.reference
    if generation.engine == "vllm":
        on_cpu = resolve_device(generation.device).type == "cpu"
        prepare_environment(generation.threads, generation.vllm.kv_cache_gb, on_cpu=on_cpu)
        in_process = on_cpu or generation.vllm.mode == "in-process"
        _check_arguments(arguments_of(config, config.model.path, on_cpu=on_cpu), count_devices=not in_process)
    if config.scores_with_vllm:
        on_cpu = resolve_device(reference.device).type == "cpu"
        prepare_environment(reference.threads, reference.vllm.kv_cache_gb, on_cpu=on_cpu)
        _check_arguments(scoring_arguments(config, config.reference_model, on_cpu=on_cpu), count_devices=not on_cpu)


def _check_arguments(arguments: dict[str, Any], *, count_devices: bool) -> None:
    from vllm import EngineArgs

    try:
        vllm_config = EngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError, NotImplementedError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    if not count_devices:
        return
    import torch

    wanted = vllm_config.parallel_config.world_size_across_dp
    if wanted > torch.cuda.device_count():
        raise ConfigError(f"tensor and data parallel sizes need {wanted} GPUs, {torch.cuda.device_count()} are visible")


def main() -> ExitCode:
    try:
        check(load_config([Path(sys.argv[1])]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    return ExitCode.OK
