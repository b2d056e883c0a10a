"""What is measured on this machine: on its GPU, or tiny models on the CPU."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ops.bench.gpu.models import SHAPES, Shape
from pipeline.config.schema import RunConfig
from pipeline.observability.start_record import commit_of
from pipeline.preflight.host import driver
from pipeline.preflight.vllm import installed_builds

ROOT = Path(__file__).resolve().parents[3]
GPU_SHARE = 0.45
"""vLLM's share of a GPU's memory; the learner gets the rest."""

Found = Iterator[tuple[str, Mapping[str, float] | str]]
"""What a part measures, as it goes: a name with its figures, or with the reason why there are none."""


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
    """Models of the learner's parts."""
    published: tuple[Shape, ...]
    num_sequences: int
    num_slots: int
    prompt_tokens: int
    response_tokens: int
    """Length of the longest response."""
    learner_tokens: int
    """Tokens of one optimiser step."""
    num_updates: int
    """Of the run with the demo's model."""
    smollm2: Path = Path("runs/models/smollm2")
    limit_s: float = 600.0
    """Time limit of the part that is measured, in a process that was started at ``began_s``."""
    began_s: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """Type that engine and learner compute in."""
        return "bfloat16" if self.on_gpu else "float32"


def detect(shapes: Sequence[str] = ()) -> Form:
    """Choose the GPU form if torch sees a GPU, and vLLM if it is installed. ``shapes`` are the models of the
    learner's parts, if other ones than the form's are wanted."""
    engine = "vllm" if find_spec("vllm") is not None else "local"
    if torch.cuda.is_available():
        form = Form(
            "cuda", engine, SHAPES["0.5B"], (SHAPES["1.5B"], SHAPES["0.5B"]), (SHAPES["135M"], SHAPES["1.5B"]),
            num_sequences=1024, num_slots=256, prompt_tokens=256, response_tokens=1024, learner_tokens=1 << 17, num_updates=100,
        )  # fmt: skip
    else:
        form = Form(
            "cpu", engine, SHAPES["0.3M"], (SHAPES["5M"],), (SHAPES["5M"],), num_sequences=192, num_slots=64,
            prompt_tokens=16, response_tokens=128, learner_tokens=1 << 10, num_updates=3,
        )  # fmt: skip
    return dataclasses.replace(form, learned=tuple(SHAPES[name] for name in shapes)) if shapes else form


def run_config(form: Form, model: Path) -> RunConfig:
    """Return a run's configuration with the form's engine and types, for the engines that the parts build."""
    settings: dict[str, Any] = {
        "model": {"path": model, "dtype": form.dtype, "device": form.device},
        "data": {"train": [model / "no-data.jsonl"], "max_prompt_tokens": form.prompt_tokens},
        "generation": {
            "engine": form.engine, "num_slots": form.num_slots, "window_tokens": form.response_tokens,
            "max_response_tokens": form.response_tokens, "dtype": form.dtype, "device": form.device,
            "vllm": {"engine_args": {"gpu_memory_utilization": GPU_SHARE} if form.on_gpu else {}},
        },
        "learner": {"micro_batch_tokens": "auto", "warmup_updates": 0},
        "weights": {"dtype": form.dtype},
    }  # fmt: skip
    return RunConfig.model_validate(settings)


def describe(form: Form) -> dict[str, str]:
    """Return the machine, the versions and the commit behind the figures."""
    device = torch.cuda.get_device_name() if form.on_gpu else f"{platform.machine()} CPU, one thread"
    there = {name: _version(name) for name in ("torch", "transformers", "trl", "headrace")} | installed_builds()
    found = driver()
    return {
        "device": device,
        "driver": "none" if found is None else ".".join(map(str, found)),
        "CUDA of torch": torch.version.cuda or "none",
        "python": platform.python_version(),
        **there,
        "commit": commit_of(ROOT)[:12] or "unknown",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
