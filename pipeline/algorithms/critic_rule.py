"""Base class of rules with a critic: turns values and rewards into whitened advantages per token.

A span is a whole finished response (PPO, VAPO) or one window of a response (T-PPO). Each span, with
the values that the value worker computed, makes one training sample.

    delta_j = r_j + gamma V_{j+1} - V_j,     A_t = sum_{j >= t} (gamma lambda)^{j-t} delta_j     within the span
    V after the last token: 0 if the response is finished (by a stop token or at the cap), else V_{n-1} again
    A <- clamp( (A - mean) / std ) over all loss tokens of the whole update's batch

Values are only a baseline here. The value worker makes its own targets (Monte-Carlo, lambda = 1)
and steps, which is VAPO's decoupled GAE. Whole responses and windows share this code, so that T-PPO
with a window as long as the cap is PPO, bit for bit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.algorithms.assemble import SampledSequence
from pipeline.algorithms.base import Rule, per_token
from pipeline.algorithms.batching import TrainingSample, cut_response
from pipeline.algorithms.terms.advantage import discounted_sums, terminal_rewards
from pipeline.algorithms.terms.gae import adaptive_lambda, whiten_windows, window_deltas, window_policy_mask
from pipeline.algorithms.terms.guidance import UNGUIDED, guided_columns, is_right
from pipeline.config.base import Fraction, ReadIf, setting
from pipeline.config.learning import Aggregation, DiscountedSettings
from pipeline.ledger.types import ClaimedUnit
from protocol.trajectory import Field, GuidanceScore, RewardScore

if TYPE_CHECKING:
    from pipeline.algorithms.terms.clip import TokenLoss
    from pipeline.algorithms.terms.loss_terms import LossTerms
    from pipeline.config.schema import RunConfig


_FIXED = ReadIf(
    lambda run: run.algorithm.adaptive_lambda_alpha == 0.0, "lambda adapts to the length, by adaptive_lambda_alpha"
)
_ADAPTS = ReadIf(
    lambda run: run.algorithm.adaptive_lambda_alpha > 0.0, "adaptive_lambda_alpha is 0, so lambda does not adapt"
)
_WHITENS = ReadIf(lambda run: run.algorithm.whiten, "algorithm.whiten is off")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """N tokens of one response, sampled one after the other, that train the policy together."""

    name: str
    """Trajectory or chunk id."""
    sequences: tuple[SampledSequence, ...]
    """With the earlier tokens of the response, of which a span of several sequences has none."""
    num_earlier: int
    """Response tokens before the span: context only, from any policy version."""
    behavior_logprobs: np.ndarray
    """float32 [N]"""
    versions: np.ndarray
    """int32 [N]"""
    values: np.ndarray
    """float32 [N], value of the state before each token"""
    reference_logprobs: np.ndarray | None
    """float32 [N]"""
    score: RewardScore | None
    """Score of the whole response if it ends with this span; None for a window of an unfinished one."""
    guidance: GuidanceScore | None = None
    """Guidance of the whole response if it ends with this span, else None."""

    @property
    def num_tokens(self) -> int:
        return int(self.values.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticRule(Rule):
    """A learning rule that takes its baseline from a value model, with PPO's clipped loss."""

    class Settings(DiscountedSettings):
        gae_lambda: Fraction = setting(
            0.95,
            "Lambda of the policy, if it does not adapt to the length.",
            unit="factor",
            also="lam lambd",
            read_if=_FIXED,
        )
        adaptive_lambda_alpha: float = setting(
            0.0, "lambda = 1 - 1 / (alpha l), clamped. 0: off. VAPO section 4.2: 0.05.", ge=0.0, unit="1 / token"
        )
        adaptive_lambda_floor: Fraction = setting(
            0.0, "Smallest adaptive lambda. T-PPO's port: 0.95. VAPO: 0, our choice.", unit="factor", read_if=_ADAPTS
        )
        whiten: bool = setting(True, "Whiten critic advantages over the valid tokens of the whole batch.")
        whiten_min_std: float = setting(
            1e-3, "Below this std only the mean is subtracted.", ge=0.0, unit="advantage", read_if=_WHITENS
        )
        advantage_clamp: float = setting(
            0.0,
            "Bound of |A| after whitening. 0: off. T-PPO's port: 10. VAPO, PPO: none.",
            ge=0.0,
            unit="standard deviations",
        )

    settings: Settings

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for a configuration that this rule cannot train; subclasses may add checks."""
        if not config.declaration.has_critic:
            raise ValueError(
                f"{config.algorithm.name} declares no critic, but a CriticRule reads values: set has_critic in its "
                "declaration, or make it a GroupRule"
            )

    @abstractmethod
    def token_spans(self, unit: ClaimedUnit) -> list[TokenSpan]:
        """Split a unit into the spans that train the policy. Raises NonFiniteUnit, LedgerError."""

    @per_token
    def token_loss(self, terms: LossTerms) -> TokenLoss:
        return terms.clip(terms.ratio, self.settings, dual_clip=self.settings.dual_clip)

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make the samples of each span, in the order of the units. That order does not change a bit of
        any sample. Raises NonFiniteUnit; raises LedgerError for missing or contradictory chunks."""
        spans = [span for unit in units for span in self.token_spans(unit)]
        masks = [self.policy_mask(span) for span in spans]
        advantages = self._normalised([self.advantages(span) for span in spans], masks)
        counts = self._counted_tokens(spans)
        parts = zip(spans, masks, advantages, counts, strict=True)
        return [sample for part in parts for sample in self._samples(*part)]

    def policy_lambda(self, span: TokenSpan) -> float:
        """Return lambda for the response's length so far. An unfinished response counts half a
        window more, as in T-PPO's port."""
        if not self.settings.adaptive_lambda_alpha:
            return self.settings.gae_lambda
        expected = 0 if span.score is not None else self.window_tokens // 2
        length = span.num_earlier + span.num_tokens + expected
        return adaptive_lambda(
            length, alpha=self.settings.adaptive_lambda_alpha, floor=self.settings.adaptive_lambda_floor
        )

    def advantages(self, span: TokenSpan) -> np.ndarray:
        """Return the advantages of a span before whitening, float64 [N]."""
        rewards = terminal_rewards(0.0 if span.score is None else span.score.reward, span.num_tokens)
        values = span.values.astype(np.float64)
        deltas = window_deltas(rewards, values, is_finished=span.score is not None, gamma=self.settings.gamma)
        return discounted_sums(deltas, self.settings.gamma * self.policy_lambda(span))

    @property
    def num_ignored(self) -> int:
        """How many last tokens of an unfinished window train nothing."""
        return 0

    def policy_mask(self, span: TokenSpan) -> np.ndarray:
        """Mark the tokens that train the policy, bool [N]: not the tail of an unfinished window,
        whose advantages are the most biased, and no token of an over-long response under filtering."""
        if span.score is not None and span.score.masked:
            return np.zeros(span.num_tokens, dtype=np.bool_)
        is_finished = span.score is not None
        return window_policy_mask(span.num_tokens, is_finished=is_finished, num_ignored=self.num_ignored)

    def _normalised(self, advantages: list[np.ndarray], masks: list[np.ndarray]) -> list[np.ndarray]:
        clamp = self.settings.advantage_clamp or np.inf
        if self.settings.whiten:
            return whiten_windows(advantages, masks, clamp=clamp, min_std=self.settings.whiten_min_std)
        return [np.where(mask, np.clip(row, -clamp, clamp), 0.0) for row, mask in zip(advantages, masks, strict=True)]

    def _counted_tokens(self, spans: Sequence[TokenSpan]) -> list[float]:
        """Return what each span counts in the loss's denominator: its tokens, including the dropped
        tail.

        For a token mean every span counts the batch's mean, so that a token weighs the same in
        every mini-batch: ``sum / N_batch * num_minibatches`` (T-PPO's port)."""
        counts = [float(s.num_tokens) if s.score is None or not s.score.masked else 0.0 for s in spans]
        if self.settings.loss_aggregation != Aggregation.TOKEN_MEAN or not counts:
            return counts
        return [sum(counts) / len(counts)] * len(counts)

    def _samples(
        self, span: TokenSpan, mask: np.ndarray, advantages: np.ndarray, counted_tokens: float
    ) -> list[TrainingSample]:
        """Make the sample of a span, or one for each of its sequences. Earlier tokens belong to the
        prompt, except in an imitated response."""
        imitate = self.settings.positive_nll_coefficient > 0.0 and span.score is not None and is_right(span.score)
        num_earlier = span.num_earlier if imitate else 0
        sequences = span.sequences
        if num_earlier < span.num_earlier:
            tokens = sequences[0].tokens
            sequences = (SampledSequence(tokens, tokens.size - span.num_tokens),)
        reference = span.reference_logprobs
        columns = UNGUIDED
        if span.guidance is not None and span.score is not None:
            columns = guided_columns(span.guidance, span.score, num_earlier + span.num_tokens)
        whole = TrainingSample(
            name=span.name,
            tokens=sequences[0].tokens,
            prompt_length=sequences[0].prompt_length,
            loss_mask=_prepend_filler(num_earlier, mask),
            advantages=_prepend_filler(num_earlier, advantages.astype(np.float32)),
            behavior_logprobs=_prepend_filler(num_earlier, span.behavior_logprobs),
            versions=_prepend_filler(num_earlier, span.versions, int(span.versions.min())),
            reference_logprobs=None if reference is None else _prepend_filler(num_earlier, reference),
            nll_mask=np.ones(num_earlier + span.num_tokens, dtype=np.bool_) if imitate else None,
            standard_logprobs=columns.standard_logprobs,
            judge_logprobs=columns.judge_logprobs,
            is_unguided=columns.is_absent if Field.GUIDANCE in self.fields and span.score is not None else None,
            counted_tokens=counted_tokens,
            reward=0.0 if span.score is None else span.score.reward,
            accuracy=0.0 if span.score is None else span.score.accuracy,
            reward_parts={} if span.score is None else span.score.parts,
            is_finished=span.score is not None,
            num_context_tokens=span.num_earlier - num_earlier,
        )
        return cut_response(whole, sequences)


def _prepend_filler(num_earlier: int, values: np.ndarray, filler: int = 0) -> np.ndarray:
    return np.concatenate([np.full(num_earlier, filler, dtype=values.dtype), values])
