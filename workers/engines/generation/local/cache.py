"""The slot KV cache, behind transformers' interface: a row per slot, each of a length of its own.

A *step* maps the keys and values of a model's attention layers to rows. Attention reads views over
the live rows, up to the longest live length.

Rows ``0 .. num_rows - 1`` of a step are the live ones, so dead slots cost nothing. The slot table
keeps it so by moving rows (:meth:`SlotCache.move`). Rows and lengths grow in blocks, by at least
half of their present size. Layers grow one after another, so that growing never holds two whole
caches. Memory is bounded by slots x (longest prompt + longest response)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

LENGTH_BLOCK = 64
"""Tokens that a row's capacity is rounded up to."""
ROW_BLOCK = 8
"""Rows that the number of rows is rounded up to."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One new token for each live row."""

    rows: torch.Tensor
    """int64 [n]: 0 .. n - 1"""
    positions: torch.Tensor
    """int64 [n]: place of each new token in its row; earlier places are its context."""
    longest: int
    """Longest context of a live row, the new token included."""
    mask: torch.Tensor | None
    """[n, 1, 1, longest], added to scores: -inf after the row's position; None if all are full."""

    @property
    def num_rows(self) -> int:
        """Number of live rows, n."""
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Contexts laid end to end in one row; those that several slots share are computed once."""

    source: torch.Tensor
    """int64 [m]: place in the packed row of each token to be stored."""
    rows: torch.Tensor
    """int64 [m]: slot row that it goes to."""
    positions: torch.Tensor
    """int64 [m]: place in that row."""


class RowStore(Protocol):
    """The memory behind the rows of a slot table."""

    max_length: int

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for ``num_rows`` rows of ``length`` tokens."""
        ...

    def move(self, targets: list[int], sources: list[int], length: int) -> None:
        """Move what rows ``sources`` hold to rows ``targets``, all at once."""
        ...

    def release(self) -> None:
        """Give all memory back."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        ...


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer: ``[rows, key heads, capacity, head dim]``."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take type, device, heads and widths from the first keys and values."""
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def _zeros(self, states: torch.Tensor) -> torch.Tensor:
        # zeros: masked places are still multiplied by 0, and uninitialised memory may hold NaN
        return states.new_zeros(self._cache.num_rows, states.shape[1], self._cache.capacity, states.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values where the step has them; return those that attention reads."""
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
        """Grow to the given size, keeping the stored keys and values."""
        if self.keys is not None and self.values is not None:
            self.keys = _grown(self.keys, num_rows, capacity)
            self.values = _grown(self.values, num_rows, capacity)

    def move(self, targets: torch.Tensor, sources: torch.Tensor, length: int) -> None:
        """Copy ``length`` tokens of rows ``sources`` to ``targets``, all at once, overlaps too."""
        if self.keys is not None and self.values is not None:
            self.keys[targets, :, :length] = self.keys[sources, :, :length]
            self.values[targets, :, :length] = self.values[sources, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that attention reads, and their offset."""
        step = self._cache.step
        return (step.longest if isinstance(step, DecodeStep) else query_length), 0

    def get_seq_length(self) -> int:
        """Return the longest live context before the present step."""
        step = self._cache.step
        return step.longest - 1 if isinstance(step, DecodeStep) else 0

    def get_max_length(self) -> int:
        """Return -1: a row grows as long as it must."""
        return -1


class SlotCache(Cache):
    """A cache of ``num_layers`` slot layers that share their size and the present step."""

    def __init__(self, num_layers: int, max_rows: int) -> None:
        self.num_rows = 0
        self.capacity = 0
        self.max_rows = max_rows
        self.max_length = 0
        """Longest that any request so far may become; a reserve is at most a block longer."""
        self.step: DecodeStep | PrefillStep | None = None
        """Where the keys and values of the next forward go. The caller of the model sets it."""
        self._slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, num_rows: int, length: int) -> None:
        """Grow so that ``num_rows`` rows of ``length`` tokens fit."""
        rows = min(_in_blocks(num_rows, self.num_rows, ROW_BLOCK, self.max_rows), self.max_rows)
        capacity = _in_blocks(length, self.capacity, LENGTH_BLOCK, self.max_length)
        if rows > self.num_rows or capacity > self.capacity:
            self.num_rows, self.capacity = rows, capacity
            for layer in self._slot_layers:
                layer.resize(rows, capacity)

    def move(self, targets: list[int], sources: list[int], length: int) -> None:
        """Copy rows ``sources`` to rows ``targets`` in every layer, all at once."""
        first = self._slot_layers[0].keys
        if first is None or not targets or length == 0:
            return
        to = torch.tensor(targets, device=first.device)
        came_from = torch.tensor(sources, device=first.device)
        for layer in self._slot_layers:
            layer.move(to, came_from, length)

    def release(self) -> None:
        """Give all memory back; the next use starts small again."""
        self.num_rows = self.capacity = 0
        for layer in self._slot_layers:
            layer.keys = layer.values = None
            layer.is_initialized = False

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = [t for layer in self._slot_layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


def _in_blocks(needed: int, present: int, block: int, limit: int) -> int:
    """Return ``present`` if that suffices, else 1.5 times it or more, up to ``limit``."""
    if needed <= present:
        return present
    return -(-max(needed, min(present + present // 2, limit)) // block) * block


def _grown(old: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
    new = old.new_zeros(num_rows, old.shape[1], capacity, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
