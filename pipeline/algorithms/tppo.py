"""T-PPO: truncated PPO (2506.15050), which trains on each window as soon as it is sampled.

    EGAE          V(s_n) := V(s_{n-1}) after the last token of an unfinished window; 0 after a finished response. A response
                  cut at the cap is finished: it is scored, with its reward at the last token
    lambda        max(floor, 1 - 1/(alpha l)), l = response tokens so far over all windows, + W // 2 when unfinished;
                  after an environment replaced the context, those since then
    tail          the last tokens of an unfinished window train nothing; they still count in the denominator
    whitening     over the remaining window tokens of the whole batch, with a least std; clamped; 0 elsewhere
    loss          clip-higher, summed over window tokens, by all window tokens of the batch
    imitation     + mu NLL over the whole of finished right responses, by their own number of tokens

Certain (abstract, reviews): EGAE's boundary and the independent training of the two models. From an
unfinished public port, apparently the authors' own: tail, whitening, clamp, floor, denominators,
NLL. Ours: the least std, and truncated importance weights on the window, since sampling runs ahead
of learning. Not copied from the port: the ratio ``exp(k3)``, integer negation of the finished flag,
the reward lost at a cut, and a tail of 0 that masks the whole window.

**The order of chunks does not matter.** A chunk may be trained before, after or without the earlier
chunks of its trajectory. The policy gradient of a token needs three things: the state it was
sampled in, its log-prob when sampled, and an advantage. The state is the prefix, which the chunk
carries in full as context, without loss or ratio. The ratio covers the window's own actions. The
advantage ends at the window's edges, because EGAE reads values and rewards of the window alone. The
order only changes how often each prefix distribution is weighted, as with any partial rollout.

Meaningless with a flat critic: windows before the last see a reward only through the values, so a
constant critic gives them no advantage. Meaningless with a group baseline: the outcome of an
unfinished member is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipeline.algorithms.assemble import (
    NonFiniteUnit,
    SampledSequence,
    guidance_of,
    is_ended,
    join_segments,
    token_scores,
)
from pipeline.algorithms.critic_rule import CriticRule, TokenSpan
from pipeline.config.base import setting
from pipeline.config.catalogue import Declaration
from pipeline.ledger.types import ClaimedUnit, ScoredChunk, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field, FinishReason, RewardScore

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


class Tppo(CriticRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration(Unit.CHUNK, has_critic=True, has_group_baseline=False)

    class Settings(
        CriticRule.Settings,
        defaults={
            "dynamic_sampling": False,
            "adaptive_lambda_alpha": 0.05,
            "adaptive_lambda_floor": 0.95,
            "advantage_clamp": 10.0,
            "positive_nll_coefficient": 0.1,
        },
    ):
        tail_drop_tokens: int = setting(
            8, "This many last tokens of an unfinished window get no advantage. T-PPO: 8.", ge=0
        )

    settings: Settings

    @classmethod
    def check(cls, config: RunConfig) -> None:
        super().check(config)
        tail, window = getattr(config.algorithm, "tail_drop_tokens", 0), config.generation.window_tokens
        if tail >= window:
            raise ValueError(
                f"algorithm.tail_drop_tokens is {tail}, and a window has {window} tokens. No token of an unfinished window "
                "would be trained on: lower it"
            )

    @property
    def num_ignored(self) -> int:
        return self.settings.tail_drop_tokens

    def token_spans(self, unit: ClaimedUnit) -> list[TokenSpan]:
        """Return the unit's one chunk as a span: its context is state, its tokens are actions. An opening
        has none. Raises NonFiniteUnit; raises LedgerError for any other unit or a missing score."""
        scored = _only_chunk(unit)
        chunk = scored.chunk
        if chunk.is_opening:
            return []
        score = scored.scores.get(Field.REWARD)
        if is_ended(scored) is not isinstance(score, RewardScore):
            raise LedgerError(
                f"chunk {unit.name} ended with {chunk.finish_reason} and reward {score}; expected a reward on final chunks only"
            )
        values = token_scores(unit.name, scored, Field.VALUE)
        if values is None:
            raise LedgerError(
                f"chunk {unit.name} has no values; expected them: the ledger holds a chunk back until then"
            )
        reference = token_scores(unit.name, scored, Field.REFERENCE)
        if Field.REFERENCE in self.fields and reference is None:
            raise LedgerError(f"chunk {unit.name} lacks reference log-probs; expected them on every chunk")
        try:
            versions, behavior_logprobs = join_segments([(chunk.segments, chunk.behavior_logprobs)])
        except ValueError as error:
            raise LedgerError(f"chunk {unit.name} is inconsistent: {error}") from error
        outcome = score if isinstance(score, RewardScore) else None
        for what, found in (
            ("behavior_logprobs", chunk.behavior_logprobs),
            ("values", values),
            ("reference_logprobs", reference),
            ("reward and accuracy", np.array([outcome.reward, outcome.accuracy]) if outcome else None),
        ):
            if found is not None and not np.isfinite(found).all():
                raise NonFiniteUnit(unit.name, f"{what} of chunk {chunk.id}")
        return [
            TokenSpan(
                name=str(chunk.id),
                sequences=(SampledSequence.of(chunk),),
                num_earlier=chunk.num_sampled - chunk.num_tokens,
                behavior_logprobs=behavior_logprobs.astype(np.float32, copy=False),
                versions=versions,
                values=values,
                reference_logprobs=reference,
                score=outcome,
                guidance=guidance_of(unit.name, scored),
            )
        ]


def _only_chunk(unit: ClaimedUnit) -> ScoredChunk:
    chunks = [scored for member in unit.trajectories for scored in member]
    if len(chunks) != 1 or chunks[0].chunk.finish_reason is FinishReason.ABORT:
        raise LedgerError(
            f"unit {unit.name} holds chunks {[str(scored.chunk.id) for scored in chunks]}; expected one that was not aborted"
        )
    return chunks[0]
