"""Training samples, mini-batches, micro-batches, and packing without padding.

A mini-batch is one optimiser step; a micro-batch under a token budget is one forward pass.
Everything here is a pure function of numpy arrays; no torch.

Loss weights are computed from the whole mini-batch (``pipeline.algorithms.terms.aggregation``) before it
is cut, so every plan that uses each sample once gives the same gradient."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from pipeline.algorithms.assemble import SampledSequence
from pipeline.algorithms.prefixes import SharedPrefixes

_CPU_TOKENS, _CUDA_TOKENS = 1 << 10, 1 << 14
"""Default token budget of a micro-batch."""
READ_AGAIN = 8
"""Attention may copy the keys and values of this many tokens for each token of a budget."""
ROW_METRICS = (
    "proximal_perplexity", "proximal_log_perplexity", "behavior_perplexity", "behavior_log_perplexity",
    "log_perplexity_gap", "log_perplexity_gap_abs", "perplexity_ratio", "sequence_chi2",
)  # fmt: skip
"""The step metrics that are averaged over samples rather than tokens (``divergence``)."""
_TOKEN_ARRAYS = (
    "loss_mask", "advantages", "behavior_logprobs", "versions", "old_logprobs", "reference_logprobs", "nll_mask",
    "standard_logprobs", "judge_logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One trajectory, or a window of it, as the training step reads it, with R response tokens: those
    that the policy sampled. Tokens of an environment among them are state."""

    name: str
    """Trajectory or chunk id, for error messages."""
    tokens: np.ndarray
    """int32 [prompt + response], ending with a response token."""
    prompt_length: int
    """Tokens before the first response token; at least 1."""
    loss_mask: np.ndarray
    """bool [R]: tokens that carry loss."""
    advantages: np.ndarray
    """float32 [R]; only read where the mask is set."""
    behavior_logprobs: np.ndarray
    """float32 [R], recorded when the tokens were sampled."""
    versions: np.ndarray
    """int32 [R], the policy version that sampled each token."""
    reference_logprobs: np.ndarray | None = None
    """float32 [R]"""
    old_logprobs: np.ndarray | None = None
    """float32 [R], the learner's at the start of the update; filled in before its first step."""
    nll_mask: np.ndarray | None = None
    """bool [R], independent of loss_mask: tokens of right responses with imitation loss (VAPO, 4.3.2)."""
    standard_logprobs: np.ndarray | None = None
    """float32 [R], given the prompt with the gold text; None without guidance."""
    judge_logprobs: np.ndarray | None = None
    """float32 [R], given the prompt with the judgment; only for wrong responses."""
    is_unguided: bool | None = None
    """Whether the guidance that the rule reads is absent; None for rules that read none."""
    counted_tokens: float | None = None
    """What the sample counts in the loss's denominator, if not its number of loss tokens (T-PPO)."""
    reward: float = 0.0
    accuracy: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The named terms that sum to the reward, for the history."""
    is_finished: bool = True
    """Whether the response ends here; if not, reward and accuracy are still unknown and 0."""
    num_context_tokens: int = 0
    """How many earlier response tokens count as prompt here, because windows are trained one by one."""
    places: np.ndarray | None = None
    """int64 [R]: indices of the response tokens, the first ``prompt_length``; None if all tokens after the prompt."""
    part: int = 0
    """Number of this sequence in its response, which has several if an environment replaced the context. They
    follow each other and stay in one mini-batch."""

    @property
    def response_length(self) -> int:
        return self.num_after_prompt if self.places is None else int(self.places.size)

    @property
    def num_after_prompt(self) -> int:
        """Response tokens, and the environment's among them."""
        return int(self.tokens.size - self.prompt_length)

    @property
    def trains(self) -> bool:
        """Whether any token carries loss, including imitation loss."""
        return bool(self.loss_mask.any()) or (self.nll_mask is not None and bool(self.nll_mask.any()))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """``num_rows`` samples laid end to end without padding: N tokens, of which M are response tokens."""

    tokens: np.ndarray
    """int32 [N]"""
    position_ids: np.ndarray
    """int32 [N]; restarts at 0 with each sample."""
    cumulative_lengths: np.ndarray
    """int32 [num_rows + 1]: where each sample starts in ``tokens``, then N."""
    predictors: np.ndarray
    """int64 [M]: index of the token before each response token, whose output predicts it."""
    targets: np.ndarray
    """int32 [M]: the response tokens."""
    row_ids: np.ndarray
    """int64 [M]: which sample each response token belongs to, 0 .. num_rows - 1, ascending."""
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
    """float32 [M], 0 where absent; None if no sample has them."""
    judge_logprobs: np.ndarray | None = None
    """float32 [M], 0 where absent; None if no sample has standard log-probs."""
    has_standard: np.ndarray | None = None
    """bool [M]: tokens that have standard log-probs."""
    has_judge: np.ndarray | None = None
    """bool [M]: tokens that have judge log-probs."""

    @property
    def num_rows(self) -> int:
        return int(self.cumulative_lengths.size - 1)

    @property
    def num_tokens(self) -> int:
        """N: prompt and response tokens."""
        return int(self.tokens.size)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Split per-token values [M] into one array [R] per sample, in order."""
        counts = np.bincount(self.row_ids, minlength=self.num_rows)
        return np.split(values, np.cumsum(counts)[:-1])


def pack(samples: Sequence[TrainingSample]) -> PackedBatch:
    """Lay samples end to end, in the order given.

    Raises ValueError, naming the sample, if there are no samples, if one has no prompt token, or if
    an array does not have one entry per response token."""
    if not samples:
        raise ValueError("a packed batch of 0 samples; expected at least 1; skip the step instead")
    for sample in samples:
        _check(sample)
    lengths = np.array([sample.tokens.size for sample in samples], dtype=np.int64)
    response_lengths = np.array([sample.response_length for sample in samples], dtype=np.int64)
    ends = np.cumsum(lengths)
    row_ids = np.repeat(np.arange(len(samples), dtype=np.int64), response_lengths)
    # index of every response token
    within = [np.arange(s.prompt_length, s.tokens.size) if s.places is None else s.places for s in samples]
    places = np.concatenate(within) + np.repeat(ends - lengths, response_lengths)
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


def cut_response(whole: TrainingSample, sequences: Sequence[SampledSequence]) -> list[TrainingSample]:
    """Return the samples of a response, one a sequence. ``whole`` has the arrays of all its tokens."""
    found: list[TrainingSample] = []
    end = 0
    for part, sequence in enumerate(sequences):
        begin, end = end, end + sequence.num_sampled
        arrays = {name: getattr(whole, name) for name in _TOKEN_ARRAYS}
        found.append(
            replace(
                whole,
                tokens=sequence.tokens,
                prompt_length=sequence.prompt_length,
                places=sequence.places,
                part=part,
                # the response counts once
                counted_tokens=whole.counted_tokens if part == 0 or whole.counted_tokens is None else 0.0,
                **{name: array[begin:end] for name, array in arrays.items() if array is not None},
            )
        )
    return found


def tokens_at_once(micro_batch_tokens: int | Literal["auto"], *, on_cpu: bool) -> int:
    """Return the token budget of one forward pass: the setting, else a default for its kind of device.

    Beyond a thousand tokens a CPU gets no faster and only uses more memory; a GPU needs many."""
    if micro_batch_tokens != "auto":
        return micro_batch_tokens
    return _CPU_TOKENS if on_cpu else _CUDA_TOKENS


def plan_micro_batches(prefixes: SharedPrefixes, max_tokens: int) -> list[list[int]]:
    """Group whole samples into micro-batches of at most ``max_tokens`` tokens, of which common
    prefixes count once.

    Samples that share a prefix stay together as far as the budget allows (:func:`cut_trees`).
    Best-fit decreasing: the largest trees first, each into the fullest micro-batch that still has
    room (at most 11/9 of the optimum, plus one). A tree above the budget gets a micro-batch to
    itself. Deterministic; each index occurs once, ascending within a micro-batch, and micro-batches
    are ordered by their first index. Raises ValueError for a budget below 1."""
    trees = cut_trees(prefixes, max_tokens)
    batches: list[list[int]] = []
    # (tokens still free, micro-batch), ascending
    rooms: list[tuple[int, int]] = []
    for place in sorted(range(len(trees)), key=lambda i: (-trees[i].size, i)):
        tree = trees[place]
        fitting = bisect_left(rooms, (tree.size, -1))
        if fitting < len(rooms):
            room, batch = rooms.pop(fitting)
        else:
            room, batch = max_tokens, len(batches)
            batches.append([])
        batches[batch] += tree.members
        if room > tree.size:
            insort(rooms, (room - tree.size, batch))
    return sorted(sorted(batch) for batch in batches)


@dataclass(frozen=True, slots=True)
class Tree:
    """Samples that are computed together because they share a prefix, or one sample."""

    members: list[int]
    size: int
    """Its share of a budget of tokens."""


def cut_trees(prefixes: SharedPrefixes, max_tokens: int) -> list[Tree]:
    """Split samples into trees of at most ``max_tokens`` tokens so that the fewest tokens are
    computed again: a prefix is computed once in each tree that has it.

    A tree counts its tokens, or if that is more, an eighth of all its samples' tokens: attention
    copies keys and values of a whole sequence. A sample above the budget cannot be cut, and a tree
    may be a quarter of the budget larger than its longest sample, so that a long prompt is not
    computed for each answer alone. Raises ValueError for a budget below 1."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1: raise the token budget of a micro-batch")
    lengths, shared = prefixes.lengths[prefixes.order].tolist(), prefixes.shared.tolist()
    # for the samples before each place: the fewest tokens that cuts repeat, and their last tree as (begin, size)
    best = [(0, 0, 0)]
    for last, length in enumerate(lengths):
        chosen = (best[last][0] + shared[last], last, length)
        tokens = read = longest = length
        for begin in range(last - 1, -1, -1):
            common = shared[begin + 1]
            if not common:
                break
            tokens += lengths[begin] - common
            # one that the next sample only extends is read as a part of that
            read += lengths[begin] if common < lengths[begin] else 0
            longest = max(longest, lengths[begin])
            size = max(tokens, read // READ_AGAIN)
            if size > max(max_tokens, longest + max_tokens // 4):
                break
            if best[begin][0] + shared[begin] < chosen[0]:
                chosen = (best[begin][0] + shared[begin], begin, size)
        best.append(chosen)
    trees: list[Tree] = []
    end = len(lengths)
    while end:
        _, begin, size = best[end]
        trees.append(Tree(prefixes.order[begin:end].tolist(), size))
        end = begin
    return trees[::-1]


def plan_padded_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequences into padded batches: the number of sequences times the longest is at most
    ``max_tokens``.

    Sequences of similar length come together, longest first, so that little is padded. A sequence
    above the budget is alone. Raises ValueError for a budget below 1."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; expected at least 1: raise the token budget of a batch")
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def plan_ranks(prefixes: SharedPrefixes, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Share samples among ranks by :func:`balance`, and split each share by
    :func:`plan_micro_batches`.

    Samples that share a prefix go to one rank together, in trees of at most a quarter of a rank's
    share. Ranks compute in lockstep, so all get the same number of micro-batches; some may be empty.
    Each rank's fullest comes first, so that micro-batches of the same step have about the same size.
    Raises ValueError for ``num_ranks`` or ``max_tokens`` below 1."""
    plans: list[list[list[int]]] = []
    quarter = max(1, prefixes.num_tokens // (4 * max(1, num_ranks)))
    trees = cut_trees(prefixes, min(max_tokens, quarter))
    for share in balance([tree.size for tree in trees], num_ranks):
        own = sorted(index for place in share for index in trees[place].members)
        plan = [[own[place] for place in batch] for batch in plan_micro_batches(prefixes.take(own), max_tokens)]
        plans.append(sorted(plan, key=lambda batch: (-prefixes.take(batch).num_tokens, batch)))
    num_rounds = max(len(plan) for plan in plans)
    return [plan + [[]] * (num_rounds - len(plan)) for plan in plans]


def split_minibatches(samples: Sequence[TrainingSample], num: int) -> list[list[TrainingSample]]:
    """Split samples, in order, into at most ``num`` non-empty mini-batches whose numbers of responses
    differ by at most one. Raises ValueError for ``num`` below 1."""
    if num < 1:
        raise ValueError(f"num is {num}; expected at least 1 mini-batch")
    begins = [index for index, sample in enumerate(samples) if not sample.part]
    num = min(num, len(begins))
    cuts = [begins[len(begins) * i // num] for i in range(num)] + [len(samples)]
    return [list(samples[start:end]) for start, end in pairwise(cuts)]


def balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share samples among ranks with nearly equal token counts: longest first, each to the emptiest
    rank.

    The fullest rank holds at most 4/3 of the optimum. Deterministic; indices ascend within a rank,
    and a rank may get none. Raises ValueError for ``num_ranks`` below 1."""
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
    if sample.places is not None and (
        sample.places[0] != sample.prompt_length
        or sample.places[-1] >= sample.tokens.size
        or (np.diff(sample.places) < 1).any()
    ):
        raise ValueError(
            f"sample {sample.name} has response tokens at {sample.places}; expected ascending indices from "
            f"{sample.prompt_length}, where its prompt ends, below {sample.tokens.size}"
        )
    for name in _TOKEN_ARRAYS:
        values: np.ndarray | None = getattr(sample, name)
        if values is not None and values.shape != (length,):
            raise ValueError(
                f"sample {sample.name} has {name} of shape {values.shape}; expected ({length},), one entry per response token"
            )


def _join(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False)


def _join_all(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [array for array in arrays if array is not None]
    return _join(present, np.float32) if len(present) == len(arrays) else None
