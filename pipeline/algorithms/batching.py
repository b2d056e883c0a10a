"""Training samples, mini-batches, micro-batches and packing plans without padding.

A mini-batch is one optimiser step; a micro-batch under a token budget is one forward. Everything
here is a pure function on numpy arrays; no torch.

Nothing here decides what a token is worth. Loss weights are made from the lengths of a whole
mini-batch (``pipeline.algorithms.aggregation``) before it is cut. Every plan that uses each sample
once therefore gives the same gradient."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike

_CPU_TOKENS, _CUDA_TOKENS = 1 << 10, 1 << 14
"""Tokens of a micro-batch that a configuration does not set."""
ROW_METRICS = (
    "proximal_perplexity", "proximal_log_perplexity", "behavior_perplexity", "behavior_log_perplexity",
    "log_perplexity_gap", "log_perplexity_gap_abs", "perplexity_ratio", "sequence_chi2",
)  # fmt: skip
"""The metrics of a step that are means over samples, not over tokens (``divergence``)."""
_TOKEN_ARRAYS = (
    "loss_mask", "advantages", "behavior_logprobs", "versions", "old_logprobs", "reference_logprobs", "nll_mask",
    "standard_logprobs", "judge_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One trajectory, or a window of it, as a training step reads it: R response tokens."""

    name: str
    """Trajectory or chunk id, for error messages."""
    tokens: np.ndarray
    """int32 [prompt + response]"""
    prompt_length: int
    """Tokens before the first response token; at least 1."""
    loss_mask: np.ndarray
    """bool [R]: tokens that carry loss."""
    advantages: np.ndarray
    """float32 [R]; only read where the mask is set."""
    behavior_logprobs: np.ndarray
    """float32 [R], when sampled."""
    versions: np.ndarray
    """int32 [R], the policy version that sampled each token."""
    reference_logprobs: np.ndarray | None = None
    """float32 [R]"""
    old_logprobs: np.ndarray | None = None
    """float32 [R], the learner's at the start of the update; filled in before its first step."""
    nll_mask: np.ndarray | None = None
    """bool [R], whatever loss_mask: right responses' tokens with imitation loss (VAPO, 4.3.2)."""
    standard_logprobs: np.ndarray | None = None
    """float32 [R], after the prompt with the gold text; None: no guidance."""
    judge_logprobs: np.ndarray | None = None
    """float32 [R], after the prompt with the judgment: of wrong responses alone."""
    is_unguided: bool | None = None
    """Whether guidance is absent that its rule reads; None for a rule that reads none."""
    counted_tokens: float | None = None
    """Its count in the loss's denominator, where that is not its number of loss tokens (T-PPO)."""
    reward: float = 0.0
    accuracy: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Summands of the reward by name, for the history."""
    is_finished: bool = True
    """Whether the response ends here; if not, reward and accuracy are unknown and 0."""
    num_context_tokens: int = 0
    """Earlier response tokens that ``tokens`` holds as prompt: windows are trained one by one."""

    @property
    def response_length(self) -> int:
        """R."""
        return int(self.tokens.size - self.prompt_length)

    @property
    def trains(self) -> bool:
        """Whether any of its tokens carries loss, imitation's included."""
        return bool(self.loss_mask.any()) or (self.nll_mask is not None and bool(self.nll_mask.any()))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """``num_rows`` samples laid end to end, without padding: N tokens, of which M are scored."""

    tokens: np.ndarray
    """int32 [N]"""
    position_ids: np.ndarray
    """int32 [N]: restarts at 0 with each sample."""
    cumulative_lengths: np.ndarray
    """int32 [num_rows + 1]: where each sample begins in ``tokens``, and N."""
    predictors: np.ndarray
    """int64 [M]: place in ``tokens`` of the token before each response token, which predicts it."""
    targets: np.ndarray
    """int32 [M]: the response tokens."""
    row_ids: np.ndarray
    """int64 [M]: the sample of each response token, 0 .. num_rows - 1, ascending."""
    loss_mask: np.ndarray
    """bool [M]"""
    advantages: np.ndarray
    """float32 [M]"""
    behavior_logprobs: np.ndarray
    """float32 [M]"""
    old_logprobs: np.ndarray | None
    """float32 [M]; None unless every sample has them."""
    reference_logprobs: np.ndarray | None
    """float32 [M]; None unless every sample has them."""
    versions: np.ndarray
    """int32 [M]"""
    nll_mask: np.ndarray
    """bool [M]: tokens that carry imitation loss."""
    standard_logprobs: np.ndarray | None = None
    """float32 [M], 0 where absent; None unless some sample has them."""
    judge_logprobs: np.ndarray | None = None
    """float32 [M], 0 where absent; None unless some sample has standard log-probs."""
    has_standard: np.ndarray | None = None
    """bool [M]: tokens whose standard log-probs are there."""
    has_judge: np.ndarray | None = None
    """bool [M]: tokens whose judge log-probs are there."""

    @property
    def num_rows(self) -> int:
        """Samples in the batch."""
        return int(self.cumulative_lengths.size - 1)

    @property
    def num_tokens(self) -> int:
        """N: prompt and response tokens."""
        return int(self.tokens.size)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut an array [M] of response-token values into one [R] for each sample, in order."""
        counts = np.bincount(self.row_ids, minlength=self.num_rows)
        return np.split(values, np.cumsum(counts)[:-1])


def pack(samples: Sequence[TrainingSample]) -> PackedBatch:
    """Lay samples end to end, in the order given.

    Raises ValueError for no sample, and for one without a token before its first response token.
    Each array must have one entry a response token. The error names the sample."""
    if not samples:
        raise ValueError("a packed batch of 0 samples; expected at least 1; skip the step instead")
    for sample in samples:
        _check(sample)
    lengths = np.array([sample.tokens.size for sample in samples], dtype=np.int64)
    response_lengths = np.array([sample.response_length for sample in samples], dtype=np.int64)
    ends = np.cumsum(lengths)
    row_ids = np.repeat(np.arange(len(samples), dtype=np.int64), response_lengths)
    # place of every response token: the last `response_lengths[r]` places of each row
    places = np.arange(row_ids.size) + np.repeat(ends - np.cumsum(response_lengths), response_lengths)
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int32, copy=False)
    imitated = [np.zeros(s.response_length, np.bool_) if s.nll_mask is None else s.nll_mask for s in samples]
    return PackedBatch(
        tokens=tokens,
        position_ids=(np.arange(tokens.size) - np.repeat(ends - lengths, lengths)).astype(np.int32),
        cumulative_lengths=np.concatenate([[0], ends]).astype(np.int32),
        predictors=places - 1,
        targets=tokens[places],
        row_ids=row_ids,
        loss_mask=_join([sample.loss_mask for sample in samples], np.bool_),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        behavior_logprobs=_join([sample.behavior_logprobs for sample in samples], np.float32),
        old_logprobs=_join_all([sample.old_logprobs for sample in samples]),
        reference_logprobs=_join_all([sample.reference_logprobs for sample in samples]),
        versions=_join([sample.versions for sample in samples], np.int32),
        nll_mask=_join(imitated, np.bool_),
        **_guided(samples),
    )


def _guided(samples: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    """Return the guided columns of a batch; none where no sample has guidance."""
    found = {"standard": [s.standard_logprobs for s in samples], "judge": [s.judge_logprobs for s in samples]}
    if all(array is None for array in found["standard"]):
        return {}
    lengths = [sample.response_length for sample in samples]
    columns: dict[str, np.ndarray] = {}
    for name, arrays in found.items():
        pairs = list(zip(arrays, lengths, strict=True))
        columns[f"{name}_logprobs"] = _join([np.zeros(n) if a is None else a for a, n in pairs], np.float32)
        columns[f"has_{name}"] = np.repeat([array is not None for array in arrays], lengths)
    return columns


def tokens_at_once(micro_batch_tokens: int | None, *, on_cpu: bool) -> int:
    """Return the tokens of one pass of a learning worker: the setting, else the device's default. A
    CPU gains nothing beyond a thousand, whose activations lie in host memory. A GPU needs many."""
    return micro_batch_tokens or (_CPU_TOKENS if on_cpu else _CUDA_TOKENS)


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, prompts: Sequence[bytes] = ()) -> list[list[int]]:
    """Group samples into micro-batches of at most ``max_tokens`` tokens, every sample whole.

    Best-fit decreasing: the longest samples first, each into the fullest micro-batch that still has
    room (at most 11/9 of the fewest possible, plus one). A sample above the budget is alone in its
    micro-batch, since it cannot be cut. With ``prompts``, one for each sample, neighbours with the
    same prompt are placed together, as many as the budget holds. The same arguments give the same
    plan: each index once, ascending within a micro-batch, micro-batches by their first. ValueError
    for a budget below 1."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1: raise the token budget of a micro-batch")
    pieces = _neighbours(lengths, max_tokens, prompts) if prompts else [[index] for index in range(len(lengths))]
    sizes = [sum(lengths[index] for index in piece) for piece in pieces]
    batches: list[list[int]] = []
    # (tokens still free, micro-batch), ascending
    rooms: list[tuple[int, int]] = []
    for place in sorted(range(len(pieces)), key=lambda i: (-sizes[i], i)):
        size = sizes[place]
        fitting = bisect_left(rooms, (size, -1))
        if fitting < len(rooms):
            room, batch = rooms.pop(fitting)
        else:
            room, batch = max_tokens, len(batches)
            batches.append([])
        batches[batch] += pieces[place]
        if room > size:
            insort(rooms, (room - size, batch))
    return sorted(sorted(batch) for batch in batches)


