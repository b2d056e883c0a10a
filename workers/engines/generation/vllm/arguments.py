"""Arguments of vLLM's ``EngineArgs`` from a run's configuration. This module imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.preflight.guidance import longest_scored

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

EXTENSION = "workers.engines.generation.vllm.worker.WorkerExtension"
_SCORED_AT_ONCE = 64


def arguments_of(config: RunConfig, model_path: Path, *, on_cpu: bool) -> dict[str, Any]:
    generation, vllm = config.generation, config.generation.vllm
    extra: dict[str, Any] = dict(vllm.engine_args)
    if vllm.block_tokens is not None:
        extra["block_size"] = vllm.block_tokens
    if vllm.tensor_parallel_size > 1:
        extra["tensor_parallel_size"] = vllm.tensor_parallel_size
    if vllm.data_parallel_size > 1:
        extra["data_parallel_size"] = vllm.data_parallel_size
    return engine_arguments(
        model_path,
        num_slots=generation.num_slots,
        positions=config.data.max_prompt_tokens + generation.max_response_tokens,
        dtype=config.types.generator,
        on_cpu=on_cpu,
        extra=extra,
    )


def scoring_arguments(config: RunConfig, model_path: Path, *, on_cpu: bool) -> dict[str, Any]:
    reference = config.reference
    num_tokens = reference.micro_batch_tokens
    arguments = engine_arguments(
        model_path,
        num_slots=min(_SCORED_AT_ONCE, num_tokens) - 1,
        positions=longest_scored(config) + 1,
        dtype=config.types.learner,
        on_cpu=on_cpu,
    )
    arguments |= {
        "load_format": "safetensors",
        "enable_prefix_caching": False,
        # only prompts are scored: there are no decode steps to speed up
        "enforce_eager": True,
        "max_num_batched_tokens": num_tokens,
    }
    if reference.vllm.tensor_parallel_size > 1:
        arguments["tensor_parallel_size"] = reference.vllm.tensor_parallel_size
    return arguments | reference.vllm.engine_args


def engine_arguments(
    model_path: Path,
    *,
    num_slots: int,
    positions: int,
    dtype: str,
    on_cpu: bool,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return vLLM's arguments for a model folder; the weights come with the first version.

    ``num_slots`` requests are decoded at once; one more is admitted, so that a probe never waits
    for a window to end. ``positions`` is the longest sequence. The configuration's ``extra``
    arguments win."""
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": dtype,
        "max_model_len": positions,
        "max_num_seqs": num_slots + 1,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
    }
    if on_cpu:
        arguments |= {"distributed_executor_backend": "uni", "enforce_eager": True, "async_scheduling": False}
    return arguments | dict(extra or {})
