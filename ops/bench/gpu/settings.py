"""The configuration that the parts build their engines from: a run's own, around a random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ops.bench.gpu.form import Form
from pipeline.config.schema import RunConfig

GPU_SHARE = 0.45
"""Of a GPU's memory, for vLLM: the learner has the rest."""


def run_config(form: Form, model: Path, *, micro_batch_tokens: int = 1 << 14) -> RunConfig:
    """Return a run's configuration with the form's engine and types."""
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
