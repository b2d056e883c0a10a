"""Log-probs of response tokens from one forward over packed sequences, without padding. Entropies
are computed on request.

All sequences lie end to end in one row ``[1, N]`` whose position ids restart with each sequence
(``workers.engines.model.attention`` keeps them apart). Logits are computed only where a response
token is predicted. A big vocabulary is taken some rows at a time, and each part's logits are
recomputed for its gradient. So memory holds ``MAX_LOGITS`` logits whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pipeline.algorithms.batching import PackedBatch
from protocol.errors import EngineError
from workers.engines.model.attention import PACKED_ATTENTION, PackedLayout
from workers.engines.model.layers import attend_by, count_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LOGITS = 1 << 26
"""Logits alive at once: 64 Mi, or 256 MiB in fp32 (a row of 150,000 words: 447 tokens at once)."""

_Scores: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
_LOGIT_SCALING = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Entropy(Enum):
    """Whether the entropy of the next-token distribution is computed, and how."""

    NONE = "none"
    MEASURE = "measure"
    """Compute it without a gradient."""
    DIFFERENTIATE = "differentiate"


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Sequences laid end to end, of which the last tokens of each are scored: M in all."""

    tokens: torch.Tensor
    """int64 [N]"""
    layout: PackedLayout
    positions: torch.Tensor
    """int64 [M]: place in the row of the token before each scored one, where it is predicted."""
    targets: torch.Tensor
    """int64 [M]: the scored tokens."""

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], num_scored: Sequence[int], device: torch.device) -> PackedTokens:
        """Pack sequences. Raises EngineError unless a token precedes each one's scored tail."""
        lengths = np.array([sequence.size for sequence in sequences], dtype=np.int64)
        scored = np.array(num_scored, dtype=np.int64)
        wrong = np.flatnonzero((scored < 0) | (scored >= lengths))
        if wrong.size:
            first = int(wrong[0])
            raise EngineError(
                f"sequence {first} of {lengths.size} has {lengths[first]} tokens of which {scored[first]} are to be scored; "
                "at least one token must come before the scored ones: start prompts with a token"
            )
        row = np.concatenate(sequences).astype(np.int64)
        ends = np.cumsum(lengths)
        # place in the row of each scored token: the last `scored` places of every sequence
        places = np.arange(scored.sum()) + np.repeat(ends - np.cumsum(scored), scored)
        return cls(
            tokens=torch.from_numpy(row).to(device),
            layout=PackedLayout.of(lengths, device),
            positions=torch.from_numpy(places - 1).to(device),
            targets=torch.from_numpy(row[places]).to(device),
        )

    @classmethod
    def from_batch(cls, batch: PackedBatch, device: torch.device) -> PackedTokens:
        """Take the tokens of a training batch, whose scored tokens are its response tokens."""
        return cls(
            tokens=torch.from_numpy(batch.tokens.astype(np.int64)).to(device),
            layout=PackedLayout.of(np.diff(batch.cumulative_lengths), device),
            positions=torch.from_numpy(batch.predictors.astype(np.int64)).to(device),
            targets=torch.from_numpy(batch.targets.astype(np.int64)).to(device),
        )


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The policy's log-probs of the scored tokens, in row order, at the requested temperature."""

    logprobs: torch.Tensor
    """[M], float32 (float64 for a float64 model)"""
    entropy: torch.Tensor | None
    """[M], or None when not requested"""


def prepare_packed(model: PreTrainedModel) -> PreTrainedModel:
    """Make ``model`` attend by packed layout, and count its layers; see :func:`attend_by`."""
    refusal = "its sequences cannot be packed"
    return attend_by(PACKED_ATTENTION, model, unfit="would mix packed sequences", verb="packed", refusal=refusal)


def score_packed(
    model: PreTrainedModel,
    batch: PackedTokens,
    temperature: float = 1.0,
    entropy: Entropy = Entropy.NONE,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """Compute the log-prob of every scored token, differentiable when gradients are on.

    ``model`` went through :func:`prepare_packed`. Logits are divided by ``temperature``; that of
    sampling makes these the sampler's log-probs. Bigger batches than ``max_logits`` are computed in
    parts."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = max(1, max_logits // vocabulary)
    num_scored = batch.targets.numel()
    if num_scored <= rows or _scales_logits(model):
        output = model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.layout.position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.positions,
            packed_layout=batch.layout,
        )
        return TokenScores(*score_logits(output.logits.squeeze(0), batch.targets, temperature, entropy))
    hidden = hidden_packed(model, batch)
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"

    def score_part(states: torch.Tensor, targets: torch.Tensor) -> _Scores:
        return score_logits(head(states), targets, temperature, entropy)

    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for positions, targets in zip(batch.positions.split(rows), batch.targets.split(rows), strict=True):
        states = hidden.index_select(0, positions)
        if torch.is_grad_enabled():
            part = cast("_Scores", checkpoint(score_part, states, targets, use_reentrant=False))
        else:
            part = score_part(states, targets)
        count_part(part[0], 0.0)
        logprobs.append(part[0])
        if part[1] is not None:
            entropies.append(part[1])
    return TokenScores(torch.cat(logprobs), torch.cat(entropies) if entropies else None)


def hidden_packed(model: PreTrainedModel, batch: PackedTokens) -> torch.Tensor:
    """Return the last hidden states [N, hidden] under a model of :func:`prepare_packed`."""
    return model.base_model(
        input_ids=batch.tokens.unsqueeze(0),
        position_ids=batch.layout.position_ids.unsqueeze(0),
        use_cache=False,
        packed_layout=batch.layout,
    ).last_hidden_state.squeeze(0)


def score_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: Entropy) -> _Scores:
    """Return log-probs [M] of ``targets``, ``z[target] - logsumexp(z)``, and entropies [M],
    ``-sum p log p`` in nats, of ``logits`` [M, vocabulary] at ``temperature``."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = -cross_entropy(logits, targets, reduction="none")
    if entropy is Entropy.NONE:
        return logprobs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy is Entropy.DIFFERENTIATE):
        everything = torch.log_softmax(logits, dim=-1)
        return logprobs, -(everything.exp() * everything).sum(dim=-1)


def _scales_logits(model: PreTrainedModel) -> bool:
    """Whether the model changes logits after its head, so that only its ``forward`` is right."""
    config = model.config.get_text_config()
    return any(getattr(config, name, None) not in (None, 1.0) for name in _LOGIT_SCALING)
