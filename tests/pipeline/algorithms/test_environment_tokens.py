"""With an environment's tokens between the sampled ones, the gradient of each rule at each sampled token is that of
a plain loop over what was sampled, written here anew in Python floats; the environment's tokens have none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev, variance
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.algorithms.assemble import assemble, has_verdict
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import pack, split_minibatches
from pipeline.algorithms.cispo import Cispo
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.grpo import DrGrpo, Grpo
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.loss import imitation_loss, policy_loss
from pipeline.algorithms.ppo import Ppo
from pipeline.algorithms.reinforce import ReinforcePlusPlus
from pipeline.algorithms.rloo import Rloo
from pipeline.algorithms.sft import Sft
from pipeline.algorithms.tppo import Tppo
from pipeline.algorithms.vapo import Vapo
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.errors import LedgerError
from protocol.trajectory import Field, FinishReason, GivenSpan, RewardScore, Turn
from tests.pipeline.algorithms.conversations import (
    Conversation,
    SampledToken,
    chunk_units,
    conversations,
    converse,
    group_units,
    sample_at,
    trajectory_units,
)
from tests.rules import make_rule

SEEDS = st.integers(0, 2**32 - 1)
REPLACES = st.sampled_from([0.0, 0.4, 1.0])
drawn_often = settings(max_examples=30, deadline=None)

LOW, HIGH, DUAL, CAP, KL, ENTROPY = 0.2, 0.28, 3.0, 1.5, 0.1, 0.02
GAMMA, LAMBDA, ALPHA, FLOOR, MU, TAIL, WINDOW = 0.9, 0.8, 0.3, 0.5, 0.1, 2, 6
SHARED = {
    "clip_low": LOW,
    "clip_high": HIGH,
    "dual_clip": DUAL,
    "importance": "tis",
    "importance_cap": CAP,
    "kl_coefficient": KL,
    "kl_estimator": "k3",
    "entropy_coefficient": ENTROPY,
    "group_size": 3,
    "dynamic_sampling": False,
}
CRITIC = SHARED | {"gamma": GAMMA, "group_size": 1, "whiten_min_std": 0.0}
ADAPTIVE = CRITIC | {"adaptive_lambda_alpha": ALPHA, "adaptive_lambda_floor": FLOOR, "positive_nll_coefficient": MU}

RIGHT = RewardScore(reward=1.0, accuracy=1.0)

Key = tuple[str, tuple[int, ...], int]
"""A sampled token: its trajectory, the state that it was sampled in, and itself."""


def current(state: tuple[int, ...], token: int) -> float:
    """Stands for the model: a log-prob that depends on every token before, and on their order."""
    mixed = 0.0
    for one in state:
        mixed = 0.7 * mixed + math.sin(one)
    return -1.5 + 0.6 * math.sin(mixed + token)


def proximal(state: tuple[int, ...], token: int) -> float:
    return float(np.float32(current(state, token) + 0.3 * math.cos(3.0 * token + len(state))))


def gradients(rule: Rule, units: list[ClaimedUnit]) -> dict[Key, float]:
    """Return the gradient of the loss with respect to each scored token's log-prob, through the product."""
    samples = rule.prepare(units)
    batch = pack(samples)
    keys: list[Key] = []
    for row, predictor, target in zip(batch.row_ids, batch.predictors, batch.targets, strict=True):
        begin = batch.cumulative_lengths[row]
        trajectory = ".".join(samples[row].name.split(".")[:3])
        keys.append((trajectory, tuple(map(int, batch.tokens[begin : predictor + 1])), int(target)))
    logprobs = torch.tensor(
        [current(state, token) for _, state, token in keys], dtype=torch.float64, requires_grad=True
    )
    assert batch.reference_logprobs is not None
    losses, _ = policy_loss(
        rule,
        logprobs=logprobs,
        old_logprobs=torch.tensor([proximal(state, token) for _, state, token in keys], dtype=torch.float64),
        behavior_logprobs=torch.from_numpy(batch.behavior_logprobs),
        reference_logprobs=torch.from_numpy(batch.reference_logprobs),
        entropy=-logprobs,
        advantages=torch.from_numpy(batch.advantages),
        mask=torch.from_numpy(batch.loss_mask),
        row_ids=torch.from_numpy(batch.row_ids),
        num_rows=batch.num_rows,
    )
    nll = imitation_loss(logprobs, torch.from_numpy(batch.nll_mask))
    weights, imitation = (np.concatenate(of(samples)) for of in (rule.token_weights, rule.imitation_weights))
    ((losses * torch.from_numpy(weights)).sum() + (nll * torch.from_numpy(imitation)).sum()).backward()
    assert logprobs.grad is not None
    found: dict[Key, float] = defaultdict(float)
    for key, value in zip(keys, logprobs.grad.tolist(), strict=True):
        found[key] += value
    return found


