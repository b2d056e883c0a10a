"""Chooses how the local engine computes a model: on the slot cache, or a row at a time.

A model of an unknown type makes a trial pass on its own weights. It is served on the slot cache if
that gives transformers' own logits, else a row at a time if that does, and otherwise refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.preflight.engines import KNOWN
from protocol.errors import EngineError
from workers.engines.generation.local.attention import SLOT_ATTENTION
from workers.engines.generation.local.forward import SlotForward
from workers.engines.generation.local.lone import LoneForward
from workers.engines.model.layers import count_layers
from workers.engines.model.trial import attend_eagerly, difference, trial, trial_tokens, try_attention, unlike_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEPS = 2
"""Decode steps of a trial: the second one reads what the first one kept."""


def make_forward(model: PreTrainedModel, num_slots: int) -> SlotForward | LoneForward:
    """Return how ``model`` is computed. Raises EngineError when no way gives its own logits."""
    if model.config.model_type in KNOWN and unlike_attention(model) is None:
        forward = SlotForward(model, num_slots)
    else:
        forward, _ = choose_forward(model, num_slots)
    count_layers(forward.model)
    return forward


def choose_forward(model: PreTrainedModel, num_slots: int) -> tuple[SlotForward | LoneForward, str]:
    """Return how a model is computed, by a trial, and why not on the slot cache, in words."""
    sequences = trial_tokens(model)
    attend_eagerly(model)
    truth = trial(lambda: _plain_logits(model, sequences))
    slots: list[SlotForward] = []

    def on_slots() -> torch.Tensor:
        slots.append(SlotForward(model, max(num_slots, len(sequences))))
        return _run(slots[0], sequences)

    reason = try_attention(model, SLOT_ATTENTION, on_slots, truth, passes=1 + _STEPS)
    if not reason:
        slots[0].cache.release()
        return slots[0], ""
    lone = LoneForward(model)
    if truth.is_meta:
        return lone, reason
    try:
        wrong = difference(trial(lambda: _run(lone, sequences)), truth)
    except EngineError as error:
        wrong = str(error)
    if wrong:
        raise EngineError(
            f"{type(model).__name__} cannot be sampled token by token: {wrong}. On the slot cache: {reason}. Choose another "
            "model (Qwen2, Qwen3 and Llama do), or generation.engine = 'vllm'"
        )
    lone.cache.release()
    return lone, reason


def _plain_logits(model: PreTrainedModel, sequences: list[np.ndarray]) -> torch.Tensor:
    """Return logits [steps, sequences, vocabulary] of each sequence's last tokens, each alone;
    nothing on ``meta``, where masks cannot be made."""
    if model.device.type == "meta":
        return torch.empty(0, device="meta")
    rows = [
        model(input_ids=torch.from_numpy(tokens)[None].to(model.device), use_cache=False)[0][0] for tokens in sequences
    ]
    return torch.stack([row[-_STEPS:] for row in rows], 1)


def _run(forward: SlotForward | LoneForward, sequences: list[np.ndarray]) -> torch.Tensor:
    """Return the same logits by prefill and decode steps."""
    heads = [tokens[: tokens.size - _STEPS + 1].astype(np.int32) for tokens in sequences]
    forward.prefill(heads, range(len(heads)))
    lengths = np.array([head.size for head in heads])
    steps: list[torch.Tensor] = []
    for step in range(_STEPS):
        places = lengths - 1 + step
        fed = np.array([tokens[place] for tokens, place in zip(sequences, places, strict=True)], np.int64)
        steps.append(forward.decode(fed, places))
    return torch.stack(steps)
