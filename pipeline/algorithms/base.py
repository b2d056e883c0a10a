"""What all learning rules share.

A rule turns units into training samples (``prepare``) and gives each token a loss (``token_loss``).
``prepare`` is a pure function of claimed units whose declared fields are all present: the same claim
always gives the same samples. Numpy only: ``pipeline.algorithms.loss`` adds the terms that need
torch to ``token_loss``, and processes that only prepare samples never load it. A training backend
uses both in three lines:

    weights = rule.token_weights(samples)                         # once, from the whole mini-batch
    losses, metrics = policy_loss(rule, logprobs=..., ...)        # for each micro-batch
    (losses * weights_of_this_micro_batch).sum().backward()       # times num_ranks where gradients are averaged

Imitation (VAPO's positive-example loss) has its own mask and denominator, computed from the whole
mini-batch in the same way: ``imitation_weights`` and ``loss.imitation_loss``.

Three policies (2505.24298, section 5.2). *Behaviour* sampled the token, perhaps some versions ago
and with other numerics. *Proximal* is the learner at the start of the update; the ratio is taken to
it. *Current* is being trained. The importance mode sets how the gap between the first two is
corrected; no mode corrects it twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np
from jaxtyping import Float, Real

from pipeline.algorithms.assemble import AssembledTrajectory
from pipeline.algorithms.batching import TrainingSample, cut_response
from pipeline.algorithms.terms.aggregation import row_weights
from pipeline.algorithms.terms.guidance import UNGUIDED, GuidedColumns, guided_columns, is_right
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import (
    AlgorithmSection,
    Importance,
    ImportanceLevel,
    Proximal,
    Rejection,
    RejectionLevel,
    SampledSettings,
)
from pipeline.config.rewards import GuidanceSection
from pipeline.ledger.types import ClaimedUnit, Unit
from protocol.trajectory import Field

if TYPE_CHECKING:
    import torch

    from pipeline.algorithms.terms.clip import TokenLoss
    from pipeline.algorithms.terms.loss_terms import LossTerms
    from pipeline.config.schema import RunConfig

UNCORRECTED: Final = SampledSettings(importance=Importance.NONE)
"""Of rules that compare nothing with the policy that sampled."""
Method = TypeVar("Method", bound=Callable[..., object])


def per_token(token_loss: Method) -> Method:
    """Mark a ``token_loss`` that reads nothing of a row's other tokens, so that rows may be cut. One
    that is not marked is given whole rows."""
    token_loss.is_per_token = True  # pyright: ignore[reportFunctionMemberAccess]
    return token_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """A learning rule: what the learner claims, which scores it needs, its samples and its loss.

    Each rule subclasses ``GroupRule``, ``CriticRule`` or ``ResponseRule``."""

    declaration: ClassVar[Declaration]
    Settings: ClassVar[type[AlgorithmSection]]
    """The keys of ``[algorithm]``, with their defaults."""
    settings: AlgorithmSection
    fields: frozenset[Field] = frozenset({Field.REWARD})
    """The scores that every chunk of a unit needs before the unit is ready."""
    guidance: GuidanceSection = field(default_factory=GuidanceSection)
    norm_length: float = 1.0
    """Divisor of seq-mean-token-sum-norm: the longest response, in tokens."""
    window_tokens: int = 512
    proximal_version: int = 0
    """The learner's version at the start of the update, for interpolation; set by ``at``."""

    @classmethod
    def of(cls, **settings: Any) -> Rule:
        """Return the rule with these settings of ``[algorithm]``."""
        return cls(settings=cls.Settings(**settings))

    @classmethod
    def from_config(cls, config: RunConfig) -> Rule:
        return cls(
            settings=config.algorithm,
            fields=config.score_fields,
            guidance=config.guidance,
            norm_length=float(config.generation.max_response_tokens),
            window_tokens=config.generation.window_tokens,
        )

    @classmethod
    @abstractmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for a configuration that this rule cannot train; subclasses may add checks."""

    @abstractmethod
    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make samples in the order of units and their members; ``old_logprobs`` are filled in
        later. Raises NonFiniteUnit; raises LedgerError when a chunk or score is missing, or chunks
        disagree."""

    @abstractmethod
    def token_loss(self, terms: LossTerms) -> TokenLoss | torch.Tensor:
        """Return the loss of each token, before its weights and the terms that all rules share: a
        TokenLoss, or just the losses if nothing is clipped."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def unit(self) -> Unit:
        """What the learner claims at a time: chunk, trajectory or group."""
        return self.declaration.filtered(self.settings.dynamic_sampling).unit

    @property
    def signal_filter(self) -> bool:
        """Whether groups whose members all have the same accuracy are dropped before they are claimed."""
        return self.settings.dynamic_sampling

    @property
    def sampled(self) -> SampledSettings:
        """How the gap to the policy that sampled is corrected."""
        return self.settings if isinstance(self.settings, SampledSettings) else UNCORRECTED

    def at(self, policy_version: int) -> Rule:
        """Return the rule for the update that starts from ``policy_version``."""
        return replace(self, proximal_version=policy_version)

    @property
    def reads_versions(self) -> bool:
        """Whether the loss uses policy versions, whose differences it takes as numbers of updates."""
        sampled = self.sampled
        return sampled.importance is not Importance.BYPASS and sampled.proximal is not Proximal.RECOMPUTE

    @property
    def needs_reference(self) -> bool:
        return self.settings.kl_coefficient > 0.0

    @property
    def reads_rows(self) -> bool:
        """Whether a token's loss may depend on other tokens of its row: the loss is then given whole
        rows only."""
        sampled = self.sampled
        return (
            not getattr(type(self).token_loss, "is_per_token", False)
            or sampled.importance_level is not ImportanceLevel.TOKEN
            or (sampled.rejection is not Rejection.NONE and sampled.rejection_level is not RejectionLevel.TOKEN)
            or self.mixes_guidance
        )

    @property
    def mixes_guidance(self) -> bool:
        """Whether each advantage is multiplied by its token's credit (``guided.token_credit``)."""
        return self.sampled.guidance == "mix"

    @property
    def needs_entropy(self) -> bool:
        return self.settings.entropy_coefficient != 0.0

    @property
    def needs_states(self) -> bool:
        """Whether the loss needs the policy's hidden states, for clusters."""
        return self.guidance.clusters and self.declaration.needs_guidance

    @property
    def needs_old(self) -> bool:
        """Whether the loss needs the proximal policy's log-probs."""
        return self.sampled.importance is not Importance.BYPASS and self.sampled.proximal is Proximal.RECOMPUTE

    @property
    def needs_old_first(self) -> bool:
        """Whether the whole mini-batch needs proximal log-probs before the first of its losses."""
        return self.sampled.importance_normalize

    def row_weights(self, num_loss_tokens: Real[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
        """Return the weight of every loss token of each row of a whole mini-batch, float64."""
        return row_weights(num_loss_tokens, self.settings.loss_aggregation, norm_length=self.norm_length)

    def token_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the factors of each sample's token losses, float64 [R], from a whole mini-batch; 0
        off the mask. The mini-batch's loss is the sum of all products, however it is cut. A response of
        several samples is one row."""
        counts = [
            np.count_nonzero(sample.loss_mask) if sample.counted_tokens is None else sample.counted_tokens
            for sample in samples
        ]
        rows = np.cumsum([sample.part == 0 for sample in samples]) - 1
        weights = self.row_weights(np.bincount(rows, np.array(counts, dtype=np.float64)))[rows]
        return [weight * sample.loss_mask for weight, sample in zip(weights, samples, strict=True)]

    def imitation_weights(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return the factors of each sample's imitation losses, float64 [R]: ``mu / number of
        imitation tokens in the mini-batch`` on those tokens, 0 elsewhere (VAPO, section 4.3.2)."""
        masks = [np.zeros(s.response_length, np.bool_) if s.nll_mask is None else s.nll_mask for s in samples]
        num_tokens = sum(int(np.count_nonzero(mask)) for mask in masks)
        weight = self.settings.positive_nll_coefficient / max(1, num_tokens)
        return [weight * mask for mask in masks]

    def columns(self, member: AssembledTrajectory) -> GuidedColumns:
        """Return the guidance of a response's tokens."""
        if not member.guidance:
            return UNGUIDED
        return guided_columns(member.guidance, member.score, member.versions.size)

    def response_samples(
        self, member: AssembledTrajectory, mask: np.ndarray, advantages: np.ndarray
    ) -> list[TrainingSample]:
        """Make the sample of a whole response, or one for each of its sequences. ``mask`` and
        ``advantages`` have one number per response token."""
        columns = self.columns(member)
        imitate = self.settings.positive_nll_coefficient > 0.0 and is_right(member.score)
        whole = TrainingSample(
            name=member.name,
            tokens=member.sequences[0].tokens,
            prompt_length=member.sequences[0].prompt_length,
            loss_mask=mask,
            advantages=advantages.astype(np.float32),
            behavior_logprobs=member.behavior_logprobs,
            versions=member.versions,
            reference_logprobs=member.reference_logprobs,
            nll_mask=np.ones(mask.size, dtype=np.bool_) if imitate else None,
            standard_logprobs=columns.standard_logprobs,
            judge_logprobs=columns.judge_logprobs,
            is_unguided=columns.is_absent if Field.GUIDANCE in self.fields else None,
            reward=member.score.reward,
            accuracy=member.score.accuracy,
            reward_parts=member.score.parts,
        )
        return cut_response(whole, member.sequences)