# -- the plain loop ----------------------------------------------------------------------------------------------


@dataclass
class Stretch:
    """Tokens whose advantages are computed together: a response, or a window of one."""

    name: str
    tokens: list[SampledToken]
    score: RewardScore | None
    num_earlier: int = 0
    imitated: list[SampledToken] | None = None
    """None: its own tokens."""

    @property
    def is_masked(self) -> bool:
        return self.score is not None and self.score.masked

    def trains(self, place: int) -> bool:
        return not self.is_masked and (self.score is not None or place < len(self.tokens) - TAIL)


def token_gradient(of: SampledToken, advantage: float) -> float:
    now, old = current(of.state, of.token), proximal(of.state, of.token)
    ratio = math.exp(now - old)
    free, bounded = -advantage * ratio, -advantage * min(max(ratio, 1.0 - LOW), 1.0 + HIGH)
    slope = -advantage * ratio if free >= bounded else 0.0
    if advantage < 0.0 and max(free, bounded) > -advantage * DUAL:
        slope = 0.0
    slope *= min(math.exp(old - of.behavior), CAP)
    return slope + KL * (1.0 - math.exp(of.reference - now)) + ENTROPY


def add_up(
    stretches: list[Stretch], advantages: list[list[float]], weights: list[float], mu: float
) -> dict[Key, float]:
    found: dict[Key, float] = defaultdict(float)
    for stretch, row, weight in zip(stretches, advantages, weights, strict=True):
        for place, (token, advantage) in enumerate(zip(stretch.tokens, row, strict=True)):
            key = (stretch.name, token.state, token.token)
            if stretch.trains(place):
                found[key] += weight * token_gradient(token, float(np.float32(advantage)))
            else:
                found[key] += 0.0
    right = [s for s in stretches if s.score is not None and s.score.accuracy > 0.5 and not s.score.masked]
    imitated = [(s.name, token) for s in right for token in (s.tokens if s.imitated is None else s.imitated)]
    for name, token in imitated:
        found[name, token.state, token.token] -= mu / len(imitated)
    return found


