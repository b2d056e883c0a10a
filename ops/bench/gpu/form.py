"""The form of the measurement on this machine: the GPU form, or the CPU form."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

import torch

from ops.bench.gpu.models import DEMO, HALF_BILLION, ONE_AND_A_HALF_BILLION, TINY, Shape
from pipeline.preflight.vllm import installed_builds


@dataclass(frozen=True, slots=True)
class Form:
    """The device, precision and sizes of the check."""

    device: str
    """``cuda`` or ``cpu``"""
    engine: str
    """``vllm`` where it is installed, else ``local``"""
    sampled: Shape
    """Model of the engine's parts."""
    learned: tuple[Shape, ...]
    """Models of the learner's part."""
    num_sequences: int
    num_slots: int
    prompt_tokens: int
    response_tokens: int
    """Of the longest response."""
    learner_tokens: int
    """Of one optimiser step."""

    @property
    def on_gpu(self) -> bool:
        """Whether this is the GPU form."""
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """Type that engine and learner compute in."""
        return "bfloat16" if self.on_gpu else "float32"


def detect() -> Form:
    """Take the GPU form where torch sees a GPU, and vLLM where it is installed."""
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


def describe(form: Form) -> dict[str, str]:
    """Return a description of the machine and packages behind the figures."""
    device = torch.cuda.get_device_name() if form.on_gpu else f"{platform.machine()} CPU, one thread"
    packages = {name: metadata.version(name) for name in ("torch", "transformers")} | installed_builds()
    return {"device": device, "python": platform.python_version()} | packages
