"""Losses by guidance: what is flagged, what trains nothing, and that cuts and order change
nothing. The numbers are in tests/golden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample, pack
from pipeline.algorithms.nlft import Nlft, NlftFirst
from pipeline.algorithms.terms.clip import TokenLoss
from pipeline.algorithms.terms.guided import (
    GuidedLogprobs,
    clusters,
    first_places,
    standard_weights,
    token_credit,
    unlikelihood,
)
from pipeline.algorithms.terms.loss_terms import LossTerms
from pipeline.algorithms.terms.tokens import Mask
from pipeline.config.learning import Aggregation, Importance
from pipeline.config.rewards import GuidanceSection
from tests.pipeline.algorithms.packed import Policy, few, guided_samples, guided_tokens, some, token_losses, train
from tests.rules import make_rule, with_settings

PUBLISHED = GuidanceSection()
GUIDED = tuple(
    make_rule(kind, loss_aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN, importance=Importance.NONE)
    for kind in (Nlft, NlftFirst)
)
MIXED = make_rule(guidance="mix", importance=Importance.NONE)
SEEDS = st.integers(0, 10_000)
WRONG, RIGHT, ALONE = "wrong with a judgment", "right", "wrong without a judgment"


def _kind(sample: TrainingSample) -> str:
    if sample.advantages[0] > 0:
        return RIGHT
    return ALONE if sample.judge_logprobs is None else WRONG


def _one(
    base: list[float], standard: list[float], judge: list[float] | None, *, verdict: float = -1.0
) -> tuple[list[TrainingSample], Policy]:
    """Return one response from its probabilities, and the policy."""
    sample = replace(
        guided_samples(0)[0],
        tokens=np.zeros(1 + len(base), np.int32),
        prompt_length=1,
        loss_mask=np.ones(len(base), np.bool_),
        advantages=np.full(len(base), verdict),
        behavior_logprobs=np.log(base),
        versions=np.zeros(len(base), np.int32),
        old_logprobs=np.log(base),
        reference_logprobs=np.log(base),
        standard_logprobs=np.log(standard),
        judge_logprobs=None if judge is None else np.log(judge),
    )
    return [sample], Policy.near([sample], 0, spread=0.0)


@few
@given(seed=SEEDS, data=st.data())
@pytest.mark.parametrize("objective", [*GUIDED, MIXED], ids=["nlft", "nlft-first", "mix"])
def test_neither_cuts_nor_order_change_a_guided_update(objective: Rule, seed: int, data: st.DataObject) -> None:
    samples = guided_samples(seed)
    policy = Policy.near(samples, seed)
    loss, gradients = train(objective, samples, policy, [list(range(len(samples)))])
    order = data.draw(st.permutations(range(len(samples))))
    cuts = sorted({0, len(samples), *data.draw(st.lists(st.integers(1, len(samples) - 1), max_size=4))})
    plan = [order[start:end] for start, end in pairwise(cuts)]
    other_loss, others = train(objective, samples, policy, plan)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-12, atol=1e-15)


@few
@given(seed=SEEDS)
@pytest.mark.parametrize("objective", [*GUIDED, MIXED], ids=["nlft", "nlft-first", "mix"])
def test_nothing_off_the_mask_is_read_or_trained(objective: Rule, seed: int) -> None:
    samples = guided_samples(seed)
    policy = Policy.near(samples, seed)

    def spoiled(values: np.ndarray | None, mask: np.ndarray) -> np.ndarray | None:
        return None if values is None else np.where(mask, values, np.nan)

    blind = [
        replace(
            sample,
            standard_logprobs=spoiled(sample.standard_logprobs, sample.loss_mask),
            judge_logprobs=spoiled(sample.judge_logprobs, sample.loss_mask),
        )
        for sample in samples
    ]
    loss, gradients = train(objective, samples, policy, [list(range(len(samples)))])
    blind_loss, others = train(objective, blind, policy, [list(range(len(samples)))])
    assert blind_loss == loss
    for sample in samples:
        assert torch.equal(others[sample.name], gradients[sample.name])
        assert not gradients[sample.name][~torch.from_numpy(sample.loss_mask)].any()


def test_a_rule_sees_no_guidance_off_the_mask() -> None:
    seen: list[LossTerms] = []

    class Remembering(Nlft):
        def token_loss(self, terms: LossTerms) -> TokenLoss:
            seen.append(terms)
            return super().token_loss(terms)

    samples = guided_samples(1)
    token_losses(make_rule(Remembering), samples, Policy.near(samples, 1))
    [terms] = seen
    assert terms.guided is not None and not terms.mask.all()
    for column in fields(terms.guided):
        values = getattr(terms.guided, column.name)
        assert values is None or not values[~terms.mask].any()


@few
@given(seed=SEEDS)
@pytest.mark.parametrize("objective", GUIDED, ids=["nlft", "nlft-first"])
def test_a_wrong_response_without_a_judgment_trains_nothing(objective: Rule, seed: int) -> None:
    samples = guided_samples(seed)
    told = [
        replace(sample, standard_logprobs=np.full(sample.response_length, -3.0)) if _kind(sample) == ALONE else sample
        for sample in samples
    ]
    _, gradients = train(objective, told, Policy.near(samples, seed), [list(range(len(samples)))])
    for sample in samples:
        if _kind(sample) == ALONE:
            assert not gradients[sample.name].any()
        elif _kind(sample) == RIGHT:
            on_mask = gradients[sample.name][torch.from_numpy(sample.loss_mask)]
            assert (on_mask < 0.0).all(), "each token of a right response becomes likelier"


@pytest.mark.parametrize("objective", GUIDED, ids=["nlft", "nlft-first"])
def test_a_right_response_without_guidance_trains_by_plain_nll(objective: Rule) -> None:
    samples, policy = _one([0.2, 0.5], [0.3, 0.9], None, verdict=1.0)
    _, gradients = train(objective, [replace(samples[0], standard_logprobs=None)], policy, [[0]])
    scale = PUBLISHED.loss_scale * (1.0 + PUBLISHED.nll_coefficient) / 2
    torch.testing.assert_close(
        gradients[samples[0].name], torch.full((2,), -scale, dtype=torch.float64), rtol=1e-7, atol=0
    )


@few
@given(seed=SEEDS)
def test_the_first_error_form_flags_at_most_one_token_and_masks_the_rest(seed: int) -> None:
    objective = GUIDED[1]
    samples = guided_samples(seed)
    policy = Policy.near(samples, seed)
    _, metrics = token_losses(objective, samples, policy)
    flags = metrics["flagged_fraction"].split([sample.response_length for sample in samples])
    _, gradients = train(objective, samples, policy, [list(range(len(samples)))])
    for sample, flagged in zip(samples, flags, strict=True):
        assert flagged.sum() <= (1 if _kind(sample) == WRONG else 0)
        if _kind(sample) != WRONG:
            continue
        if not flagged.any():
            assert not gradients[sample.name].any(), "without an error nothing is known of the response"
            continue
        error = int(flagged.argmax())
        gradient = gradients[sample.name]
        assert gradient[error] > 0.0
        assert not gradient[error + 1 :].any()
        before = gradient[:error][torch.from_numpy(sample.loss_mask[:error])]
        assert (before < 0.0).all()


@pytest.mark.parametrize(("objective", "flags"), [(GUIDED[0], 0.0), (GUIDED[1], 1.0)], ids=["nlft", "nlft-first"])
def test_only_the_first_error_form_flags_a_confident_error(objective: Rule, flags: float) -> None:
    samples, policy = _one([0.9, 0.95, 0.9], [0.8, 0.02, 0.9], [0.85, 0.97, 0.9])
    _, metrics = token_losses(objective, samples, policy)
    assert metrics["flagged_fraction"].sum() == flags


@pytest.mark.parametrize(("objective", "trains"), [(GUIDED[0], True), (GUIDED[1], False)], ids=["nlft", "nlft-first"])
def test_a_wrong_response_without_a_flag_trains_in_the_published_form_alone(objective: Rule, trains: bool) -> None:
    samples, policy = _one([0.5, 0.6, 0.4], [0.5, 0.7, 0.5], [0.4, 0.7, 0.5])
    _, metrics = token_losses(objective, samples, policy)
    assert metrics["flagged_fraction"].sum() == 0.0
    _, gradients = train(objective, samples, policy, [[0]])
    assert bool(gradients[samples[0].name].any()) is trains


def test_too_many_flags_leave_the_flagged_tokens_alone() -> None:
    base, standard = [0.2] * 40, [0.3] * 40
    for num_flagged, are_others_trained in ((2, True), (3, False)):
        judge = [0.9] * num_flagged + [0.3] * (40 - num_flagged)
        samples, policy = _one(base, standard, judge)
        _, gradients = train(GUIDED[0], samples, policy, [[0]])
        gradient = gradients[samples[0].name]
        assert (gradient[:num_flagged] > 0.0).all()
        assert bool(gradient[num_flagged:].any()) is are_others_trained


@pytest.mark.parametrize("objective", [*GUIDED, MIXED], ids=["nlft", "nlft-first", "mix"])
def test_the_gradient_is_that_of_finite_differences(objective: Rule) -> None:
    samples = guided_samples(3, 5)
    policy = Policy.near(samples, 3)
    plan = [list(range(len(samples)))]
    if type(objective) is Nlft:
        # weights against p_b are detached, so their own slope is no part of the gradient
        objective = with_settings(objective, constants={"max_flagged_share": 1.0, "judge_ratio": 1e9})
    _, gradients = train(objective, samples, policy, plan)
    step = 1e-6
    for sample in samples:
        logprobs = policy.logprobs[sample.name]
        for place in range(sample.response_length):
            sides: list[float] = []
            for sign in (1.0, -1.0):
                moved = logprobs.detach().clone()
                moved[place] += sign * step
                near = Policy(policy.logprobs | {sample.name: moved.requires_grad_()})
                sides.append(train(objective, samples, near, plan)[0])
            slope = (sides[0] - sides[1]) / (2 * step)
            assert gradients[sample.name][place].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_weights_and_flags_have_no_gradient() -> None:
    samples, policy = _one([0.3, 0.4, 0.2], [0.1, 0.6, 0.1], [0.9, 0.3, 0.1])
    _, gradients = train(GUIDED[0], samples, policy, [[0]])
    weight = 2.0 / (1.0 + np.exp(-(0.9 / 0.3 - 1.5)))
    expected = PUBLISHED.loss_scale / 3 * weight * 0.3 / 0.7
    assert gradients[samples[0].name][0].item() == pytest.approx(expected, rel=1e-7)


@some
@given(st.floats(-20.0, -1e-5))
def test_unlikelihood_is_the_logarithm_of_the_rest(logprob: float) -> None:
    at = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    loss = unlikelihood(at)
    (slope,) = torch.autograd.grad(loss.sum(), at)
    probability = np.exp(logprob)
    assert loss.item() == pytest.approx(-np.log(-np.expm1(logprob)), rel=1e-12)
    assert slope.item() == pytest.approx(probability / -np.expm1(logprob), rel=1e-12)


def test_a_certain_token_is_still_made_less_likely() -> None:
    at = torch.zeros(1, requires_grad=True)
    loss = unlikelihood(at)
    (slope,) = torch.autograd.grad(loss.sum(), at)
    assert torch.isfinite(loss).all() and slope.item() == pytest.approx(1e6, rel=1e-5)


@some
@given(st.lists(st.floats(-30.0, 0.0), min_size=2, max_size=9))
def test_weights_of_right_tokens_rise_with_the_standard_probability(logprobs: list[float]) -> None:
    weights = standard_weights(torch.tensor(sorted(logprobs), dtype=torch.float64), PUBLISHED)
    assert ((weights >= 0.0) & (weights <= 2.0)).all()
    assert (weights.diff() >= -1e-12).all()


def test_the_first_place_is_found_in_each_row() -> None:
    flags = torch.tensor([False, True, True, False, False, True])
    rows = torch.tensor([0, 0, 0, 1, 2, 2])
    assert first_places(flags, rows, 3).tolist() == [1, 1, 1, 6, 5, 5]


@few
@given(seed=SEEDS)
def test_credit_is_1_on_average_and_speaks_of_the_verdict_alone(seed: int) -> None:
    samples = guided_samples(seed)
    columns = guided_tokens(samples)
    assert columns is not None
    place = (
        torch.from_numpy(np.concatenate([s.loss_mask for s in samples])),
        torch.arange(len(samples)).repeat_interleave(torch.tensor([s.response_length for s in samples])),
        len(samples),
        PUBLISHED,
    )
    verdicts = torch.from_numpy(np.concatenate([s.advantages for s in samples]))
    lengths = [sample.response_length for sample in samples]
    credit = token_credit(columns, verdicts, *place).split(lengths)
    opposite = token_credit(columns, -verdicts, *place)
    assert (opposite == 1.0).all(), "guidance says nothing of the other sign"
    for sample, factors in zip(samples, credit, strict=True):
        on_mask = factors[torch.from_numpy(sample.loss_mask)]
        if sample.standard_logprobs is None:
            assert (factors == 1.0).all()
        elif on_mask.numel():
            assert on_mask.mean().item() == pytest.approx(1.0, rel=1e-12)
            if _kind(sample) == WRONG:
                assert on_mask.max() <= 6.0 * on_mask.min()


def test_mixed_advantages_blame_the_error_more_than_its_neighbours() -> None:
    samples, policy = _one([0.5, 0.5, 0.5], [0.9, 0.1, 0.9], [0.9, 0.9, 0.9])
    _, plain = train(with_settings(MIXED, guidance="none"), samples, policy, [[0]])
    _, mixed = train(MIXED, samples, policy, [[0]])
    name = samples[0].name
    factors = mixed[name] / plain[name]
    assert factors.mean().item() == pytest.approx(1.0)
    assert factors[1] > 2.0 * factors[0] and factors[0] == factors[2]


def test_packed_columns_are_0_where_a_sample_has_none() -> None:
    samples = guided_samples(1, 4)
    batch = pack(samples)
    assert batch.standard_logprobs is not None and batch.judge_logprobs is not None
    assert batch.has_standard is not None and batch.has_judge is not None
    assert batch.standard_logprobs.dtype == batch.judge_logprobs.dtype == np.float32
    for name, has in (("standard", batch.has_standard), ("judge", batch.has_judge)):
        found = batch.split(getattr(batch, f"{name}_logprobs"))
        for sample, values, present in zip(samples, found, batch.split(has), strict=True):
            column = getattr(sample, f"{name}_logprobs")
            assert present.all() if column is not None else not present.any()
            np.testing.assert_array_equal(values, 0.0 if column is None else column.astype(np.float32))
    bare = pack([replace(sample, standard_logprobs=None, judge_logprobs=None) for sample in samples])
    assert bare.standard_logprobs is bare.judge_logprobs is bare.has_standard is bare.has_judge is None


def test_a_column_of_another_length_is_refused_by_name() -> None:
    sample = guided_samples(1)[0]
    with pytest.raises(ValueError, match="has standard_logprobs of shape"):
        pack([replace(sample, standard_logprobs=np.zeros(sample.response_length + 1))])


CLUSTERED = GuidanceSection(clusters=True)


def walked(salient: list[bool], states: np.ndarray, mask: list[bool], rows: list[int], settings: GuidanceSection):
    """Return the clusters one walk after the other, one token after the other."""
    found = [False] * len(salient)
    for start in np.flatnonzero(salient):
        for step in (-1, 1):
            passed, at = [states[start]], start + step
            while 0 <= at < len(salient) and rows[at] == rows[start] and mask[at]:
                mean = np.mean(passed, axis=0)
                cosine = states[at] @ mean / (np.linalg.norm(states[at]) * np.linalg.norm(mean))
                if (1 - cosine > settings.cluster_distance) != settings.dissimilar_clusters:
                    break
                found[at] = True
                passed.append(states[at])
                at += step
    return found


@few
@given(seed=st.integers(0, 10_000), distance=st.floats(0.05, 1.5), dissimilar=st.booleans())
def test_all_walks_at_once_are_the_walks_one_by_one(seed: int, distance: float, dissimilar: bool) -> None:
    dice = np.random.default_rng(seed)
    num = int(dice.integers(1, 24))
    rows = np.sort(dice.integers(0, 3, num)).tolist()
    states = dice.normal(size=(num, 5)) + 0.5
    mask, salient = (dice.random(num) < share for share in (0.9, 0.4))
    salient &= mask
    settings = CLUSTERED.model_copy(update={"cluster_distance": distance, "dissimilar_clusters": dissimilar})
    tensors = (torch.tensor(salient), torch.tensor(states), torch.tensor(mask), torch.tensor(rows))
    expected = walked(salient.tolist(), states.astype(np.float32), mask.tolist(), rows, settings)
    assert clusters(*tensors, settings).tolist() == expected


def terms(advantage: float, standard: list[float], judge: list[float], states: torch.Tensor | None) -> LossTerms:
    num = len(standard)
    everywhere: Mask = torch.ones(num, dtype=torch.bool)
    logprobs = torch.full((num,), -0.5, dtype=torch.float64, requires_grad=True)
    guided = GuidedLogprobs(
        torch.tensor(standard, dtype=torch.float64).log(),
        torch.tensor(judge, dtype=torch.float64).log(),
        everywhere,
        everywhere if advantage < 0 else ~everywhere,
        states,
    )
    return LossTerms(
        logprobs=logprobs, proximal=logprobs.detach(), mask=everywhere, num_rows=1, guided=guided,
        advantages=torch.full((num,), advantage, dtype=torch.float64), row_ids=torch.zeros(num, dtype=torch.int64),
    )  # fmt: skip


ALIKE = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.0, 1.0]])
"""The first two tokens are alike, and the last two."""


@pytest.mark.parametrize("loss", [LossTerms.published_loss, LossTerms.first_error_loss])
def test_tokens_like_one_above_tau_weigh_more_in_a_right_response(
    loss: Callable[[LossTerms, GuidanceSection], TokenLoss],
) -> None:
    standard = [0.99, 0.5, 0.5, 0.5]
    found = loss(terms(1.0, standard, [1.0] * 4, ALIKE), CLUSTERED)
    near = torch.tensor([False, True, False, False])
    weights = standard_weights(torch.tensor(standard, dtype=torch.float64).log(), CLUSTERED, near)
    assert weights[1] == pytest.approx((0.5 / 0.95) ** 0.3) and weights[2] == pytest.approx((0.5 / 0.95) ** 0.6)
    torch.testing.assert_close(found.loss.detach(), 10 * (weights + 1) * 0.5)


def test_tokens_like_a_flagged_one_are_spared_in_the_published_form() -> None:
    settings = CLUSTERED.model_copy(update={"max_flagged_share": 0.5})
    found = terms(-1.0, [0.1, 0.9, 0.9, 0.9], [0.95, 0.01, 0.01, 0.01], ALIKE).published_loss(settings)
    assert found.flagged is not None and found.flagged.tolist() == [True, False, False, False]
    assert (found.loss.detach() == 0).tolist() == [False, True, False, False]


def test_clusters_without_hidden_states_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"hidden states are None, but guidance\.clusters is on"):
        terms(1.0, [0.99, 0.5], [1.0, 1.0], None).published_loss(CLUSTERED)
