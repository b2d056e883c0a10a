"""Measures whether bfloat16 pays for a run's policy on this machine: ``pipeline.preflight.compute_types`` asks.

Reads a resolved configuration file, and writes a ``Measured`` as JSON to standard output."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import torch

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.compute_types import Measured
from pipeline.preflight.memory_needs import count_weights
from pipeline.process.exit_codes import ExitCode
from protocol.errors import HeadraceError
from workers.engines.model.loading import load_model, resolve_device
from workers.engines.model.packed import PackedTokens, prepare_packed
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_WEIGHTS: Final = 1_000_000_000
"""Of larger models two layers with random weights are measured."""
NUM_TOKENS: Final = 192
_ROUNDS = 2


def measure(config: RunConfig) -> Measured:
    """Time the log-probs of the first training prompts in both types, and compare them. Raises DataError,
    ConfigError or EngineError."""
    device = resolve_device(config.model.device)
    if device.type == "cuda":
        return Measured(gpu_has_units=torch.cuda.get_device_capability(device) >= (8, 0))
    torch.set_num_threads(1)
    is_whole = count_weights(config.model.path) <= MOST_WEIGHTS
    model = prepare_packed((load_model if is_whole else _two_layers)(config.model.path, torch.float32, device))
    batch = _batch(config, device)
    policies = [PackedPolicy(model, ForwardSettings(1.0, NUM_TOKENS, autocast)) for autocast in (None, torch.bfloat16)]
    seconds: list[list[float]] = [[], []]
    logprobs: list[torch.Tensor] = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        # as the learner, which keeps the weights in bfloat16 over all micro-batches
        for number in range(1 + _ROUNDS):
            for policy, taken in zip(policies, seconds, strict=True):
                started = time.process_time()
                found = policy(batch)
                taken.append(time.process_time() - started)
                if number == 0:
                    logprobs.append(found.float())
    gain = min(seconds[0][1:]) / min(seconds[1][1:])
    return Measured(gain, float((logprobs[0] - logprobs[1]).abs().mean()) if is_whole else None)


def _two_layers(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config.get_text_config().num_hidden_layers = 2
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _batch(config: RunConfig, device: torch.device) -> PackedTokens:
    """Return the first training prompts, to about NUM_TOKENS."""
    source = PromptSource(config, load_text_tokenizer(config.model.path))
    sequences: list[np.ndarray] = []
    for number in range(source.num_prompts):
        tokens = source.at(number).tokens[:NUM_TOKENS].astype(np.int32)
        if tokens.size > 1:
            sequences.append(tokens)
        if sum(one.size for one in sequences) >= NUM_TOKENS:
            break
    return PackedTokens.of(sequences, [one.size - 1 for one in sequences], device)


def main() -> ExitCode:
    try:
        measured = measure(load_config([Path(sys.argv[1])]))
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
