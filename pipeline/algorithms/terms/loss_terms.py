"""What a rule's ``token_loss`` is made of: the tokens of a micro-batch, and the terms over them.

The methods are the functions of this package, applied to these tokens, so that the file of a rule
needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeline.algorithms.terms import guided as of_guidance
from pipeline.algorithms.terms.clip import Bounds, TokenLoss, clipped_loss, clipped_weight_loss
from pipeline.algorithms.terms.guided import GuidedLogprobs
from pipeline.algorithms.terms.ratio import log_ratio, sequence_ratio
from pipeline.algorithms.terms.tokens import Floats, Ints, Mask, Tokens
from pipeline.config.rewards import GuidanceSection


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The tokens of a micro-batch end to end; 0 off the mask."""

    logprobs: Tokens
    """Of the current policy; the loss is differentiated with respect to them."""
    proximal: Tokens
    """Log-probs of the policy in the ratio's denominator."""
    advantages: Tokens
    mask: Mask
    row_ids: Ints
    """The response of each token, 0 .. num_rows - 1, rows whole."""
    num_rows: int
    guided: GuidedLogprobs | None = None
    """None if no response of the micro-batch has guidance."""

    @cached_property
    def log_ratio(self) -> Tokens:
        """``clamp(logprobs - proximal)``, differentiable."""
        return log_ratio(self.logprobs, self.proximal)

    @cached_property
    def ratio(self) -> Tokens:
        """``exp(log_ratio)``, differentiable."""
        return self.log_ratio.exp()

    def sequence_ratio(self) -> Tokens:
        """Return GSPO's ratio of each token's response (``ratio.sequence_ratio``)."""
        return sequence_ratio(self.logprobs, self.proximal, self.mask, self.row_ids, self.num_rows)

    def clip(self, ratio: Floats, bounds: Bounds, *, dual_clip: float = 0.0) -> TokenLoss:
        """Return PPO's clipped loss (``clip.clipped_loss``)."""
        return clipped_loss(ratio, self.advantages, bounds, dual_clip)

    def clipped_weight(self, ratio: Floats, bounds: Bounds) -> TokenLoss:
        """Return ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp`` (``clip.clipped_weight_loss``)."""
        return clipped_weight_loss(self.logprobs, ratio, self.advantages, bounds)

    def published_loss(self, settings: GuidanceSection) -> TokenLoss:
        """Return NLFT's loss (``guided.published_weights``)."""
        guided, wrong = self._guidance(settings)
        base = self.logprobs.detach()
        found = of_guidance.published_weights(base, guided, wrong, self.row_ids, self.num_rows, settings)
        return self._guided_loss(guided, *found, settings)

    def first_error_loss(self, settings: GuidanceSection) -> TokenLoss:
        """Return the loss of the first-error variant (``guided.first_error_weights``): at most one
        token of a response is flagged."""
        guided, wrong = self._guidance(settings)
        found = of_guidance.first_error_weights(guided, wrong, self.row_ids, self.num_rows, settings)
        return self._guided_loss(guided, *found, settings)

    def _guidance(self, settings: GuidanceSection) -> tuple[GuidedLogprobs, Mask]:
        """Return the guidance, and the tokens of the wrong responses that have a judgment."""
        guided = self.guided or of_guidance.absent(self.mask, self.advantages, with_states=settings.clusters)
        return guided, self.mask & (self.advantages < 0.0) & guided.has_standard & guided.has_judge

    def _guided_loss(
        self, guided: GuidedLogprobs, flagged: Mask, weights: Tokens, settings: GuidanceSection
    ) -> TokenLoss:
        return of_guidance.guided_loss(
            self.logprobs, self.advantages, guided, self.mask, self.row_ids, flagged, weights, settings
        )
