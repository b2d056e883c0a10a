"""What is measured on this machine: on its GPU, or tiny models on the CPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ops.bench.gpu.models import DEMO, HALF_BILLION, ONE_AND_A_HALF_BILLION, TINY, Shape
from pipeline.config.schema import RunConfig
from pipeline.preflight.vllm import installed_builds

GPU_SHARE = 0.45
"""vLLM's share of a GPU's memory; the learner gets the rest."""


@dataclass(frozen=True, slots=True)
class Form:
    """Device, precision and sizes of the check."""

    device: str
    """``cuda`` or ``cpu``"""
    engine: str
    """``vllm`` where it is installed, else ``local``"""
    sampled: Shape
    """Model of the engine parts."""
    learned: tuple[Shape, ...]
    """Models of the learner part."""
    num_sequences: int
    num_slots: int
    prompt_tokens: int
    response_tokens: int
    """Length of the longest response."""
    learner_tokens: int
    """Tokens of one optimiser step."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """Type that engine and learner compute in."""
        return "bfloat16" if self.on_gpu else "float32"


def detect() -> Form:
    """Choose the GPU form if torch sees a GPU, and vLLM if it is installed."""
    engine = "vllm" if find_spec("vllm") is not None else "local"
    if torch.cuda.is_available():
        return Form(
            "cuda", engine, HALF_BILLION, (HALF_BILLION, ONE_AND_A_HALF_BILLION), num_sequences=1024, num_slots=256,
            prompt_tokens=256, response_tokens=1024, learner_tokens=1 << 18,
        )  # fmt: skip
    return Form(
        "cpu", engine, TINY, (DEMO,), num_sequences=64, num_slots=32, prompt_tokens=16, response_tokens=128,
        learner_tokens=1 << 13,
    )  # fmt: skip


def run_config(form: Form, model: Path, *, micro_batch_tokens: int | str = 1 << 14) -> RunConfig:
    """Return a run's configuration with the form's engine and types, for the engines that the parts build."""
    settings: dict[str, Any] = {
        "model": {"path": model, "dtype": form.dtype, "device": form.device},
        "data": {"train": [model / "no-data.jsonl"], "max_prompt_tokens": form.prompt_tokens},
        "generation": {
            "engine": form.engine,
            "num_slots": form.num_slots,
            "window_tokens": form.response_tokens,
            "max_response_tokens": form.response_tokens,
            "dtype": form.dtype,
            "device": form.device,
            "vllm": {"engine_args": {"gpu_memory_utilization": GPU_SHARE} if form.on_gpu else {}},
        },
        "learner": {"micro_batch_tokens": micro_batch_tokens, "warmup_updates": 0},
        "weights": {"dtype": form.dtype},
    }
    return RunConfig.model_validate(settings)


def describe(form: Form) -> dict[str, str]:
    """Return the machine and package versions behind the figures."""
    device = torch.cuda.get_device_name() if form.on_gpu else f"{platform.machine()} CPU, one thread"
    packages = {name: metadata.version(name) for name in ("torch", "transformers")} | installed_builds()
    return {"device": device, "python": platform.python_version()} | packages
