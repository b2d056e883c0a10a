"""A configuration that passes preflight: the committed small model and a few prompts."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig

MODEL = Path(__file__).resolve().parents[2] / "ops" / "demo" / "tiny_model"


def write_config(folder: Path, *, num_prompts: int = 64) -> Path:
    """Write data and a run file; return the run file."""
    lines = [json.dumps({"prompt": "1+1=", "answer": "2", "id": str(n)}) for n in range(num_prompts)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "run.toml"
    path.write_text(
        f"""
[run]
name = "op"
dir = "{folder / "runs"}"
num_updates = 4
[model]
path = "{MODEL}"
[data]
train = ["{folder / "train.jsonl"}"]
max_prompt_tokens = 32
[algorithm]
group_size = 4
groups_per_update = 4
[generation]
window_tokens = 8
max_response_tokens = 16
[supervisor]
backoff_s = 0.05
drain_timeout_s = 5.0
[observer]
enabled = false
"""
    )
    return path


def op_config(folder: Path, *overrides: str) -> RunConfig:
    return load_config([write_config(folder)], overrides)
