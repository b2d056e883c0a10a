# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""``python -P -m workers.engines.vllm.check CONFIG``: whether vLLM itself would take a run's model and arguments.

*Consumes* a resolved configuration file. *Produces* exit code 0, or 2 and vLLM's own reason on standard error. *Waits for*
vLLM's import, seconds; no weights are read and nothing is computed. ``headrace config check`` and ``headrace up`` run it, since
only vLLM knows its architectures and arguments, and the command line does not import it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.config.load import load_config
from pipeline.runtime.exit_codes import ExitCode
from protocol.errors import ConfigError
from workers.engines.models import resolve_device
from workers.engines.vllm.arguments import arguments_of
from workers.engines.vllm.build import prepare_environment


def check(path: Path) -> None:
    """Raise what keeps vLLM from making an engine of the configuration in ``path``."""
    config = load_config([path])
    on_cpu = resolve_device(config.generation.device).type == "cpu"
    prepare_environment(config, on_cpu=on_cpu)
    arguments = arguments_of(config, config.model.path, on_cpu=on_cpu)
    from vllm import EngineArgs

    try:
        vllm_config = EngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError, NotImplementedError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    if on_cpu or config.generation.vllm.mode == "in-process":
        return
    import torch

    wanted = vllm_config.parallel_config.world_size_across_dp
    if wanted > torch.cuda.device_count():
        raise ConfigError(f"tensor and data parallel sizes need {wanted} GPUs, {torch.cuda.device_count()} are visible")


if __name__ == "__main__":
    try:
        check(Path(sys.argv[1]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(ExitCode.CONFIG)