def _neighbours(lengths: Sequence[int], max_tokens: int, prompts: Sequence[bytes]) -> list[list[int]]:
    """Cut samples, in their order, where the prompt changes or ``max_tokens`` would be exceeded."""
    pieces: list[list[int]] = []
    size = 0
    for index, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        if not pieces or prompt != prompts[index - 1] or size + length > max_tokens:
            pieces.append([])
            size = 0
        pieces[-1].append(index)
        size += length
    return pieces


def plan_padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences that are padded to their batch's longest, at most ``max_tokens`` in all.

    Neighbours in length come together, the longest first, so that there is little to pad. A
    sequence above the budget is alone. Each index is in one batch. ValueError for a budget below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1: raise the token budget of a batch")
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def plan_ranks(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Share samples among ranks by :func:`balance`, and group each share by
    :func:`plan_micro_batches`.

    All ranks get the same number of micro-batches, for they compute in step: a rank with fewer gets
    empty ones. Each has its fullest first, so that micro-batches of the same step are of about the
    same size. Raises ValueError for ``num_ranks`` or ``max_tokens`` below 1."""
    plans: list[list[list[int]]] = []
    for share in balance(lengths, num_ranks):
        plan = plan_micro_batches([lengths[index] for index in share], max_tokens)
        batches = [[share[place] for place in batch] for batch in plan]
        plans.append(sorted(batches, key=lambda batch: (-sum(lengths[index] for index in batch), batch)))
    num_rounds = max(len(plan) for plan in plans)
    return [plan + [[]] * (num_rounds - len(plan)) for plan in plans]


def split_minibatches(samples: Sequence[TrainingSample], num: int) -> list[list[TrainingSample]]:
    """Cut samples, in their order, into at most ``num`` mini-batches whose sizes differ by at most
    one; none is empty. Raises ValueError for ``num`` below 1."""
    if num < 1:
        raise ValueError(f"num is {num}; expected at least 1 mini-batch")
    num = min(num, len(samples))
    cuts = [len(samples) * i // num for i in range(num + 1)] if num else [0]
    return [list(samples[start:end]) for start, end in pairwise(cuts)]


def balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share samples among ranks so that their token counts are nearly equal: longest first, each to
    the emptiest rank.

    The fullest rank holds at most 4/3 of the best possible. The same lengths give the same shares,
    ascending; a rank may get none. Raises ValueError for ``num_ranks`` below 1."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; expected at least 1")
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(num_ranks), key=lambda r: (totals[r], len(shares[r]), r))
        shares[rank].append(index)
        totals[rank] += lengths[index]
    return [sorted(share) for share in shares]


def _check(sample: TrainingSample) -> None:
    length = sample.response_length
    if not 1 <= sample.prompt_length < sample.tokens.size:
        raise ValueError(
            f"sample {sample.name} has {sample.tokens.size} tokens, of which {sample.prompt_length} are prompt; expected at "
            "least 1 prompt and 1 response token"
        )
    for name in _TOKEN_ARRAYS:
        values: np.ndarray | None = getattr(sample, name)
        if values is not None and values.shape != (length,):
            raise ValueError(
                f"sample {sample.name} has {name} of shape {values.shape}; expected ({length},), one entry a response token"
            )


def _join(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False)


def _join_all(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [array for array in arrays if array is not None]
    return _join(present, np.float32) if len(present) == len(arrays) else None
