"""Attention of the slot cache: new tokens against their rows' own past, or whole packed contexts.

Keys and values are those that :class:`workers.engines.generation.local.cache.SlotCache` returned.

The function is registered with transformers under :data:`SLOT_ATTENTION`, without a mask of its
own, so that transformers builds none. Rows differ in length, and only the step knows where each
ends. Grouped queries are laid along the query axis. So the keys of a group are read once and never
repeated in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from protocol.errors import EngineError
from workers.engines.generation.local.cache import DecodeStep
from workers.engines.model.attention import PackedLayout, attend, packed_attention

SLOT_ATTENTION = "headrace_slots"
"""Name under which transformers knows :func:`slot_attention`."""


def slot_attention(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    slot_step: DecodeStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer: in a decode step (``slot_step``), or in a prefill (``packed_layout``).

    Query is [n, query heads, 1, head dim] in a step, [1, query heads, N, head dim] in a prefill.
    Key and value are [n, key heads, longest, head dim] or [1, key heads, N, head dim]. ``scaling``
    is 1/sqrt(head dim) when absent. By ``sliding_window`` a token sees itself and so many - 1
    before it. ``softcap`` and ``s_aux`` (sinks) are as in packed attention.

    Returns [n, 1, query heads, head dim] or [1, N, query heads, head dim], and None for weights.
    Raises EngineError without a step, or with a mask."""
    if packed_layout is not None:
        return packed_attention(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window,
            softcap=softcap, s_aux=s_aux, packed_layout=packed_layout, **options,
        )  # fmt: skip
    if slot_step is None or attention_mask is not None:
        raise EngineError(
            f"attention {SLOT_ATTENTION} was called {'without a step' if slot_step is None else 'with a mask'}; "
            "run the model through workers.engines.generation.local, or load it with another attn_implementation"
        )
    mask = slot_step.mask
    if sliding_window is not None and sliding_window < slot_step.longest:
        mask = _windowed(slot_step, sliding_window, query.dtype)
    if softcap is not None or s_aux is not None:
        return attend(query, key, value, mask, scaling, softcap, s_aux).transpose(1, 2), None
    num_rows, query_heads, _, head_dim = query.shape
    key_heads = key.shape[1]
    grouped = query.reshape(num_rows, key_heads, query_heads // key_heads, head_dim)
    if grouped.dtype != key.dtype:
        grouped = grouped.to(key.dtype)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(num_rows, 1, query_heads, output.shape[-1]), None


def _windowed(step: DecodeStep, window: int, dtype: torch.dtype) -> torch.Tensor:
    place = torch.arange(step.longest, device=step.positions.device)
    distance = step.positions[:, None] - place
    return hide((distance < 0) | (distance >= window), dtype)


def hide(places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask [n, 1, 1, longest] that hides ``places``, bool [n, longest]."""
    return torch.where(places, -torch.inf, 0.0).to(dtype)[:, None, None]


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
