"""Log-probs of response tokens, and optionally entropies, from one forward over packed sequences
without padding.

All sequences are laid end to end in one row ``[1, N]`` whose position ids restart with each
sequence (``workers.engines.model.attention`` keeps them apart). A prefix that several sequences
share, such as the prompt of a group, is in the row once (``pipeline.algorithms.prefixes``), except
on CUDA, whose kernel needs whole sequences; the state of its last token then predicts the next token
of each. Logits are computed only where a response token is predicted, a few
rows at a time (``workers.engines.model.head``), so they take at most ``HEAD_BYTES`` of memory,
whatever the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import structlog
import torch
from torch.utils.checkpoint import checkpoint

from pipeline.algorithms.batching import PackedBatch
from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.preflight.engines import KNOWN
from protocol.errors import EngineError
from workers.engines.model.attention import PACKED_ATTENTION, PackedLayout, lay
from workers.engines.model.head import (
    HEAD_BYTES,
    Entropy,
    cut_parts,
    head_math,
    loss_in_parts,
    rows_at_once,
    score_logits,
)
from workers.engines.model.layers import count_layers, count_part
from workers.engines.model.trial import (
    attend_eagerly,
    backbone,
    difference,
    plain_hidden,
    trial,
    trial_tokens,
    try_attention,
    unlike_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Plan = Sequence[Sequence[int]]
"""Micro-batches, each as indices into the samples. An empty one is a pass that counts for nothing: ranks that
compute together must all make the same number of passes."""

Backward = Callable[[torch.Tensor, torch.Tensor | None], None]
"""Adds the gradient of a micro-batch's loss to the parameters'. The second argument is given with the last
micro-batch: the sum of all losses of this rank, detached."""


def share_of_plan(plan: Plan, indices: Sequence[int], lengths: Sequence[int]) -> float:
    """Return a micro-batch's share of the tokens of ``plan``; 0 for an empty one."""
    everything = sum(lengths[index] for micro in plan for index in micro)
    return sum(lengths[index] for index in indices) / max(1, everything)


@contextmanager
def memory_errors(micro_batch_tokens: int, advice: str) -> Iterator[None]:
    """Turn running out of device memory into an EngineError that names the settings to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"no device memory for micro-batches of {micro_batch_tokens} tokens: {error}; {advice}"
        ) from error


_log = structlog.get_logger(__name__)

_Scores: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
_PACKING = "headrace_packing"


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Sequences laid end to end, of whose tokens M are scored."""

    tokens: torch.Tensor
    layout: PackedLayout
    positions: torch.Tensor
    """int64 [M]: index in the row of the token before each scored one, where it is predicted."""
    targets: torch.Tensor

    @classmethod
    def of(
        cls, sequences: Sequence[np.ndarray], num_scored: Sequence[int] | np.ndarray, device: torch.device
    ) -> PackedTokens:
        """Pack sequences whose last tokens are scored. Raises EngineError unless a token precedes them."""
        lengths = np.array([sequence.size for sequence in sequences], dtype=np.int64)
        scored = np.array(num_scored, dtype=np.int64)
        wrong = np.flatnonzero((scored < 0) | (scored >= lengths))
        if wrong.size:
            first = int(wrong[0])
            raise EngineError(
                f"sequence {first} of {lengths.size} has {lengths[first]} tokens of which {scored[first]} are to be scored; "
                "at least one token must precede them: start prompts with a token"
            )
        return cls.at(sequences, [np.arange(n - m, n) for n, m in zip(lengths, scored, strict=True)], device)

    @classmethod
    def at(cls, sequences: Sequence[np.ndarray], scored: Sequence[np.ndarray], device: torch.device) -> PackedTokens:
        """Pack sequences with the indices of their scored tokens, from 1 on."""
        lengths = np.array([sequence.size for sequence in sequences], dtype=np.int64)
        prefixes = find_prefixes(sequences, device)
        order, shared = prefixes.order.tolist(), prefixes.shared
        row = np.concatenate([sequences[index][alike:] for index, alike in zip(order, shared, strict=True)])
        places = dict(zip(order, lay(lengths[prefixes.order], shared), strict=True))
        # for each scored token, the index of the one before
        before = np.concatenate([places[index][at - 1] for index, at in enumerate(scored)], dtype=np.int64)
        targets = np.concatenate([sequence[at] for sequence, at in zip(sequences, scored, strict=True)])
        return cls(
            tokens=torch.from_numpy(row.astype(np.int64)).to(device),
            layout=PackedLayout.of(lengths[prefixes.order], device, shared),
            positions=torch.from_numpy(before).to(device),
            targets=torch.from_numpy(targets.astype(np.int64)).to(device),
        )

    @classmethod
    def from_batch(cls, batch: PackedBatch, device: torch.device) -> PackedTokens:
        begins = batch.cumulative_lengths[:-1]
        scored = batch.split(batch.predictors + 1 - begins[batch.row_ids])
        return cls.at(np.split(batch.tokens, begins[1:]), scored, device)


