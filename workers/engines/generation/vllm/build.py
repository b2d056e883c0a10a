# pyright: reportMissingImports=false
"""Builds a run's vLLM engine, which then waits for its first weights. Loading may take minutes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.device_memory import vllm_share
from pipeline.preflight.memory_needs import read_shape
from pipeline.preflight.vllm import check_versions
from protocol.errors import ConfigError, EngineError
from protocol.ids import Role
from workers.engines.generation.vllm.arguments import arguments_of
from workers.engines.generation.vllm.engine import VllmEngine
from workers.engines.model.loading import model_state, resolve_device

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from workers.engines.generation.vllm.core import Core

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean difference to the learner's log-probs, in nats, that is expected from the coarsest type."""


def build_vllm(config: RunConfig, model_path: Path) -> VllmEngine:
    """Start vLLM around a model and build an engine on it.

    Raises ConfigError when vLLM is missing or refuses, DataError when there is no tokenizer."""
    check_versions()
    generation = config.generation
    device = resolve_device(generation.device)
    prepare_environment(generation.threads, generation.vllm.kv_cache_gb, on_cpu=device.type == "cpu")
    hf_config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    arguments = arguments_of(config, model_path, on_cpu=device.type == "cpu")
    if device.type == "cuda":
        arguments |= planned_share(config, hf_config.to_dict())
    core = start_core(config, arguments, on_cpu=device.type == "cpu")
    if not core.has_streams:
        check_counts(config)
    tokenizer = load_text_tokenizer(model_path)
    return VllmEngine(
        core,
        model_state(hf_config),
        num_slots=generation.num_slots,
        vocabulary=int(hf_config.get_text_config().vocab_size),
        positions=int(arguments["max_model_len"]),
        stop_token_ids=end_tokens(model_path, tokenizer, generation.stop_token_ids),
        kv_policy=generation.kv_policy,
        pause=generation.vllm.pause,
        tolerance=tolerance(config),
        tokenizer=tokenizer,
    )


def planned_share(config: RunConfig, model: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of a GPU that the plan gives vLLM beside the run's other workers, if the
    settings leave it open. ``model`` is ``config.json``."""
    shape = read_shape(config.model.path, model)
    share = vllm_share(config, shape, torch.cuda.mem_get_info(0)[1]) if shape is not None else None
    return {} if share is None else {"gpu_memory_utilization": share}


def start_core(config: RunConfig, arguments: dict[str, object], *, on_cpu: bool) -> Core:
    """Start vLLM in this process or its own. Raises ConfigError with vLLM's own reason."""
    mode = config.generation.vllm.mode
    try:
        if mode == "in-process" or (mode == "auto" and on_cpu):
            from workers.engines.generation.vllm.in_process import InProcessCore

            return InProcessCore(arguments, temperature=config.generation.temperature)
        from workers.engines.generation.vllm.background import BackgroundCore

        return BackgroundCore(arguments, temperature=config.generation.temperature)
    except EngineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"vLLM does not start with {config.model.path}: {type(error).__name__}: {error}; change the model, "
            "[generation.vllm], or set generation.engine to local"
        ) from error


def check_counts(config: RunConfig) -> None:
    """Raise ConfigError for presence and frequency penalties if vLLM's own sampler counts the
    tokens.

    It takes earlier windows for a part of the prompt, and so counts only from the start of each
    window."""
    for what, settings in config.evaluation.named():
        for name in ("presence_penalty", "frequency_penalty"):
            if given := getattr(settings, name):
                raise ConfigError(
                    f"{what}.{name} is {given:g}, but vLLM's model runner for {config.model.path} counts only the tokens of "
                    "the current window; set it to 0, or generation.engine to local"
                )


def prepare_environment(threads: int, kv_cache_gb: int, *, on_cpu: bool) -> None:
    """Set the environment variables that vLLM reads at import; existing ones are kept."""
    settings = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        torch.set_num_threads(threads)
        # The supervisor assigns a worker's threads; vLLM would bind them all to the first cores.
        settings |= {"VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def import_vllm(config: RunConfig, role: Role) -> None:
    """Import what a worker of this role uses of vLLM, which takes seconds; touch no device."""
    section = config.reference if role is Role.REFERENCE else config.generation
    on_cpu = resolve_device(section.device).type == "cpu"
    prepare_environment(section.threads, section.vllm.kv_cache_gb, on_cpu=on_cpu)
    from vllm.v1.engine import async_llm, llm_engine  # noqa: F401

    if on_cpu:
        from vllm.v1.worker import cpu_worker  # noqa: F401


def tolerance(config: RunConfig) -> float:
    given = config.generation.vllm.parity_tolerance
    if given is not None:
        return given
    return max(TOLERANCE[name] for name in config.types)
