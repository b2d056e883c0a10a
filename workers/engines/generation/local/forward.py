"""Runs a causal language model on the slot cache: prefill of contexts, decode of one token per row.

Uses slot attention; ``choose_forward`` verifies it against transformers.

A prefill fills the cache for all but a context's last token. That token goes through the next
decode step, so every token is sampled in one place. Contexts are laid end to end without padding; a
prompt that members of a group share is computed once. Small models of the dense family go through
``workers.engines.generation.local.dense``, all others through transformers' own forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from pipeline.preflight.engines import KNOWN
from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.generation.local.cache import SLOT_ATTENTION, DecodeStep, PrefillStep, SlotCache, hide
from workers.engines.generation.local.dense import (
    DenseForward,
    Prefill,
    is_dense,
    replace_weights,
    unserved_weights,
)
from workers.engines.generation.local.lone import LoneForward
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


class SlotForward:
    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        model.set_attn_implementation(SLOT_ATTENTION)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.cache = SlotCache(self.config.num_hidden_layers, num_slots)
        self.device = model.device
        self._columns = torch.arange(0, device=self.device)
        self._dense = DenseForward(model) if is_dense(model) else None
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

    def prefill(self, contexts: Sequence[np.ndarray], rows: Sequence[int]) -> int:
        """Fill rows with all but the last token of int32 contexts; return the tokens computed.

        A decode step of these rows must follow before any row is moved: it may do the computation."""
        self._store_joined()
        wanted: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for context, row in zip(contexts, rows, strict=True):
            if context.size > 1:
                head = context[:-1]
                wanted.setdefault(head.tobytes(), (head, []))[1].append(row)
        if not wanted:
            return 0
        self.cache.reserve(max(rows) + 1, max(context.size for context in contexts))
        by_length = sorted(wanted.values(), key=lambda entry: entry[0].size)
        total = sum(head.size for head, _ in by_length)
        if self._dense is not None and total <= JOINED_TOKENS:
            self._joined = self._lay(by_length)
            return total
        batch: list[tuple[np.ndarray, list[int]]] = []
        with work.task("prefill", float(total), "tokens"):
            for entry in by_length:
                if batch and sum(head.size for head, _ in batch) + entry[0].size > PREFILL_TOKENS:
                    self._fill(self._lay(batch), total)
                    batch = []
                batch.append(entry)
            self._fill(self._lay(batch), total)
        return total

    def _lay(self, batch: Sequence[tuple[np.ndarray, list[int]]]) -> Prefill:
        """Lay contexts end to end; each goes to one or more rows."""
        lengths = np.array([head.size for head, _ in batch])
        starts = np.cumsum(lengths) - lengths
        stored = [(start, head.size, row) for (head, rows), start in zip(batch, starts, strict=True) for row in rows]
        source = np.concatenate([np.arange(start, start + size) for start, size, _ in stored])
        positions = np.concatenate([np.arange(size) for _, size, _ in stored])
        target = np.repeat([row for _, _, row in stored], [size for _, size, _ in stored])
        return Prefill(
            self._put(np.concatenate([head for head, _ in batch]).astype(np.int64)),
            PackedLayout.of(lengths, self.device),
            PrefillStep(self._put(source), self._put(target), self._put(positions)),
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
        self.cache.step = prefill.step
        # only the base model, as a prefill needs no logits
        backbone(self.model)(
            input_ids=prefill.tokens[None],
            position_ids=prefill.layout.position_ids[None],
            past_key_values=self.cache,
            use_cache=True,
            packed_layout=prefill.layout,
        )

    def decode(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Feed int64 [n] tokens at ``positions`` of n rows; return logits [n, vocabulary]."""
        longest = int(positions.max()) + 1
        self.cache.reserve(positions.size, longest)
        step = self._decode_step(positions, longest)
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

    def _decode_step(self, positions: np.ndarray, longest: int) -> DecodeStep:
        if self._columns.shape[0] < max(longest, positions.size):
            self._columns = torch.arange(2 * max(longest, positions.size), device=self.device)
        place = self._put(positions)
        mask = None
        if int(positions.min()) + 1 < longest:
            mask = hide(self._columns[:longest] > place[:, None], self.model.dtype)
        return DecodeStep(self._columns[: positions.size], place, longest, mask)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