def find_prefixes(sequences: Sequence[np.ndarray], device: torch.device) -> SharedPrefixes:
    """Return the prefixes that a packed row on ``device`` holds once."""
    if not _has_shared_rows(device):
        return SharedPrefixes.none([sequence.size for sequence in sequences])
    return SharedPrefixes.of(sequences)


def _has_shared_rows(device: torch.device) -> bool:
    # the kernel of CUDA needs whole sequences
    return device.type != "cuda"


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of the scored tokens, in row order, at the requested temperature."""

    logprobs: torch.Tensor
    """[M], float32 (float64 for a float64 model)"""
    entropy: torch.Tensor | None
    states: torch.Tensor | None = None
    """[M, hidden]: the last hidden states that predict them, detached; or None"""


PartLoss: TypeAlias = Callable[[TokenScores, slice], torch.Tensor]
"""Returns the scalar loss of one slice of the scored tokens."""


@dataclass(frozen=True, slots=True)
class Packing:
    unpacked_because: str = ""
    """Why sequences are computed in padded batches; empty if they stay packed."""
    is_head_last: bool = True
    """Whether the logits are exactly what the head returns for the last hidden states."""


def prepare_packed(model: PreTrainedModel) -> PreTrainedModel:
    """Make ``model`` compute rows of sequences, packed where that is correct, and count its layers.

    A model of an unknown type is tried first (``workers.engines.model.trial``), with a shared prefix
    too. If packed attention gives other results, sequences of similar length are computed in padded
    batches, each with its whole prefix, and a line of the log says why. Raises EngineError when
    padding changes the results too."""
    packing = _find_packing(model)
    setattr(model, _PACKING, packing)
    if packing.unpacked_because:
        _log.warning("sequences_padded", model=type(model).__name__, reason=packing.unpacked_because)
    return count_layers(model)


def keep_packed(model: PreTrainedModel) -> PreTrainedModel:
    """Prepare a model, and raise EngineError if its sequences cannot stay packed. Padded batches
    take several passes, and ranks that share a model would make different numbers of them."""
    if reason := packing_of(prepare_packed(model)).unpacked_because:
        raise EngineError(
            f"{type(model).__name__} needs padded batches ({reason}), which sharding over ranks does not support; set the "
            "backend to torch, or choose another model (Qwen2, Qwen3 and Llama work)"
        )
    return model


def packing_of(model: PreTrainedModel) -> Packing:
    return getattr(model, _PACKING)


def planned_prefixes(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> SharedPrefixes:
    """Return the prefixes that ``model`` computes once: none in padded batches."""
    if packing_of(model).unpacked_because:
        return SharedPrefixes.none([sequence.size for sequence in sequences])
    return find_prefixes(sequences, model.device)


def shares_prefixes(model: PreTrainedModel) -> bool:
    return _has_shared_rows(model.device) and not packing_of(model).unpacked_because


def _find_packing(model: PreTrainedModel) -> Packing:
    if model.config.model_type in KNOWN and unlike_attention(model) is None:
        model.set_attn_implementation(PACKED_ATTENTION)
        return Packing()
    attend_eagerly(model)
    first, second = trial_tokens(model)
    sequences = [first, second, np.concatenate([first[: first.size // 2], second])]
    truth = trial(lambda: plain_hidden(model, sequences))
    is_head_last = truth.is_meta or _is_head_last(model)
    batch = PackedTokens.of(sequences, [tokens.size - 1 for tokens in sequences], model.device)
    reason = try_attention(model, PACKED_ATTENTION, lambda: _hidden_packed(model, batch)[batch.positions], truth)
    if not reason:
        return Packing(is_head_last=is_head_last)
    attend_eagerly(model)
    if truth.is_meta:
        return Packing(unpacked_because=reason)
    if wrong := difference(trial(lambda: _hidden_padded(model, batch)[batch.positions]), truth):
        raise EngineError(
            f"{type(model).__name__} is not causal: a token's outputs depend on later tokens ({wrong}); choose a "
            "decoder-only language model (Qwen2, Qwen3 and Llama are)"
        )
    return Packing(unpacked_because=reason, is_head_last=is_head_last)


@torch.no_grad()
def _is_head_last(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    if head is None:
        return False
    tokens = torch.from_numpy(trial_tokens(model)[0])[None].to(model.device)
    logits = model(input_ids=tokens, use_cache=False)[0]
    made = head(backbone(model)(input_ids=tokens, use_cache=False)[0]).to(logits.dtype)
    return torch.equal(made, logits)


def score_packed(
    model: PreTrainedModel,
    batch: PackedTokens,
    temperature: float = 1.0,
    entropy: Entropy = Entropy.NONE,
    head_bytes: int = HEAD_BYTES,
    *,
    keep_states: bool = False,
) -> TokenScores:
    """Compute the log-prob of every scored token, differentiable when gradients are enabled.

    ``model`` must have been through :func:`prepare_packed`. Logits are divided by ``temperature``;
    with the sampling temperature these are the sampler's log-probs. Logits that take more than
    ``head_bytes`` are computed in parts and recomputed for the gradient; :func:`loss_packed` avoids
    that. ``keep_states`` also returns hidden states, and raises EngineError for a model that changes
    them before its head."""
    packing = packing_of(model)
    if keep_states and not packing.is_head_last:
        raise EngineError(
            f"{type(model).__name__} changes its hidden states before its head, so guidance.clusters cannot use them; "
            "turn clusters off, or choose another model (Qwen2, Qwen3 and Llama work)"
        )
    if packing.unpacked_because and not packing.is_head_last:
        logits = _each_bucket(batch, lambda tokens: model(input_ids=tokens, use_cache=False)[0])
        logits = logits.index_select(0, batch.positions)
        return TokenScores(*score_logits(logits, batch.targets, temperature, entropy, head_math(model)))
    fits = batch.targets.numel() <= _rows_at_once(model, head_bytes) and not _is_released(model)
    if not keep_states and not packing.unpacked_because and (fits or not packing.is_head_last):
        output = model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.layout.position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.positions,
            packed_layout=batch.layout,
        )
        return TokenScores(
            *score_logits(output.logits.squeeze(0), batch.targets, temperature, entropy, head_math(model))
        )
    hidden = hidden_packed(model, batch).index_select(0, batch.positions)
    scores = _score_states(model, hidden, batch.targets, temperature, entropy, head_bytes)
    return TokenScores(*scores, hidden.detach() if keep_states else None)


def loss_packed(
    model: PreTrainedModel,
    batch: PackedTokens,
    loss: PartLoss,
    temperature: float = 1.0,
    entropy: Entropy = Entropy.NONE,
    head_bytes: int = HEAD_BYTES,
    *,
    row_ids: np.ndarray,
    keep_rows: bool,
    keep_states: bool = False,
) -> torch.Tensor:
    """Compute the sum of ``loss`` over parts of the scored tokens, a scalar to differentiate.

    Logits are computed once, and their gradient with them. The exceptions, computed as by
    :func:`score_packed`: a sequence that ``keep_rows`` keeps in one part although its logits take
    more than ``head_bytes``, a model that changes its hidden states before its head, and ZeRO-3.
    ``row_ids`` [M] are the scored tokens' sequences, ascending. Other arguments and errors are
    those of :func:`score_packed`."""
    packing = packing_of(model)
    parts = cut_parts(row_ids, _rows_at_once(model, head_bytes), keep_rows=keep_rows)
    if len(parts) == 1 or not packing.is_head_last or _is_released(model):
        everything = slice(0, batch.targets.numel())
        return loss(score_packed(model, batch, temperature, entropy, head_bytes, keep_states=keep_states), everything)

    def of_part(states: torch.Tensor, part: slice) -> torch.Tensor:
        scores = _score_states(model, states, batch.targets[part], temperature, entropy, head_bytes)
        return loss(TokenScores(*scores, states.detach() if keep_states else None), part)

    states = hidden_packed(model, batch).index_select(0, batch.positions)
    return loss_in_parts(_head(model), states, parts, of_part)


def _rows_at_once(model: PreTrainedModel, head_bytes: int) -> int:
    return rows_at_once(int(model.config.get_text_config().vocab_size), model.dtype, head_bytes)


def _head(model: PreTrainedModel) -> torch.nn.Module:
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    return head


def _is_released(model: PreTrainedModel) -> bool:
    """Whether ranks bring the head's parameters together for each call of it, and release them after
    it, so that no gradient is made later and all ranks must call it as often as one another.
    DeepSpeed's ZeRO-3 marks such parameters."""
    head = model.get_output_embeddings()
    return head is not None and any(hasattr(parameter, "ds_id") for parameter in head.parameters())


