"""The KV cache of the local engine: one row per slot, each with its own length, and the attention
over it.

A *step* says to which rows the keys and values of a model's attention layers go. Attention reads
views over the live rows, up to the longest live length.

Rows ``0 .. num_rows - 1`` of a step are the live ones, so dead slots cost nothing; the slot table
moves rows to keep it so (:meth:`SlotCache.move`). Rows and lengths grow in blocks, by at least half
of their current size, one layer after another, so that two whole caches never exist at once. Memory
is bounded by slots x (longest prompt + longest response)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from protocol.errors import EngineError
from workers.engines.model.attention import PackedLayout, attend, packed_attention

SLOT_ATTENTION = "headrace_slots"
"""Name under which :func:`slot_attention` is registered with transformers."""


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
    """Attend in one layer, in a decode step (``slot_step``) or a prefill (``packed_layout``).

    Query is [n, query heads, 1, head dim] in a step, [1, query heads, N, head dim] in a prefill;
    key and value are [n, key heads, longest, head dim] or [1, key heads, N, head dim]. Returns [n,
    1, query heads, head dim] or [1, N, query heads, head dim], and None for weights. Other
    arguments are those of packed attention. Raises EngineError without a step, or with a mask."""
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


LENGTH_BLOCK = 64
"""A row's capacity is rounded up to a multiple of this many tokens."""
ROW_BLOCK = 8
"""The number of rows is rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One new token for each live row."""

    rows: torch.Tensor
    """int64 [n]: 0 .. n - 1"""
    positions: torch.Tensor
    """int64 [n]: position of each new token in its row; earlier positions are its context."""
    longest: int
    mask: torch.Tensor | None
    """[n, 1, 1, longest], added to scores: -inf after the row's position; None if all rows are
    full."""
    shared: SharedStep | None = None
    """Prompts that rows share and that precede them; None: rows hold whole contexts."""

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Contexts laid end to end in one row; one that several slots share is computed once."""

    source: torch.Tensor
    """int64 [m]: index into the packed row of each token to be stored."""
    rows: torch.Tensor
    """int64 [m]: slot row that it goes to."""
    positions: torch.Tensor
    """int64 [m]: position in that row."""


@dataclass(frozen=True, slots=True)
class SharedStep:
    """How the rows of a decode step attend to prompts that are stored once, for as long as the rows are the same."""

    cache: SlotCache
    """Of the prompts, which are its first rows."""
    stored: np.ndarray
    """int64 [n]: tokens of each row that its prompt holds, 0 without a prompt."""
    queries: torch.Tensor
    """int64 [num_prompts, most members]: rows of the step that attend to each prompt; padded."""
    prompts: torch.Tensor
    """int64 [n]: prompt of each row, and next its number among the prompt's members; 0 without a prompt."""
    members: torch.Tensor
    has_prompt: torch.Tensor | None
    """bool [n, 1, 1, 1]; None if all rows have one."""
    longest: int
    mask: torch.Tensor | None
    """[num_prompts, 1, 1, longest], added to scores: -inf after a prompt's end; None if all are as long."""


def shared_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, step: DecodeStep, layer: int
) -> torch.Tensor:
    """Attend in one layer of a decode step to rows and the prompts before them, on a CPU.

    Takes and returns what :func:`slot_attention` does. Each part's softmax is normalised by its own sum; their
    logarithms say how much each part weighs."""
    shared = step.shared
    assert shared is not None, "the caller checks that there are shared prompts"
    num_prompts, most = shared.queries.shape
    n, key_heads, head_dim = query.shape[0], key.shape[1], query.shape[-1]
    # [n, key heads, queries of a key head, head dim]
    query = query.reshape(n, key_heads, -1, head_dim)
    own, own_sum = _flash_attention(query, key, value, attn_mask=step.mask, scale=scaling)
    together = query[shared.queries].transpose(1, 2).reshape(num_prompts, key_heads, -1, head_dim)
    keys, values = shared.cache.read(layer, num_prompts, shared.longest)
    read, read_sum = _flash_attention(together, keys, values, attn_mask=shared.mask, scale=scaling)
    # of each row: [n, key heads, queries, head dim], and 1 instead of head dim
    read, read_sum = (
        part.unflatten(2, (most, -1)).transpose(1, 2)[shared.prompts, shared.members]
        for part in (read, read_sum.unsqueeze(-1))
    )
    weight = torch.sigmoid(read_sum - own_sum.unsqueeze(-1)).to(own.dtype)
    if shared.has_prompt is not None:
        weight = weight * shared.has_prompt
    return own.lerp(read, weight).reshape(n, 1, -1, head_dim)