def by_group(
    stretches: list[Stretch], groups: list[int], weights: Callable[[list[int]], list[float]]
) -> dict[Key, float]:
    advantages: list[list[float]] = []
    for stretch, group in zip(stretches, groups, strict=True):
        rewards = [s.score.reward for s, g in zip(stretches, groups, strict=True) if g == group and s.score is not None]
        assert stretch.score is not None
        one = (stretch.score.reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
        advantages.append([one] * len(stretch.tokens))
    counts = [0 if s.is_masked else len(s.tokens) for s in stretches]
    return add_up(stretches, advantages, weights(counts), 0.0)


def by_critic(stretches: list[Stretch], lambda_of: Callable[[Stretch], float], mu: float) -> dict[Key, float]:
    raw: list[list[float]] = []
    for stretch in stretches:
        values = [token.value for token in stretch.tokens]
        after = values[-1] if stretch.score is None else 0.0
        row: list[float] = []
        following = 0.0
        for place in reversed(range(len(values))):
            reward = stretch.score.reward if stretch.score is not None and place == len(values) - 1 else 0.0
            delta = reward + GAMMA * (values[place + 1] if place + 1 < len(values) else after) - values[place]
            following = delta + GAMMA * lambda_of(stretch) * following
            row.append(following)
        raw.append(row[::-1])
    trained = [a for s, row in zip(stretches, raw, strict=True) for place, a in enumerate(row) if s.trains(place)]
    mean, scale = (fmean(trained), math.sqrt(variance(trained) + 1e-8)) if len(trained) > 1 else (0.0, math.inf)
    whitened = [[(a - mean) / scale for a in row] for row in raw]
    counted = sum(len(s.tokens) for s in stretches if not s.is_masked)
    return add_up(stretches, whitened, [1.0 / max(counted, 1)] * len(stretches), mu)


def adaptive(stretch: Stretch) -> float:
    length = stretch.num_earlier + len(stretch.tokens) + (0 if stretch.score is not None else WINDOW // 2)
    return max(1.0 - 1.0 / (ALPHA * length), FLOOR)


def responses(drawn: list[Conversation]) -> list[Stretch]:
    return [Stretch(one.name, one.tokens, one.score) for one in drawn]


def windows(drawn: list[Conversation]) -> list[Stretch]:
    found: list[Stretch] = []
    for one in drawn:
        for number, tokens in enumerate(one.windows):
            is_last = number == len(one.windows) - 1
            # imitated: what this sequence has of the response
            since = next(n for n in reversed(range(number + 1)) if one.earlier[n] == 0)
            imitated = [token for window in one.windows[since:] for token in window] if is_last else []
            found.append(Stretch(one.name, tokens, one.score if is_last else None, one.earlier[number], imitated))
    return found


def dapo(drawn: list[Conversation]) -> dict[Key, float]:
    return by_group(responses(drawn), [c.group for c in drawn], lambda n: [1.0 / max(sum(n), 1)] * len(n))


def grpo(drawn: list[Conversation]) -> dict[Key, float]:
    def weights(counts: list[int]) -> list[float]:
        return [1.0 / (n + 1e-8) / sum(map(bool, counts)) if n else 0.0 for n in counts]

    return by_group(responses(drawn), [c.group for c in drawn], weights)


def ppo(drawn: list[Conversation]) -> dict[Key, float]:
    return by_critic(responses(drawn), lambda _: LAMBDA, 0.0)


def vapo(drawn: list[Conversation]) -> dict[Key, float]:
    return by_critic(responses(drawn), adaptive, MU)


def tppo(drawn: list[Conversation]) -> dict[Key, float]:
    return by_critic(windows(drawn), adaptive, MU)


RULES: dict[type[Rule], tuple[dict[str, Any], Any, Any]] = {
    Dapo: (SHARED, group_units, dapo),
    Grpo: (SHARED, group_units, grpo),
    Ppo: (CRITIC | {"gae_lambda": LAMBDA}, trajectory_units, ppo),
    Vapo: (ADAPTIVE, trajectory_units, vapo),
    Tppo: (ADAPTIVE | {"tail_drop_tokens": TAIL, "advantage_clamp": 0.0}, chunk_units, tppo),
}


def rule_of(kind: type[Rule], **changes: Any) -> Rule:
    return make_rule(kind, window_tokens=WINDOW, **RULES[kind][0] | changes)


@pytest.mark.parametrize("kind", RULES)
@drawn_often
@given(seed=SEEDS, replaces=REPLACES)
def test_the_gradient_at_sampled_tokens_is_that_of_a_plain_loop(kind: type[Rule], seed: int, replaces: float) -> None:
    _, units, loop = RULES[kind]
    drawn = conversations(seed, replaces=replaces)
    wanted, got = loop(drawn), gradients(rule_of(kind), units(drawn))
    assert set(got) == set(wanted), "exactly the sampled tokens are scored, each in its own state"
    for key, gradient in wanted.items():
        assert got[key] == pytest.approx(gradient, rel=1e-10, abs=1e-15)


def stripped(one: Conversation) -> ClaimedUnit:
    """Return the same response as if nothing had answered: the same tokens in the same windows."""
    chunks: list[ScoredChunk] = []
    before: list[int] = []
    for scored in one.body:
        is_last = scored is one.body[-1]
        chunk = msgspec.structs.replace(
            scored.chunk,
            id=msgspec.structs.replace(scored.chunk.id, index=len(chunks)),
            context_tokens=np.array(before, np.int32),
            given=msgspec.UNSET,
            finish_reason=FinishReason.STOP if is_last else FinishReason.WINDOW,
        )
        chunks.append(
            ScoredChunk(chunk, {field: score for field, score in scored.scores.items() if field != Field.TURN})
        )
        before += scored.chunk.tokens.tolist()
    return ClaimedUnit(one.name, (tuple(chunks),))


def as_groups(units: list[ClaimedUnit]) -> list[ClaimedUnit]:
    return [
        ClaimedUnit(str(n), tuple(u.trajectories[0] for u in units[3 * n : 3 * n + 3])) for n in range(len(units) // 3)
    ]


def as_chunks(units: list[ClaimedUnit]) -> list[ClaimedUnit]:
    return [ClaimedUnit(str(s.chunk.id), ((s,),)) for unit in units for s in unit.trajectories[0]]


SHAPES: dict[type[Rule], Callable[[list[ClaimedUnit]], list[ClaimedUnit]]] = {
    **dict.fromkeys((Dapo, Grpo, DrGrpo, Gspo, Cispo, Rloo, ReinforcePlusPlus), as_groups),
    **dict.fromkeys((Ppo, Vapo, Sft), list),
    Tppo: as_chunks,
}


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_an_environments_tokens_change_no_length_no_advantage_and_no_weight(kind: type[Rule], seed: int) -> None:
    drawn = conversations(seed, replaces=0.0)
    rule = make_rule(kind, **{**ADAPTIVE, "group_size": 3, "gae_lambda": LAMBDA}, window_tokens=WINDOW)
    with_turns = rule.prepare(SHAPES[kind](trajectory_units(drawn)))
    without = rule.prepare(SHAPES[kind]([stripped(one) for one in drawn]))
    names = ("loss_mask", "advantages", "behavior_logprobs", "reference_logprobs", "versions", "nll_mask")
    for one, other in zip(with_turns, without, strict=True):
        assert (one.response_length, one.num_context_tokens) == (other.response_length, other.num_context_tokens)
        assert (one.counted_tokens, one.is_finished) == (other.counted_tokens, other.is_finished)
        for name in names:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for of in (rule.token_weights, rule.imitation_weights):
        np.testing.assert_array_equal(np.concatenate(of(with_turns)), np.concatenate(of(without)))


def test_a_response_of_several_sequences_is_one_row_of_the_loss_and_stays_in_one_mini_batch() -> None:
    drawn = conversations(3, replaces=1.0)
    rule = rule_of(Grpo, kl_coefficient=0.0)
    samples = rule.prepare(group_units(drawn))
    assert len(samples) > len(drawn) == sum(sample.part == 0 for sample in samples)
    assert {sample.name for sample in samples} == {one.name for one in drawn}
    weights = rule.token_weights(samples)
    for one in drawn:
        total = sum(w.sum() for w, s in zip(weights, samples, strict=True) if s.name == one.name)
        assert total == pytest.approx(0.0 if one.score.masked else 1.0 / sum(not c.score.masked for c in drawn))
    for num in range(1, 9):
        batches = split_minibatches(samples, num)
        assert [s for batch in batches for s in batch] == samples
        owners = [{s.name for s in batch} for batch in batches]
        assert sum(map(len, owners)) == len(drawn), "no response is in two"
        assert max(map(len, owners)) - min(map(len, owners)) <= 1


def test_two_of_a_turns_sequences_are_trained_once_each_with_what_was_sampled_in_it() -> None:
    one = converse(np.random.default_rng(1), 0, 0, RIGHT, num_turns=3, replaces=1.0)
    samples = rule_of(Vapo).prepare(trajectory_units([one]))
    assert [sample.part for sample in samples] == [0, 1, 2]
    assert [sample.counted_tokens for sample in samples] == [len(one.tokens), 0.0, 0.0]
    sampled = [int(token) for s in samples for token in s.tokens[s.prompt_length :]]
    assert sampled == [token.token for token in one.tokens]
    turns = [scored.scores.get(Field.TURN) for scored in one.chunks]
    begins = [turn.tokens.tolist() for turn in turns if isinstance(turn, Turn) and turn.tokens.size]
    assert [sample.tokens[: sample.prompt_length].tolist() for sample in samples] == begins


# -- what the ledger promised ------------------------------------------------------------------------------------


def two_turns() -> Conversation:
    """One window a turn, and no context replaced: opening, turn, last turn."""
    return next(
        one
        for seed in range(100)
        if len((one := converse(np.random.default_rng(seed), 0, 0, RIGHT, num_turns=2, replaces=0.0)).chunks) == 3
    )


def altered(index: int, *, turn: Turn | bool | None = True, **changes: Any) -> Callable[[], list[ScoredChunk]]:
    def alter() -> list[ScoredChunk]:
        chunks = two_turns().chunks
        scores = dict(chunks[index].scores)
        if turn is None:
            del scores[Field.TURN]
        elif isinstance(turn, Turn):
            scores[Field.TURN] = turn
        chunks[index] = ScoredChunk(msgspec.structs.replace(chunks[index].chunk, **changes), scores)
        return chunks

    return alter


def told(*tokens: int, **changes: Any) -> Turn:
    return Turn(tokens=np.array(tokens, np.int32), **changes)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (altered(2, turn=told(7)), "unfinished trajectory"),
        (altered(2, turn=None), "unfinished trajectory"),
        (altered(1, turn=None), "different tokens"),
        (altered(1, turn=told(99, 99)), "two generators extended"),
        (altered(1, turn=told(is_done=True)), "different tokens|as its turns say"),
        (altered(2, given=msgspec.UNSET), "as its turns say"),
        (altered(2, given=(GivenSpan(0, 1),)), "as its turns say"),
        (altered(1, given=(GivenSpan(0, 1),)), "as its turns say"),
        (altered(0, turn=told(99)), "does not begin with the prompt"),
        (altered(0, turn=None), "does not begin with the prompt"),
        (lambda: two_turns().chunks[:1], "unfinished trajectory"),
    ],
)
def test_a_conversation_whose_chunks_and_turns_disagree_is_refused(
    break_it: Callable[[], list[ScoredChunk]], message: str
) -> None:
    assemble("9", two_turns().chunks)
    with pytest.raises(LedgerError, match=message) as caught:
        assemble("9", break_it())
    assert "unit 9" in str(caught.value)


def test_a_context_that_was_replaced_is_the_turns_and_not_another() -> None:
    one = converse(np.random.default_rng(1), 0, 0, RIGHT, num_turns=2, replaces=1.0)
    assert len(assemble("9", one.chunks).sequences) == 2
    first = max(n for n, scored in enumerate(one.chunks[:-1]) if Field.TURN in scored.scores)
    turn = one.chunks[first].scores[Field.TURN]
    assert isinstance(turn, Turn)
    one.chunks[first].scores[Field.TURN] = msgspec.structs.replace(turn, tokens=turn.tokens + 1)
    with pytest.raises(LedgerError, match="does not begin with the context that the environment gave"):
        assemble("9", one.chunks)


def test_a_trajectory_whose_environment_gave_up_has_no_verdict_and_its_group_goes_on_without_it() -> None:
    drawn = conversations(3, num_groups=1)
    chunks = drawn[1].chunks
    assert has_verdict(chunks)
    last = ScoredChunk(chunks[-1].chunk, {})
    assert not has_verdict([*chunks[:-1], last]) and not has_verdict([ScoredChunk(chunks[0].chunk, {})])
    (unit,) = group_units(drawn)
    members = (unit.trajectories[0], (*chunks[:-1], last), unit.trajectories[2])
    samples = rule_of(Dapo).prepare([ClaimedUnit(unit.name, members)])
    assert {sample.name for sample in samples} == {drawn[0].name, drawn[2].name}
    of_critic = rule_of(Vapo, dynamic_sampling=True, group_size=3).prepare([ClaimedUnit(unit.name, members)])
    assert [sample.name for sample in of_critic] == [sample.name for sample in samples]
    with pytest.raises(LedgerError):
        rule_of(Vapo).prepare([ClaimedUnit(drawn[1].name, members[1:2])])


def test_a_window_of_a_conversation_is_finished_when_its_environment_says_so() -> None:
    one = two_turns()
    opening, first, last = units = chunk_units([one])
    rule = rule_of(Tppo)
    assert rule.prepare([opening]) == []
    assert [sample.is_finished for sample in rule.prepare(units)] == [False, True]
    with pytest.raises(LedgerError, match="expected a reward on final chunks only"):
        rule.prepare([scored_as(first, {**first.trajectories[0][0].scores, Field.REWARD: RIGHT})])
    without = {field: score for field, score in last.trajectories[0][0].scores.items() if field != Field.REWARD}
    with pytest.raises(LedgerError, match="expected a reward on final chunks only"):
        rule.prepare([scored_as(last, without)])


def scored_as(unit: ClaimedUnit, scores: dict[Field, Any]) -> ClaimedUnit:
    return ClaimedUnit(unit.name, ((ScoredChunk(unit.trajectories[0][0].chunk, scores),),))


@pytest.mark.parametrize("places", [[3, 4], [2, 2], [2, 9]], ids=["later", "twice", "outside"])
def test_places_that_are_not_of_the_sequence_are_refused(places: list[int]) -> None:
    with pytest.raises(ValueError, match="response tokens at"):
        pack([sample_at(np.array(places), np.arange(6), 2)])
