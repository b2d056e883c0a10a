"""Makes a run's local generation engine, which waits for its first weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.model.loading import load_model, load_structure, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


def build_local(config: RunConfig, model_path: Path) -> LocalEngine:
    """Make an engine around a folder's model. Raises DataError, ConfigError or EngineError."""
    generation = config.generation
    device = resolve_device(generation.device)
    if device.type == "cpu":
        torch.set_num_threads(generation.threads)
    # a joined host's folder has no weights: the learner's first version brings them
    load = load_model if any(model_path.glob("*.safetensors")) else load_structure
    model = load(model_path, resolve_dtype(generation.dtype), device)
    tokenizer = load_text_tokenizer(model_path)
    return LocalEngine(
        model,
        num_slots=generation.num_slots,
        stop_token_ids=end_tokens(model_path, tokenizer, generation.stop_token_ids),
        kv_policy=generation.kv_policy,
        tokenizer=tokenizer,
    )