_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateUsage]
"""What torch's attention calls on a CPU. Returns also the logarithms of the sums, which torch has no public name for."""


class RowStore(Protocol):
    max_length: int

    def reserve(self, num_rows: int, length: int) -> None: ...

    def move(self, targets: list[int], sources: list[int], length: int) -> None:
        """Move the contents of rows ``sources`` to rows ``targets``, all at once."""
        ...

    def release(self) -> None: ...

    @property
    def num_bytes(self) -> int: ...


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer: ``[rows, key heads, capacity, head dim]``."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, states: torch.Tensor) -> torch.Tensor:
        # masked positions are still multiplied by 0, and uninitialised memory may hold NaN
        return states.new_zeros(self._cache.num_rows, states.shape[1], self._cache.capacity, states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values where the step says; return those that attention reads."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        step = self._cache.step
        if isinstance(step, PrefillStep):
            self.keys[step.rows, :, step.positions] = key_states[0].transpose(0, 1)[step.source]
            self.values[step.rows, :, step.positions] = value_states[0].transpose(0, 1)[step.source]
            return key_states, value_states
        assert step is not None, "a step is set before the model runs"
        self.keys[step.rows, :, step.positions] = key_states.squeeze(2)
        self.values[step.rows, :, step.positions] = value_states.squeeze(2)
        live, longest = step.num_rows, step.longest
        return self.keys[:live, :, :longest], self.values[:live, :, :longest]

    def resize(self, num_rows: int, capacity: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = _grown(self.keys, num_rows, capacity)
            self.values = _grown(self.values, num_rows, capacity)

    def move(self, targets: torch.Tensor, sources: torch.Tensor, length: int) -> None:
        """Copy ``length`` tokens of rows ``sources`` to ``targets``, all at once; they may overlap."""
        if self.keys is not None and self.values is not None:
            self.keys[targets, :, :length] = self.keys[sources, :, :length]
            self.values[targets, :, :length] = self.values[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        step = self._cache.step
        return (step.longest if isinstance(step, DecodeStep) else query_length), 0

    def get_seq_length(self) -> int:
        step = self._cache.step
        return step.longest - 1 if isinstance(step, DecodeStep) else 0

    def get_max_length(self) -> int:
        # unlimited
        return -1


class SlotCache(Cache):
    def __init__(self, num_layers: int, max_rows: int) -> None:
        self.num_rows = 0
        self.capacity = 0
        self.max_rows = max_rows
        self.max_length = 0
        """The longest that any request so far may become; capacity exceeds it by at most a block."""
        self.step: DecodeStep | PrefillStep | None = None
        """Where the next forward pass stores keys and values; set by the model's caller."""
        self._slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, num_rows: int, length: int) -> None:
        rows = min(_in_blocks(num_rows, self.num_rows, ROW_BLOCK, self.max_rows), self.max_rows)
        capacity = _in_blocks(length, self.capacity, LENGTH_BLOCK, self.max_length)
        if rows > self.num_rows or capacity > self.capacity:
            self.num_rows, self.capacity = rows, capacity
            for layer in self._slot_layers:
                layer.resize(rows, capacity)

    def move(self, targets: list[int], sources: list[int], length: int) -> None:
        first = self._slot_layers[0].keys
        if first is None or not targets or length == 0:
            return
        to = torch.tensor(targets, device=first.device)
        came_from = torch.tensor(sources, device=first.device)
        for layer in self._slot_layers:
            layer.move(to, came_from, length)

    def copy_start(self, target: int, source: int, length: int) -> None:
        """Copy the first ``length`` tokens of row ``source`` to row ``target``, both reserved."""
        for layer in self._slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[target, :, :length] = layer.keys[source, :, :length]
                layer.values[target, :, :length] = layer.values[source, :, :length]

    def read(self, layer: int, num_rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first tokens of the first rows as views, [rows, key heads, length, head dim]."""
        stored = self._slot_layers[layer]
        assert stored.keys is not None and stored.values is not None, "a prefill has stored them"
        return stored.keys[:num_rows, :, :length], stored.values[:num_rows, :, :length]

    def release(self) -> None:
        self.num_rows = self.capacity = 0
        for layer in self._slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    @property
    def num_bytes(self) -> int:
        tensors = [t for layer in self._slot_layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


def _in_blocks(needed: int, present: int, block: int, limit: int) -> int:
    """Return ``present`` if it suffices, else at least 1.5 times it, up to ``limit``, in whole
    blocks."""
    if needed <= present:
        return present
    return -(-max(needed, min(present + present // 2, limit)) // block) * block


def _grown(old: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
    new = old.new_zeros(num_rows, old.shape[1], capacity, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