def _most_over_ranks(number: int, device: torch.device) -> int:
    if not torch.distributed.is_initialized():
        return number
    most = torch.tensor([number], device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def _score_states(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: Entropy,
    head_bytes: int,
) -> _Scores:
    head, math, rows = _head(model), head_math(model), _rows_at_once(model, head_bytes)

    def score_part(states: torch.Tensor, targets: torch.Tensor) -> _Scores:
        return score_logits(head(states), targets, temperature, entropy, math)

    size = targets.numel()
    num_parts = -(-size // rows)
    if _is_released(model):
        num_parts = _most_over_ranks(num_parts, hidden.device)
    if num_parts == 1:
        return score_part(hidden, targets)
    if num_parts > size:
        # every rank makes the same number of parts: the last token again, for those that it lacks
        hidden = torch.cat([hidden, hidden[-1:].expand(num_parts - size, -1)])
        targets = torch.cat([targets, targets[-1:].expand(num_parts - size)])
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for states, wanted in zip(hidden.tensor_split(num_parts), targets.tensor_split(num_parts), strict=True):
        if torch.is_grad_enabled():
            part = cast("_Scores", checkpoint(score_part, states, wanted, use_reentrant=False))
        else:
            part = score_part(states, wanted)
        count_part(part[0], 0.0)
        logprobs.append(part[0])
        if part[1] is not None:
            entropies.append(part[1])
    return torch.cat(logprobs)[:size], torch.cat(entropies)[:size] if entropies else None


def hidden_packed(model: PreTrainedModel, batch: PackedTokens) -> torch.Tensor:
    """Return the last hidden states [N, hidden]."""
    return (_hidden_padded if packing_of(model).unpacked_because else _hidden_packed)(model, batch)


def _hidden_packed(model: PreTrainedModel, batch: PackedTokens) -> torch.Tensor:
    return backbone(model)(
        input_ids=batch.tokens.unsqueeze(0),
        position_ids=batch.layout.position_ids.unsqueeze(0),
        use_cache=False,
        packed_layout=batch.layout,
    )[0].squeeze(0)


def _hidden_padded(model: PreTrainedModel, batch: PackedTokens) -> torch.Tensor:
    return _each_bucket(batch, lambda tokens: backbone(model)(input_ids=tokens, use_cache=False)[0])


def _each_bucket(batch: PackedTokens, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute each bucket's int64 [sequences, length] tokens; return the results in row order, [N,
    ...]. Padding is on the right, where no token of a causal model sees it."""
    made: list[torch.Tensor] = []
    for bucket in batch.layout.buckets:
        tokens = batch.tokens.index_select(0, bucket.gather).unflatten(0, (bucket.num_sequences, bucket.length))
        made.append(compute(tokens).flatten(0, 1))
        # some models have no layers with progress marks
        count_part(made[-1], 0.0)
    # of a token and its padding the first has the token's place; assigned last, it stays
    gathered = torch.cat([bucket.gather for bucket in batch.layout.buckets]).cpu().numpy()
    first = np.empty(batch.tokens.numel(), np.int64)
    first[gathered[::-1]] = np.arange(gathered.size)[::-1]
    return torch.cat(made).index_select(0, torch.from_numpy(first).to(batch.tokens.device))
