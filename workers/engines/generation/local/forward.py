"""Runs a causal language model on the slot cache: prefill of contexts, decode of one token per row.

Uses slot attention; ``choose_forward`` verifies it against transformers.

A prefill fills the cache for all but a context's last token. That token goes through the next
decode step, so every token is sampled in one place. Contexts are laid end to end without padding; a
prompt that members of a group share is computed once. Small models of the dense family go through
``workers.engines.generation.local.dense``, all others through transformers' own forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from pipeline.preflight.engines import KNOWN
from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.generation.local.cache import (
    SLOT_ATTENTION,
    DecodeStep,
    PrefillStep,
    SharedStep,
    SlotCache,
    hide,
)
from workers.engines.generation.local.dense import (
    DenseForward,
    Prefill,
    is_dense,
    replace_weights,
    unserved_weights,
)
from workers.engines.generation.local.lone import LoneForward
from workers.engines.generation.local.prompts import SharedPrompt, SharedPrompts
from workers.engines.model.attention import PackedLayout
from workers.engines.model.layers import count_layers
from workers.engines.model.trial import (
    attend_eagerly,
    backbone,
    difference,
    trial,
    trial_tokens,
    try_attention,
    unlike_attention,
)

_STEPS = 2
"""Decode steps of a trial: the second one reads what the first one stored."""


def make_forward(model: PreTrainedModel, num_slots: int) -> SlotForward | LoneForward:
    """Choose how to compute ``model``. Raises EngineError when no way reproduces its own logits."""
    if model.config.model_type in KNOWN and unlike_attention(model) is None:
        forward = SlotForward(model, num_slots)
    else:
        forward, _ = choose_forward(model, num_slots)
    count_layers(forward.model)
    return forward


def choose_forward(model: PreTrainedModel, num_slots: int) -> tuple[SlotForward | LoneForward, str]:
    """Choose by trial how to compute a model; also return why the slot cache cannot be used, if so."""
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
            f"{type(model).__name__} cannot be sampled token by token: {wrong}. With the slot cache: {reason}. Choose another "
            "model (Qwen2, Qwen3 and Llama work), or generation.engine = 'vllm'"
        )
    lone.cache.release()
    return lone, reason


def _plain_logits(model: PreTrainedModel, sequences: list[np.ndarray]) -> torch.Tensor:
    """Return logits [steps, sequences, vocabulary] of each sequence's last tokens; empty on
    ``meta``."""
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


PREFILL_TOKENS = 8192
"""Tokens of one prefill forward; a longer context goes alone."""
JOINED_TOKENS = 1024
"""A prefill of at most this many tokens goes through the layers with the next decode step, since
reading the weights takes as long as computing with them."""


@dataclass(frozen=True, slots=True)
class _Head:
    """A context to compute, without its last token."""

    tokens: np.ndarray
    stores: list[tuple[SlotCache, int, int, int]]
    """Cache and row that tokens ``start`` to ``end`` go to."""


class SlotForward:
    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        model.set_attn_implementation(SLOT_ATTENTION)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.cache = SlotCache(self.config.num_hidden_layers, num_slots)
        self.device = model.device
        self._columns = torch.arange(0, device=self.device)
        self._dense = DenseForward(model) if is_dense(model) else None
        self.prompts: SharedPrompts | None = None
        if self._dense is not None and self._dense.can_share:
            self.prompts = SharedPrompts(self.config.num_hidden_layers, num_slots)
        self._joined: Prefill | None = None
        """Contexts that the next decode step stores."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        replace_weights(self.model, tensors)
        if self._dense is not None:
            self._dense.take_weights()

    def unserved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        found = unserved_weights(self.model, tensors)
        return found if self._dense is None or self._dense.is_current() else [*found, "(copies of the dense forward)"]

    def copy_start(self, target: int, source: int, length: int) -> None:
        """Fill row ``target`` with the first tokens of row ``source``."""
        self.cache.reserve(max(target, source) + 1, length + 1)
        self.cache.copy_start(target, source, length)

    @property
    def cache_bytes(self) -> int:
        return self.cache.num_bytes + (0 if self.prompts is None else self.prompts.cache.num_bytes)

    def share(self, prompts: Sequence[SharedPrompt | None]) -> SharedStep | None:
        """Prepare decode steps of rows with these prompts; valid until rows or prompts change."""
        return None if self.prompts is None else self.prompts.step(prompts, self.device, self.model.dtype)

    def prefill(
        self, contexts: Sequence[np.ndarray], rows: Sequence[int], prompts: Sequence[SharedPrompt | None] = ()
    ) -> int:
        """Fill rows with all but the last token of int32 contexts; return the tokens computed.

        What a shared prompt holds of a context is stored there, unless it is already. A decode step of these rows
        must follow before any row is moved: it may do the computation."""
        self._store_joined()
        wanted: dict[bytes, _Head] = {}
        for context, row, prompt in zip(contexts, rows, prompts or [None] * len(rows), strict=True):
            tokens, start = context[:-1], 0
            stores: list[tuple[SlotCache, int, int, int]] = []
            if prompt is not None and self.prompts is not None:
                start = prompt.size
                if not prompt.is_stored:
                    stores.append((self.prompts.cache, prompt.row, 0, start))
                    prompt.is_stored = True
            if tokens.size > start:
                stores.append((self.cache, row, start, tokens.size))
            if stores:
                wanted.setdefault(tokens.tobytes(), _Head(tokens, [])).stores.extend(stores)
        if not wanted:
            return 0
        by_length = sorted(wanted.values(), key=lambda head: head.tokens.size)
        for head in by_length:
            for cache, row, start, end in head.stores:
                cache.reserve(row + 1, end - start + 1)
        total = sum(head.tokens.size for head in by_length)
        if self._dense is not None and total <= JOINED_TOKENS:
            self._joined = self._lay(by_length)
            return total
        batch: list[_Head] = []
        with work.task("prefill", float(total), "tokens"):
            for head in by_length:
                if batch and sum(other.tokens.size for other in batch) + head.tokens.size > PREFILL_TOKENS:
                    self._fill(self._lay(batch), total)
                    batch = []
                batch.append(head)
            self._fill(self._lay(batch), total)
        return total

    def _lay(self, batch: Sequence[_Head]) -> Prefill:
        """Lay contexts end to end."""
        lengths = np.array([head.tokens.size for head in batch])
        begins = np.cumsum(lengths) - lengths
        stores: list[tuple[SlotCache, PrefillStep]] = []
        caches = [self.cache] if self.prompts is None else [self.cache, self.prompts.cache]
        for cache in caches:
            parts = [
                (row, begin + start, end - start)
                for head, begin in zip(batch, begins.tolist(), strict=True)
                for where, row, start, end in head.stores
                if where is cache
            ]
            if parts:
                source = np.concatenate([np.arange(first, first + size) for _, first, size in parts])
                positions = np.concatenate([np.arange(size) for _, _, size in parts])
                target = np.repeat([row for row, _, _ in parts], [size for _, _, size in parts])
                stores.append((cache, PrefillStep(self._put(source), self._put(target), self._put(positions))))
        return Prefill(
            self._put(np.concatenate([head.tokens for head in batch]).astype(np.int64)),
            PackedLayout.of(lengths, self.device),
            stores,
        )

    def _store_joined(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            self._fill(joined, joined.layout.num_tokens)

    def _fill(self, prefill: Prefill, total: int) -> None:
        """Compute a prefill, which is a part of ``total`` tokens."""
        with work.part(prefill.layout.num_tokens / total):
            self._compute(prefill)

    def _compute(self, prefill: Prefill) -> None:
        if self._dense is not None:
            self._dense.prefill(prefill, self.cache)
            return
        ((_, self.cache.step),) = prefill.stores
        # only the base model, as a prefill needs no logits
        backbone(self.model)(
            input_ids=prefill.tokens[None],
            position_ids=prefill.layout.position_ids[None],
            past_key_values=self.cache,
            use_cache=True,
            packed_layout=prefill.layout,
        )

    def decode(self, tokens: np.ndarray, positions: np.ndarray, shared: SharedStep | None = None) -> torch.Tensor:
        """Feed int64 [n] tokens at ``positions`` of n contexts; return logits [n, vocabulary]."""
        if shared is not None:
            positions = positions - shared.stored
        longest = int(positions.max()) + 1
        self.cache.reserve(positions.size, longest)
        step = self._decode_step(positions, longest, shared)
        if self._dense is not None:
            joined, self._joined = self._joined, None
            return self._dense.decode(self._put(tokens), self.cache, step, joined)
        self.cache.step = step
        output = self.model(
            input_ids=self._put(tokens)[:, None],
            position_ids=step.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
            slot_step=step,
        )
        return output.logits[:, -1]

    def _decode_step(self, positions: np.ndarray, longest: int, shared: SharedStep | None) -> DecodeStep:
        if self._columns.shape[0] < max(longest, positions.size):
            self._columns = torch.arange(2 * max(longest, positions.size), device=self.device)
        place = self._put(positions)
        mask = None
        if int(positions.min()) + 1 < longest:
            mask = hide(self._columns[:longest] > place[:, None], self.model.dtype)
        return DecodeStep(self._columns[: positions.size], place, longest, mask, shared)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
